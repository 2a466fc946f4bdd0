"""A run that is cut into other stages, or into none, goes on; one that is cut as before goes on bit for bit."""

import numpy as np
import pytest
from ranks_helper import run_ranks
from test_layouts import losses, lost_on_ranks_at, run_on_ranks
from test_resume import outcome, settings

from xgram_dist.checkpoint.folder import list_steps
from xgram_dist.train.trainer import Trainer


def changed(config, **parallel):
    return config.model_copy(update={"parallel": config.parallel.model_copy(update=parallel)})


def in_two_stages(ranks, config, folder):
    """In one set of processes: the whole run, and the same lost in step 5 and gone on with."""
    run_on_ranks(ranks, config, folder / "whole")
    lost_on_ranks_at(ranks, config, folder / "lost", 5)
    run_on_ranks(ranks, config, folder / "lost")


@pytest.mark.parametrize("memory", [{"optimizer": "catch_up", "rows": "touched"}, {"optimizer": "dense"}])
def test_the_same_stages_go_on_bit_for_bit(data, finished, tmp_path, memory):
    config = settings(data, **memory)
    run_ranks(in_two_stages, 2, changed(config, pipeline=2), tmp_path)
    found, expected = outcome(tmp_path / "lost"), outcome(tmp_path / "whole")
    assert found[0] == expected[0]
    assert list(found[1]) == list(expected[1])
    assert all(np.array_equal(found[1][name], expected[1][name]) for name in found[1])
    if memory["optimizer"] == "catch_up":
        assert losses(tmp_path / "whole") == pytest.approx(losses(finished), rel=1e-5)


@pytest.mark.parametrize("rows", ["all", "touched"])
def test_a_run_goes_through_numbers_of_stages_data_and_context_ranks(data, finished, tmp_path, rows):
    config = settings(data, optimizer="catch_up", rows=rows)
    config = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"every": 1, "keep": 1})})
    folder = tmp_path / "run"
    for size, parallel, lost_at in (
        (2, {"pipeline": 2, "engine": "deepspeed"}, 3),
        (1, {}, 4),
        (4, {"pipeline": 2, "engine": "hsdp"}, 6),
        (4, {"pipeline": 2, "context": 2}, 7),
        (2, {"pipeline": 2}, None),
    ):
        if lost_at is None:
            run_ranks(run_on_ranks, size, changed(config, **parallel), folder)
        else:
            run_ranks(lost_on_ranks_at, size, changed(config, **parallel), folder, lost_at)
            assert list_steps(folder) == [lost_at - 1]
    assert losses(folder) == pytest.approx(losses(finished), rel=1e-5)
    found, expected = outcome(folder)[1], outcome(finished)[1]
    assert list(found) == list(expected)
    for name in found:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-3, atol=2e-5, err_msg=name)


def start_from(ranks, config, start, folder, weights_only):
    """What the run says of what it takes."""
    from xgram_dist.train.checkpointing import StartCheckpoint

    said = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_say", lambda self, text: said.append(text))
        source = StartCheckpoint.find(start, folder, weights_only=weights_only, fresh=False)
        trainer = Trainer(config, folder, fresh=False, ranks=ranks, start_from=source)
    assert trainer.run() == 0
    return sorted(said)


@pytest.mark.parametrize("weights_only", [True, False])
def test_a_new_run_of_two_stages_starts_from_one(data, finished, tmp_path, weights_only):
    config = settings(data, optimizer="catch_up")
    config = config.model_copy(update={"train": config.train.model_copy(update={"steps": 10})})
    one = start_from(None, config, finished, tmp_path / "one", weights_only)
    two = run_ranks(start_from, 2, changed(config, pipeline=2), finished, tmp_path / "two", weights_only)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    assert two[0] == one, "the first rank tells what all stages have taken"
