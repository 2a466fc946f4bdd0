"""SCONE: frequent n-grams (f-grams) have an embedding of their own, from a small side network, added at the input.

    retrieve   the tokens of each distinct f-gram of the micro-batch: the longest that ends at a position
    extract    a small causal transformer over these tokens' embeddings; its last state is the f-gram's embedding,
               a function of the f-gram, so a table once training is over
    inject     h_0 <- embedding[token] + embedding of the f-gram; nothing where no f-gram ends

The side network is spread over a tensor axis as the backbone is.
Shapes: U distinct f-grams (the first stands for none), N tokens of the longest, B batch, T sequence, D width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xgram_dist.config import Config
from xgram_dist.memory.ngrams.frequent import NOTHING
from xgram_dist.model.attention import Attention
from xgram_dist.model.layers import RMSNorm, SwiGLU, embed, rotary_table
from xgram_dist.parallel.tensor import ALONE, TensorAxis


class SideBlock(nn.Module):
    def __init__(self, config: Config, axis: TensorAxis):
        super().__init__()
        model = config.model
        self.attention_norm = RMSNorm(model.width, model.norm_eps)
        self.attention = Attention(model, axis)
        self.ffn_norm = RMSNorm(model.width, model.norm_eps)
        self.ffn = SwiGLU(model.width, model.ffn_width, axis)

    def forward(self, x_UND: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        x_UND = x_UND + self.attention(self.attention_norm(x_UND), rotary, {}, mask)
        return x_UND + self.ffn(self.ffn_norm(x_UND))


class Scone(nn.Module):
    rotary_cos: Tensor
    rotary_sin: Tensor

    def __init__(self, config: Config, axis: TensorAxis = ALONE):
        super().__init__()
        self.axis = axis
        self.blocks = nn.ModuleList(SideBlock(config, axis) for _ in range(config.memory.scone.layers))
        model = config.model
        cos, sin = rotary_table(config.memory.scone.longest, model.width // model.heads, model.rope_theta)
        self.register_buffer("rotary_cos", cos, persistent=False)
        self.register_buffer("rotary_sin", sin, persistent=False)

    def embeddings(self, grams_UN: Tensor, embedding: Tensor, dtype: torch.dtype) -> Tensor:
        """Of each f-gram [U, D]: the rows of its table. `embedding`: the model's, of this rank's range."""
        real_UN = grams_UN != NOTHING
        x = embed(grams_UN.clamp_min(0), embedding, dtype, self.axis)
        length = grams_UN.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        # A token sees those before it that are there, and itself, so that no row of the mask is empty.
        seen = real_UN[:, None, :] | torch.eye(length, dtype=torch.bool, device=x.device)
        mask = (causal & seen)[:, None]
        for block in self.blocks:
            x = block(x, (self.rotary_cos, self.rotary_sin), mask)
        return x[:, -1] * real_UN[:, -1:]

    def forward(self, grams_UN: Tensor, embedding: Tensor, slots_BT: Tensor, dtype: torch.dtype) -> Tensor:
        """What is added to the input [B, T, D]."""
        return F.embedding(slots_BT, self.embeddings(grams_UN, embedding, dtype))
