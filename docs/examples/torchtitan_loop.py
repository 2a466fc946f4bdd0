"""torchtitan's Llama 3 under its own FSDP2 wrapping, in a loop of ours, and X-gram tables after its attention.

torchtitan 0.3 takes "cuda" where it finds no GPU, so its Trainer does not start on CPUs; its model and
`apply_fsdp_to_decoder` do.

make titan
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry

from xgram_dist.library import TableSites, TokenTables

LENGTH, BATCH, STEPS = 64, 4, 30


def build_model():
    config = model_registry("debugmodel").model
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()  # flex attention needs a compiler
    torch.manual_seed(0)
    model = config.build()
    model.init_states()
    return model, TableSites({f"layers.{n}.o": block.attention.wo for n, block in model.layers.items()})


def build_data():
    text = torch.frombuffer(bytearray(Path(torch.__file__).read_bytes()), dtype=torch.uint8).long()
    return text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)


def main(steps=STEPS, shard=True):
    model, sites = build_model()
    data, rank, ranks = build_data(), 0, 1
    if shard:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))
        apply_fsdp_to_decoder(model, mesh, torch.float32, torch.float32, pp_enabled=False)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(ranks)  # means over ranks, as the tables take
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    losses = []
    with TokenTables(sites.widths, 256) as tables:
        for step in range(steps):
            tokens = data[step * BATCH : (step + 1) * BATCH].chunk(ranks)[rank]
            rows = tables.fetch(tables.plan(tokens))
            sites.use(rows.values, rows.slots[0])
            logits = model(tokens)
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            tables.give_back(rows)
            tables.clip(model.parameters(), 1.0)
            if tables.step(5e-3):
                optimizer.step()
            mean = loss.detach()
            if ranks > 1:
                dist.all_reduce(mean)
            losses.append(mean.item() / ranks)
            if rank == 0 and step % 10 == 9:
                print(f"step {step + 1}: loss {losses[-1]:.3f}", flush=True)
    return losses


if __name__ == "__main__":
    if "RANK" not in os.environ:
        main(shard=False)
    else:
        dist.init_process_group("gloo")
        main()
        dist.destroy_process_group()
