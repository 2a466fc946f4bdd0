"""`train --ranks N` and torchrun: the same run as in one process; ranks end together."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from train_helpers import read_metrics, saved_weights, small_config

from xgram_dist.checkpoint.folder import list_steps
from xgram_dist.checkpoint.lease import check_free
from xgram_dist.cli.main import main
from xgram_dist.config import dump_config
from xgram_dist.train.starts import read_starts


def recipe(tmp_path, data, **sections):
    path = tmp_path / "recipe.yaml"
    path.write_text(dump_config(small_config(data, **sections)))
    return str(path)


def start(*words, **environment):
    command = [sys.executable, "-m", "xgram_dist", "train", *words]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}
    )


def finish(process, timeout=90):
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, output, errors


@pytest.fixture
def alone(tmp_path, data):
    """The run in one process, for comparison. Three batches of validation do not divide over two ranks."""
    path = recipe(tmp_path, data, train={"validation_sequences": 12})
    code, _, errors = finish(start(path, "--folder", str(tmp_path / "alone")))
    assert code == 0, errors
    return path, tmp_path / "alone"


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one core")
def test_ranks_keep_to_cores_of_their_own(tmp_path, data):
    process = start(recipe(tmp_path, data), "--ranks", "2", "--folder", str(tmp_path / "run"))
    found = set()
    while process.poll() is None and len(found) < 2:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        for child in children:
            with suppress(ProcessLookupError):
                found.add(frozenset(os.sched_getaffinity(int(child))))
        found.discard(frozenset(os.sched_getaffinity(0)))  # one that has just been started
        time.sleep(0.02)
    process.terminate()
    finish(process)
    assert len(found) == 2
    one, other = found
    assert not one & other


def test_two_ranks_give_the_losses_and_tables_of_one_process(alone, tmp_path):
    path, one = alone
    folder = tmp_path / "two"
    code, output, errors = finish(start(path, "--ranks", "2", "--folder", str(folder)))
    assert code == 0, errors
    assert "done after step 4" in output
    for kind in ("train", "validation"):
        ours = [record["loss"] for record in read_metrics(folder, kind)]
        theirs = [record["loss"] for record in read_metrics(one, kind)]
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    whole, spread = saved_weights(one), saved_weights(folder)
    assert list(whole) == list(spread)
    for name, values in whole.items():
        np.testing.assert_allclose(spread[name], values, rtol=1e-4, atol=1e-6, err_msg=name)
    for record in read_metrics(folder, "train"):  # the exchange is on record
        assert 0 < record["vectors_received"] <= 2 * 2 * record["distinct_tokens"]  # two slabs, two owners
        assert record["bytes_bound"] < record["bytes_received"] + record["bytes_sent"]
        assert 1.0 <= record["imbalance"] < 2.0
        for phase in ("fetch", "wait", "return", "update", "compute"):
            assert record[f"seconds_{phase}"] > 0
    assert read_metrics(folder, "train")[0]["seconds_plan"] > 0  # the last step plans no other
    ends = [read_metrics(run, "end")[0] for run in (folder, one)]
    assert ends[0]["rows"] == ends[1]["rows"]
    assert ends[0]["rows_hit"] == ends[1]["rows_hit"]


def test_torchrun_starts_the_same_run(alone, tmp_path):
    path, one = alone
    folder = tmp_path / "torchrun"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "-m", "xgram_dist", "train", path]
    done = subprocess.run([*command, "--folder", str(folder)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    ours = [record["loss"] for record in read_metrics(folder, "train")]
    np.testing.assert_allclose(ours, [record["loss"] for record in read_metrics(one, "train")], rtol=1e-5)


def ranks_of(process):
    """Process ids of the ranks a launcher started, by rank."""
    found = {}
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        try:
            with open(f"/proc/{pid}/stat") as file:
                parent = int(file.read().rsplit(")", 1)[1].split()[1])
            with open(f"/proc/{pid}/environ", "rb") as file:
                environment = dict(item.split(b"=", 1) for item in file.read().split(b"\0") if b"=" in item)
        except (OSError, ValueError):
            continue
        if parent == process.pid and b"RANK" in environment:
            found[int(environment[b"RANK"])] = pid
    return found


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_rank_takes_the_others_down_and_is_named_first(tmp_path, data, killed):
    process = start_training(tmp_path, data)
    pids = ranks_of(process)
    assert set(pids) == {0, 1}
    os.kill(pids[killed], signal.SIGKILL)
    since = time.monotonic()
    code, _, errors = finish(process, timeout=120)
    assert code != 0
    assert time.monotonic() - since < 30
    assert errors.startswith(f"xgram-dist: rank {killed} of 2 was killed by signal 9 (SIGKILL)")
    assert "Traceback" not in errors
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids.values())


def test_ranks_end_with_their_launcher_and_free_the_folder(tmp_path, data):
    process = start_training(tmp_path, data)
    pids = ranks_of(process)
    process.kill()
    process.communicate(timeout=30)
    end = time.monotonic() + 10
    while any(is_running(pid) for pid in pids.values()):
        assert time.monotonic() < end, "ranks outlive their launcher"
        time.sleep(0.05)
    check_free(tmp_path / "run")


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def listening_addresses(pids):
    """Addresses at which these processes accept connections over TCP."""
    sockets = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                sockets.add(os.readlink(link))
    found = set()
    for family in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{family}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                found.add(fields[1].split(":")[0])
    return found


def test_ranks_of_one_machine_listen_on_the_loopback_device_alone(tmp_path, data):
    process = start_training(tmp_path, data)
    found = listening_addresses(ranks_of(process).values())
    process.kill()
    process.communicate(timeout=30)
    assert found == {"0100007F"}  # 127.0.0.1, in the kernel's order


def start_training(tmp_path, data):
    """A run on two ranks, under way."""
    path = recipe(tmp_path, data, train={"steps": 100_000})
    process = start(path, "--ranks", "2", "--folder", str(tmp_path / "run"))
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step"):
            return process
    pytest.fail(process.communicate()[1])


def test_a_rank_that_waits_too_long_says_on_which_step_and_phase(tmp_path, data):
    path = recipe(tmp_path, data, train={"steps": 100_000, "collective_timeout": 3.0})
    process = start(path, "--ranks", "2", "--folder", str(tmp_path / "run"))
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step"):
            break
    os.kill(ranks_of(process)[1], signal.SIGSTOP)  # neither dead nor alive
    code, _, errors = finish(process, timeout=30)
    assert code != 0
    phases = "plan|fetch|wait|compute|return|update|agree"
    assert re.search(rf"rank 0: step \d+, phase '({phases})': waited 3 s", errors), errors
    assert "train.collective_timeout" in errors
    assert "most recent call first" in (tmp_path / "run" / "watchdog" / "rank-0.txt").read_text()


def test_a_window_too_small_for_a_micro_batch_is_refused_by_all_ranks_before_training(tmp_path, data):
    path = recipe(tmp_path, data)
    code, output, errors = finish(start(path, "memory.window=1KiB", "--ranks", "2", "--folder", str(tmp_path / "run")))
    assert code == 2
    assert "step" not in output
    assert "memory.window = 1KiB is too small for one micro-batch" in errors
    assert "Traceback" not in errors


def test_planning_ahead_and_placement_change_no_bit(tmp_path, data):
    path = recipe(tmp_path, data)
    found = []
    for name, words in (("first", []), ("second", ["memory.plan_ahead=false", "memory.placement=host"])):
        folder = tmp_path / name
        code, _, errors = finish(start(path, *words, "--ranks", "2", "--folder", str(folder)))
        assert code == 0, errors
        found.append((read_metrics(folder, "train"), saved_weights(folder)))
    (first, tables), (second, tables_again) = found
    for key in ("loss", "gradient_norm", "bytes_sent", "distinct_tokens"):
        assert [record[key] for record in first] == [record[key] for record in second]
    assert all(np.array_equal(tables[name], tables_again[name]) for name in tables)


def test_ctrl_c_ends_all_ranks_after_the_same_step(tmp_path, data):
    path = recipe(tmp_path, data, train={"steps": 100_000})
    process = start(path, "--ranks", "2", "--folder", str(tmp_path / "run"))
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step"):
            break
    process.send_signal(signal.SIGINT)
    code, output, errors = finish(process, timeout=60)
    assert code == 130, errors
    end = read_metrics(tmp_path / "run", "end")[0]
    assert not end["complete"]
    assert f"stopped after step {end['step']}" in output
    assert list_steps(tmp_path / "run") == [end["step"]]


def test_ranks_with_different_recipes_are_refused_on_all_ranks(tmp_path, data):
    from ranks_helper import _free_port

    port = str(_free_port())
    path = recipe(tmp_path, data)
    processes = []
    for rank in range(2):
        environment = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        words = [path, f"optimizer.learning_rate={1e-3 * (rank + 1)}", "--folder", str(tmp_path / "run")]
        processes.append(start(*words, **environment))
    for process in processes:
        code, _, errors = finish(process)
        assert code == 2
        assert "rank 1 has another config" in errors


def test_a_batch_that_does_not_divide_over_the_ranks_is_refused_before_they_start(tmp_path, data):
    code, _, errors = finish(start(recipe(tmp_path, data), "--ranks", "3", "--folder", str(tmp_path / "run")))
    assert code == 2
    assert "train.global_batch = 8" in errors
    assert "3 ranks" in errors
    assert not (tmp_path / "run").exists()


def test_ranks_that_lost_one_are_forked_again_and_train_to_the_last_bit(tmp_path, data):
    path = recipe(tmp_path, data, train={"steps": 60}, checkpoint={"every": 4})
    code, _, errors = finish(start(path, "--ranks", "2", "--folder", str(tmp_path / "whole")))
    assert code == 0, errors
    folder = tmp_path / "run"
    process = start(path, "--ranks", "2", "--restarts", "1", "--folder", str(folder), "--fresh")
    deadline = time.monotonic() + 60
    while not list_steps(folder) and time.monotonic() < deadline:
        time.sleep(0.01)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    code, output, errors = finish(process)
    assert code == 0, errors
    assert "starting 2 ranks again (restart 1 of 1)" in errors
    assert "resuming after step" in output
    ours, theirs = saved_weights(folder), saved_weights(tmp_path / "whole")
    assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)
    starts = read_starts(folder)
    assert [one["ended"] for one in starts] == [None, "complete"]
    assert starts[1]["after_step"] > 0


def test_restarts_without_ranks_are_refused(tmp_path, data, capsys):
    assert main(["train", recipe(tmp_path, data), "--restarts", "1", "--folder", str(tmp_path / "run")]) == 2
    assert "add --ranks N" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
