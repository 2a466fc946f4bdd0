"""The loop with xgram_dist.library."""

import torch
import torch.distributed as dist
from common import BATCH, EPSILON, GPT, LENGTH, NAMES, RATE, TABLE_RATE, VOCABULARY, WIDTH, text, timed
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from xgram_dist.library import TokenTables, gather

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(GPT())
optimizer = torch.optim.AdamW(model.parameters(), RATE)
tables = TokenTables(dict.fromkeys(NAMES, WIDTH), VOCABULARY, optimizer="adagrad", eps=EPSILON, weight_decay=0.0)
batches = text(dist.get_rank())
plans = [tables.plan(batches[0])]


def step(number: int) -> Tensor:
    rows = tables.fetch(plans.pop())
    if number + 1 < len(batches):
        plans.append(tables.plan(batches[number + 1]))
    tokens, slots = batches[number], rows.slots[0]
    assert slots.shape == (BATCH, LENGTH)
    loss = model(tokens, {name: gather(rows.values[name], slots) for name in NAMES})
    optimizer.zero_grad()
    loss.backward()
    tables.give_back(rows)
    tables.step(TABLE_RATE)
    optimizer.step()
    return loss.detach()


timed(step)
tables.close()
dist.destroy_process_group()
