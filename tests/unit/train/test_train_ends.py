"""If this fails, an error on one of several ranks hangs the run, or is not printed.

The other ranks wait in a collective. Whatever waits for them, such as destroying an NCCL group, never returns.
"""

import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from train_helpers import small_config

from xgram_dist.cli.main import main
from xgram_dist.config import dump_config
from xgram_dist.errors import UserError
from xgram_dist.parallel import mesh
from xgram_dist.parallel.process_group import ProcessGroup
from xgram_dist.train import trainer
from xgram_dist.train.checkpointing import TrainState
from xgram_dist.train.starts import StartClock, StartRecord
from xgram_dist.train.trainer import Trainer


class WaitingRanks(ProcessGroup):
    def close(self) -> None:
        time.sleep(60)


def train_on_a_rank(words: list[str], error: BaseException, log: Path) -> int:
    """Exit code of `train`, as the first of two ranks, whose training fails. The process is forked."""

    def fail(*_: Any) -> Any:
        raise error

    child = os.fork()
    if child == 0:
        try:
            sys.stderr = log.open("w", encoding="utf-8", buffering=4096)
            mesh.init_world = lambda *_: WaitingRanks(0, 2)  # type: ignore[assignment]
            trainer.Trainer = lambda *_, **__: SimpleNamespace(run=fail)  # type: ignore[assignment, misc]
            main(words)
        finally:
            os._exit(99)
    end = time.monotonic() + 10
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(child, 9)
    os.waitpid(child, 0)
    pytest.fail("the rank waits for the others")


@pytest.mark.parametrize(
    ("error", "exit_code", "text"),
    [
        (RuntimeError("a kernel failed"), 1, "[rank0]: RuntimeError: a kernel failed"),
        (UserError("train.steps = 0 is too small"), 2, "xgram-dist train: train.steps = 0 is too small"),
        (MemoryError("no memory"), 2, "out of memory (no memory)"),
        (KeyboardInterrupt(), 130, "stopped by Ctrl-C"),
    ],
    ids=["bug", "user-error", "out-of-memory", "interrupt"],
)
def test_an_error_on_one_of_several_ranks_is_printed_and_ends_it(
    data: Path, tmp_path: Path, error: BaseException, exit_code: int, text: str
) -> None:
    recipe, folder, log = tmp_path / "recipe.yaml", tmp_path / "run", tmp_path / "stderr"
    recipe.write_text(dump_config(small_config(data)))
    assert train_on_a_rank(["train", str(recipe), "--folder", str(folder)], error, log) == exit_code
    printed = log.read_text()
    assert text in printed
    assert ("Traceback" in printed) == (exit_code == 1)
    (lease,) = (folder / "lease").glob("*.json")
    assert lease.stat().st_mtime == 0  # released


@pytest.mark.parametrize("size", [1, 2])
def test_a_failed_rank_does_not_wait_for_its_threads(size: int) -> None:
    closed = []

    def closes(name: str) -> Any:
        def note(*_: Any) -> None:
            closed.append(name)

        return SimpleNamespace(close=note, drain=note, wait=lambda seconds: closed.append(f"{name}, {seconds:.0f} s"))

    def fail(step: int) -> Any:
        raise RuntimeError("a kernel failed")

    failing: Any = object.__new__(Trainer)
    failing.config, failing.start = SimpleNamespace(train=SimpleNamespace(steps=1)), 0
    failing.loader, failing.ranks, failing._train = nullcontext(), ProcessGroup(0, size), fail
    failing.next_working, failing.state = None, TrainState()
    failing.start_record = StartRecord(None, StartClock(), ["a"], 0)
    failing.metrics, failing.due_work, failing.resumed = closes("metrics"), closes("callback"), False
    for name in ("batches", "checkpoints", "lookup", "engine"):
        setattr(failing, name, closes(name))
    with pytest.raises(RuntimeError, match="a kernel failed"):
        failing.run()
    threads = ["checkpoints, 10 s"] if size > 1 else ["batches", "checkpoints", "lookup", "engine"]
    assert closed == ["callback", "metrics", *threads]
