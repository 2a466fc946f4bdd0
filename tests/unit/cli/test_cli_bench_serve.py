"""`bench serve`: the model it makes walks through the vocabulary, and large tables have no rows on the disk."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from xgram_dist.bench.generate import saved_checkpoint
from xgram_dist.bench.serve import MORE_ROWS, Workload, _write_without_rows
from xgram_dist.bench.step import step_config
from xgram_dist.cli.main import main
from xgram_dist.inference.generate import generate
from xgram_dist.inference.model import HOST
from xgram_dist.model.build import build_model
from xgram_dist.serving.mapped_rows import MappedRows


def test_without_the_environment_of_serving_it_says_how_to_make_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--python", "nowhere/python"]) == 2
    assert "make the environment of serving with `make serving`" in capsys.readouterr().err


def test_greedy_decoding_gives_the_tokens_that_are_checked(tmp_path: Path) -> None:
    work = Workload(512)
    config = step_config("vanilla", 512, False)
    model = build_model(config, HOST)
    work.teach(model)
    served = saved_checkpoint(config, model, torch.ones(512).numpy(), tmp_path / "run").load(HOST, "fp32")
    prompts = work.prompts(3, 4)
    made = [list(tokens) for tokens in zip(*generate(served, prompts, 6), strict=True)]
    work.check(prompts, made)
    assert all(len(set(tokens)) == 6 for tokens in made)
    made[1][3] = (made[1][3] + 1) % 512
    with pytest.raises(AssertionError, match="gives other tokens"):
        work.check(prompts, made)


def test_tables_with_more_rows_are_a_hole_of_their_file(tmp_path: Path) -> None:
    name = "tables.views.0.rows"
    save_file({name: torch.ones(300, 64)}, tmp_path / "small")
    _write_without_rows(tmp_path / "small", tmp_path / "large")
    assert MappedRows(tmp_path / "large", name).rows.shape == (300 * MORE_ROWS, 64)
    assert (tmp_path / "large").stat().st_size > MORE_ROWS * 300 * 256
    assert (tmp_path / "large").stat().st_blocks * 512 < 100_000
    with (tmp_path / "large").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    assert header[name]["shape"] == [300 * MORE_ROWS, 64]
