"""A run that is killed again and again ends with the weights of the run that never was."""

from kills import MOMENTS, Run, assert_same_end, kill_loop
from train_helpers import read_metrics, small_config

from xgram_dist.config import dump_config

KILLS = 8


def write_recipe(path, data, steps):
    """Two ranks, sharded tables, a checkpoint every fifth step."""
    config = small_config(
        data, train={"steps": steps, "log_every": 1, "validation_sequences": 4}, checkpoint={"every": 5}
    )
    path.write_text(dump_config(config))
    return str(path)


def test_eight_kills_change_no_bit(tmp_path, data, zygote):
    recipe = write_recipe(tmp_path / "recipe.yaml", data, 200)
    whole = Run(recipe, tmp_path / "whole", zygote=zygote)
    assert whole.end() == 0, whole.said()
    kills = kill_loop(recipe, tmp_path / "killed", KILLS, seed=1, zygote=zygote, tell=print)
    assert {kill.moment for kill in kills} == set(MOMENTS)
    assert len({kill.whom for kill in kills}) == 3
    assert_same_end(tmp_path / "killed", tmp_path / "whole")
    losses = [[record["loss"] for record in read_metrics(tmp_path / name, "train")] for name in ("killed", "whole")]
    assert len(losses[0]) == 200
    assert losses[0] == losses[1]
