"""Saving while training goes on: the state is copied, then written by a thread over a process group of its own."""

import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import save

from xgram_dist.checkpoint.boxes import Box, Spread, State
from xgram_dist.checkpoint.folder import begin, complete, discard, found_steps, remove, superfluous
from xgram_dist.checkpoint.storage import BoxSavePlanner, FolderWriter, allow_one_process
from xgram_dist.config.schema import CheckpointConfig
from xgram_dist.parallel.ranks import Ranks


class Saver:
    def __init__(self, run: Path, settings: CheckpointConfig, world: Ranks):
        self.run, self.settings, self.world = run, settings, world
        # Its own group: the thread's messages must not mix with those of training.
        self._group = dist.new_group(backend="gloo", timeout=world.timeout) if world.size > 1 else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="save")
        self._under_way: Future[str] | None = None

    def save(self, state: State, facts: dict[str, Any], files: list[Path], *, wait: bool) -> str | None:
        """Begin to save; the outcome of the save before, or of this one when waited for."""
        before = self.outcome(wait=True)
        copied = not wait and self.settings.asynchronous
        self._under_way = self._thread.submit(self._write, _copy(state) if copied else state, facts, files)
        return self.outcome(wait=True) if not copied else before

    def outcome(self, *, wait: bool = False) -> str | None:
        """One sentence about the last save, once, when it is through."""
        if self._under_way is None or not (wait or self._under_way.done()):
            return None
        done, self._under_way = self._under_way, None
        return done.result()

    def close(self) -> None:
        self._thread.shutdown()

    def _write(self, state: State, facts: dict[str, Any], files: list[Path]) -> str:
        """All ranks succeed or all fail; training goes on in both cases."""
        step, start = facts["step"], time.monotonic()
        try:
            aside = self._begin(step, files)
            allow_one_process()
            save(
                state,
                storage_writer=FolderWriter(aside, self.world.rank, facts),
                planner=BoxSavePlanner(),
                process_group=self._group,
                no_dist=self.world.size == 1,
            )
            folder = self._complete(step)
        except Exception as error:
            if self.world.first:
                discard(self.run, step)
            cause = _cause(error)
            return f"step {step}: checkpoint NOT written: {cause}; training goes on, the checkpoint before stays good"
        seconds = time.monotonic() - start
        size = sum(box.tensor.nbytes for spread in state.values() for box in spread.boxes)
        return f"step {step}: checkpoint {folder} ({size / 1e6:,.1f} MB of this rank in {seconds:.1f} s)"

    def _begin(self, step: int, files: list[Path]) -> Path:
        """The first rank makes the folder; all hear whether it could."""

        def make() -> str:
            aside = begin(self.run, step)
            for file in files:
                shutil.copyfile(file, aside / file.name)
            return str(aside)

        return Path(self._by_first(make))

    def _complete(self, step: int) -> str:
        def finish() -> str:
            final = complete(self.run, step)
            for old in superfluous(found_steps(self.run), self.settings.keep, self.settings.keep_every):
                remove(self.run, old)
            return str(final)

        return self._by_first(finish)

    def _by_first(self, work: Any) -> str:
        """Done by the first rank; its result, or its failure, on all."""
        found: list[Any] = [None, None]
        if self.world.first:
            try:
                found[0] = work()
            except OSError as error:
                found[1] = f"{error.strerror} ('{error.filename}')"
        if self.world.size > 1:
            dist.broadcast_object_list(found, src=0, group=self._group)
        if found[1] is not None:
            raise RuntimeError(found[1])
        return str(found[0])


@torch.no_grad()
def _copy(state: State) -> State:
    return {
        name: Spread(s.shape, s.dtype, [Box(box.offsets, box.tensor.to("cpu", copy=True)) for box in s.boxes])
        for name, s in state.items()
    }


def _cause(error: BaseException) -> str:
    failures = getattr(error, "failures", None)  # torch.distributed.checkpoint gathers those of all ranks
    if failures:
        rank, (first, _) = next(iter(failures.items()))
        return f"rank {rank}: {first}"
    return str(error)
