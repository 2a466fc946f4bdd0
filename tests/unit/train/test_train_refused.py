"""Runs that cannot start: data and routing files that do not fit the recipe."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from train_helpers import ROWS, VOCABULARY, read_metrics, small_config

from xgram_dist.cli.main import main
from xgram_dist.config import Config, dump_config
from xgram_dist.errors import UserError
from xgram_dist.tables.routing import RoutingSettings
from xgram_dist.tables.routing_build import build_routing
from xgram_dist.tables.routing_io import load_routing, save_routing
from xgram_dist.train import trainer as loop
from xgram_dist.train.trainer import Trainer


def with_routing(data: Path, **routing: Any) -> Config:
    memory = small_config(data).memory.model_dump(mode="json")
    return small_config(data, memory={**memory, "routing": {**memory["routing"], **routing}})


def routing_file(folder: Path, vocabulary: int = VOCABULARY, compression: float = 0.5, views: int = 2) -> str:
    settings = RoutingSettings(vip=10, buckets=4, compression=compression)
    path = folder / "routing.npz"
    save_routing(build_routing(1.0 / (1 + np.arange(vocabulary)), settings, views), path)
    return str(path)


@pytest.mark.parametrize(
    ("made", "parts"),
    [
        ({"vocabulary": 640}, ["vocabulary of 640", "model.vocabulary = 320", "--vocabulary 320"]),
        ({"compression": 0.6}, ["192 rows", "memory.compression = 0.5", f"gives {ROWS}", "--compression"]),
        ({"views": 1}, ["1 view", "memory.sites ask for 2", "--views 2"]),
    ],
)
def test_a_routing_file_for_another_recipe_is_refused_by_name(
    data: Path, tmp_path: Path, made: dict[str, Any], parts: list[str]
) -> None:
    file = routing_file(tmp_path, **made)
    with pytest.raises(UserError) as error:
        Trainer(with_routing(data, file=file), tmp_path / "run", fresh=False)
    for part in (f"memory.routing.file = '{file}'", *parts):
        assert part in str(error.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("views", [2, 3])
def test_a_routing_file_that_fits_is_the_one_that_is_used(data: Path, tmp_path: Path, views: int) -> None:
    file = routing_file(tmp_path, views=views)
    assert Trainer(with_routing(data, file=file), tmp_path / "run", fresh=False).run() == 0
    assert load_routing(tmp_path / "run" / "routing.npz").sha256() == load_routing(file).sha256()


def test_a_frequency_file_is_taken_before_the_counts_of_the_data(data: Path, tmp_path: Path) -> None:
    frequencies = tmp_path / "frequencies.npz"
    np.savez(frequencies, counts=np.arange(VOCABULARY, dtype=np.int64))
    trainer = Trainer(with_routing(data, frequencies=str(frequencies)), tmp_path / "given", fresh=False)
    trainer.metrics.close()
    trainer = Trainer(with_routing(data), tmp_path / "counted", fresh=False)
    trainer.metrics.close()
    rows = {}
    for name in ("given", "counted"):
        first = load_routing(tmp_path / name / "routing.npz").views[0]
        rows[name] = int(first.rows[first.offsets[VOCABULARY - 1]])
    assert rows["given"] == 0  # the last token is the most frequent there
    assert rows["counted"] != 0  # padding, never seen in the data


def test_the_counts_are_found_when_shards_are_read_through_a_cache(data: Path, tmp_path: Path) -> None:
    config = small_config(data, data={"cache": str(tmp_path / "cache")})
    assert Trainer(config, tmp_path / "run", fresh=False).run() == 0
    plain = Trainer(small_config(data), tmp_path / "plain", fresh=False)
    assert plain.run() == 0
    cached, direct = (read_metrics(tmp_path / name, "train") for name in ("run", "plain"))
    assert [record["loss"] for record in cached] == [record["loss"] for record in direct]


def test_without_counts_the_keys_that_help_are_named(data: Path, tmp_path: Path) -> None:
    config = small_config(data, data={"path": None, "remote": str(data), "cache": str(tmp_path / "cache")})
    with pytest.raises(UserError, match=r"counts\.npz.*set memory\.routing\.file or memory\.routing\.frequencies"):
        Trainer(config, tmp_path / "run", fresh=False)


def test_data_that_is_not_there_is_refused_by_its_key(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"data\.path = '{tmp_path / 'gone'}' does not exist; .*xgram-dist prepare"):
        Trainer(small_config(tmp_path / "gone"), tmp_path / "run", fresh=False)
    assert not (tmp_path / "run").exists()


def test_a_folder_that_is_no_data_set_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=str(tmp_path / "empty")):
        Trainer(small_config(tmp_path / "empty"), tmp_path / "run", fresh=False)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"model": {"vocabulary": 280}}, "280"),
        ({"model": {"sequence_length": 256}}, "256"),
        ({"data": {"weights": {"wbe": 1.0}}}, "did you mean 'web'"),
    ],
)
def test_a_recipe_that_does_not_fit_the_data_is_refused(
    data: Path, tmp_path: Path, sections: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        Trainer(small_config(data, "vanilla", **sections), tmp_path / "run", fresh=False)
    assert not (tmp_path / "run").exists()


def test_running_out_of_memory_ends_with_the_plan_and_the_keys_that_help(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def step(*arguments: object, **keywords: object) -> None:
        torch.empty(1 << 60, dtype=torch.uint8)  # the real thing: no machine has it

    monkeypatch.setattr(loop, "train_step", step)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(dump_config(small_config(data)))
    assert main(["train", str(recipe), "--folder", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert "out of memory" in said
    assert "the plan for a rank, in GiB: " in said
    assert "train.activation_checkpointing" in said
    assert "Traceback" not in said
