"""tools/consolidate.py: one file with the weights as training would go on with them."""

import shutil

import pytest
import torch
from engine_helper import full_parameters
from safetensors import safe_open
from safetensors.torch import load_file
from test_resume import run_until, settings
from tiny_models import table_tensors
from tools_helpers import load_tool

from xgram_dist.checkpoint import reader
from xgram_dist.train.trainer import Trainer

tool = load_tool("consolidate")


def test_the_file_holds_what_training_goes_on_with(data, two_ranks, tmp_path):
    """Two ranks whose optimizer was behind with most rows."""
    shutil.copytree(two_ranks[0], tmp_path / "run")
    check_file(settings(data, optimizer="catch_up"), tmp_path)


def test_vip_rows_catch_up_at_their_own_rate(data, tmp_path, monkeypatch):
    config = settings(data, optimizer="catch_up", learning_rate={"vip_multiplier": 0.1})
    run_until(config, tmp_path / "run", 5, monkeypatch)
    check_file(config, tmp_path)


def check_file(config, tmp_path):
    assert tool.main([str(tmp_path / "run"), str(tmp_path / "out.safetensors")]) == 0
    found = load_file(tmp_path / "out.safetensors")
    trainer = Trainer(config, tmp_path / "run", fresh=False)
    expected = {f"backbone.{name}": value for name, value in full_parameters(trainer.engine).items()}
    rows = trainer.lookup.shards[0].rows.clone()
    expected |= {f"tables.{name}": value for name, value in table_tensors(trainer.lookup.shards).items()}
    assert not torch.equal(rows, trainer.lookup.shards[0].rows)  # there was something to catch up with
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    with safe_open(tmp_path / "out.safetensors", "pt") as file:
        assert (file.metadata()["step"], file.metadata()["name"]) == ("3", "small-xgram")


def test_no_table_is_ever_whole(finished, tmp_path, monkeypatch):
    made = []

    class WatchedRows(reader.MappedRows):
        def gather(self, positions_R, columns=None):
            rows = super().gather(positions_R, columns)
            made.append(rows.nbytes)
            return rows

    class WatchedReader(reader.CheckpointReader):
        def _row_range(self, *arguments):
            block = super()._row_range(*arguments)
            made.append(block.nbytes)
            return block

    assert tool.main([str(finished), str(tmp_path / "whole.safetensors")]) == 0
    monkeypatch.setattr(reader, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(reader, "MappedRows", WatchedRows)
    monkeypatch.setattr(reader, "CheckpointReader", WatchedReader)
    assert tool.main([str(finished), str(tmp_path / "pieces.safetensors")]) == 0
    assert len(made) > 100
    assert max(made) <= 1000
    assert (tmp_path / "pieces.safetensors").read_bytes() == (tmp_path / "whole.safetensors").read_bytes()


@pytest.mark.parametrize("bad", ["source", "target", "damaged"])
def test_a_mistake_is_one_sentence_and_leaves_nothing(finished, tmp_path, capsys, bad):
    source, out = tmp_path / "run", tmp_path / "out.safetensors"
    if bad != "source":
        shutil.copytree(finished, source)
    if bad == "target":
        out = tmp_path / "missing" / "out.safetensors"
    if bad == "damaged":
        file = source / "checkpoints" / "step-00000008" / "rank-00000.safetensors"
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    assert tool.main([str(source), str(out)]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert {"source": "does not exist", "target": "cannot write", "damaged": "checksum does not match"}[bad] in error
    assert not out.exists()
    assert not list(tmp_path.glob(".*.part"))
