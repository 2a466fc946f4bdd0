"""The network: embedding, blocks, head. It reads tables only through the leaf tensors of the working set.

In: tokens [B,T]; slots, the row of each token in the working set ([B,T], or [B,T,K] where a position has several keys);
the working set's values by table name; the warm-up factor of the injection. Out: hidden states [B,T,D], or the loss.

On a pipeline axis each rank has the blocks of its stages (pipeline_stages.py), under the names they have in the whole
model; one call runs one stage.

On a tensor axis each rank holds its shards of the parameters, gets the same tokens, and ends with the same loss and
complete gradients; all collectives are those of parallel/tensor_parallel.py. On a context axis each rank gets the same
tokens, too, and computes its chunks of every sequence; its loss and gradients are shares
(parallel/context_parallel.py).

Shapes: B batch, T sequence, D width, U distinct tokens of a micro-batch, K keys of a position.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from xgram_dist.config import Config
from xgram_dist.model.attention import Attention
from xgram_dist.model.document_attention import DocumentMask, build_document_mask, number_documents
from xgram_dist.model.gather import Slots, sort_slots
from xgram_dist.model.layers import RMSNorm, SwiGLU, rotary_cos_sin, vocab_parallel_embedding
from xgram_dist.model.loss import VocabParallelHead, count_targets, next_token_labels
from xgram_dist.model.methods.base import TOKEN_EMBEDDINGS, MemoryMethod, method_of
from xgram_dist.model.pipeline_stages import PipelineStage, layers_of, whole_model
from xgram_dist.parallel.context_parallel import WHOLE_SEQUENCES, ContextAxis
from xgram_dist.parallel.tensor_parallel import (
    SINGLE_RANK,
    TensorAxis,
    gather_from_sequence_parallel_region,
    sharded_parameter,
)

ADDITIVE_SITES = ("h", "q", "k", "v", "o", "qk")
"""Sites where a vector is added that does not depend on the hidden state."""


class Block(nn.Module):
    """x <- x + delta_h;  x <- x + attention(norm x);  x <- x + ffn(norm x). With `model.norms = after`, the norms are
    of the outputs: x + norm(attention(x)), x + norm(ffn(x)).

    Vectors are added at h, q, k, v and o. Other sites change the block's input depending on it (ngram), replace the up
    projection (up), scale the output of the feed-forward (ffn), or add to the block's output (block, experts).
    """

    def __init__(
        self,
        method: MemoryMethod,
        layer: int,
        axis: TensorAxis = SINGLE_RANK,
        context: ContextAxis = WHOLE_SEQUENCES,
    ):
        super().__init__()
        model = method.model
        self.norms_after = model.norms == "after"
        self.attention_norm = RMSNorm(model.width, model.norm_eps, axis.sequence_axis)
        self.attention = Attention(model, axis, context)
        self.ffn_norm = RMSNorm(model.width, model.norm_eps, axis.sequence_axis)
        sites = nn.ModuleDict(method.build_sites(layer, axis, context))
        self.ffn = SwiGLU(model.width, model.ffn_width, axis, has_up="up" not in sites)
        self.sites = sites
        self.keys = method.layer_keys(layer)
        """Which of a position's keys this block reads; None: the only one. `Transformer` selects them, so that the
        blocks of all layers share one compiled graph."""

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        values: dict[str, list[Tensor]],
        slots_BT: Slots,
        warmup: Tensor,
        documents_BT: Tensor | None,
        mask: DocumentMask | None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Returns the new x; with the site `block`, also its auxiliary loss.

        `x`: [B,T,D], or, with sequence parallelism, this rank's part of the sequence; slots, documents and mask are
        those of the whole sequence. On a context axis, T are the positions that this rank computes, and slots and
        documents those that it reads (context_parallel.py). `values`: the working-set rows of this block's views, by
        site."""
        deltas = {
            site: injection(values[site], slots_BT, warmup, documents_BT, x.dtype)
            for site, injection in self.sites.items()
            if site in ADDITIVE_SITES
        }
        if "qk" in deltas:
            deltas["q"] = deltas["k"] = deltas.pop("qk")
        if "h" in deltas:
            x = x + deltas.pop("h")
        if "ngram" in self.sites:
            x = self.sites["ngram"](x, values["ngram"], slots_BT, documents_BT)
        attended = self.attention(x if self.norms_after else self.attention_norm(x), rotary, deltas, mask)
        x = x + (self.attention_norm(attended) if self.norms_after else attended)
        normed = x if self.norms_after else self.ffn_norm(x)
        up = self.sites["up"](values["up"], slots_BT, x.dtype) if "up" in self.sites else None
        out = self.ffn(normed, up)
        if "ffn" in self.sites:
            out = self.sites["ffn"](out, values["ffn"], slots_BT)
        if self.norms_after:
            out = self.ffn_norm(out)
        if "experts" in self.sites:
            out = out + self.sites["experts"](normed, values["experts"], slots_BT)
        if "block" in self.sites:
            added, auxiliary_loss = self.sites["block"](normed, values["block"], slots_BT)
            return x + out + added, auxiliary_loss
        return x + out


class Transformer(nn.Module):
    rotary_cos: Tensor
    rotary_sin: Tensor

    def __init__(
        self,
        config: Config,
        compute_dtype: torch.dtype = torch.float32,
        end_of_text: int | None = None,
        axis: TensorAxis = SINGLE_RANK,
        context: ContextAxis = WHOLE_SEQUENCES,
        stages: Sequence[PipelineStage] | None = None,
    ):
        """`compute_dtype`: of the residual stream. `end_of_text`: the token that ends a document, for masking.
        `axis`: the ranks that share each layer. `context`: those that share each sequence. `stages`: this rank's, of a
        pipeline; None: all. `build_model` (model/build.py) initialises the parameters and applies the rest."""
        super().__init__()
        self.stages = (whole_model(config),) if stages is None else tuple(stages)
        model, method = config.model, method_of(config, layers_of(self.stages))
        is_first, is_last = self.stages[0].is_first, self.stages[-1].is_last
        self.axis, self.context = axis, context
        self.compute_dtype = compute_dtype
        self.end_of_text = end_of_text if model.document_masking else None
        self.unlabelled = end_of_text if model.label_masking else None
        """The token that has no label."""
        self.activation_checkpointing = False
        """Recompute each block in the backward pass."""
        # A parameter, not a module VocabParallelEmbedding: see `vocab_parallel_embedding`.
        has_embedding = is_first or method.reads_embeddings
        self.embedding = sharded_parameter((model.vocabulary, model.width), 0, axis) if has_embedding else None
        self.blocks = nn.ModuleList()
        for layer in method.held:
            self.blocks.add_module(str(layer), Block(method, layer, axis, context))
        self.norm = RMSNorm(model.width, model.norm_eps, axis.sequence_axis) if is_last else None
        self.side = method.build_input_network(axis) if is_first else None
        self.reads_embeddings = method.reads_embeddings
        """Whether blocks are given the embeddings of the distinct tokens."""
        is_whole = is_first and is_last
        self.shared = frozenset({"embedding"} if method.reads_embeddings and not is_whole else ())
        """Parameters that every stage of a pipeline holds, and whose gradient is the sum over the stages."""
        self.head = (
            VocabParallelHead(model.width, model.vocabulary, model.z_loss, model.loss_chunk, axis) if is_last else None
        )
        cos, sin = rotary_cos_sin(model, model.sequence_length)
        self.register_buffer("rotary_cos", cos, persistent=False)
        self.register_buffer("rotary_sin", sin, persistent=False)

    def forward(
        self,
        tokens_BT: Tensor,
        slots_BT: Tensor,
        values: Mapping[str, Tensor],
        warmup: Tensor,
        *,
        with_loss: bool = False,
        stage: PipelineStage | None = None,
        x: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """Hidden states after the final norm [B, T, D]; or what `loss` returns, for engines that wrap this call.

        On a context axis tokens are those of whole sequences, slots those of the positions that this rank reads, and
        hidden states and loss of those that it computes: the mean of the ranks' losses is the loss.
        `stage`: the one to run; None: the only one. All but the first take `x`, the residual stream; all but the last
        return (residual stream, sum of its auxiliary losses or None)."""
        stage = stage or self.stages[0]
        length = tokens_BT.shape[1]
        cos, sin = (self.context.select(angles[:length], 0) for angles in (self.rotary_cos, self.rotary_sin))
        rotary = (cos, sin)
        documents, mask = self._documents(tokens_BT)
        whole_BT, tokens_BT = tokens_BT, self.context.select(tokens_BT)
        if stage.is_first:
            x = self._embed(tokens_BT, slots_BT, values)
        assert x is not None
        if self.reads_embeddings:
            assert self.embedding is not None
            distinct_U, slots_BT = tokens_BT.unique(return_inverse=True)
            values = {
                TOKEN_EMBEDDINGS: vocab_parallel_embedding(distinct_U, self.embedding, self.compute_dtype, self.axis)
            }
        num_rows = len(next(iter(values.values()))) if values else 0
        # Where a position has several keys, each block sorts those it reads.
        slots = sort_slots(slots_BT, num_rows) if values and slots_BT.dim() == 2 else Slots(slots_BT)
        _any_number_of_rows(slots)
        auxiliary_losses: list[Tensor] = []
        for layer in stage.layers:
            block = self.blocks.get_submodule(str(layer))
            assert isinstance(block, Block)
            # Read here and not earlier: reading a table waits for its vectors.
            block_values = {
                site: [values[name] for name in injection.tables]  # type: ignore[union-attr]
                for site, injection in block.sites.items()
            }
            for leaves in block_values.values():
                _mark_rows_dynamic(leaves)
            block_slots = slots
            if block.keys is not None:
                block_slots = sort_slots(slots_BT[..., block.keys], num_rows)
                _any_number_of_rows(block_slots)
            arguments = (x, rotary, block_values, block_slots, warmup, documents, mask)
            if self.activation_checkpointing and torch.is_grad_enabled():
                out = checkpoint(block, *arguments, use_reentrant=False)
            else:
                out = block(*arguments)
            if isinstance(out, tuple):
                x, auxiliary_loss = out
                auxiliary_losses.append(auxiliary_loss)
            else:
                x = out
        if not stage.is_last:
            return x, sum(auxiliary_losses[1:], auxiliary_losses[0]) if auxiliary_losses else None
        assert self.norm is not None
        assert self.head is not None
        hidden = self.norm(x)
        if with_loss:
            # Benchmarks put an end-of-text token before a text and score what follows.
            labels_BT = next_token_labels(whole_BT, None if self.head.keeps_scores else self.unlabelled)
            num_targets = count_targets(labels_BT)
            if self.context.size > 1:
                num_targets = num_targets / self.context.size
            loss, entropy = self.head(hidden, self.context.select(labels_BT), num_targets)
            return loss + sum(auxiliary_losses) if auxiliary_losses else loss, entropy
        return gather_from_sequence_parallel_region(hidden, self.axis.sequence_axis, tensor_parallel_output_grad=False)

    def _embed(self, tokens_BT: Tensor, slots_BT: Tensor, values: Mapping[str, Tensor]) -> Tensor:
        """The residual stream before the first block."""
        assert self.embedding is not None
        x = vocab_parallel_embedding(tokens_BT, self.embedding, self.compute_dtype, self.axis)
        if self.side is None:
            return x
        inputs = [values[name] for name in self.side.tables]  # type: ignore[union-attr]
        added: Tensor = self.side(*inputs, self.embedding, slots_BT, self.compute_dtype)
        return x + added

    def loss(
        self, tokens_BT: Tensor, slots_BT: Tensor, values: Mapping[str, Tensor], warmup: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Of predicting each next token: (training loss with z-loss and auxiliary losses, plain cross-entropy)."""
        return self(tokens_BT, slots_BT, values, warmup, with_loss=True)

    def _documents(self, tokens_BT: Tensor) -> tuple[Tensor | None, DocumentMask | None]:
        """For all layers: with document masking the document of each position that is read; and the mask of attention,
        which parts of sequences need, too."""
        if self.end_of_text is None:
            if self.context.size == 1:
                return None, None
            return None, build_document_mask(torch.zeros_like(tokens_BT), self.context)
        documents = number_documents(tokens_BT, self.end_of_text)
        return self.context.select_read(documents), build_document_mask(documents, self.context)


def _any_number_of_rows(slots: Slots) -> None:
    """The working set has another number of rows in every window: a dynamic dimension from the first step on, so that
    blocks are compiled once and not again when the second window comes."""
    _mark_rows_dynamic([slots.starts_U, None if slots.long is None else slots.long.entry_U])


def _mark_rows_dynamic(tensors: Sequence[Tensor | None]) -> None:
    for tensor in tensors:
        if tensor is not None:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
