"""A small GPT in plain PyTorch with DDP, and X-gram tables at its attention values.

torchrun --nproc-per-node 2 docs/examples/gpt_ddp.py
"""

from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from xgram_dist.library import TokenTables, XgramInjection

VOCABULARY, WIDTH, HEADS, LAYERS, BATCH, LENGTH, STEPS = 256, 64, 4, 2, 8, 64, 60


class Block(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.ffn = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.memory = XgramInjection([f"{layer}.v.0", f"{layer}.v.1"], WIDTH, scale=(layer + 1) ** 0.5)

    def forward(self, x, slots, values):
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        v = v + self.memory(values, slots)  # the tables
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.ffn(self.norm2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(layer) for layer in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens, slots, values):
        x = self.tokens(tokens) + self.positions.weight
        for block in self.blocks:
            x = block(x, slots, values)
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    text = torch.frombuffer(bytearray(Path(torch.__file__).read_bytes()), dtype=torch.uint8).long()
    model = DistributedDataParallel(GPT())
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    widths = {f"{layer}.v.{view}": WIDTH for layer in range(LAYERS) for view in range(2)}
    with TokenTables(widths, VOCABULARY) as tables:  # rows sharded over the ranks
        torch.manual_seed(dist.get_rank())
        for step in range(STEPS):
            starts = torch.randint(0, len(text) - LENGTH, (BATCH,))
            tokens = torch.stack([text[start : start + LENGTH] for start in starts])
            rows = tables.fetch(tables.plan(tokens))
            loss = model(tokens, rows.slots[0], dict(rows.values))
            optimizer.zero_grad()
            loss.backward()
            tables.give_back(rows)
            tables.clip(model.parameters(), 1.0)  # the joint norm of model and tables
            if tables.step(1e-2):
                optimizer.step()
            if dist.get_rank() == 0 and step % 20 == 19:
                print(f"step {step + 1}: loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
