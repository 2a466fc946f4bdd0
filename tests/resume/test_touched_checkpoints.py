"""Checkpoints of touched rows hold those rows alone, and are as good as checkpoints of all rows: bit for bit, for runs
that keep touched rows or all, on as many ranks or others, and for whoever reads a checkpoint."""

import functools
import json
import shutil

import numpy as np
import pytest
import torch
from ranks_helper import run_ranks
from test_resume import outcome, run_until, settings

from xgram_dist.checkpoint.folder import checkpoints_at
from xgram_dist.checkpoint.reader import CheckpointReader
from xgram_dist.cli.main import main
from xgram_dist.inference.mapped_tables import MappedTables
from xgram_dist.tables.initial_rows import initial_rows
from xgram_dist.tables.optimizers import adamw_catchup, build
from xgram_dist.train.checkpointing import StartCheckpoint
from xgram_dist.train.trainer import Trainer

ENGRAM = {"method": "engram", "compression": 1.0, "sites": {}, "routing": {}, "optimizer": "catch_up"}
MEMORIES = {
    "catch-up": {"optimizer": "catch_up", "learning_rate": {"multiplier": 4.0, "vip_multiplier": 1.5}},
    "windows, counted": {"optimizer": "catch_up", "window": 1, "count_updates": True},
    "Adagrad": {"optimizer": "adagrad"},
    "bf16": {"optimizer": "catch_up", "rows_dtype": "bf16", "moments": "bf16"},
    "lazy": {"optimizer": "lazy", "compression": 1.0},
    "engram": {**ENGRAM, "engram": {"heads": 2, "rows": 3000, "width": 24, "taps": 3, "layers": [0, 1]}},
}
"""By case. Tables are caught up every few steps (HISTORY), so that rows are first touched in a later history."""
HISTORY = 3


def config_of(data, case, rows):
    return settings(data, **MEMORIES[case], rows=rows)


@pytest.fixture(autouse=True)
def _short_history(monkeypatch):
    shorten_history(monkeypatch)


def shorten_history(patch):
    patch.setattr(build, "CatchUpAdamW", functools.partial(adamw_catchup.CatchUpAdamW, history=HISTORY))


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """Runs that keep all rows, from the first step to the last; by case."""
    made = {}

    def get(case):
        if case not in made:
            made[case] = tmp_path_factory.mktemp("whole") / "run"
            assert Trainer(config_of(data, case, "all"), made[case], fresh=False).run() == 0
        return made[case]

    return get


def check(folder, expected):
    (losses, weights), (wanted_losses, wanted) = outcome(folder), outcome(expected)
    assert losses == wanted_losses
    assert list(weights) == list(wanted)
    for name in weights:
        assert torch.equal(weights[name], wanted[name]), name


@pytest.mark.parametrize("case", MEMORIES)
def test_a_lost_run_of_touched_rows_goes_on_to_the_last_bit(data, whole, tmp_path, monkeypatch, case):
    config = config_of(data, case, "touched")
    for lost_at in (5, 8):
        folder = tmp_path / f"lost-{lost_at}"
        run_until(config, folder, lost_at, monkeypatch)
        assert Trainer(config, folder, fresh=False).run() == 0
        check(folder, whole(case))


@pytest.mark.parametrize("case", MEMORIES)
@pytest.mark.parametrize("order", [("all", "touched"), ("touched", "all"), ("all", "touched", "all")])
def test_runs_change_between_all_and_touched_rows(data, whole, tmp_path, monkeypatch, case, order):
    for number, rows in enumerate(order[:-1]):
        run_until(config_of(data, case, rows), tmp_path / "run", (5, 7)[number], monkeypatch)
    assert Trainer(config_of(data, case, order[-1]), tmp_path / "run", fresh=False).run() == 0
    check(tmp_path / "run", whole(case))


def test_touched_rows_alone_are_saved(data, tmp_path):
    config = config_of(data, "engram", "touched")
    assert Trainer(config, tmp_path / "run", fresh=False).run() == 0
    newest = checkpoints_at(tmp_path / "run")[-1]
    tree = json.loads((newest / "manifest.json").read_text())
    (name, row_ids), *others = tree["row_ids"].items()
    saved = CheckpointReader(newest).saved_rows(name)
    assert (tree["version"], name, others) == (4, "tables.view-0", [])
    assert 0 < len(saved.rows) < row_ids["table_rows"] == saved.table_rows
    rows = {tuple(entry["shape"][:1]) for entry in tree["tensors"].values() if entry["row_ids"] is not None}
    assert rows == {(row_ids["num_rows"],)}


def on_ranks(ranks, config, folder, lost_at=None):
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        shorten_history(patch)
        if lost_at is not None:
            run_until(config, folder, lost_at, patch, ranks)
        else:
            assert Trainer(config, folder, fresh=False, ranks=ranks).run() == 0


@pytest.mark.parametrize("case", ["catch-up", "engram"])
def test_two_ranks_go_on_as_others_as_with_all_rows(data, tmp_path, case):
    for rows in ("all", "touched"):
        run_ranks(on_ranks, 2, config_of(data, case, rows), tmp_path / rows, 5)
        shutil.copytree(tmp_path / rows, tmp_path / f"{rows}-four")
        on_ranks(None, config_of(data, case, rows), tmp_path / rows)
        config = config_of(data, case, rows)
        parallel = config.parallel.model_copy(update={"tensor": 2})
        run_ranks(on_ranks, 4, config.model_copy(update={"parallel": parallel}), tmp_path / f"{rows}-four")
    check(tmp_path / "touched", tmp_path / "all")
    check(tmp_path / "touched-four", tmp_path / "all-four")


@pytest.mark.parametrize("all_rows", [build.ALL_ROWS, 10])
def test_whoever_reads_a_checkpoint_finds_all_rows(data, whole, tmp_path, capsys, monkeypatch, all_rows):
    """inspect, lookups at inference, diagnose; which reads large tables by touched rows, too."""
    assert Trainer(config_of(data, "catch-up", "touched"), tmp_path / "touched", fresh=False).run() == 0
    vectors, figures = {}, {}
    for name, folder in {"touched": tmp_path / "touched", "all": whole("catch-up")}.items():
        newest = checkpoints_at(folder)[-1]
        assert main(["inspect", str(newest), "--verify"]) == 0
        reader = CheckpointReader(newest)
        vectors[name] = MappedTables(reader).vectors(torch.arange(reader.config.model.vocabulary))
        capsys.readouterr()
        out = str(tmp_path / f"figures-{name}")
        monkeypatch.setattr(build, "ALL_ROWS", all_rows)
        assert main(["diagnose", str(newest), "--sequences", "4", "--out", out, "--no-pictures", "--json"]) == 0
        figures[name] = json.loads(capsys.readouterr().out)
    assert all(torch.equal(vectors["touched"][table], vectors["all"][table]) for table in vectors["all"])
    touched, every = figures["touched"]["figures"], figures["all"]["figures"]
    if all_rows == 10:  # of the rows that are saved
        assert touched.pop("movement") != every.pop("movement")
    assert touched == every


@pytest.mark.parametrize("rows", ["all", "touched"])
def test_a_run_starts_from_touched_rows(data, tmp_path, rows):
    """Rows that were never touched have their initial values, and so the values of a run that keeps all rows."""
    source = tmp_path / "source"
    assert Trainer(config_of(data, "engram", "touched"), source, fresh=False).run() == 0
    reader = CheckpointReader(checkpoints_at(source)[-1])
    found = StartCheckpoint.find(source, tmp_path / "new", weights_only=True, fresh=False)
    started = Trainer(config_of(data, "engram", rows), tmp_path / "new", fresh=False, start_from=found)
    (shard,) = started.lookup.shards
    saved, name = reader.saved_rows("tables.view-0"), "tables.layers.all.ngram.0.rows"
    ids = shard.row_ids.numpy()
    held, is_saved = shard.rows[: len(ids)], saved.positions_of(ids) >= 0
    assert is_saved.sum() == len(saved.rows)
    assert torch.equal(held[torch.from_numpy(is_saved)], reader.table_rows(name, ids[is_saved]))
    others = torch.from_numpy(ids[~is_saved])
    assert torch.equal(held[torch.from_numpy(~is_saved)], initial_rows(others, held.shape[1], 0.02, 0, shard.names[0]))
    started.lookup.close()


def test_a_missing_row_is_its_formula_in_any_order(data, whole, tmp_path):
    assert Trainer(config_of(data, "engram", "touched"), tmp_path / "run", fresh=False).run() == 0
    touched, every = (CheckpointReader(checkpoints_at(one)[-1]) for one in (tmp_path / "run", whole("engram")))
    name = "tables.layers.all.ngram.0.rows"
    rows = np.random.default_rng(3).permutation(touched.manifest.table_shape(name)[0])[:900]
    assert torch.equal(touched.table_rows(name, rows), every.table_rows(name, rows))
    assert torch.equal(touched.table_rows(name, rows, slice(2, 5)), every.table_rows(name, rows)[:, 2:5])


def test_a_damaged_checkpoint_leaves_no_rows_behind(data, whole, tmp_path, capsys):
    """Rows that the damaged one holds and the one before does not are their formula again."""
    config = config_of(data, "engram", "touched")
    assert Trainer(config, tmp_path / "run", fresh=False).run() == 0
    file = checkpoints_at(tmp_path / "run")[-1] / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1000] ^= 1
    file.write_bytes(content)
    capsys.readouterr()
    assert Trainer(config, tmp_path / "run", fresh=False).run() == 0
    assert "resuming after step 6" in capsys.readouterr().out
    check(tmp_path / "run", whole("engram"))
