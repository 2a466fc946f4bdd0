"""A run that is killed again and again ends with the weights of the run that never was: a sample of `make soak`."""

import signal
import sys

import pytest
from kills import (
    CHAIN_MOMENTS,
    MOMENTS,
    WHOM,
    Killer,
    Run,
    assert_same_end,
    change_layout,
    kill_loop,
    steps_saved,
    wait_until,
)
from train_helpers import read_metrics, small_config

from xgram_dist.config import dump_config

STEPS = 90


@pytest.fixture(scope="module")
def whole(tmp_path_factory, data, zygote):
    """(recipe, folder) of a run on two ranks, with sharded tables, that nothing happened to."""
    folder = tmp_path_factory.mktemp("whole")
    train = {"steps": STEPS, "log_every": 1, "validation_sequences": 4}
    recipe = folder / "recipe.yaml"
    recipe.write_text(dump_config(small_config(data, train=train, checkpoint={"every": 5})))
    run = Run(str(recipe), folder / "run", zygote=zygote)
    assert run.end() == 0, run.said()
    return str(recipe), folder / "run"


def assert_same_losses(folder, other, steps=STEPS):
    ours, theirs = ([record["loss"] for record in read_metrics(run, "train")] for run in (folder, other))
    assert len(ours) == steps
    assert ours == theirs


def test_kills_at_all_moments_change_no_bit(tmp_path, whole, zygote):
    recipe, undisturbed = whole
    kills = kill_loop(recipe, tmp_path / "killed", len(MOMENTS), seed=1, zygote=zygote, tell=print)
    assert {kill.moment for kill in kills} == set(MOMENTS)
    assert {kill.whom for kill in kills} == set(WHOM)
    assert_same_end(tmp_path / "killed", undisturbed)
    assert_same_losses(tmp_path / "killed", undisturbed)


def test_torchrun_restarts_a_run_that_lost_a_rank(tmp_path, whole):
    recipe, undisturbed = whole
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "2", "--standalone")
    run = Run(recipe, tmp_path / "run", command=(sys.executable, *torchrun, "-m", "xgram_dist", "train"))
    wait_until(run, lambda: bool(steps_saved(run.folder)))
    run.send(signal.SIGKILL, run.pids()[1])
    assert run.end(120) == 0, run.said()
    assert "resuming after step " in run.said()
    assert_same_end(run.folder, undisturbed)
    assert_same_losses(run.folder, undisturbed)


def test_kills_of_a_run_whose_rows_lie_on_disk_change_no_bit(tmp_path, data, zygote):
    """Against a run that keeps its rows in memory. What a killed run leaves in the scratch folder is cleared."""
    recipes, scratch = {}, tmp_path / "scratch"
    for tier, memory in {"memory": {}, "disk": {"placement": "disk", "folder": str(scratch)}}.items():
        train = {"steps": STEPS, "log_every": 1, "validation_sequences": 4}
        tree = small_config(data, train=train, checkpoint={"every": 5}).memory.model_dump(exclude_unset=True)
        memory = {**tree, "optimizer": "catch_up", "rows": "touched", **memory}
        recipes[tier] = tmp_path / f"{tier}.yaml"
        recipes[tier].write_text(dump_config(small_config(data, train=train, memory=memory, checkpoint={"every": 5})))
    undisturbed = Run(str(recipes["memory"]), tmp_path / "undisturbed", zygote=zygote)
    assert undisturbed.end() == 0, undisturbed.said()
    more = {"seed": 2, "zygote": zygote, "tell": print, "moments": CHAIN_MOMENTS}
    kills = kill_loop(str(recipes["disk"]), tmp_path / "killed", len(CHAIN_MOMENTS), **more)
    assert {kill.moment for kill in kills} == set(CHAIN_MOMENTS)
    assert_same_end(tmp_path / "killed", tmp_path / "undisturbed")
    assert_same_losses(tmp_path / "killed", tmp_path / "undisturbed")
    assert not list(scratch.glob("*.records"))


def test_kills_of_a_run_on_two_then_three_then_one_rank_change_no_bit(tmp_path, data, zygote):
    """Against a run that changes its ranks after the same steps and is not killed otherwise."""
    recipe, third = tmp_path / "recipe.yaml", 15
    train = {"steps": 3 * third, "log_every": 1, "validation_sequences": 4, "global_batch": 6, "micro_batch": 1}
    memory = {"optimizer": "catch_up", "rows": "touched"}
    checkpoint = {"every": 5, "keep_every": third}
    recipe.write_text(dump_config(small_config(data, train=train, memory=memory, checkpoint=checkpoint)))
    layouts = [(2, third), (3, 2 * third), (1, 3 * third)]
    undisturbed = Killer(str(recipe), tmp_path / "undisturbed", seed=3, zygote=zygote)
    change_layout(undisturbed, layouts, kills=0)
    killer = Killer(str(recipe), tmp_path / "killed", seed=3, zygote=zygote, moments=MOMENTS, tell=print)
    assert len(change_layout(killer, layouts, kills=3)) == 3
    assert_same_end(killer.folder, undisturbed.folder)
    assert_same_losses(killer.folder, undisturbed.folder, 3 * third)
