"""`ProcessGroup`: the ranks of one mesh axis and the collectives over them.

Collectives carry the names that `torch.distributed` gives them. With one rank there is no torch process group, and
every collective is the identity. Process groups are made in `parallel/mesh.py` alone.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from xgram_dist.parallel.watchdog import Phases


class ProcessGroup:
    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        group: Any = None,
        host: "ProcessGroup | None" = None,
        timeout: timedelta | None = None,
        phases: Phases | None = None,
    ):
        """`group`: torch's process group; None for a single rank."""
        self.rank, self.size, self.group = rank, size, group
        self.host = host or self
        """The same ranks over gloo, for tensors in host memory. Its messages do not mix with those of `group`, so one
        thread can use it while another uses `group`."""
        self.timeout = timeout or timedelta(minutes=10)
        self.phases = phases or Phases(rank, torch.device("cpu"))
        """What this rank is doing now; the trainer sets its device."""

    @property
    def first(self) -> bool:
        """Whether this is rank 0 of the group."""
        return self.rank == 0

    def for_device(self, device: torch.device) -> "ProcessGroup":
        """The same ranks, for collectives on tensors of `device`: `host` for host memory where this group is NCCL's."""
        if self.size == 1 or device.type != "cpu" or dist.get_backend(self.group) == "gloo":
            return self
        return self.host

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """In place."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        """In place."""
        if self.size > 1:
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)
        return tensor

    def all_reduce_mean(self, tensors: list[Tensor]) -> None:
        """In place, as one flat message; the tensors have one dtype."""
        if self.size == 1 or not tensors:
            return
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        dist.all_reduce(flat, group=self.group)
        flat /= self.size
        for tensor, mean in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(mean.view_as(tensor))

    def all_reduce_integers(self, first: int, second: int) -> tuple[int, int]:
        """The sums of two integers, as one message in host memory: for a gloo group. The device is not waited for."""
        total = self.all_reduce_sum(torch.tensor([first, second])).tolist()
        return total[0], total[1]

    def all_to_all(self, sent: Tensor, sent_counts: list[int], received_counts: list[int]) -> tuple[Tensor, Any]:
        """Starts an all-to-all of rows, in segments by rank: (buffer to be filled, handle to wait on)."""
        if self.size == 1:
            return sent, CompletedWork()
        received = sent.new_empty(sum(received_counts), *sent.shape[1:])
        return received, self._all_to_all_single(received, sent, received_counts, sent_counts)

    def all_to_all_remote(
        self, received: Tensor, sent: Tensor, sent_counts: list[int], received_counts: list[int]
    ) -> Any:
        """Starts an all-to-all that skips this rank's own segment: neither buffer has room for it, whatever its count.
        Returns a handle to wait on."""
        if self.size == 1:
            return CompletedWork()
        remote_received, remote_sent = self._without_own(received_counts), self._without_own(sent_counts)
        return self._all_to_all_single(received, sent, remote_received, remote_sent)

    def all_gather(self, local: Tensor, dim: int | None) -> Tensor:
        """The ranks' tensors, all of one shape, concatenated along `dim` in rank order. `dim` None: the tensor is
        replicated and returned as it is."""
        if self.size == 1 or dim is None:
            return local
        gathered = [torch.empty_like(local, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(gathered, local.contiguous(), group=self.group)
        return torch.cat(gathered, dim=dim)

    def all_gather_object(self, value: Any) -> list[Any]:
        """The ranks' values (plain data of our own), in rank order."""
        if self.size == 1:
            return [value]
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, value, group=self.group)
        return gathered

    def close(self) -> None:
        """Of the world: destroys all process groups."""
        if self.size > 1:
            dist.destroy_process_group()

    def _without_own(self, counts: list[int]) -> list[int]:
        return [0 if rank == self.rank else count for rank, count in enumerate(counts)]

    def _all_to_all_single(
        self, received: Tensor, sent: Tensor, received_counts: list[int], sent_counts: list[int]
    ) -> Any:
        return dist.all_to_all_single(received, sent, received_counts, sent_counts, group=self.group, async_op=True)


class CompletedWork:
    """The handle of a collective that had nothing to do."""

    def wait(self) -> None:
        pass
