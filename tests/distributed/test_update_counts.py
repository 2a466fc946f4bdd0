"""Counted updates are the steps whose tokens read a row, over ranks, windows and resumes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from inference_helpers import recipe
from ranks_helper import run_ranks

from xgram_dist.analysis.diagnose.row_statistics import counted_update_shares
from xgram_dist.checkpoint.folder import checkpoints_at
from xgram_dist.checkpoint.reader import CheckpointReader
from xgram_dist.cli.main import main
from xgram_dist.data.dataset import PreparedData
from xgram_dist.data.loader import Loader
from xgram_dist.errors import UserError
from xgram_dist.parallel.process_group import ProcessGroup
from xgram_dist.train.trainer import Trainer


def train(ranks, config, folder):
    assert Trainer(config, Path(folder), False, ranks).run() == 0


def expected_counts(data: Path, reader: CheckpointReader, seed: int, steps: int) -> list[dict[int, int]]:
    """Of each view, by global row, read off the tokens of every step."""
    assert reader.routing is not None
    counts: list[dict[int, int]] = [{} for _ in reader.routing.views]
    prepared = PreparedData.open(data, "train")
    with Loader(prepared, sequence_length=32, global_batch=4, micro_batch=1, seed=seed) as loader:
        for _ in range(steps):
            tokens = {int(token) for token in next(loader).tokens.flatten()}
            for view, of_view in zip(reader.routing.views, counts, strict=True):
                for row in {int(row) for token in tokens for row in view.of_token(token)[0]}:
                    of_view[row] = of_view.get(row, 0) + 1
    return counts


@pytest.mark.parametrize("memory", [{}, {"window": 1}, {"optimizer": "catch_up"}, {"optimizer": "dense"}])
def test_counts_of_two_ranks_that_go_on_as_one(data: Path, tmp_path: Path, memory: dict[str, Any]) -> None:
    config = recipe(data, "v", memory={**memory, "count_updates": True}, train={"steps": 3})
    run_ranks(train, 2, config, str(tmp_path / "run"))
    whole = config.model_copy(update={"train": config.train.model_copy(update={"steps": 6})})
    train(ProcessGroup(), whole, tmp_path / "run")
    reader = CheckpointReader(checkpoints_at(tmp_path / "run")[-1])
    assert reader.facts["step"] == 6
    expected = expected_counts(data, reader, config.train.seed, 6)
    for number, of_view in enumerate(expected):
        name = f"tables.view-{number}.updates"
        saved = reader.tensor(name)[reader.positions()]
        assert saved.tolist() == [of_view.get(row, 0) for row in range(len(saved))]


def test_shares_are_of_all_rows_and_a_mean_over_views() -> None:
    first, second = torch.tensor([0, 1, 5, 9], dtype=torch.int32), torch.tensor([0, 0, 0, 9], dtype=torch.int32)
    assert counted_update_shares([first, second], 4, [0, 4, 9]) == pytest.approx({"0": 0.5, "4": 0.375, "9": 0.0})


def test_counting_cannot_begin_in_the_middle(data: Path, tmp_path: Path) -> None:
    config = recipe(data, "v", train={"steps": 2})
    train(ProcessGroup(), config, tmp_path / "run")
    counting = recipe(data, "v", memory={"count_updates": True}, train={"steps": 4})
    with pytest.raises(UserError, match=r"saved without counts of updates; set memory\.count_updates=false"):
        Trainer(counting, tmp_path / "run", False).run()


def test_diagnose_shows_counts_where_there_are(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(ProcessGroup(), recipe(data, "v", memory={"count_updates": True}), tmp_path / "run")
    capsys.readouterr()
    words = ["diagnose", str(tmp_path / "run"), "--no-pictures", "--sequences", "2", "--updates", "0,3", "--json"]
    assert main(words) == 0
    updates = json.loads(capsys.readouterr().out)["figures"]["updates"]
    reader = CheckpointReader(checkpoints_at(tmp_path / "run")[-1])
    counts = [reader.tensor(f"tables.view-{view}.updates").numpy() for view in range(2)]
    assert updates["counted"]
    assert updates["more_than"]["0"] == pytest.approx(np.mean([(one > 0).mean() for one in counts]))
    assert updates["more_than"]["3"] == pytest.approx(np.mean([(one > 3).mean() for one in counts]))
    assert updates["expected"]["0"] >= updates["more_than"]["0"]  # of the tokens of the whole data set
