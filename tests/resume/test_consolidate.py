"""tools/consolidate.py: one file with the weights as training would go on with them."""

import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from test_resume import run_until, settings
from tools_helpers import load_tool

from xgram_dist.checkpoint import weights
from xgram_dist.train.loop import Trainer

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
    expected = {f"backbone.{name}": value for name, value in trainer.engine.full_parameters()}
    rows = trainer.lookup.store.states[0].rows.clone()
    expected |= {f"tables.{name}": value for name, value in trainer.lookup.store.named_tensors().items()}
    assert not torch.equal(rows, trainer.lookup.store.states[0].rows)  # there was something to catch up with
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    with safe_open(tmp_path / "out.safetensors", "pt") as file:
        assert (file.metadata()["step"], file.metadata()["name"]) == ("3", "small-xgram")


def test_no_table_is_ever_whole(finished, tmp_path, monkeypatch):
    made = []

    class Watched(weights.SavedWeights):
        def _gather(self, name, positions_R, columns):
            made.append(super()._gather(name, positions_R, columns).nbytes)
            return super()._gather(name, positions_R, columns)

        def _box(self, *arguments):
            box = super()._box(*arguments)
            made.append(box.nbytes)
            return box

    assert tool.main([str(finished), str(tmp_path / "whole.safetensors")]) == 0
    monkeypatch.setattr(weights, "PIECE_BYTES", 1000)
    monkeypatch.setattr(weights, "SavedWeights", Watched)
    assert tool.main([str(finished), str(tmp_path / "pieces.safetensors")]) == 0
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
