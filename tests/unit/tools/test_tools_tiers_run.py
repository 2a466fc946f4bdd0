"""`tools/tiers_run.py`: what it looks at, and its picture."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tools_helpers import load_tool

tiers_run = load_tool("tiers_run")


def test_disk_and_memory_are_those_of_the_run(tmp_path: Path) -> None:
    with (tmp_path / "rank-0.view-0.records").open("wb") as file:
        file.truncate(1 << 30)
        os.posix_fallocate(file.fileno(), 0, 1 << 20)
    (tmp_path / "another").write_bytes(bytes(1 << 16))
    assert 1 << 20 <= tiers_run.disk_bytes(tmp_path) < 2 << 20
    with subprocess.Popen(["sleep", "60"]) as alone:
        assert tiers_run.rank_memory(alone.pid)[0] == 0, "it has started no ranks"
        alone.kill()
    assert tiers_run.newest_step(tmp_path) == 0


def test_both_runs_are_drawn(tmp_path: Path) -> None:
    keys = ("validation_loss", "memory_own", "memory_mapped", "disk", "seconds", "checkpoints")
    runs = [{"rows": rows, **{key: [[0, 1.0], [5, 2.0], [10, 3.0]] for key in keys}} for rows in (10**6, 10**9)]
    tiers_run.draw(runs, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000


def test_too_few_steps_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["tiers_run.py", "--data", "data", "--steps", "20"])
    with pytest.raises(SystemExit):
        tiers_run.main()
    assert "--steps 20 is below 24" in capsys.readouterr().err
