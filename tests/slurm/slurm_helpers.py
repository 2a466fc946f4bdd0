"""What the tests of jobs share: a site, submitting, waiting, comparing the end with an undisturbed run."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import torch
import yaml
from cluster import wait_for
from train_helpers import saved_weights, small_config

from xgram_dist.cli.main import main
from xgram_dist.cluster.slurm.attempts import read_attempts
from xgram_dist.cluster.slurm.commands import ENDED, job_facts, job_state
from xgram_dist.config import dump_config

PACED = Path(__file__).with_name("paced.py")
STEPS = 12
LONG = 240.0


def paced_python(folder):
    """An interpreter whose training takes its time (paced.py)."""
    path = folder / "python"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} {PACED} "$@"\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def write_site(folder, pace=0.3, crash="", absent=None, **keys):
    tree = {
        "gpus_per_node": 0,
        "ranks_per_node": 1,
        "time": "10",
        "restart_wait": 0.5,
        "python": paced_python(folder),
        "environment": {"OMP_NUM_THREADS": "1", "TEST_PACE": str(pace), "TEST_CRASH": crash or ":"},
        **keys,
    }
    if absent:
        tree["environment"]["TEST_ABSENT"] = absent
    tree["environment"]["PYTHON_EXEC"] = tree["python"]  # what torchrun starts ranks with
    path = folder / "site.yaml"
    path.write_text(yaml.safe_dump(tree))
    return str(path)


def on(*nodes):
    """Options that keep a job to some nodes, so that no other test meets it."""
    others = sorted({f"n{number}" for number in range(1, 9)} - set(nodes))
    return {"sbatch": [f"--exclude={','.join(others)}"]}


def write_recipe(folder, data, engine="replicated", **train):
    config = small_config(
        data,
        train={"steps": STEPS, "micro_batch": 1, "global_batch": 4, "validation_sequences": 4, **train},
        checkpoint={"every": 3},
        parallel={"engine": engine},
    )
    path = folder / "recipe.yaml"
    path.write_text(dump_config(config))
    return str(path)


def submit(recipe, site, run, *words):
    """`xgram-dist submit`; the id of its job."""
    assert main(["submit", recipe, "--site", site, "--folder", str(run), *words]) == 0
    return json.loads((run / "slurm" / "jobs.json").read_text())["train"]


def log(run):
    path = run / "slurm" / "log.txt"
    return path.read_text() if path.exists() else "(no log)"


def step_of(run):
    """The last step the run has said."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("}")]
    return max((record["step"] for record in records if record["kind"] == "train"), default=0)


def wait_for_step(run, step, seconds=120):
    wait_for(lambda: step_of(run) >= step, seconds, lambda: log(run))


def wait_for_end(job, run, seconds=LONG):
    """The state in which the job ended, for good."""
    wait_for(lambda: job_state(job) in ENDED, seconds, lambda: f"{job_facts(job)}\n{log(run)}")
    return job_state(job)


def starts(run):
    return len(read_attempts(run))


def wait_for_start(run, number, seconds=120):
    """The number-th start of the run has begun."""
    wait_for(lambda: starts(run) >= number, seconds, lambda: log(run))


def reasons(run):
    return [attempt.explain() for attempt in read_attempts(run)]


def outcomes(run):
    return [attempt.outcome for attempt in read_attempts(run)]


def undisturbed(recipe, run, ranks, *overrides):
    """The same run without Slurm."""
    words = [
        sys.executable,
        "-m",
        "xgram_dist",
        "train",
        recipe,
        *overrides,
        "--folder",
        str(run),
        "--ranks",
        str(ranks),
    ]
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return run


def assert_same_weights(run, expected, tolerance=0.0):
    ours, theirs = saved_weights(run), saved_weights(expected)
    assert set(ours) == set(theirs)
    for name, value in theirs.items():
        if tolerance:
            torch.testing.assert_close(ours[name], value, rtol=tolerance, atol=tolerance, msg=name)
        else:
            assert torch.equal(ours[name], value), name
