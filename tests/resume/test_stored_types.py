"""Checkpoints say in which type rows and moments are stored, and load into runs that store them in another."""

import pytest
import torch
from test_resume import run_until, settings

from xgram_dist.checkpoint.folder import checkpoints_at
from xgram_dist.checkpoint.load import load_newest
from xgram_dist.checkpoint.reader import CheckpointReader
from xgram_dist.cli.main import main
from xgram_dist.train import checkpointing
from xgram_dist.train.trainer import Trainer

SMALL = {"optimizer": "catch_up", "rows_dtype": "bf16", "moments": "bf16"}
LARGE = {"optimizer": "catch_up"}
SUFFIXES = (".rows", ".rows.first", ".rows.second")


def row_tensors(folder):
    """(name -> tensor by ascending row, the types of these)"""
    reader = CheckpointReader(checkpoints_at(folder)[-1])
    names = [name for name in reader.manifest.tensors if name.endswith(SUFFIXES)]
    tensors = {}
    for name in names:
        rows = reader.saved_rows(reader.entry(name).row_ids)
        tensors[name] = reader.tensor(name)[torch.from_numpy(rows.positions_of(rows.rows))]
    return tensors, {reader.entry(name).dtype for name in names}


@pytest.mark.parametrize("rows", ["all", "touched"])
@pytest.mark.parametrize(("before", "after"), [(LARGE, SMALL), (SMALL, LARGE)])
def test_a_run_goes_on_in_another_type(data, tmp_path, monkeypatch, capsys, rows, before, after):
    folder = tmp_path / "run"
    run_until(settings(data, **before, rows=rows), folder, 5, monkeypatch)
    saved, types = row_tensors(folder)
    assert types == ({"BF16"} if before is SMALL else {"F32"})
    loaded = {}

    def load_and_look(run, engine, tables, *others):
        result = load_newest(run, engine, tables, *others)
        for shard in tables:
            order = shard.row_ids.argsort()
            for name, tensor in shard.state_dict().columns.items():
                loaded[f"tables.{name}"] = tensor[order].clone()
        return result

    monkeypatch.setattr(checkpointing, "load_newest", load_and_look)
    trainer = Trainer(settings(data, **after, rows=rows), folder, fresh=False)
    assert trainer.run() == 0
    for name, tensor in saved.items():  # to the nearest, or exactly
        assert torch.equal(loaded[name], tensor.to(torch.float32 if before is SMALL else torch.bfloat16)), name
    found, types = row_tensors(folder)
    assert types == ({"F32"} if before is SMALL else {"BF16"})
    assert main(["inspect", str(checkpoints_at(folder)[-1]), "--verify"]) == 0
    assert ("BF16" if before is LARGE else "F32") in capsys.readouterr().out
    assert all(torch.isfinite(tensor.float()).all() for tensor in found.values())
