"""The ranks of a run, and the collectives it uses.

Made once, from the environment that torchrun, srun or `train --ranks` sets (RANK, WORLD_SIZE, MASTER_ADDR,
MASTER_PORT), and passed in; with one rank there is no process group and every collective is the identity.
"""

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from xgram_dist.parallel.phases import Phases

START_SECONDS = 300.0


class Ranks:
    """This process's rank, the number of ranks, and sums over them."""

    def __init__(self, rank: int = 0, size: int = 1, group: Any = None, host: "Ranks | None" = None):
        self.rank, self.size, self.group = rank, size, group
        self.host = host or self
        """The same ranks, for what lies in host memory; its messages do not mix with the others, so that a thread may
        have it for itself."""
        self.timeout = timedelta(minutes=10)
        self.phases = Phases(rank, torch.device("cpu"))
        """What this rank is doing; `train` sets its device."""

    @property
    def first(self) -> bool:
        return self.rank == 0

    def all_reduce_mean(self, tensors: list[Tensor]) -> None:
        """Mean over ranks, in place, as one message: the tensors are of one type."""
        if self.size == 1 or not tensors:
            return
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        dist.all_reduce(flat, group=self.group)
        flat /= self.size
        for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        if self.size > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        if self.size > 1:
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)
        return tensor

    def any(self, flag: bool, device: torch.device) -> bool:
        """Whether any rank says so; every rank gets the same answer."""
        return flag if self.size == 1 else self.sum_integers(int(flag), 0, device)[0] > 0

    def sum_integers(self, first: int, second: int, device: torch.device) -> tuple[int, int]:
        total = self.all_reduce_sum(torch.tensor([first, second], device=device)).tolist()
        return total[0], total[1]

    def exchange(self, sent: Tensor, sent_counts: list[int], received_counts: list[int]) -> tuple[Tensor, Any]:
        """All-to-all of rows, in flight: (buffer to be filled, handle to wait on)."""
        if self.size == 1:
            return sent, Done()
        received = sent.new_empty(sum(received_counts), *sent.shape[1:])
        return received, self._all_to_all(received, sent, received_counts, sent_counts)

    def exchange_with_others(self, received: Tensor, sent: Tensor, sent_counts: list[int], counts: list[int]) -> Any:
        """The same without what each rank would send itself, whatever the counts say of it, into a buffer that is
        there; a handle to wait on."""
        if self.size == 1:
            return Done()
        return self._all_to_all(received, sent, *(self._of_others(both) for both in (counts, sent_counts)))

    def _of_others(self, counts: list[int]) -> list[int]:
        return [0 if rank == self.rank else count for rank, count in enumerate(counts)]

    def _all_to_all(self, received: Tensor, sent: Tensor, received_counts: list[int], sent_counts: list[int]) -> Any:
        return dist.all_to_all_single(received, sent, received_counts, sent_counts, group=self.group, async_op=True)

    def gather_along(self, piece: Tensor, dim: int | None) -> Tensor:
        """Every rank's piece, joined along a dimension in rank order; None: all have the whole."""
        if self.size == 1 or dim is None:
            return piece
        found = [torch.empty_like(piece, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(found, piece.contiguous(), group=self.group)
        return torch.cat(found, dim=dim)

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's value (plain data of our own), on every rank."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.group)
        return found

    def close(self) -> None:
        if self.size > 1:
            dist.destroy_process_group()


class Done:
    """A handle of what needs no waiting for."""

    def wait(self) -> None:
        pass


def join_ranks(device: torch.device, timeout: float = 600.0) -> Ranks:
    """The process group the environment describes.

    The library's own limit lies above `timeout`, which `Phases.watch` enforces: it knows step and phase, and ranks may
    take their time to start.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return Ranks()
    backend = "nccl" if device.type == "cuda" else "gloo"
    limit = timedelta(seconds=timeout + START_SECONDS)
    store, rank, size = next(iter(rendezvous("env://", timeout=limit)))
    # torchrun keeps one store over its restarts; addresses of ranks that are gone must not be found in it.
    store = PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    host = Ranks(rank, size, dist.new_group(backend="gloo", timeout=limit))
    world = Ranks(rank, size, dist.group.WORLD, host)
    world.timeout = limit
    return world
