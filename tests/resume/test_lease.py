"""One run at a time writes to a run folder, also when an older one is only asleep."""

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from kills import Run, saving, steps_saved, training
from train_helpers import small_config

from xgram_dist.checkpoint import lease as lease_module
from xgram_dist.checkpoint.folder import begin_checkpoint, clear_unfinished, commit_checkpoint, list_steps
from xgram_dist.checkpoint.lease import STALE_SECONDS, check_free, hold
from xgram_dist.config import dump_config
from xgram_dist.errors import UserError

SLURM = {"SLURM_JOB_ID": "4711", "SLURM_RESTART_COUNT": "1"}


@pytest.fixture(autouse=True)
def short_look(monkeypatch):
    monkeypatch.setattr(lease_module, "DYING_SECONDS", 0.1)


@pytest.fixture
def take():
    """Leases that are let go of with the test; one that lost its folder would end the process with its next beat."""
    leases = []

    def taken(run):
        leases.append(lease_module.take(run))
        return leases[-1]

    yield taken
    for lease in leases:
        lease.release()


def change(run, **values):
    """The lease as another holder would have left it."""
    (path,) = (run / "lease").glob("*.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    return path


def elsewhere(take, run, **values):
    """A lease that is held on another machine."""
    take(run)
    return change(run, machine="another", host="far", **values)


def grow_old(path, seconds):
    then = os.stat(path).st_mtime - seconds
    os.utime(path, (then, then))


def test_a_held_folder_is_refused_with_the_holder_named(take, tmp_path):
    with hold(tmp_path):
        for attempt in (take, check_free):
            with pytest.raises(
                UserError, match=rf"is held by process {os.getpid()} on .*, since 20.*wait for that run"
            ):
                attempt(tmp_path)
    with hold(tmp_path):  # released: free at once
        pass
    check_free(tmp_path)


def test_the_dead_of_this_machine_are_taken_over_at_once(tmp_path):
    code = "import os, pathlib; from xgram_dist.checkpoint.lease import take"
    code += f"; take(pathlib.Path({str(tmp_path)!r})); os.kill(os.getpid(), 9)"
    child = subprocess.Popen([sys.executable, "-c", code])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, but not buried
    with hold(tmp_path) as lease:
        assert lease.number == 2
    child.wait()


def test_a_holder_that_is_still_dying_is_waited_for(take, tmp_path, monkeypatch):
    monkeypatch.setattr(lease_module, "DYING_SECONDS", 60.0)
    code = "import pathlib, time; from xgram_dist.checkpoint.lease import take"
    code += f"; take(pathlib.Path({str(tmp_path)!r})); print('held', flush=True); time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"held\n"
    threading.Timer(0.3, child.kill).start()
    assert take(tmp_path).number == 2
    child.wait()


def test_a_new_process_with_the_old_number_is_not_the_holder(take, tmp_path):
    take(tmp_path)
    change(tmp_path, started="1")
    take(tmp_path)


def test_a_holder_on_another_machine_is_taken_over_when_it_is_silent(take, tmp_path):
    path = elsewhere(take, tmp_path, pid=1)
    grow_old(path, STALE_SECONDS - 20)
    with pytest.raises(UserError, match=r"process 1 on far.*1 m 40 s ago.*taken over after 2 m 00 s"):
        take(tmp_path)
    grow_old(path, 21)
    assert take(tmp_path).number == 2


@pytest.mark.parametrize(
    ("before", "now", "free"),
    [
        (SLURM, {**SLURM, "SLURM_RESTART_COUNT": "2"}, True),
        ({"SLURM_JOB_ID": "4711"}, SLURM, True),
        (SLURM, SLURM, False),
        (SLURM, {**SLURM, "SLURM_RESTART_COUNT": "0"}, False),
        (SLURM, {"SLURM_JOB_ID": "4712", "SLURM_RESTART_COUNT": "2"}, False),
        ({"TORCHELASTIC_RUN_ID": "a"}, {"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": "1"}, True),
        ({"TORCHELASTIC_RUN_ID": "none"}, {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "1"}, False),
        ({}, SLURM, False),
        (
            {"XGRAM_DIST_JOB": "7:0.0.0"},
            {"XGRAM_DIST_JOB": "7:0.0.1", "SLURM_JOB_ID": "7"},
            True,
        ),  # ranks started again
        ({"XGRAM_DIST_JOB": "7:0.2.1"}, {"XGRAM_DIST_JOB": "7:1.0.0", "SLURM_JOB_ID": "9"}, True),  # the successor
        ({"XGRAM_DIST_JOB": "7:1.0.0"}, {"XGRAM_DIST_JOB": "7:0.2.1", "SLURM_JOB_ID": "7"}, False),
        ({"XGRAM_DIST_JOB": "7:0.0.0"}, {"XGRAM_DIST_JOB": "8:1.0.0", "SLURM_JOB_ID": "9"}, False),
    ],
)
def test_a_later_incarnation_of_the_same_job_takes_over(take, tmp_path, monkeypatch, before, now, free):
    for name, value in before.items():
        monkeypatch.setenv(name, value)
    elsewhere(take, tmp_path)
    for name in before:
        monkeypatch.delenv(name)
    for name, value in now.items():
        monkeypatch.setenv(name, value)
    if free:
        assert take(tmp_path).number == 2
    else:
        with pytest.raises(UserError, match="is held by"):
            take(tmp_path)


def test_of_many_that_come_at_once_one_gets_it(take, tmp_path):
    grow_old(elsewhere(take, tmp_path), 1000)

    def attempt(_):
        try:
            return take(tmp_path).number
        except UserError:
            return None

    with ThreadPoolExecutor(8) as pool:
        assert [number for number in pool.map(attempt, range(8)) if number is not None] == [2]


def test_who_lost_the_folder_after_looking_cannot_complete_a_checkpoint(tmp_path):
    """Between the look at the lease and the renaming there is always a moment."""
    begin_checkpoint(tmp_path, 5, "older")
    clear_unfinished(tmp_path)  # the newer run starts
    with pytest.raises(FileNotFoundError):
        commit_checkpoint(tmp_path, 5, "older")
    begin_checkpoint(tmp_path, 5, "newer")
    commit_checkpoint(tmp_path, 5, "newer")
    with pytest.raises(FileNotFoundError):
        commit_checkpoint(tmp_path, 5, "older")
    assert list_steps(tmp_path) == [5]


def snapshot(folder):
    """Everything that counts in a run folder."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "tensorboard" not in path.parts
    }


@pytest.mark.parametrize("moment", [training, saving])
def test_a_run_that_slept_through_a_takeover_writes_nothing(tmp_path, data, zygote, moment):
    recipe, folder = tmp_path / "recipe.yaml", tmp_path / "run"
    recipe.write_text(dump_config(small_config(data, train={"steps": 100_000}, checkpoint={"every": 3})))
    older = Run(str(recipe), folder, zygote=zygote)
    try:
        assert older.stop_at(lambda run: len(steps_saved(folder)) > 1 and moment(run))
        pids = older.pids()
        refused = Run(str(recipe), folder, zygote=zygote)
        assert refused.end() == 2
        assert f"is held by process {pids[0]} on " in refused.said()
        assert "Traceback" not in refused.said()
        (lease,) = (folder / "lease").glob("*.json")
        grow_old(lease, 1000)
        steps = max(steps_saved(folder)) + 4
        newer = Run(str(recipe), folder, f"train.steps={steps}", ranks=1, zygote=zygote)
        assert newer.end() == 0, newer.said()
        assert f"resuming after step {steps - 4}" in newer.said()
        before = snapshot(folder)
        older.send(signal.SIGCONT, *pids)
        assert older.end() == 1
        assert f"is no longer held by this run: it was taken over by process {newer.process.pid} on" in older.said()
        assert snapshot(folder) == before
    finally:
        older.send(signal.SIGKILL, older.process.pid, *older.pids())


def test_a_process_that_is_killed_while_it_takes_the_lease_holds_up_nobody(tmp_path: Path) -> None:
    """Killed before its file is whole, it leaves no lease; on a file system without links, too, one run at a time."""
    code = "import os, pathlib; from xgram_dist.checkpoint import lease"
    code += "; lease.os.fsync = lambda _: os.kill(os.getpid(), 9)"
    code += f"; lease.take(pathlib.Path({str(tmp_path)!r}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    with hold(tmp_path) as lease:
        assert lease.number == 1


def test_a_file_system_without_hard_links_has_leases_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(lease_module.os, "link", link)
    with hold(tmp_path) as lease:
        assert lease.number == 1
        assert [path.name for path in (tmp_path / "lease").iterdir()] == ["00000001.json"]
        with pytest.raises(UserError, match="is held by process"):
            check_free(tmp_path)
