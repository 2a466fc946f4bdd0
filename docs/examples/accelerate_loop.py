"""A small Qwen3 in a loop of Hugging Face accelerate, and X-gram tables at its attention values.

pip install accelerate 'transformers>=4.57,<5'
torchrun --nproc-per-node 2 docs/examples/accelerate_loop.py
"""

from contextlib import nullcontext
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import Qwen3Config, Qwen3ForCausalLM

from xgram_dist.library import TableSites, TokenTables

VOCABULARY, LENGTH, STEPS, ACCUMULATION = 256, 64, 30, 2


def build_model():
    torch.manual_seed(0)
    config = Qwen3Config(
        VOCABULARY, 64, 128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32
    )
    model = Qwen3ForCausalLM(config)
    return model, TableSites({f"layers.{n}.v": block.self_attn.v_proj for n, block in enumerate(model.model.layers)})


def build_data():
    text = torch.frombuffer(bytearray(Path(torch.__file__).read_bytes()), dtype=torch.uint8).long()
    return text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)


def main(steps=STEPS):
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    model, sites = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3, weight_decay=0.0)
    loader = DataLoader(build_data(), batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses, batches = [], iter(loader)
    with TokenTables(sites.widths, VOCABULARY) as tables:  # rows sharded over accelerate's processes
        for step in range(steps):
            micro_batches = [next(batches) for _ in range(ACCUMULATION)]
            rows = tables.fetch(tables.plan(*(tokens.cpu() for tokens in micro_batches)))
            mean = 0.0
            for tokens, slots in zip(micro_batches, rows.slots, strict=True):
                sites.use(rows.values, slots)
                with nullcontext() if tokens is micro_batches[-1] else accelerator.no_sync(model):
                    loss = model(input_ids=tokens, labels=tokens).loss / ACCUMULATION
                    accelerator.backward(loss)
                mean += accelerator.reduce(loss.detach(), "mean").item()
            tables.give_back(rows)
            tables.clip(model.parameters(), 1.0)  # the joint norm of model and tables
            if tables.step(1e-2):
                optimizer.step()
            optimizer.zero_grad()
            losses.append(mean)
            if step % 10 == 9:
                accelerator.print(f"step {step + 1}: loss {mean:.3f}")
    return losses


if __name__ == "__main__":
    main()
