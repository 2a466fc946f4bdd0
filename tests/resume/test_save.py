"""When a run saves, and what happens when it cannot."""

import errno
import os
import signal
import subprocess
from contextlib import suppress

import pytest
from kills import Run, contents, saving, steps_saved, wait_until
from ranks_helper import run_ranks
from train_helpers import read_metrics, small_config

from xgram_dist.checkpoint import dcp_storage as storage
from xgram_dist.checkpoint.folder import list_steps
from xgram_dist.config import dump_config
from xgram_dist.train.trainer import Trainer


def full(*arguments):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "somewhere")


def one_rank_cannot_write(ranks, config, folder):
    """The second rank finds its disk full, once."""
    original, left = storage.write_tensors, 1

    def write(*arguments):
        nonlocal left
        left -= 1
        return full() if ranks.rank == 1 and left >= 0 else original(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "write_tensors", write)
        return Trainer(config, folder, fresh=False, ranks=ranks).run()


def test_saves_by_the_clock_go_on_after_one_that_failed_on_one_rank(data, tmp_path):
    config = small_config(data, train={"steps": 5}, checkpoint={"minutes": 1e-6, "keep": 9})
    assert run_ranks(one_rank_cannot_write, 2, config, tmp_path / "run") == [0, 0]
    told = {record["step"]: record["written"] for record in read_metrics(tmp_path / "run", "checkpoint")}
    assert told == {1: False, 2: True, 3: True, 4: True, 5: True}
    assert list_steps(tmp_path / "run") == [2, 3, 4, 5]
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 4  # nothing else is left


def test_a_run_whose_end_cannot_be_saved_is_not_complete(data, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(storage, "write_tensors", full)
    assert Trainer(small_config(data, train={"steps": 2}), tmp_path / "run", fresh=False).run() == 1
    said = capsys.readouterr().err
    assert "step 2: checkpoint NOT written: rank 0: No space left on device ('somewhere')" in said
    assert read_metrics(tmp_path / "run", "end")[0]["complete"] is False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_ends_a_run_with_a_checkpoint_of_its_last_step(data, tmp_path, zygote, number):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(dump_config(small_config(data, train={"steps": 100_000})))
    run = Run(str(recipe), tmp_path / "run", zygote=zygote)
    wait_until(run, lambda: "\nstep " in run.said())
    for _ in range(3):  # schedulers ask more than once
        run.send(number, run.process.pid)
    assert run.end() == 130
    (end,) = read_metrics(run.folder, "end")
    assert steps_saved(run.folder) == [end["step"]]
    assert end["complete"] is False


@pytest.fixture
def small_disk(tmp_path):
    path = tmp_path / "disk"
    path.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(path)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"needs a file system of its own, which root may mount: {done.stderr.strip()}")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def fill(path):
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))


def test_a_full_disk_costs_a_checkpoint_and_no_more(data, tmp_path, small_disk, zygote):
    recipe, folder = tmp_path / "recipe.yaml", small_disk / "run"
    recipe.write_text(
        dump_config(small_config(data, train={"steps": 100_000, "log_every": 5}, checkpoint={"every": 5}))
    )
    run = Run(str(recipe), folder, zygote=zygote)
    assert run.stop_at(lambda run: len(steps_saved(folder)) == 2 and not saving(run))
    before = {step: contents(folder / "checkpoints" / f"step-{step:08d}") for step in steps_saved(folder)}
    ballast = small_disk / "ballast"
    fill(ballast)
    run.send(signal.SIGCONT)
    wait_until(run, lambda: run.said().count("checkpoint NOT written") >= 2)  # it said so, and trained on to the next
    assert "No space left on device" in run.said()
    assert list(before) == steps_saved(folder)
    for step, tensors in before.items():
        again = contents(folder / "checkpoints" / f"step-{step:08d}")
        assert all((again[name] == tensors[name]).all() for name in tensors)
    ballast.unlink()
    wait_until(run, lambda: max(steps_saved(folder), default=0) > max(before))
    run.send(signal.SIGTERM, run.process.pid)
    assert run.end() == 130
    last = max(steps_saved(folder))
    again = Run(str(recipe), folder, f"train.steps={last + 2}", ranks=1, zygote=zygote)
    assert again.end() == 0, again.said()
    assert f"resuming after step {last}" in again.said()
    steps = [record["step"] for record in read_metrics(folder, "train")]
    assert steps[-1] == last + 2
    assert steps == sorted(set(steps))
