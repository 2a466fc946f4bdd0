"""If this fails, a hang ends a run without saying where, or names the phase in which the host happened to wait."""

import os
import time
from pathlib import Path

import pytest
import torch

from xgram_dist.parallel import watchdog
from xgram_dist.parallel.device import dump_flight_recorder
from xgram_dist.parallel.watchdog import Phases


class FakeEvent:
    """A point of a stream, as `record_time` returns it on a GPU."""

    def __init__(self) -> None:
        self.reached = False

    def query(self) -> bool:
        return self.reached


class BrokenEvent(FakeEvent):
    def query(self) -> bool:
        raise RuntimeError("CUDA error: unspecified launch failure")


def run_phases(monkeypatch: pytest.MonkeyPatch, event: type[FakeEvent], *names: str) -> tuple[Phases, list[FakeEvent]]:
    """Phases that the host has left, and the events at their ends."""
    recorded: list[FakeEvent] = []

    def record(device: torch.device) -> FakeEvent:
        recorded.append(event())
        return recorded[-1]

    monkeypatch.setattr(watchdog, "record_time", record)
    phases = Phases(0, torch.device("cpu"))
    for name in names:
        with phases(name):
            pass
    return phases, recorded[1::2]


def test_on_a_device_the_oldest_unfinished_phase_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    phases, ends = run_phases(monkeypatch, FakeEvent, "fetch", "wait", "compute", "return")
    assert phases.overdue(-1.0) is None  # the host waits nowhere
    with phases("update"):
        assert phases.overdue(60.0) is None
        assert phases.overdue(-1.0) == "fetch"
        ends[0].reached = True
        assert phases.overdue(-1.0) == "wait"
        for end in ends:
            end.reached = True
        assert phases.overdue(-1.0) == "update"


def test_planning_is_host_work_and_names_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    phases, _ = run_phases(monkeypatch, FakeEvent, "fetch")
    with phases("plan"):
        assert phases.overdue(-1.0) == "plan"


def test_a_failed_device_leaves_the_phase_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    phases, _ = run_phases(monkeypatch, BrokenEvent, "fetch")
    with phases("update"):
        assert phases.overdue(-1.0) == "update"


def test_on_the_cpu_the_phase_of_the_host_is_named() -> None:
    phases = Phases(0, torch.device("cpu"))
    with phases("fetch"):
        pass
    with phases("update"):
        assert phases.overdue(-1.0) == "update"
    with phases("data"):
        assert phases.overdue(-1.0) is None  # without collectives


def a_phase_that_hangs(phases: Phases) -> None:
    with phases("fetch"):
        time.sleep(60)


def test_the_stacks_of_all_threads_are_printed_and_kept(tmp_path: Path) -> None:
    log, folder = tmp_path / "stderr", tmp_path / "run" / "watchdog"
    child = os.fork()
    if child == 0:
        try:
            os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
            watchdog.sys.stderr = os.fdopen(2, "w")  # type: ignore[attr-defined]
            phases = Phases(1, torch.device("cpu"))
            phases.watch(0.2, folder)
            a_phase_that_hangs(phases)
        finally:
            os._exit(99)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    text = log.read_text()
    assert "in a_phase_that_hangs" in text
    assert text.splitlines()[-1].startswith("rank 1: step 0, phase 'fetch': waited 0.2 s")
    assert "in a_phase_that_hangs" in (folder / "rank-1.txt").read_text()
    assert not (folder / "nccl_trace_rank_1").exists()


def test_the_flight_recorder_is_asked_on_a_gpu_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C._distributed_c10d, "_dump_nccl_trace", lambda: b"trace", raising=False)
    dump_flight_recorder(torch.device("cpu"), tmp_path / "cpu")
    dump_flight_recorder(torch.device("cuda"), tmp_path / "cuda")
    monkeypatch.delattr(torch._C._distributed_c10d, "_dump_nccl_trace")
    dump_flight_recorder(torch.device("cuda"), tmp_path / "unavailable")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("cuda", b"trace")]


def test_a_phase_within_another_interrupts_it() -> None:
    phases = Phases(0, torch.device("cpu"))
    with phases("compute"):
        with phases("wait"):
            time.sleep(0.05)
            assert phases.overdue(-1.0) == "wait"
        with pytest.raises(KeyError), phases("fetch"):
            raise KeyError
        with phases("return"):
            pass
        assert phases.overdue(-1.0) is None  # "compute" is watched from its second time on
    with phases("compute"):
        assert phases.overdue(-1.0) == "compute"
    seconds = phases.take()
    assert seconds["seconds_wait"] >= 0.05 > seconds["seconds_compute"]
    assert not phases._open
