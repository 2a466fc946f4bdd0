"""Saving while training continues: the state is copied to host memory, then a thread writes it.

`Saver.save` blocks for the copy only. The thread runs torch.distributed.checkpoint over a process group of its own,
because a group that two threads use hangs when their order differs between ranks. Before it, one all-gather of the
numbers of touched rows says where each rank's rows stand.

A save succeeds on all ranks or fails on all: each stage of torch.distributed.checkpoint gathers the failures of all
ranks, and the result of what rank 0 does alone is broadcast. A failed save leaves the previous checkpoint as it was.
"""

import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save

from xgram_dist.checkpoint.dcp_storage import FolderWriter, ShardSavePlanner, ignore_single_process_warning
from xgram_dist.checkpoint.folder import (
    begin_checkpoint,
    clear_unfinished,
    commit_checkpoint,
    copy_file,
    discard_checkpoint,
    expired_steps,
    list_steps,
    remove_checkpoint,
)
from xgram_dist.checkpoint.lease import Lease
from xgram_dist.checkpoint.sharded_tensor import (
    CheckpointState,
    LocalShard,
    ShardedTensor,
    count_rows,
    place_rows,
    rows_by_rank,
)
from xgram_dist.config.schema import CheckpointConfig
from xgram_dist.console import ByteProgress
from xgram_dist.parallel.device import empty_on_host, synchronize
from xgram_dist.parallel.mesh import new_host_group
from xgram_dist.parallel.process_group import ProcessGroup


@dataclass(frozen=True)
class SaveResult:
    """How a save ended."""

    step: int
    seconds: float
    blocked: float
    """Seconds for which training was blocked."""
    bytes: int = 0
    """Of all ranks; known to rank 0."""
    error: str | None = None

    def __str__(self) -> str:
        if self.error is not None:
            return f"step {self.step}: checkpoint NOT written: {self.error}; the previous checkpoint is unchanged"
        rate = self.bytes / 1e6 / max(self.seconds, 1e-9)
        return (
            f"step {self.step}: checkpoint of {self.bytes / 1e6:,.1f} MB in {self.seconds:.1f} s ({rate:,.0f} MB/s, "
            f"training blocked for {1000 * self.blocked:,.0f} ms)"
        )


class Saver:
    def __init__(self, run: Path, settings: CheckpointConfig, world: ProcessGroup, lease: Lease | None = None):
        """`lease`: of the run folder, on rank 0."""
        self.run, self.settings, self.world, self.lease = run, settings, world, lease
        self._group = new_host_group(world).group
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="save")
        self._pending: Future[SaveResult] | None = None
        self._staging = StagingBuffers()
        if world.first:
            clear_unfinished(run)
        self._last_save = time.monotonic()

    def due(self, step: int) -> bool:
        """Whether it is time to save. The clocks of ranks differ, so rank 0 decides."""
        every, minutes = self.settings.every, self.settings.minutes
        overdue = minutes > 0 and time.monotonic() - self._last_save >= 60 * minutes
        return overdue or (every > 0 and step % every == 0)

    def save(
        self,
        state: CheckpointState,
        facts: dict[str, Any],
        files: list[Path],
        *,
        wait: bool,
        base: Path | None = None,
    ) -> list[SaveResult]:
        """Start a save; `files` are copied into the checkpoint. `base`: as in `FolderWriter`. The former save must have
        ended. With `wait`, returns the result."""
        start = self._last_save = time.monotonic()
        assert self._pending is None, "a save is under way"
        if wait or not self.settings.asynchronous:
            self._pending = self._thread.submit(self._write, state, facts, files, start, None, base)
            return self.finished_saves(wait=True)
        staged = self._staging.copy(state)
        blocked = time.monotonic() - start
        self._pending = self._thread.submit(self._write, staged, facts, files, start, blocked, base)
        return []

    def finished_saves(self, *, wait: bool = False) -> list[SaveResult]:
        """The result of the last save, once, when it has ended."""
        if self._pending is None or not (wait or self._pending.done()):
            return []
        pending, self._pending = self._pending, None
        return [pending.result()]

    def wait(self, seconds: float) -> None:
        """Until the save under way has ended, if it ends in time."""
        if self._pending is not None:
            wait_for([self._pending], timeout=seconds)

    def close(self) -> None:
        self._thread.shutdown()

    def all_gather(self, value: Any) -> list[Any]:
        """From all ranks, while no save is under way. The group is the saver's own: planning may be using others."""
        gathered = [value] * self.world.size
        if self.world.size > 1:
            dist.all_gather_object(gathered, value, group=self._group)
        return gathered

    # On the thread.

    def _write(
        self,
        state: CheckpointState,
        facts: dict[str, Any],
        files: list[Path],
        start: float,
        blocked: float | None,
        base: Path | None,
    ) -> SaveResult:
        """`blocked`: None if training waits for all of it."""
        step = facts["step"]
        lines = ByteProgress(f"step {step}: checkpoint") if self.world.first else None
        try:
            unfinished = Path(self._on_rank_0(lambda: self._begin(step, files)))
            placed = place_rows(state, rows_by_rank(self.all_gather(count_rows(state))))
            writer = FolderWriter(unfinished, self.world.rank, facts, placed, lines, base)
            ignore_single_process_warning()
            save(
                placed.tensors,
                storage_writer=writer,
                planner=ShardSavePlanner(placed.row_ids),
                process_group=self._group,
                no_dist=self.world.size == 1,
            )
            self._on_rank_0(lambda: self._commit(step))
        except (Exception, CheckpointException) as error:  # CheckpointException is a BaseException
            if self.world.first:
                self._check_lease()
                discard_checkpoint(self.run, step, self._token)
            seconds = time.monotonic() - start
            return SaveResult(step, seconds, seconds if blocked is None else blocked, error=_cause(error))
        self._staging.divide(_written_by_this_rank(state, placed, writer.written))
        seconds = time.monotonic() - start
        return SaveResult(step, seconds, seconds if blocked is None else blocked, writer.total_bytes)

    @property
    def _token(self) -> str:
        return "alone" if self.lease is None else self.lease.token

    def _check_lease(self) -> None:
        if self.lease is not None:
            self.lease.check()

    def _begin(self, step: int, files: list[Path]) -> str:
        self._check_lease()
        unfinished = begin_checkpoint(self.run, step, self._token)
        for file in files:
            copy_file(file, unfinished)
        return str(unfinished)

    def _commit(self, step: int) -> str:
        self._check_lease()
        folder = commit_checkpoint(self.run, step, self._token)
        for expired in expired_steps(list_steps(self.run), self.settings.keep, self.settings.keep_every):
            self._check_lease()
            remove_checkpoint(self.run, expired)
        return str(folder)

    def _on_rank_0(self, work: Callable[[], str]) -> str:
        """Run on rank 0; broadcast its result or its failure to all ranks."""
        outcome: list[Any] = [None, None]
        if self.world.first:
            try:
                outcome[0] = work()
            except Exception as error:
                outcome[1] = _cause(error)
        if self.world.size > 1:
            dist.broadcast_object_list(outcome, src=0, group=self._group)
        if outcome[1] is not None:
            raise RuntimeError(outcome[1])
        return str(outcome[0])


def _cause(error: BaseException) -> str:
    failures = getattr(error, "failures", None)  # torch.distributed.checkpoint gathers those of all ranks
    if failures:
        rank, (first, _) = next(iter(failures.items()))
        return f"rank {rank}: {_cause(first)}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f" ('{error.filename}')" if error.filename else "")
    return str(error) or type(error).__name__


ShardKey = tuple[str, tuple[int, ...]]
"""Name of a tensor and offsets of a shard of it."""


def _written_by_this_rank(
    state: CheckpointState, placed: CheckpointState, written: set[ShardKey]
) -> dict[ShardKey, bool]:
    """For `StagingBuffers.divide`: shards have their offsets before `place_rows`. One without rows is written by
    nobody."""
    return {
        (name, shard.offsets): (name, final.offsets) in written
        for name, tensor in state.tensors.items()
        for shard, final in zip(tensor.shards, placed.tensors[name].shards, strict=False)
    }


class StagingBuffers:
    """The host copy of a state that the thread writes from.

    Buffers are reused between saves: allocating them page by page costs more than copying. Tensors that together cover
    one contiguous base tensor (the tables of a view) are copied with it in one piece."""

    def __init__(self) -> None:
        self._buffers: dict[ShardKey, Tensor] = {}
        self._skipped: set[ShardKey] = set()

    def divide(self, written: dict[ShardKey, bool]) -> None:
        """After a save, of each shard that this rank holds: whether it has written it. Those that other ranks write
        are not copied from now on."""
        self._skipped -= {key for key, by_this_rank in written.items() if by_this_rank}
        self._skipped |= {key for key, by_this_rank in written.items() if not by_this_rank}
        self._buffers = {key: buffer for key, buffer in self._buffers.items() if key not in self._skipped}

    @torch.no_grad()
    def copy(self, state: CheckpointState) -> CheckpointState:
        """A copy, valid until the next one is made."""
        shards = {
            (name, shard.offsets): (shard.tensor, shard.is_copy)
            for name, tensor in state.tensors.items()
            for shard in tensor.shards
            if (name, shard.offsets) not in self._skipped
        }
        covered_bases = _covered_bases([local for local, is_copy in shards.values() if not is_copy])
        copies: dict[ShardKey, Tensor] = {}
        base_copies: dict[int, Tensor] = {}
        for key, (local, is_copy) in shards.items():
            if is_copy and local.device.type == "cpu":
                copies[key] = local
                continue
            base = covered_bases.get(id(local._base))
            if base is None:
                copies[key] = self._copy(key, local)
                continue
            if id(base) not in base_copies:
                base_copies[id(base)] = self._copy(key, base)
            offset = local.storage_offset() - base.storage_offset()
            copies[key] = base_copies[id(base)].as_strided(local.shape, local.stride(), offset)
        for device in {local.device for local, _ in shards.values()}:
            synchronize(device)
        tensors = {
            name: ShardedTensor(
                tensor.shape,
                tensor.dtype,
                [LocalShard(s.offsets, copies[name, s.offsets]) for s in tensor.shards if (name, s.offsets) in copies],
                tensor.row_ids,
            )
            for name, tensor in state.tensors.items()
        }
        return CheckpointState(tensors, state.row_ids)

    def _copy(self, key: ShardKey, tensor: Tensor) -> Tensor:
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = self._buffers[key] = empty_on_host(tensor)
        return buffer.copy_(tensor, non_blocking=True)


def _covered_bases(tensors: list[Tensor]) -> dict[int, Tensor]:
    """The contiguous base tensors that these views cover completely, by id."""
    bases, covered = {}, Counter[int]()
    for tensor in tensors:
        base = tensor._base
        if base is not None and base.is_contiguous() and base.dtype == tensor.dtype:
            bases[id(base)] = base
            covered[id(base)] += tensor.numel()
    return {key: base for key, base in bases.items() if covered[key] >= base.numel()}
