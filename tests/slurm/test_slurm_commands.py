"""`submit`, `status` and `cancel` on a real Slurm: arrays, what follows a run, names that try to be commands."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from cluster import wait_for
from eval_helpers import make_benchmarks
from slurm_helpers import (
    assert_same_weights,
    log,
    on,
    outcomes,
    submit,
    undisturbed,
    wait_for_end,
    wait_for_step,
    write_recipe,
    write_site,
)

from xgram_dist.checkpoint.folder import list_steps
from xgram_dist.cli.main import main
from xgram_dist.cluster.slurm.attempts import read_attempts
from xgram_dist.cluster.slurm.commands import job_facts, job_state, run_command

ROOT = Path(__file__).resolve().parents[2]


def test_an_array_of_three_seeds_trains_three_runs_and_evaluates_each_after_it(cluster, data, tmp_path):
    recipe, folder = write_recipe(tmp_path, data), tmp_path / "sweep"
    benchmarks = make_benchmarks(tmp_path / "benchmarks", count=4)
    words = ["--site", write_site(tmp_path, pace=0.2), "--folder", str(folder), "--no-preflight"]
    words += ["eval.tasks=[sciq]", f"eval.data={benchmarks}"]
    sweep = ["--array", "train.seed=0,1,2", "--at-once", "2"]
    assert main(["submit", recipe, *words, *sweep, "--then", "eval"]) == 0
    expected = undisturbed(recipe, tmp_path / "one", 1, "train.seed=1")
    runs = [folder / str(task) for task in range(3)]
    last = json.loads((runs[2] / "slurm" / "jobs.json").read_text())["train"]
    assert "JobArrayTaskLimit" in run_command(["squeue", "-h", "-o", "%i %r"])
    wait_for_step(runs[2], 2)
    run_command(["scancel", "--signal=USR1", "--batch", last])  # requeues itself, not the tasks that are complete
    for run in runs:
        jobs = json.loads((run / "slurm" / "jobs.json").read_text())
        assert wait_for_end(jobs["train"], run) == "COMPLETED", log(run)
        wait_for(lambda jobs=jobs: job_state(jobs["eval"]) == "COMPLETED", 120)
        (result,) = (run / "eval").glob("*.json")
        assert json.loads(result.read_text())["results"]["sciq"]["acc,none"] in {0, 0.25, 0.5, 0.75, 1}
    assert [outcomes(run) for run in runs] == [["complete"], ["complete"], ["stopped", "complete"]]
    names = [yaml.safe_load((run / "config.yaml").read_text())["name"] for run in runs]
    assert names == [f"small-xgram-seed-{seed}" for seed in range(3)]
    assert_same_weights(runs[1], expected)
    with pytest.raises(AssertionError):
        assert_same_weights(runs[2], expected)


def test_cancel_saves_and_ends_and_submit_goes_on(cluster, data, tmp_path, capsys):
    recipe, run, site = write_recipe(tmp_path, data), tmp_path / "run", write_site(tmp_path, pace=0.5)
    words = ["submit", recipe, "--site", site, "--folder", str(run)]
    with ThreadPoolExecutor(2) as pool:  # twice at once
        assert sorted(pool.map(main, [words, words])) == [0, 2]
    job = json.loads((run / "slurm" / "jobs.json").read_text())["train"]
    assert len([line for line in run_command(["squeue", "-h", "-o", "%Z %j"]).splitlines() if "small" in line]) == 1
    wait_for_step(run, 2)
    capsys.readouterr()
    assert main(words) == 2  # one job a run
    assert f"already has job {job}, RUNNING" in capsys.readouterr().err
    assert main(["status", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)[0]
    assert (found["state"], found["job"], found["starts"][0]["outcome"]) == ("RUNNING", job, None)
    assert found["step"] >= 2
    assert main(["cancel", str(run)]) == 0
    assert wait_for_end(job, run) == "CANCELLED", log(run)
    assert outcomes(run) == ["stopped"]
    step = list_steps(run)[-1]
    assert 2 <= step < 12
    assert main(["cancel", str(run)]) == 0
    assert "has already ended (CANCELLED)" in capsys.readouterr().out
    job = submit(recipe, site, run, "--follow")
    captured = capsys.readouterr().out
    assert f"resuming after step {step}" in captured
    assert "done after step 12" in captured
    assert main(["status", str(run)]) == 0
    said = capsys.readouterr().out
    assert "COMPLETED" in said
    assert f"start 2 on n1 after step {step}: training is complete" in said


def test_a_folder_that_looks_like_commands_is_only_a_folder(cluster, data, tmp_path):
    mark = tmp_path / "mark"
    run = tmp_path / f'it\'s a "run" $(touch {mark.name}) `touch {mark.name}` ; touch {mark.name} & #é'
    job = submit(write_recipe(tmp_path, data, steps=1), write_site(tmp_path, pace=0), run, "--no-preflight")
    assert wait_for_end(job, run) == "COMPLETED", log(run)
    assert not list(tmp_path.rglob("mark"))


def test_torchrun_on_each_node_trains_the_same_run_through_a_signal(cluster, data, tmp_path):
    recipe, run = write_recipe(tmp_path, data), tmp_path / "run"
    job = submit(recipe, write_site(tmp_path, launcher="torchrun"), run, "--nodes", "2")
    wait_for_step(run, 2)
    run_command(["scancel", "--signal=USR1", "--batch", job])
    expected = undisturbed(recipe, tmp_path / "expected", 2)
    assert wait_for_end(job, run) == "COMPLETED", log(run)
    assert outcomes(run) == ["stopped", "complete"]
    assert "stopped after step" in log(run)
    assert_same_weights(run, expected)


def test_the_train_template_trains_without_submit(cluster, data, tmp_path):
    recipe, run = write_recipe(tmp_path, data, steps=2), tmp_path / "run"
    python = yaml.safe_load(Path(write_site(tmp_path, pace=0)).read_text())["python"]
    options = ["--nodes=2", "--gres=none", f"--output={tmp_path}/log.txt", f"--chdir={ROOT}"]
    variables = f"--export=ALL,RANKS=1,PYTHON={python},OMP_NUM_THREADS=1,PYTHONPATH={ROOT}"
    script = str(ROOT / "slurm" / "train.sbatch")
    job = run_command(["sbatch", "--parsable", *options, variables, script, str(run), recipe]).strip()
    expected = undisturbed(recipe, tmp_path / "expected", 2)
    wait_for(lambda: job_state(job) == "COMPLETED", 120, lambda: (tmp_path / "log.txt").read_text())
    assert_same_weights(run, expected)


@pytest.mark.parametrize("script", sorted((ROOT / "slurm" / "paper").glob("*.sbatch")), ids=lambda path: path.stem)
def test_slurm_would_start_the_papers_scripts(cluster, script):
    done = subprocess.run(["sbatch", "--test-only", str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    nodes = script.stem.split("-")[1]
    assert f"nodes n[1-{nodes}]" in done.stderr


def test_the_preflight_names_a_slow_node_among_three(cluster, data, tmp_path):
    recipe, run = write_recipe(tmp_path, data, steps=1, global_batch=3), tmp_path / "run"
    cluster.throttle("n2", "200mbit")
    try:
        job = submit(recipe, write_site(tmp_path, pace=0, **on("n1", "n2", "n3", "n4")), run, "--nodes", "3")
        assert wait_for_end(job, run) == "COMPLETED", log(run)
    finally:
        cluster.unthrottle("n2")
    assert "preflight: node n2 is slow" in log(run)
    assert "node n1 is slow" not in log(run)
    job = submit(recipe, str(tmp_path / "site.yaml"), run, "--nodes", "3")
    assert (job_facts(job) or {})["ExcNodeList"] == "n[2,5-8]"
    assert main(["cancel", str(run), "--now"]) == 0


def test_the_preflight_names_a_node_that_does_not_come(cluster, data, tmp_path):
    recipe, run = write_recipe(tmp_path, data), tmp_path / "run"
    site = write_site(tmp_path, absent="n2", restarts=0, sbatch=["--nodelist=n1,n2"])
    job = submit(recipe, site, run, "--nodes", "2")
    assert wait_for_end(job, run) == "FAILED", log(run)
    assert "1 of 2 ranks did not report within 5 s: node n2 (rank 1)" in log(run)
    assert "1 of 2 ranks did not report" in read_attempts(run)[-1].reason


def test_the_doctor_runs_on_two_nodes_under_srun(cluster, tmp_path):
    """Clocks, interfaces, links and the shared folder of two machines; parity of both with one process."""
    out = tmp_path / "doctor.json"
    words = [
        "srun",
        "--nodes=2",
        "--ntasks-per-node=1",
        f"--chdir={ROOT}",
        f"--export=ALL,PYTHONPATH={ROOT},OMP_NUM_THREADS=1",
    ]
    doctor = ["-m", "xgram_dist", "doctor", "--quick", "--seconds", "0.2", "--folder", str(tmp_path), "--out", str(out)]
    done = subprocess.run([*words, sys.executable, *doctor], capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert len(found["nodes"]) == 2
    status = {row["check"]: row["status"] for row in found["rows"]}
    for check in (
        "clock skew",
        "gloo interface",
        "links between ranks",
        "shared folder",
        "lease",
        "share of the exchange",
    ):
        assert status[check] == "pass", found
