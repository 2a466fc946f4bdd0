"""If this fails, nobody learns which rank the others wait for, or what it does instead."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from ranks_helper import run_ranks
from train_helpers import read_metrics, small_config

from xgram_dist.analysis.report.run_page import run_page
from xgram_dist.analysis.report.runs import read_run
from xgram_dist.cli.main import main
from xgram_dist.train import trainer as loop
from xgram_dist.train.trainer import Trainer


def train_with_a_slow_rank(ranks: Any, config: Any, folder: Path) -> None:
    original = loop.train_step

    def dawdle() -> None:
        end = time.monotonic() + 60
        while not (folder / "stacks" / "rank-1.txt").exists() and time.monotonic() < end:
            time.sleep(0.05)

    def step(*arguments: Any, **keywords: Any) -> Any:
        if arguments[-1] == 3 and ranks.rank == 1:
            dawdle()
        return original(*arguments, **keywords)

    loop.train_step = step  # type: ignore[assignment]
    assert Trainer(config, folder, fresh=False, ranks=ranks).run() == 0


def test_a_rank_that_keeps_the_others_waiting_is_seen(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others ask for its stacks long before they give up, and the run goes on if it comes back."""
    run = tmp_path / "run"
    train = {"steps": 4, "micro_batch": 2, "collective_timeout": 20.0, "validation_sequences": 4}
    config = small_config(data, train={"global_batch": 8, "precision": "fp32", "log_every": 1, **train})
    run_ranks(train_with_a_slow_rank, 2, config, run)
    assert "in dawdle" in (run / "stacks" / "rank-1.txt").read_text()
    waiting = (run / "stacks" / "rank-0.txt").read_text().splitlines()[0]
    assert waiting.startswith("rank 0 on ")
    assert " for 1" in waiting  # in a phase, for ten seconds or more
    assert [record["step"] for record in read_metrics(run, "stragglers")] == [1, 2, 3, 4]
    capsys.readouterr()
    assert main(["status", str(run), "--json"]) == 0
    (status,) = json.loads(capsys.readouterr().out)
    assert (status["complete"], status["job"]) == (True, None)
    assert status["stragglers"]["phases"]["compute"]["rank"] in (0, 1)
    assert status["goodput"]["starts"][0]["ranks"] == 2
    assert 0 < status["goodput"]["goodput"] < 1
    assert main(["status", str(run)]) == 0
    assert "goodput" in capsys.readouterr().out
    page = run_page([read_run(run)])
    assert "Own work of a rank" in page
    assert "Time to the first step of each start" in page
