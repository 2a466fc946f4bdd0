"""Every rank holds all tables; sparse gradients are summed over the ranks; torch.optim.SparseAdam updates the rows hit.

gloo's all_reduce of a sparse tensor is an all-gather of its coalesced rows and values, with the sum made by every rank.
It was faster than gathering the gradients of all tables as one padded block: the update takes most of the step.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from workload import EPSILON, INITIAL, LEARNING_RATE, Workload, half_mean_square


class SparseAdam:
    note = "replicated nn.Embedding(sparse=True), sparse all_reduce, torch.optim.SparseAdam"

    def __init__(self, workload: Workload):
        torch.manual_seed(0)  # all ranks start with the same tables
        self.ranks = workload.ranks
        self.tables = nn.ModuleList(
            nn.Embedding(workload.rows, workload.width, sparse=True) for _ in range(workload.tables)
        )
        for parameter in self.tables.parameters():
            nn.init.uniform_(parameter, -INITIAL, INITIAL)
        self.optimizer = torch.optim.SparseAdam(self.tables.parameters(), lr=LEARNING_RATE, eps=EPSILON)

    def prepare(self, tokens: Tensor) -> Tensor:
        return tokens

    def step(self, ready: Tensor) -> Tensor:
        loss = half_mean_square([table(ready) for table in self.tables])
        (loss / self.ranks).backward()  # the sum over ranks is then the mean
        pending = [dist.all_reduce(table.weight.grad, async_op=True) for table in self.tables]
        for work in pending:
            work.wait()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()
