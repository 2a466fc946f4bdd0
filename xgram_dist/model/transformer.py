"""The network: embedding, blocks, head. Reads tables only through the working set's leaf tensors.

In: tokens [B,T], the row of each token in the working set (slots [B,T]), the working set's values by table name, and
the warm-up factor of the injection. Out: hidden states [B,T,D], or the loss. No collectives.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from xgram_dist.config import Config
from xgram_dist.memory.injection.sites import build_injections
from xgram_dist.model.attention import Attention
from xgram_dist.model.layers import Linear, RMSNorm, SwiGLU, rotary_table
from xgram_dist.model.loss import chunked_cross_entropy, next_token_labels


class Block(nn.Module):
    """x <- x + delta_h;  x <- x + attention(norm x);  x <- x + ffn(norm x)."""

    def __init__(self, config: Config, layer: int):
        super().__init__()
        model = config.model
        self.attention_norm = RMSNorm(model.width, model.norm_eps)
        self.attention = Attention(model)
        self.ffn_norm = RMSNorm(model.width, model.norm_eps)
        self.ffn = SwiGLU(model.width, model.ffn_width)
        self.sites = build_injections(config, layer)

    def forward(
        self,
        x_BTD: Tensor,
        rotary: tuple[Tensor, Tensor],
        values: dict[str, list[Tensor]],
        slots_BT: Tensor,
        warmup: Tensor,
        documents_BT: Tensor | None,
        mask: Tensor | None,
    ) -> Tensor:
        """`values`: the working-set rows of this block's views, by site."""
        deltas = {
            site: injection(values[site], slots_BT, warmup, documents_BT, x_BTD.dtype)
            for site, injection in self.sites.items()
        }
        if "qk" in deltas:
            deltas["q"] = deltas["k"] = deltas.pop("qk")
        if "h" in deltas:
            x_BTD = x_BTD + deltas.pop("h")
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), rotary, deltas, mask)
        return x_BTD + self.ffn(self.ffn_norm(x_BTD))


class Transformer(nn.Module):
    rotary_cos: Tensor
    rotary_sin: Tensor

    def __init__(self, config: Config, compute_dtype: torch.dtype = torch.float32, end_of_text: int | None = None):
        super().__init__()
        model = config.model
        self.compute_dtype = compute_dtype
        self.z_loss, self.loss_chunk = model.z_loss, model.loss_chunk
        self.end_of_text = end_of_text if model.document_masking else None
        self.checkpointed = config.train.activation_checkpointing
        self.embedding = nn.Parameter(torch.empty(model.vocabulary, model.width))
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(model.layers))
        self.norm = RMSNorm(model.width, model.norm_eps)
        self.head = Linear(model.width, model.vocabulary)
        cos, sin = rotary_table(model.sequence_length, model.width // model.heads, model.rope_theta)
        self.register_buffer("rotary_cos", cos, persistent=False)
        self.register_buffer("rotary_sin", sin, persistent=False)

    def forward(self, tokens_BT: Tensor, slots_BT: Tensor, values: Mapping[str, Tensor], warmup: Tensor) -> Tensor:
        """Hidden states after the final norm [B, T, D]."""
        length = tokens_BT.shape[1]
        rotary = (self.rotary_cos[:length], self.rotary_sin[:length])
        documents, mask = self._documents(tokens_BT)
        x = F.embedding(tokens_BT, self.embedding).to(self.compute_dtype)
        for block in self.blocks:
            assert isinstance(block, Block)
            of_block = {
                site: [values[name] for name in injection.tables]  # type: ignore[union-attr]
                for site, injection in block.sites.items()
            }
            arguments = (x, rotary, of_block, slots_BT, warmup, documents, mask)
            if self.checkpointed and torch.is_grad_enabled():
                x = checkpoint(block, *arguments, use_reentrant=False)
            else:
                x = block(*arguments)
        return self.norm(x)

    def loss(
        self, tokens_BT: Tensor, slots_BT: Tensor, values: Mapping[str, Tensor], warmup: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(training loss with z-loss, plain cross-entropy) of predicting each next token."""
        hidden = self(tokens_BT, slots_BT, values, warmup)
        return chunked_cross_entropy(
            hidden, self.head.weight, next_token_labels(tokens_BT), self.z_loss, self.loss_chunk
        )

    def _documents(self, tokens_BT: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """With document masking: the document number of each position, and who may attend to whom [B,1,T,T]."""
        if self.end_of_text is None:
            return None, None
        ends = (tokens_BT == self.end_of_text).long()
        documents = torch.cumsum(ends, 1) - ends  # an end-of-text token still belongs to the document it ends
        same = documents[:, :, None] == documents[:, None, :]
        return documents, torch.tril(same)[:, None]
