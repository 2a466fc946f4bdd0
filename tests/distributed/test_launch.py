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
from xgram_dist.config import dump_config


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


def test_a_killed_rank_takes_the_others_down_and_is_named(tmp_path, data):
    path = recipe(tmp_path, data, train={"steps": 100_000})
    process = start(path, "--ranks", "2", "--folder", str(tmp_path / "run"))
    assert process.stdout is not None
    for line in process.stdout:  # training is under way
        if line.startswith("step"):
            break
    pids = ranks_of(process)
    assert set(pids) == {0, 1}
    os.kill(pids[1], signal.SIGKILL)
    killed = time.monotonic()
    code, _, errors = finish(process, timeout=30)
    assert code != 0
    assert time.monotonic() - killed < 30
    assert "rank 1 of 2 was killed by signal 9" in errors
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids.values())


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
