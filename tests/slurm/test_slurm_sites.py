"""Slurm as it is elsewhere: jobs that are not started again, that are suspended, whose signals are lost; bad nodes."""

import json
import os
import shutil
import signal

import pytest
from cluster import wait_for
from eval_helpers import make_benchmarks
from slurm_helpers import (
    assert_same_weights,
    log,
    on,
    outcomes,
    reasons,
    step_of,
    submit,
    undisturbed,
    wait_for_end,
    wait_for_start,
    wait_for_step,
    write_recipe,
    write_site,
)

from xgram_dist.checkpoint.folder import list_steps
from xgram_dist.cli.main import main
from xgram_dist.cluster.slurm.attempts import read_attempts
from xgram_dist.cluster.slurm.commands import job_facts, job_state, run_command

RANK = "paced.py -m xgram_dist train"


@pytest.fixture(scope="module")
def unsignalled(cluster, data, tmp_path_factory):
    """A run with a time limit, on a site whose `sbatch` drops --signal and whose ranks are in a shell that takes USR1;
    it goes on while other tests do."""
    folder = tmp_path_factory.mktemp("unsignalled")
    wrapper = folder / "bin" / "sbatch"
    wrapper.parent.mkdir()
    wrapper.write_text(f"""#!/bin/bash
        sed -i /--signal/d "${{@: -1}}"
        PATH="${{PATH#{wrapper.parent}:}}" exec {shutil.which("sbatch")} "$@"
    """)
    wrapper.chmod(0o755)
    shell = ["bash", "-c", 'trap : USR1; "$@"; exit $?', "bash"]
    site = write_site(folder, pace=3, time="1", save_seconds=10, container=shell, **on("n8"))
    before = os.environ["PATH"]
    os.environ["PATH"] = f"{wrapper.parent}:{before}"
    try:
        recipe = write_recipe(folder, data, steps=20)
        return submit(recipe, site, folder / "run", "--no-preflight"), recipe, folder / "run"
    finally:
        os.environ["PATH"] = before


@pytest.fixture(scope="module")
def expected(data, tmp_path_factory):
    """On two ranks, never disturbed."""
    folder = tmp_path_factory.mktemp("expected")
    return undisturbed(write_recipe(folder, data), folder / "run", ranks=2)


def jobs_of(run):
    return json.loads((run / "slurm" / "jobs.json").read_text())


@pytest.mark.usefixtures("unsignalled")
def test_a_run_is_carried_on_by_successors_where_preemption_cancels_and_no_job_is_requeued(
    cluster, data, tmp_path, expected, capsys
):
    recipe, run = write_recipe(tmp_path, data), tmp_path / "run"
    options = {"sbatch": [*on("n5", "n6")["sbatch"], "--no-requeue"], "partition": "cancels"}
    words = [f"eval.data={make_benchmarks(tmp_path / 'benchmarks', count=4)}", "eval.tasks=[sciq]", "--then", "eval"]
    first = submit(recipe, write_site(tmp_path, **options), run, "--nodes", "2", *words)
    wait_for_step(run, 4)
    second = jobs_of(run)["next"]
    nodes = ["--nodes=2", "--exclusive", "--nodelist=n5,n6"]
    run_command(["sbatch", "--partition=urgent", *nodes, "--output=/dev/null", "--wrap=sleep 1"])
    wait_for_start(run, 2)
    assert job_state(first) == "PREEMPTED"
    capsys.readouterr()
    assert main(["status", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["job"] == second
    wait_for_step(run, list_steps(run)[-1] + 2)
    cluster.lose("n6")
    wait_for(lambda: job_state(second) == "NODE_FAIL", 60)
    cluster.boot("n6")
    wait_for_start(run, 3)
    third = read_attempts(run)[-1].job
    wait_for(lambda: jobs_of(run)["train"] == third, 30)  # and its successor is in the queue
    jobs = jobs_of(run)
    evaluation = jobs["eval"]
    assert [one.job for one in read_attempts(run)] == [first, second, third]
    assert (job_facts(third) or {})["Requeue"] == "0"
    assert (job_facts(evaluation) or {})["Dependency"].startswith(
        f"afterok:{third}(unfulfilled)?afterok:{jobs['next']}"
    )
    assert wait_for_end(third, run) == "COMPLETED", log(run)
    wait_for(lambda: job_state(jobs["next"]) == "CANCELLED", 30)
    assert job_state(evaluation) != "CANCELLED"
    run_command(["scancel", evaluation])
    assert_same_weights(run, expected)


def test_a_suspended_run_resumes_although_its_ranks_have_waited_for_too_long(cluster, data, tmp_path, expected):
    recipe = write_recipe(tmp_path, data, collective_timeout=4)
    run = tmp_path / "run"
    site = write_site(tmp_path, ranks_per_node=2, partition="suspends", **on("n7"))
    job = submit(recipe, site, run, "--no-preflight")
    wait_for_step(run, 4)
    urgent = ["--partition=urgent", "--nodelist=n7", "--cpus-per-task=64", "--output=/dev/null", "--wrap=sleep 10"]
    run_command(["sbatch", *urgent])
    wait_for(lambda: job_state(job) == "SUSPENDED", 60)
    wait_for(lambda: job_state(job) != "SUSPENDED", 60)
    assert wait_for_end(job, run) == "COMPLETED", log(run)
    assert "this job was suspended for" in log(run)
    assert outcomes(run) in (["complete"], ["stopped", "complete"])  # no failure of the run, nor of its node
    assert not (run / "slurm" / "nodes.jsonl").exists()
    assert_same_weights(run, expected)


def test_a_node_that_failed_twice_is_left_out_of_the_next_start(cluster, data, tmp_path, expected, capsys):
    run = tmp_path / "run"
    job = submit(write_recipe(tmp_path, data), write_site(tmp_path, **on("n1", "n2", "n3")), run, "--nodes", "2")
    bad = None
    for start in (1, 2):
        wait_for_start(run, start)
        wait_for_step(run, (list_steps(run) or [0])[-1] + 4)
        bad = bad or read_attempts(run)[0].nodes[1]
        os.kill(cluster.processes(bad, RANK)[-1], signal.SIGKILL)
        if start == 1:  # ranks alone are started again
            wait_for_start(run, 2)
            wait_for_step(run, list_steps(run)[-1] + 1)
    assert wait_for_end(job, run) == "COMPLETED", log(run)
    assert [one.again for one in read_attempts(run)] == [0, 1, 0]
    assert bad in read_attempts(run)[1].nodes
    assert bad not in read_attempts(run)[2].nodes
    assert "requeued" in reasons(run)[1]
    capsys.readouterr()
    assert main(["status", str(run)]) == 0
    assert f": {bad}, failed 2 times, the last: Killed" in capsys.readouterr().out
    assert_same_weights(run, expected)


def test_a_time_limit_without_a_signal_changes_no_bit(cluster, unsignalled, tmp_path):
    job, recipe, run = unsignalled
    assert "--signal" not in (run / "slurm" / "job.sbatch").read_text()
    expected = undisturbed(recipe, tmp_path / "expected", ranks=1)
    assert wait_for_end(job, run, seconds=400) == "COMPLETED", log(run)
    assert set(outcomes(run)[:-1]) == {"stopped"}
    assert outcomes(run)[-1] == "complete"
    assert "the time limit: asking the ranks to save and end" in log(run)
    assert read_attempts(run)[1].step > read_attempts(run)[0].step
    assert step_of(run) == 20
    assert_same_weights(run, expected)
