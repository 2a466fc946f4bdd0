"""Causal grouped-query attention with QK-norm and injection into q, k, v and o.

The order is the paper's: project, add what is injected, normalise q and k over their whole width, split into heads,
rotate, attend, project out, add what is injected there.
Shapes: B batch, T sequence, D width, C key/value width, H heads, G key/value heads, K head width.
"""

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor, nn

from xgram_dist.config.schema import ModelConfig
from xgram_dist.model.layers import Linear, RMSNorm, rotate


class Attention(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.heads, self.kv_heads = config.heads, config.kv_heads
        self.head_width = config.width // config.heads
        kv_width = self.kv_heads * self.head_width
        self.query = Linear(config.width, config.width)
        self.key = Linear(config.width, kv_width)
        self.value = Linear(config.width, kv_width)
        self.output = Linear(config.width, config.width)
        self.query_norm = RMSNorm(config.width, config.norm_eps)
        self.key_norm = RMSNorm(kv_width, config.norm_eps)

    def forward(
        self, x_BTD: Tensor, rotary: tuple[Tensor, Tensor], deltas: Mapping[str, Tensor], mask: Tensor | None
    ) -> Tensor:
        """`deltas`: what to add by site (q, k, v [B,T,C], o [B,T,D]); `mask` [B,1,T,T] or None for plain causal."""
        batch, length, _ = x_BTD.shape
        q, k, v = self.query(x_BTD), self.key(x_BTD), self.value(x_BTD)
        if "q" in deltas:
            # One retrieved head serves all query heads of its key/value head.
            per_head = deltas["q"].view(batch, length, self.kv_heads, self.head_width)
            q = q + per_head.repeat_interleave(self.heads // self.kv_heads, dim=2).flatten(2)
        if "k" in deltas:
            k = k + deltas["k"]
        if "v" in deltas:
            v = v + deltas["v"]
        q = rotate(self.query_norm(q).view(batch, length, self.heads, self.head_width), *rotary)
        k = rotate(self.key_norm(k).view(batch, length, self.kv_heads, self.head_width), *rotary)
        v = v.view(batch, length, self.kv_heads, self.head_width)
        mixed = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=self.heads != self.kv_heads,
        )
        out = self.output(mixed.transpose(1, 2).flatten(2))
        return out + deltas["o"] if "o" in deltas else out
