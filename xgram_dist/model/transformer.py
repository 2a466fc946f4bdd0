"""The network: embedding, blocks, head. Reads tables only through the working set's leaf tensors.

In: tokens [B,T], the row of each token in the working set (slots [B,T]; [B,T,K] where a position has several keys), the
working set's values by table name, and the warm-up factor of the injection. Out: hidden states [B,T,D], or the loss.
With a tensor axis, each rank holds its part of the sharded parameters, is given the same tokens, and ends with the same
loss and complete gradients; its collectives are those of `parallel/tensor.py`. Otherwise there are none.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from xgram_dist.config import Config
from xgram_dist.memory.methods.build import build_sites
from xgram_dist.memory.methods.mole import EMBEDDING
from xgram_dist.memory.methods.scone import Scone
from xgram_dist.memory.ngrams.lookup import GRAMS
from xgram_dist.model.attention import Attention
from xgram_dist.model.layers import RMSNorm, SwiGLU, embed, rotary_table
from xgram_dist.model.loss import Head, next_token_labels
from xgram_dist.parallel.ranks import Ranks
from xgram_dist.parallel.tensor import ALONE, TensorAxis, collect_sequence, sharded, tensor_axis

ADDED = ("h", "q", "k", "v", "o", "qk")
"""Sites where a vector is added that does not depend on the hidden state."""


class Block(nn.Module):
    """x <- x + delta_h;  x <- x + attention(norm x);  x <- x + ffn(norm x).

    Beside what is added at h, q, k, v, o, a site may change the block's input by what it is (ngram), give the up
    projection (up), multiply what the feed-forward gives (ffn), or add to the block's output (block, experts).
    """

    def __init__(self, config: Config, layer: int, axis: TensorAxis = ALONE):
        super().__init__()
        model = config.model
        self.attention_norm = RMSNorm(model.width, model.norm_eps, axis.between_layers)
        self.attention = Attention(model, axis)
        self.ffn_norm = RMSNorm(model.width, model.norm_eps, axis.between_layers)
        sites = build_sites(config, layer, axis)
        self.ffn = SwiGLU(model.width, model.ffn_width, axis, has_up="up" not in sites)
        self.sites = sites

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        values: dict[str, list[Tensor]],
        slots_BT: Tensor,
        warmup: Tensor,
        documents_BT: Tensor | None,
        mask: Tensor | None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """x; where a site has a loss of its own, that too. `x`: [B,T,D], or this rank's part of the sequence;
        `values`: the working-set rows of this block's views, by site. What is given of positions is of the whole
        sequence."""
        deltas = {
            site: injection(values[site], slots_BT, warmup, documents_BT, x.dtype)
            for site, injection in self.sites.items()
            if site in ADDED
        }
        if "qk" in deltas:
            deltas["q"] = deltas["k"] = deltas.pop("qk")
        if "h" in deltas:
            x = x + deltas.pop("h")
        if "ngram" in self.sites:
            x = self.sites["ngram"](x, values["ngram"], slots_BT, documents_BT)
        x = x + self.attention(self.attention_norm(x), rotary, deltas, mask)
        normed = self.ffn_norm(x)
        up = self.sites["up"](values["up"], slots_BT, x.dtype) if "up" in self.sites else None
        out = self.ffn(normed, up)
        if "ffn" in self.sites:
            out = self.sites["ffn"](out, values["ffn"], slots_BT)
        if "experts" in self.sites:
            out = out + self.sites["experts"](normed, values["experts"], slots_BT)
        if "block" in self.sites:
            added, own_loss = self.sites["block"](normed, values["block"], slots_BT)
            return x + out + added, own_loss
        return x + out


class Transformer(nn.Module):
    rotary_cos: Tensor
    rotary_sin: Tensor

    def __init__(
        self,
        config: Config,
        compute_dtype: torch.dtype = torch.float32,
        end_of_text: int | None = None,
        tensor: Ranks | None = None,
    ):
        """`tensor`: the ranks that share each layer; without it this process holds all."""
        super().__init__()
        model = config.model
        self.axis = axis = tensor_axis(tensor, config.parallel.sequence_parallel)
        self.compute_dtype = compute_dtype
        self.end_of_text = end_of_text if model.document_masking else None
        self.checkpointed = config.train.activation_checkpointing
        self.embedding = sharded((model.vocabulary, model.width), 0, axis)
        self.blocks = nn.ModuleList(Block(config, layer, axis) for layer in range(model.layers))
        self.norm = RMSNorm(model.width, model.norm_eps, axis.between_layers)
        self.side = Scone(config, axis) if config.memory.method == "scone" else None
        self.experts_read = config.memory.method == "mole"
        """Blocks are given the embeddings of the distinct tokens."""
        self.head = Head(model.width, model.vocabulary, model.z_loss, model.loss_chunk, axis)
        cos, sin = rotary_table(model.sequence_length, model.width // model.heads, model.rope_theta)
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
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Hidden states after the final norm [B, T, D]; or what `loss` gives, for engines that wrap this call."""
        length = tokens_BT.shape[1]
        rotary = (self.rotary_cos[:length], self.rotary_sin[:length])
        documents, mask = self._documents(tokens_BT)
        x = embed(tokens_BT, self.embedding, self.compute_dtype, self.axis)
        if self.side is not None:
            x = x + self.side(values[GRAMS], self.embedding, slots_BT, self.compute_dtype)
        if self.experts_read:
            distinct_U, slots_BT = tokens_BT.unique(return_inverse=True)
            values = {EMBEDDING: embed(distinct_U, self.embedding, self.compute_dtype, self.axis)}
        losses: list[Tensor] = []
        for block in self.blocks:
            assert isinstance(block, Block)
            of_block = {
                site: [values[name] for name in injection.tables]  # type: ignore[union-attr]
                for site, injection in block.sites.items()
            }
            slots = slots_BT[..., block.sites["ngram"].keys] if "ngram" in block.sites else slots_BT  # type: ignore[index]
            arguments = (x, rotary, of_block, slots, warmup, documents, mask)
            if self.checkpointed and torch.is_grad_enabled():
                made = checkpoint(block, *arguments, use_reentrant=False)
            else:
                made = block(*arguments)
            x, *own_losses = made if isinstance(made, tuple) else (made,)
            losses += own_losses
        hidden = self.norm(x)
        if with_loss:
            loss, entropy = self.head(hidden, next_token_labels(tokens_BT))
            return loss + sum(losses) if losses else loss, entropy
        return collect_sequence(hidden, self.axis.between_layers)

    def loss(
        self, tokens_BT: Tensor, slots_BT: Tensor, values: Mapping[str, Tensor], warmup: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(training loss with z-loss and the blocks' own, plain cross-entropy) of predicting each next token."""
        return self(tokens_BT, slots_BT, values, warmup, with_loss=True)

    def _documents(self, tokens_BT: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """With document masking: the document number of each position, and who may attend to whom [B,1,T,T]."""
        if self.end_of_text is None:
            return None, None
        ends = (tokens_BT == self.end_of_text).long()
        documents = torch.cumsum(ends, 1) - ends  # an end-of-text token still belongs to the document it ends
        same = documents[:, :, None] == documents[:, None, :]
        return documents, torch.tril(same)[:, None]
