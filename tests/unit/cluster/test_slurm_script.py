"""The script: what a person typed stays a value, whatever it looks like."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from xgram_dist.cluster.slurm.job import parse_arguments
from xgram_dist.cluster.slurm.script import Script, eval_script, train_script
from xgram_dist.cluster.slurm.site import Site
from xgram_dist.errors import UserError

NASTY = """it's a "run" $(touch MARK) `touch MARK` ; touch MARK & # * ~ !x"""
STUB = """#!{python}
import json, os, sys
print(json.dumps([sys.argv[1:], os.environ["PYTHONPATH"], os.environ.get("VALUE")]))
"""


def script(tmp_path, *folders, **keys):
    python = tmp_path / "a python"
    python.write_text(STUB.format(python=sys.executable))
    python.chmod(0o755)
    runs = tuple(tmp_path / folder for folder in folders)
    return Script("name", runs, "1-2", (1, 2), Site(**keys), tmp_path, str(python))


def executed(text, tmp_path, **environment):
    """What the script would start, as the shell understands it."""
    path = tmp_path / "script"
    path.write_text(text)
    done = subprocess.run(
        ["bash", str(path)], capture_output=True, text=True, cwd=tmp_path, env={"PATH": "/usr/bin:/bin", **environment}
    )
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.rglob("MARK"))
    return json.loads(done.stdout)


def test_values_reach_the_command_as_they_were_typed(tmp_path):
    text = train_script(
        script(tmp_path, NASTY, environment={"VALUE": NASTY}, container=("wrap", NASTY), srun=(f"--comment={NASTY}",))
    ).replace("exec python3", f"exec '{tmp_path}/a python'")  # outside the container
    words, path, value = executed(text, tmp_path)
    run = str(tmp_path / NASTY)
    assert words[:4] == ["-m", "xgram_dist.cluster.slurm.job", "--folder", run]
    assert f"--srun=--comment={NASTY}" in words
    command = words[words.index("--") + 1 :]
    assert command[:3] == ["wrap", NASTY, str(tmp_path / "a python")]
    assert command[3:] == [
        "-m",
        "xgram_dist",
        "train",
        f"{run}/slurm/config.yaml",
        "--folder",
        run,
        "--preflight",
        "50",
    ]
    assert path == f"{run}/slurm/code"
    assert value == NASTY


def test_a_task_of_an_array_finds_its_own_folder(tmp_path):
    text = train_script(script(tmp_path, "a b/0", "a b/1"))
    assert "#SBATCH --array=0-1\n" in text
    assert f"#SBATCH --output='{tmp_path}/a b/%a/slurm/log.txt'\n" in text
    words, _, _ = executed(text, tmp_path, SLURM_ARRAY_TASK_ID="1")
    assert words[3] == str(tmp_path / "a b/1")


def test_the_evaluation_is_of_the_run(tmp_path):
    words, _, _ = executed(eval_script(script(tmp_path, NASTY), ("sciq", NASTY), tmp_path / NASTY), tmp_path)
    expected = [f"{tmp_path}/{NASTY}", "--tasks", f"sciq,{NASTY}", "--data", f"{tmp_path}/{NASTY}"]
    assert words == ["-m", "xgram_dist", "eval", *expected]


def test_what_a_job_needs_to_carry_on_by_itself_is_in_its_script(tmp_path):
    one = script(tmp_path, "a b/0", "a b/1", sbatch=("--exclude=n[1-2]", "-x n3"), time="2:00:00")
    text = train_script(dataclasses.replace(one, at_once=1))
    assert "#SBATCH --array=0-1%1\n" in text
    words, _, _ = executed(text, tmp_path, SLURM_ARRAY_TASK_ID="1")
    job = parse_arguments(words[2:])
    assert (job.script, job.exclude, job.time) == (f"{tmp_path}/a b/0/slurm/job.sbatch", "n[1-2],n3", "2:00:00")


@pytest.mark.parametrize("folder", ["two\nlines", "a\x1bb", "half%j", "back\\slash"])
def test_a_folder_no_script_can_hold_is_refused(tmp_path, folder):
    with pytest.raises(UserError, match=r"control character|backslash"):
        train_script(script(tmp_path, folder))


def test_a_folder_that_would_split_pythonpath_is_refused(tmp_path):
    with pytest.raises(UserError, match="PYTHONPATH cannot hold a colon; choose another with --folder"):
        train_script(script(tmp_path, "run:/tmp/code"))


def test_the_site_is_in_the_options(tmp_path):
    keys = {"partition": "gpu", "account": "me", "qos": "high", "gpu_type": "h100", "cpus_per_node": 96}
    more = {"memory_per_node": "0", "sbatch": ("--exclusive",), "save_seconds": 600, "modules": ("cuda/12.8",)}
    lines = train_script(script(tmp_path, "run", **keys, **more, interface="ib0")).splitlines()
    for line in (
        "#SBATCH --partition=gpu",
        "#SBATCH --account=me",
        "#SBATCH --qos=high",
        "#SBATCH --nodes=1-2",
        "#SBATCH --cpus-per-task=96",
        "#SBATCH --gres=gpu:h100:8",
        "#SBATCH --mem=0",
        "#SBATCH --open-mode=append",
        "#SBATCH --requeue",
        "#SBATCH --signal=B:USR1@600",
        "#SBATCH --exclusive",
        "module load cuda/12.8",
        "export NCCL_SOCKET_IFNAME=ib0",
        "export GLOO_SOCKET_IFNAME=ib0",
    ):
        assert line in lines
    assert Path(tmp_path / "run").exists() is False  # a script is text alone


@pytest.mark.parametrize(
    ("keys", "cpus"),
    [
        ({"sbatch": ("--exclusive",)}, []),
        ({"sbatch": ("--exclusive",), "cpus_per_node": 96}, ["#SBATCH --cpus-per-task=96"]),
        ({"gpus_per_node": 0, "ranks_per_node": 2}, ["#SBATCH --cpus-per-task=2"]),
    ],
)
def test_whole_nodes_with_gpus_come_with_all_their_cpus(tmp_path, keys, cpus):
    """`--cpus-per-task=8` would leave each of 8 ranks a single core of an exclusive node."""
    lines = train_script(script(tmp_path, "run", **keys)).splitlines()
    assert [line for line in lines if "--cpus-per-task" in line] == cpus
