"""What both loops share: a small GPT that adds a vector for each token to the attention values of each layer, text with
the token frequencies of language, and the clock."""

import json
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, SMALL, WIDTH, HEADS, LAYERS, BATCH, LENGTH = 32_768, 512, 128, 4, 4, 8, 256
NAMES = [f"layer{number}" for number in range(LAYERS)]
STEPS, WARM, RATE, TABLE_RATE, INITIAL, EPSILON = 25, 5, 1e-3, 1e-3, 0.02, 1e-8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.ffn = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, vectors: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (q, k, v + vectors))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.ffn(self.norm2(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(SMALL, WIDTH)  # of token % SMALL, so that the tables count
        nn.init.normal_(self.tokens.weight, 0.0, INITIAL)
        self.blocks = nn.ModuleList(Block() for _ in NAMES)

    def forward(self, tokens: Tensor, vectors: dict[str, Tensor]) -> Tensor:
        small = tokens % SMALL
        x = self.tokens(small)
        for name, block in zip(NAMES, self.blocks, strict=True):
            x = block(x, vectors[name])
        logits = F.linear(x[:, :-1], self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), small[:, 1:].flatten())


def text(rank: int) -> list[Tensor]:
    """Zipf's frequencies."""
    generator = torch.Generator().manual_seed(rank)
    shares = 1.0 / torch.arange(1, VOCABULARY + 1)
    count = STEPS * BATCH * LENGTH
    return list(torch.multinomial(shares, count, True, generator=generator).view(STEPS, BATCH, LENGTH))


def timed(step: Callable[[int], Tensor]) -> None:
    """Runs all steps; prints the median time of a step and the losses of the first and last as JSON."""
    seconds, losses = [], []
    for number in range(STEPS):
        dist.barrier()
        began = time.perf_counter()
        losses.append(float(step(number)))
        dist.barrier()
        seconds.append(time.perf_counter() - began)
    if dist.get_rank() == 0:
        median = sorted(seconds[WARM:])[len(seconds[WARM:]) // 2]
        print(json.dumps({"step_ms": round(1000 * median, 1), "losses": [losses[0], losses[-1]]}), flush=True)
