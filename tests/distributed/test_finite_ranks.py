"""NaN hunting over ranks: the rank whose module was the first to be not finite is named, with every engine."""

import math

import pytest
from ranks_helper import run_ranks
from train_helpers import read_metrics, small_config

from xgram_dist.model.layers import RMSNorm
from xgram_dist.train import trainer as loop
from xgram_dist.train.trainer import train_run


def train_with_a_fault(ranks, config, folder):
    """On the second rank, in the first norm, whose weights FSDP2 shards, the first time that step 4 is done."""
    step, faults, modules = 0, 1 if ranks.rank == 1 else 0, []
    train_step, forward = loop.train_step, RMSNorm.forward

    def count(*arguments, **keywords):
        nonlocal step
        step = arguments[5]
        return train_step(*arguments, **keywords)

    def spoiled(self, *arguments):
        nonlocal faults
        out = forward(self, *arguments)
        modules.append(self)
        if step == 4 and self is modules[0] and faults:
            faults -= 1
            return out * math.nan
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "train_step", count)
        patch.setattr(RMSNorm, "forward", spoiled)
        return train_run(config, folder, fresh=False, ranks=ranks)


@pytest.mark.parametrize("engine", ["replicated", "hsdp", "deepspeed"])
def test_the_rank_is_named_and_the_step_done_again_on_all(data, tmp_path, engine):
    train = {"steps": 5, "check_finite": "layers"}
    config = small_config(data, train=train, checkpoint={"every": 2}, parallel={"engine": engine})
    assert run_ranks(train_with_a_fault, 2, config, tmp_path / "run") == [0, 0]
    (record,) = read_metrics(tmp_path / "run", "not_finite")
    found = {name: record[name] for name in ("step", "module", "direction", "rank", "cause", "checkpoint", "repeats")}
    assert found == {
        "step": 4,
        "module": "blocks.0.attention_norm",
        "direction": "forward",
        "rank": 1,
        "cause": "device",
        "checkpoint": 2,
        "repeats": False,
    }
    assert [one["step"] for one in read_metrics(tmp_path / "run", "train")] == [1, 2, 3, 4, 5]
    assert not read_metrics(tmp_path / "run", "skipped")
