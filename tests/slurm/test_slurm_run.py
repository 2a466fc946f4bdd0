"""From `submit` to a finished run, through all that ends a job before its time.

Each run ends with the weights of a run that was never disturbed: to the last bit where the layout is the same.
"""

import os
import re
import signal

import pytest
from cluster import wait_for
from slurm_helpers import (
    STEPS,
    assert_same_weights,
    log,
    on,
    outcomes,
    reasons,
    starts,
    step_of,
    submit,
    undisturbed,
    wait_for_end,
    wait_for_start,
    wait_for_step,
    write_recipe,
    write_site,
)
from train_helpers import read_metrics

from xgram_dist.checkpoint.folder import list_steps
from xgram_dist.cluster.slurm.attempts import read_attempts
from xgram_dist.cluster.slurm.commands import run_command

RANK = "paced.py -m xgram_dist train"
"""In the command line of a rank, and of nothing else."""


@pytest.fixture(scope="module")
def expected(data, tmp_path_factory):
    """On two ranks, never disturbed."""
    folder = tmp_path_factory.mktemp("expected")
    return undisturbed(write_recipe(folder, data), folder / "run", ranks=2)


@pytest.fixture(scope="module")
def limited(cluster, data, tmp_path_factory):
    """A run that its time limit cuts into pieces, while other tests go on.

    The limit is a minute, the least there is, and Slurm gives the signal up to half a minute early: a start has between
    20 and 50 s. So it is one rank, which is soon ready, and more than 90 s of steps, for at least two stops.
    """
    folder = tmp_path_factory.mktemp("limited")
    site = write_site(folder, pace=3, time="1", save_seconds=10, **on("n8"))
    recipe = write_recipe(folder, data, steps=32)
    return submit(recipe, site, folder / "run", "--no-preflight"), recipe, folder / "run"


@pytest.mark.usefixtures("limited")
def test_two_nodes_with_sharded_tables_and_deepspeed_train_to_the_end(cluster, data, tmp_path):
    recipe, run = write_recipe(tmp_path, data, engine="deepspeed"), tmp_path / "run"
    job = submit(recipe, write_site(tmp_path, pace=0, ranks_per_node=2, **on("n1", "n2")), run, "--nodes", "2")
    other = undisturbed(recipe, tmp_path / "other", ranks=4)
    assert wait_for_end(job, run) == "COMPLETED", log(run)
    assert outcomes(run) == ["complete"]
    assert "4 ranks = 4 data x 1 tensor" in log(run)
    assert "preflight: all-to-all" in log(run)
    assert_same_weights(run, other)


def test_a_signal_a_preemption_and_a_killed_rank_change_no_bit(cluster, data, tmp_path, expected):
    run, site = tmp_path / "run", write_site(tmp_path, **on("n1", "n2"))
    job = submit(write_recipe(tmp_path, data), site, run, "--nodes", "2")
    wait_for_step(run, 2)
    run_command(["scancel", "--signal=USR1", job])
    wait_for_start(run, 2)
    stopped = list_steps(run)[-1]
    assert stopped >= 2
    wait_for_step(run, stopped + 2)
    nodes = ["--nodes=2", "--exclusive", "--nodelist=n1,n2"]
    run_command(["sbatch", "--partition=urgent", *nodes, "--output=/dev/null", "--wrap=sleep 2"])
    wait_for_start(run, 3)
    wait_for_step(run, list_steps(run)[-1] + 1)
    os.kill(cluster.processes("n2", RANK)[-1], signal.SIGKILL)
    assert wait_for_end(job, run) == "COMPLETED", log(run)
    # Slurm has been seen to preempt once more before the urgent job had left.
    assert re.fullmatch("stopped stopped crashed (stopped )?complete", " ".join(outcomes(run)))
    assert "rank 1 on n2 ended: Killed; the ranks are started again on the same nodes" in reasons(run)[2]
    crashed, again = read_attempts(run)[2:4]
    assert (again.restart, again.again) == (crashed.restart, 1)  # without the queue
    assert [record["step"] for record in read_metrics(run, "train")] == list(range(1, STEPS + 1))
    assert_same_weights(run, expected)


def test_a_lost_node_and_a_lost_batch_host_change_no_bit(cluster, data, tmp_path, expected):
    run, site = tmp_path / "run", write_site(tmp_path, **on("n3", "n4"))
    job = submit(write_recipe(tmp_path, data), site, run, "--nodes", "2")
    wait_for_step(run, 4)
    cluster.lose("n4")
    wait_for(lambda: "n4" in cluster.run("sinfo", "-h", "-t", "down", "-o", "%N"), 60)
    cluster.boot("n4")
    wait_for_start(run, 2)
    wait_for_step(run, list_steps(run)[-1] + 4)
    cluster.lose("n3")
    wait_for(lambda: "n3" in cluster.run("sinfo", "-h", "-t", "down", "-o", "%N"), 60)
    cluster.boot("n3")
    assert wait_for_end(job, run) == "COMPLETED", log(run)
    assert starts(run) >= 3
    assert_same_weights(run, expected)


def test_a_run_goes_on_with_fewer_nodes_where_a_node_stays_down(cluster, data, tmp_path, expected):
    run, site = tmp_path / "run", write_site(tmp_path, **on("n5", "n6"))
    job = submit(write_recipe(tmp_path, data), site, run, "--nodes", "1-2")
    wait_for_step(run, 4)
    assert read_attempts(run)[0].nodes == ["n5", "n6"]
    cluster.lose("n6")
    try:
        assert wait_for_end(job, run) == "COMPLETED", log(run)
    finally:
        cluster.boot("n6")
    assert read_attempts(run)[-1].nodes == ["n5"]
    assert_same_weights(run, expected, tolerance=1e-5)


def test_a_start_that_lives_on_beyond_the_network_writes_nothing_once_another_has_begun(
    cluster, data, tmp_path, expected
):
    run, site = tmp_path / "run", write_site(tmp_path, pace="4,0.1", ranks_per_node=2, **on("n5", "n6"))
    job = submit(write_recipe(tmp_path, data), site, run, "--nodes", "1")
    wait_for_step(run, 3)
    old = read_attempts(run)[0].nodes[0]
    cluster.unplug(old)
    try:
        wait_for_start(run, 2)
        assert cluster.processes(old, RANK)  # alive, and able to write to the run folder
        wait_for(lambda: not cluster.processes(old, RANK), 60, lambda: log(run))
        assert "is no longer held by this run: it was taken over by" in log(run)
        assert wait_for_end(job, run) == "COMPLETED", log(run)
    finally:
        cluster.plug(old)
    assert read_attempts(run)[-1].nodes != [old]
    assert_same_weights(run, expected)
    wait_for(
        lambda: not cluster.processes(old, "xgram_dist.cluster.slurm.job"), 120
    )  # nor does it requeue its successor
    assert starts(run) == 2


def test_a_crash_loop_stops_with_its_reason(cluster, data, tmp_path):
    run, site = tmp_path / "run", write_site(tmp_path, pace=0, crash="1:5", restarts=1, **on("n1", "n2"))
    job = submit(write_recipe(tmp_path, data), site, run, "--nodes", "2", "--no-preflight", "--then", "eval")
    assert wait_for_end(job, run) == "FAILED", log(run)
    # The first start got as far as a checkpoint; the second and the third did not get further.
    assert outcomes(run) == ["crashed"] * 3
    assert "2 starts in a row left no new checkpoint" in reasons(run)[-1]
    assert "rank 1 on n2 ended with exit code 1 (RuntimeError: a fault of this test" in reasons(run)[-1]
    wait_for(lambda: "CANCELLED" in cluster.run("scontrol", "show", "job", str(int(job) + 1)), 30)  # the evaluation


def test_a_full_disk_ends_the_job_with_the_reason_and_the_run_goes_on_when_there_is_room(
    cluster, data, tmp_path, expected
):
    run = cluster.small / "run"
    recipe, site = write_recipe(tmp_path, data), write_site(tmp_path, restarts=0, **on("n3", "n4"))
    job = submit(recipe, site, run, "--nodes", "2")
    wait_for_step(run, 4)
    filler = cluster.small / "filler"
    with filler.open("wb") as file:  # all that is left
        try:
            while True:
                file.write(b"x" * 65536)
                file.flush()
        except OSError:
            pass
    assert wait_for_end(job, run) == "FAILED"
    assert list_steps(run)[-1] < STEPS
    filler.unlink()
    job = submit(recipe, site, run, "--nodes", "2")
    assert wait_for_end(job, run) == "COMPLETED", log(run)
    assert f"resuming after step {list_steps(run)[0]}" in log(run) or "resuming after step" in log(run)
    assert_same_weights(run, expected)


def test_a_time_limit_reached_twice_changes_no_bit(cluster, limited, tmp_path):
    job, recipe, run = limited
    expected = undisturbed(recipe, tmp_path / "expected", ranks=1)
    assert wait_for_end(job, run, seconds=400) == "COMPLETED", log(run)
    assert outcomes(run).count("stopped") >= 2
    assert set(outcomes(run)[:-1]) == {"stopped"}
    assert "SIGUSR1: asking the ranks to save and end" in log(run)
    assert step_of(run) == 32
    assert_same_weights(run, expected)
