"""Engram: rows of the n-grams that end at a position, opened by the hidden state.

    retrieve   e = rows of all orders and hash heads of this layer, side by side       keys: memory/ngrams/
    extract    gate = sigmoid(signed root of <RMSNorm(W_k e), RMSNorm(h)> / sqrt(D)),  y = gate * W_v e
    inject     h <- h + y + SiLU(conv(RMSNorm(y))), before the block; conv causal and depthwise, 0 at first

Every rank of a tensor axis has the hidden state, the rows and the matrices whole, and computes the same.
Shapes: B batch, T sequence, D width, E width of e, K keys of a position in this layer, U distinct keys, W width of a
row.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xgram_dist.config import Config
from xgram_dist.memory.extraction.shortconv import shifted
from xgram_dist.memory.layout import ngram_heads, ngram_width, plan_tables, site_layers
from xgram_dist.model.layers import RMSNorm, wide

SMALLEST = 1e-6
"""Of a score before its root, whose slope has no limit at zero."""


class Engram(nn.Module):
    def __init__(self, config: Config, layer: int):
        super().__init__()
        model, heads = config.model, ngram_heads(config)
        first = site_layers(config, "ngram").index(layer) * heads
        self.keys = slice(first, first + heads)
        """Of this layer, among those of a position: whoever calls takes them out, so that all layers are one graph."""
        self.tables = [table.name for table in plan_tables(config)]
        self.value = nn.Parameter(torch.zeros(model.width, ngram_width(config)))
        self.key = nn.Parameter(torch.zeros(model.width, ngram_width(config)))
        self.key_norm = RMSNorm(model.width, model.norm_eps)
        self.query_norm = RMSNorm(model.width, model.norm_eps)
        self.output_norm = RMSNorm(model.width, model.norm_eps)
        self.kernel = nn.Parameter(torch.zeros(config.memory.engram.taps, model.width))

    def forward(self, x_BTD: Tensor, values: list[Tensor], slots_BTK: Tensor, documents_BT: Tensor | None) -> Tensor:
        """`values`: the rows of the distinct keys [U, W]; `slots_BTK`: those of this layer's keys."""
        (value_UW,) = values
        e_BTE = F.embedding(slots_BTK, value_UW).flatten(2).to(x_BTD.dtype)
        key = wide(self.key_norm(F.linear(e_BTE, self.key.to(e_BTE.dtype))))
        score = (key * wide(self.query_norm(x_BTD))).sum(-1, keepdim=True) / math.sqrt(x_BTD.shape[-1])
        gate = torch.sigmoid(score.sign() * score.abs().clamp_min(SMALLEST).sqrt())
        y = gate * wide(F.linear(e_BTE, self.value.to(e_BTE.dtype)))
        normed, kernel = self.output_norm(y), self.kernel.to(y.dtype)
        taps = [shifted(normed, step, documents_BT) * kernel[step] for step in range(len(kernel))]
        return x_BTD + (y + F.silu(sum(taps[1:], taps[0]))).to(x_BTD.dtype)
