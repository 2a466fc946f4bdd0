"""Causal grouped-query attention with QK-norm and injection into q, k, v and o.

The order is the paper's: project, add what is injected, normalise q and k over their whole width, split into heads,
rotate, attend, project out, add what is injected there.
On a tensor axis each rank has its heads, and the channels of q, k and v that belong to them.
Shapes: B batch, T sequence, D width, C key/value width, H heads, G key/value heads, K head width; C, H, G are those of
one rank.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xgram_dist.config.schema import ModelConfig
from xgram_dist.model.layers import Linear, RMSNorm, rotate, wide
from xgram_dist.parallel.tensor import ALONE, TensorAxis, enter_layer, leave_layer, sum_over_tensor


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, axis: TensorAxis = ALONE):
        super().__init__()
        self.axis = axis
        self.heads, self.kv_heads = axis.share(config.heads), axis.share(config.kv_heads)
        self.head_width = config.width // config.heads
        kv_width = config.kv_heads * self.head_width
        self.query = Linear(config.width, config.width, 0, axis)
        self.key = Linear(config.width, kv_width, 0, axis)
        self.value = Linear(config.width, kv_width, 0, axis)
        self.output = Linear(config.width, config.width, 1, axis)
        self.query_norm = RMSNorm(config.width, config.norm_eps, channels=axis)
        self.key_norm = RMSNorm(kv_width, config.norm_eps, channels=axis)

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], deltas: Mapping[str, Tensor], mask: Tensor | None
    ) -> Tensor:
        """`deltas`: what to add by site (q, k, v [B,T,C], o as x); `mask` [B,1,T,T] or None for plain causal."""
        x_BTD = enter_layer(x, self.axis)
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
        q_square, k_square = self._mean_squares(q, k)
        q = rotate(self.query_norm(q, q_square).view(batch, length, self.heads, self.head_width), *rotary)
        k = rotate(self.key_norm(k, k_square).view(batch, length, self.kv_heads, self.head_width), *rotary)
        v = v.view(batch, length, self.kv_heads, self.head_width)
        mixed = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=self.heads != self.kv_heads,
        )
        out = leave_layer(self.output(mixed.transpose(1, 2).flatten(2)), self.axis)
        return out + deltas["o"] if "o" in deltas else out

    def _mean_squares(self, q: Tensor, k: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Over the whole width of q and of k [B,T,1], in one message; None: the norms see the whole width."""
        if self.axis.size == 1:
            return None, None
        sums = torch.cat([wide(x).square().sum(-1, keepdim=True) for x in (q, k)], dim=-1)
        q_sum, k_sum = sum_over_tensor(sums, self.axis).split(1, dim=-1)
        return q_sum / (q.shape[-1] * self.axis.size), k_sum / (k.shape[-1] * self.axis.size)
