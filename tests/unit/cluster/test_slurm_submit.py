"""`submit` refuses before the queue what would fail after it; nothing is written then."""

import subprocess
import sys
import time

import pytest
import yaml
from train_helpers import small_tree

from xgram_dist.cli.main import main
from xgram_dist.cluster.slurm.submit import parse_nodes
from xgram_dist.errors import UserError


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "site.yaml").write_text("gpus_per_node: 2\ncpus_per_node: 16\nmemory_per_gpu: 80GB\n")
    return tmp_path


def recipe(here, data, **keys):
    (here / "recipe.yaml").write_text(yaml.safe_dump({**small_tree(data), **keys}))
    return "recipe.yaml"


def submit(*words):
    return main(["submit", *words, "--site", "site.yaml"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train.stesp=3"], "unknown key 'train.stesp'; did you mean 'train.steps'?"),
        (["name=$(reboot)"], "name = '$(reboot)'"),
        (["name=a b"], "name = 'a b'"),
        (["name='a\nb'"], "name = "),
        (["data.path=nowhere"], "data.path = 'nowhere' does not exist"),
        (["model.vocabulary=200", "memory.routing.buckets=2"], "200"),
        (["--nodes", "3"], "on 3 node(s) of 2 ranks: train.global_batch = 8"),
        (["--nodes", "0"], "--nodes 0 is not a number of nodes"),
        (["--nodes", "2-1"], "--nodes 2-1 is not"),
        (["--nodes", "two"], "--nodes two is not"),
        (["--array", "train.seed=1"], "--array train.seed=1 is not KEY=V1,V2"),
        (["--array", "train.seed=1,2", "--follow"], "--follow prints one log"),
        (["--at-once", "2"], "--at-once 2 is of the tasks of an array"),
        (["--array", "train.seed=1,2", "--at-once", "0"], "--at-once 0 is of the tasks of an array, and at least 1"),
        (["--folder", "a%b"], "contains a '%'"),
        (["other.yaml"], "cannot read recipe 'other.yaml'"),
        (["model.width=30720", "model.ffn_width=81920", "model.layers=80"], "GiB of a GPU on 1 node(s)"),
    ],
)
def test_a_bad_recipe_fails_at_submit(here, data, capsys, words, said):
    path = recipe(here, data)
    assert submit(path, *words) == 2
    assert said in capsys.readouterr().err
    assert sorted(path.name for path in here.rglob("*")) == ["recipe.yaml", "site.yaml"]


def test_what_does_not_fit_is_submitted_when_told(here, data, capsys):
    words = ["model.width=30720", "model.ffn_width=81920", "model.layers=80", "data.path=elsewhere"]
    assert submit(recipe(here, data), *words, "--force", "--dry-run") == 0
    assert "#SBATCH --nodes=1\n" in capsys.readouterr().out


def test_a_dry_run_prints_the_script_and_leaves_nothing(here, data, capsys):
    assert submit(recipe(here, data), "train.micro_batch=1", "--nodes", "1-2", "--dry-run", "--then", "eval") == 0
    out = capsys.readouterr().out
    assert "--counts 1,2 " in out
    assert '-m xgram_dist eval "$RUN" --tasks paper\n' in out
    assert sorted(path.name for path in here.iterdir()) == ["recipe.yaml", "site.yaml"]


def test_an_evaluation_without_its_benchmarks_is_refused_before_the_queue(here, data, capsys):
    assert submit(recipe(here, data), "eval.data=nowhere", "--dry-run", "--then", "eval") == 2
    assert "eval.data 'nowhere' is not a folder" in capsys.readouterr().err


def test_several_recipes_are_an_array(here, data, capsys):
    first = recipe(here, data)
    (here / "second.yaml").write_text("extends: recipe.yaml\nname: second\n")
    assert submit(first, "second.yaml", "train.steps=2", "--dry-run") == 0
    out = capsys.readouterr().out
    assert "#SBATCH --array=0-1\n" in out
    assert f"RUNS=({here}/runs/small-xgram-array/0 {here}/runs/small-xgram-array/1)" in out


def test_without_slurm_submit_says_where_to_run(here, data, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(here))
    assert submit(recipe(here, data)) == 2
    assert "'sbatch' is not on this machine" in capsys.readouterr().err


def test_a_folder_with_a_run_that_cannot_go_on_is_refused(here, data, capsys):
    (here / "run").mkdir()
    (here / "run" / "metrics.jsonl").write_text("")
    assert submit(recipe(here, data), "--folder", "run") == 2
    assert "already holds a run" in capsys.readouterr().err
    assert not (here / "run" / "slurm").exists()


@pytest.mark.parametrize("command", ["status", "cancel"])
def test_a_folder_without_a_job_is_named(tmp_path, capsys, command):
    assert main([command, str(tmp_path)]) == 2
    assert f"'{tmp_path}' has no job of `xgram-dist submit`" in capsys.readouterr().err


def test_a_range_of_nodes():
    assert parse_nodes("4") == (4, 4)
    assert parse_nodes("2-4") == (2, 4)
    with pytest.raises(UserError):
        parse_nodes("1-2-3")


def test_of_two_submits_at_once_one_wins_and_the_other_says_so(here, data, monkeypatch, capsys):
    """`sbatch` takes its time; meanwhile the same command is given again."""
    (here / "bin").mkdir()
    sbatch = here / "bin" / "sbatch"
    sbatch.write_text(f"#!/bin/sh\ntouch {here}/begun\nwhile [ ! -e {here}/go ]; do sleep 0.05; done\necho 7\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{here}/bin:/usr/bin:/bin")
    words = ["submit", recipe(here, data), "--site", "site.yaml", "--no-preflight"]
    first = subprocess.Popen(
        [sys.executable, "-m", "xgram_dist", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    end = time.monotonic() + 60
    while not (here / "begun").exists():
        assert time.monotonic() < end
        time.sleep(0.05)
    assert main(words) == 2
    assert "another `xgram-dist submit` of " in capsys.readouterr().err
    (here / "go").touch()
    said, _ = first.communicate(timeout=60)
    assert first.returncode == 0, said
    assert "job 7: " in said
