"""MoLE: routed experts that see the token's embedding alone, beside the feed-forward.

    retrieve   nothing in training: the embedding of each distinct token of the micro-batch
    extract    expert_j(RMSNorm(embedding)), a SwiGLU; a function of the token, so a table once training is over
    inject     h <- h + ffn(n) + sum over j of softmax(W n)_j * expert_j[token], n the normed state after attention

Experts are spread over a tensor axis as the feed-forward is; the router is whole on every rank.
Shapes: B batch, T sequence, D width, U distinct tokens, E experts.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xgram_dist.config import Config
from xgram_dist.model.layers import RMSNorm, SwiGLU, wide
from xgram_dist.parallel.tensor import ALONE, TensorAxis

EMBEDDING = "embedding"
"""Stands for a table: the embeddings of the distinct tokens."""


class Mole(nn.Module):
    def __init__(self, config: Config, layer: int, axis: TensorAxis = ALONE):
        super().__init__()
        model, settings = config.model, config.memory.mole
        inner = settings.width or model.ffn_width
        self.tables = [EMBEDDING]
        self.norm = RMSNorm(model.width, model.norm_eps)
        self.experts = nn.ModuleList(SwiGLU(model.width, inner, axis) for _ in range(settings.experts))
        self.router = nn.Parameter(torch.zeros(settings.experts, model.width))

    def answers(self, embeddings_UD: Tensor) -> list[Tensor]:
        """Of each expert to each token [U, D], at least in fp32: the rows of its table."""
        normed_UD = self.norm(embeddings_UD)
        return [wide(expert(normed_UD)) for expert in self.experts]

    def forward(self, normed_BTD: Tensor, values: list[Tensor], slots_BT: Tensor) -> Tensor:
        """What is added beside the feed-forward. `values`: the embeddings of the distinct tokens [U, D]."""
        weights_BTE = torch.softmax(wide(F.linear(normed_BTD, self.router.to(normed_BTD.dtype))), -1)
        answers = [F.embedding(slots_BT, answer_UD) for answer_UD in self.answers(values[0])]
        parts = [weights_BTE[..., j : j + 1] * answer for j, answer in enumerate(answers)]
        return sum(parts[1:], parts[0]).to(normed_BTD.dtype)
