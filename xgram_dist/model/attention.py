"""Causal grouped-query attention with QK-norm and injection into q, k, v and o.

The order is the paper's: project; add the injected vectors; normalise q and k over their whole width (or each head, or
not at all: `model.qk_norm`); split into heads; rotate; attend; project out; add the injected vector of o.

On a tensor axis each rank has its heads and their channels of q, k and v. Collectives: `column_parallel_input` once for
q, k and v; one all-reduce for the mean squares of norms over the whole width; `row_parallel_output`. On a context axis
each rank has its positions of the sequence: queries of these attend to keys and values of whole sequences, which are
gathered in one message.

Shapes: B batch, T sequence, D width, C key/value width, H heads, G key/value heads, K head width; C, H, G are of one
rank.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xgram_dist.config.schema import ModelConfig
from xgram_dist.model.document_attention import DocumentMask, document_attention
from xgram_dist.model.layers import ColumnParallelLinear, RMSNorm, RowParallelLinear, apply_rotary, at_least_fp32
from xgram_dist.parallel.context_parallel import WHOLE_SEQUENCES, ContextAxis, gather_keys_and_values
from xgram_dist.parallel.tensor_parallel import (
    SINGLE_RANK,
    TensorAxis,
    all_reduce_in_tensor_parallel_region,
    column_parallel_input,
    row_parallel_output,
)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, axis: TensorAxis = SINGLE_RANK, context: ContextAxis = WHOLE_SEQUENCES):
        super().__init__()
        self.axis, self.context = axis, context
        self.heads, self.kv_heads = axis.local_size(config.heads), axis.local_size(config.kv_heads)
        self.head_width = config.width_of_head
        kv_width = config.kv_heads * self.head_width
        self.query = ColumnParallelLinear(config.width, config.attention_width, axis)
        self.key = ColumnParallelLinear(config.width, kv_width, axis)
        self.value = ColumnParallelLinear(config.width, kv_width, axis)
        self.output = RowParallelLinear(config.attention_width, config.width, axis)
        self.query_norm: RMSNorm | None = None
        self.key_norm: RMSNorm | None = None
        self.norms_heads = config.qk_norm == "head"
        if self.norms_heads:  # each rank sees its own heads, so that the weight's gradient is summed over the axis
            self.query_norm = RMSNorm(self.head_width, config.norm_eps, sequence_axis=axis)
            self.key_norm = RMSNorm(self.head_width, config.norm_eps, sequence_axis=axis)
        elif config.qk_norm == "width":
            self.query_norm = RMSNorm(config.attention_width, config.norm_eps, channel_axis=axis)
            self.key_norm = RMSNorm(kv_width, config.norm_eps, channel_axis=axis)

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        deltas: Mapping[str, Tensor],
        mask: Tensor | DocumentMask | None,
    ) -> Tensor:
        """`deltas`: the injected vectors by site (q, k, v [B,T,C]; o of the shape of x). `mask`: of documents
        (document_attention.py), or dense [B,1,T,T] for short sequences; None: plain causal attention of whole
        sequences."""
        x_BTD = column_parallel_input(x, self.axis)
        batch, length, _ = x_BTD.shape
        q, k, v = self.query(x_BTD), self.key(x_BTD), self.value(x_BTD)
        if "q" in deltas:
            # One retrieved head is added to all query heads of its key/value head.
            per_head = deltas["q"].view(batch, length, self.kv_heads, self.head_width)
            q = q + per_head.repeat_interleave(self.heads // self.kv_heads, dim=2).flatten(2)
        if "k" in deltas:
            k = k + deltas["k"]
        if "v" in deltas:
            v = v + deltas["v"]
        q, k = self._normalised(q, k)
        q, k = apply_rotary(q, *rotary), apply_rotary(k, *rotary)
        v = v.view(batch, length, self.kv_heads, self.head_width)
        k, v = gather_keys_and_values(k, v, self.context)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if mask is None or isinstance(mask, Tensor):
            mixed = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=self.heads != self.kv_heads
            )
        else:
            mixed = document_attention(q, k, v, mask)
        out = row_parallel_output(self.output(mixed.transpose(1, 2).flatten(2)), self.axis)
        return out + deltas["o"] if "o" in deltas else out

    def _normalised(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """[B,T,H,K], [B,T,G,K]"""
        q_heads, k_heads = (*q.shape[:2], self.heads, self.head_width), (*k.shape[:2], self.kv_heads, self.head_width)
        if self.query_norm is None or self.key_norm is None:
            return q.view(q_heads), k.view(k_heads)
        if self.norms_heads:
            return self.query_norm(q.view(q_heads)), self.key_norm(k.view(k_heads))
        q_square, k_square = self._mean_squares(q, k)
        return self.query_norm(q, q_square).view(q_heads), self.key_norm(k, k_square).view(k_heads)

    def _mean_squares(self, q: Tensor, k: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Of q and of k over their global width [B,T,1], in one message; None on a single rank, where the norms see the
        whole width."""
        if self.axis.size == 1:
            return None, None
        sums = torch.cat([at_least_fp32(x).square().sum(-1, keepdim=True) for x in (q, k)], dim=-1)
        q_sum, k_sum = all_reduce_in_tensor_parallel_region(sums, self.axis).split(1, dim=-1)
        return q_sum / (q.shape[-1] * self.axis.size), k_sum / (k.shape[-1] * self.axis.size)
