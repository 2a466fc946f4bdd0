"""If this fails, a run that was stopped or killed misses a figure that it owed, or has one twice.

A run of ten steps that validates, diagnoses and saves at overlapping steps is disturbed at every moment at which a
record is written, and at every step by a signal. Its records must be those of a run that nothing disturbed.
"""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from ranks_helper import run_ranks
from test_resume import MEMORY, LostError, small_train
from train_helpers import read_metrics, saved_weights, small_config

from xgram_dist.train import due_work
from xgram_dist.train import trainer as loop
from xgram_dist.train.metrics import Metrics
from xgram_dist.train.trainer import Trainer

STEPS = 10
START_KINDS = ("memory",)
"""Of each start of a run."""


def settings(data: Path, optimizer: str = "catch_up") -> Any:
    train = {"steps": STEPS, "micro_batch": 1, "validation_sequences": 4, "log_every": 2}
    train |= {"validate_every": 2, "diagnose_every": 4}
    memory = {**MEMORY, "compression": 0.5, "optimizer": optimizer}
    return small_config(data, memory=memory, train={**small_train(), **train}, checkpoint={"every": 3, "keep": 3})


def figures(folder: Path, *, saves: bool = False) -> list[tuple[Any, ...]]:
    """(kind, step, value) of every record. Where a run was stopped it has saved more than it owed."""
    records = read_metrics(folder)
    kinds = (*START_KINDS, *(() if saves else ("checkpoint",)))
    return sorted(
        (record["kind"], record["step"], json.dumps(record.get("loss", record.get("written"))))
        for record in records
        if record["kind"] not in kinds
    )


def assert_same_records(folder: Path, whole: Path, *, saves: bool = False) -> None:
    assert figures(folder, saves=saves) == figures(whole, saves=saves)
    weights, expected = saved_weights(folder), saved_weights(whole)
    assert all(weights[name].equal(expected[name]) for name in expected)


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert Trainer(settings(data), folder, fresh=False).run() == 0
    kinds = {(record["kind"], record["step"]) for record in read_metrics(folder)}
    assert {("validation", 2), ("diagnose", 8), ("validation", STEPS), ("checkpoint", 9)} <= kinds
    return folder


def train_until_a_record(config: Any, folder: Path, number: int, patch: pytest.MonkeyPatch, *, written: bool) -> bool:
    """Lose the run at its `number`-th record of this start, before or after it is written. False: it came to its
    end."""
    left = [number]
    write = Metrics.write

    def lost(self: Metrics, kind: str, step: int, **values: Any) -> None:
        left[0] -= 1
        if left[0] or written:
            write(self, kind, step, **values)
        if not left[0]:
            raise LostError

    with patch.context() as patched:
        patched.setattr(Metrics, "write", lost)
        try:
            return Trainer(config, folder, fresh=False).run() != 0
        except LostError:
            return True


@pytest.mark.parametrize("written", [False, True], ids=["before", "after"])
def test_a_run_lost_at_any_record_has_every_record_once(
    data: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: bool
) -> None:
    """Each start is lost one record later than the one before: so the run gets on, and is lost at all of them."""
    config, folder, number = settings(data), tmp_path / "run", 1
    while train_until_a_record(config, folder, number, monkeypatch, written=written):
        number += 1
        assert number < 60
    assert number > 8
    assert_same_records(folder, whole, saves=True)


@pytest.mark.parametrize("seconds", [0.0, 20.0], ids=["left-to-the-resumed-run", "made-before-stopping"])
def test_a_run_stopped_after_every_step_has_every_record_once(
    data: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    config, folder, original = settings(data), tmp_path / "run", loop.train_step
    monkeypatch.setattr(due_work, "STOP_SECONDS", seconds)

    def step(*arguments: Any, **keywords: Any) -> Any:
        if arguments[-1] % 2 == 0 or seconds:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*arguments, **keywords)

    monkeypatch.setattr(loop, "train_step", step)
    codes = [Trainer(config, folder, fresh=False).run()]
    while codes[-1]:
        codes.append(Trainer(config, folder, fresh=False).run())
    assert codes == [130] * (STEPS - 1 if seconds else STEPS // 2 - 1) + [0]
    assert_same_records(folder, whole)
    before = (folder / "metrics.jsonl").read_text()
    assert Trainer(config, folder, fresh=False).run() == 0  # a complete run, started once more
    assert figures(folder) == figures(whole), before


@pytest.mark.parametrize(("at", "made"), [(4, [2]), (6, [2, 4, 6])], ids=["diagnosed-first-then", "known"])
def test_what_is_known_to_take_little_time_is_made_before_the_stop(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int, made: list[int]
) -> None:
    original = loop.train_step

    def step(*arguments: Any, **keywords: Any) -> Any:
        if arguments[-1] == at:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*arguments, **keywords)

    monkeypatch.setattr(loop, "train_step", step)
    assert Trainer(settings(data), tmp_path / "run", fresh=False).run() == 130
    assert [record["step"] for record in read_metrics(tmp_path / "run", "validation")] == made


def stop_and_resume(ranks: Any, config: Any, folder: Path) -> None:
    original = loop.train_step

    def step(*arguments: Any, **keywords: Any) -> Any:
        if arguments[-1] == 4 and ranks.rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        return original(*arguments, **keywords)

    loop.train_step = step  # type: ignore[assignment]
    assert Trainer(config, folder, fresh=False, ranks=ranks).run() == 130
    loop.train_step = original
    assert Trainer(config, folder, fresh=False, ranks=ranks).run() == 0


def test_ranks_agree_on_what_is_made_before_the_stop(data: Path, whole: Path, tmp_path: Path) -> None:
    run_ranks(stop_and_resume, 2, settings(data), tmp_path / "run")
    names = [one[:2] for one in figures(tmp_path / "run") if one[0] != "stragglers"]  # of several ranks alone
    assert names == [one[:2] for one in figures(whole)]
