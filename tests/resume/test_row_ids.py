"""A checkpoint records which global rows it holds: loading follows the record, and refuses one that is wrong."""

import json
import shutil

import numpy as np
import pytest
import torch
from load_helpers import edit_manifest, make_version_1
from ranks_helper import run_ranks
from test_resume import settings
from tiny_models import table_tensors

from xgram_dist.checkpoint import row_ids
from xgram_dist.checkpoint.reader import CheckpointReader
from xgram_dist.checkpoint.row_ids import RowIdSet, arithmetic_ranges, describe_row_ids, row_id_digest, row_positions
from xgram_dist.checkpoint.safetensors_io import DamagedFileError
from xgram_dist.cli.main import main
from xgram_dist.tables import row_sharding
from xgram_dist.train.trainer import Trainer

NEWEST = "checkpoints/step-00000008"


@pytest.mark.parametrize(
    ("ids", "ranges"),
    [
        ([], []),
        ([7], [[7, 8, 1]]),
        ([3, 8], [[3, 9, 5]]),
        (range(10), [[0, 10, 1]]),
        (range(1, 100, 4), [[1, 98, 4]]),
        ([0, 1, 2, 10, 20, 30, 31], [[0, 3, 1], [10, 31, 10], [31, 32, 1]]),
        ([0, 1, 3, 4, 6], [[0, 2, 1], [3, 5, 1], [6, 7, 1]]),
    ],
)
def test_ranges_are_the_ids_they_stand_for(ids, ranges):
    assert arithmetic_ranges(np.array(ids, dtype=np.int64)) == ranges
    assert [row for ends in ranges for row in range(*ends)] == list(ids)


@pytest.mark.parametrize("seed", range(20))
def test_any_sharding_gives_back_its_positions(seed):
    random = np.random.default_rng(seed)
    owner = random.integers(0, 3, size=900) if seed % 2 else np.arange(900) // 7 % 3
    tensors, segments = {}, []
    for rank in range(3):
        segments.append(describe_row_ids(np.flatnonzero(owner == rank), f"ids-{rank}"))
        tensors[f"ids-{rank}"] = np.flatnonzero(owner == rank)
    assert any(segment.tensor is not None for segment in segments) == bool(seed % 2)
    found = row_positions("here", "tables", RowIdSet(900, segments), tensors.__getitem__)
    assert np.array_equal(np.argsort(found), np.argsort(owner, kind="stable"))


def test_ids_that_do_not_ascend_keep_their_order():
    ids = np.array([4, 2, 0, 1, 3])
    segment = describe_row_ids(ids, "ids")
    assert segment.tensor == "ids"
    assert row_positions("here", "tables", RowIdSet(5, [segment]), lambda name: ids).tolist() == [2, 3, 1, 4, 0]


def saved_on_ranks(ranks, config, folder):
    """Trains with irregular row ids kept as tensors; the rows this rank held, by global id."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_ids, "MAX_RANGES", 1)
        trainer = Trainer(config, folder, fresh=False, ranks=ranks)
        assert trainer.run() == 0
    return held_rows(trainer)


def loaded_with_another_policy(ranks, config, folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_sharding, "WHOLE_BELOW", 0.0)
        return held_rows(Trainer(config, folder, fresh=False, ranks=ranks))


def held_rows(trainer):
    shards = trainer.lookup.shards
    tensors = {f"tables.{name}": tensor.numpy().copy() for name, tensor in table_tensors(shards).items()}
    return shards[0].row_ids.numpy(), tensors


@pytest.fixture(scope="module")
def irregular(data, tmp_path_factory):
    """A run of two ranks whose rows are sharded irregularly, and its tables in global order."""
    folder = tmp_path_factory.mktemp("irregular") / "run"
    parts = run_ranks(saved_on_ranks, 2, settings(data, optimizer="dense"), folder)
    return folder, in_global_order(parts)


def in_global_order(parts):
    tables = {}
    for name in parts[0][1]:
        tables[name] = np.concatenate([tensors[name] for _, tensors in parts])
        tables[name][np.concatenate([ids for ids, _ in parts])] = tables[name].copy()
    return tables


def check_tables(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert np.array_equal(found[name], value), name


def test_row_ids_that_are_irregular_are_a_tensor(irregular):
    tree = json.loads((irregular[0] / NEWEST / "manifest.json").read_text())
    segments = tree["row_ids"]["tables"]["segments"]
    assert [segment["tensor"] for segment in segments] == ["row_ids.tables.data-0", "row_ids.tables.data-1"]
    assert not any("slab" in name for name in tree["tensors"])
    assert main(["inspect", str(irregular[0]), "--verify"]) == 0


def test_rows_load_to_their_place_after_the_policy_changed(data, irregular, tmp_path, monkeypatch):
    folder, expected = irregular
    reader = CheckpointReader(folder / NEWEST)
    num_rows = len(reader.positions())
    owners = [row_sharding.plan_row_sharding(reader.routing, num_rows, 2).owner]
    monkeypatch.setattr(row_sharding, "WHOLE_BELOW", 0.0)
    owners.append(row_sharding.plan_row_sharding(reader.routing, num_rows, 2).owner)
    assert not np.array_equal(*owners)  # the policy would now say something else
    check_tables({name: CheckpointReader(folder / NEWEST).weight(name).numpy() for name in expected}, expected)
    config = settings(data, optimizer="dense")
    shutil.copytree(folder, tmp_path / "run")
    check_tables(in_global_order([held_rows(Trainer(config, tmp_path / "run", fresh=False))]), expected)
    check_tables(in_global_order(run_ranks(loaded_with_another_policy, 2, config, tmp_path / "run")), expected)


def test_version_1_finds_its_rows_by_the_policy(two_ranks, tmp_path):
    """The run of this fixture shards rows with stride 2."""
    newest = "checkpoints/step-00000003"
    shutil.copytree(two_ranks[0] / newest, tmp_path / "old")
    make_version_1(tmp_path / "old", "strided")
    expected, found = CheckpointReader(two_ranks[0] / newest), CheckpointReader(tmp_path / "old")
    assert found.manifest.version == 1
    assert found.weight_shapes() == expected.weight_shapes()
    for name in expected.weight_shapes():
        assert torch.equal(found.weight(name), expected.weight(name)), name


def tampered(ranges, *, digest=True, **changes):
    """`digest`: whether it is made again for the new ids."""

    def change(tree):
        (segment,) = tree["row_ids"]["tables"]["segments"]
        segment["ranges"] = ranges
        if digest:
            ids = np.concatenate([np.arange(*ends) for ends in ranges])
            segment["digest"] = row_id_digest(ids)
        segment.update(changes)

    return change


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (tampered([[0, 80, 1], [79, 159, 1]]), "name row 79 twice (data rank 0)"),
        (tampered([[1, 161, 1]]), "name row 160, but 'tables' has 160 rows"),
        (tampered([[80, 160, 1], [0, 80, 1]], digest=False), "their digest does not match"),
        (tampered([[0, 159, 1]]), "of data rank 0 are not 160 rows"),
        (tampered([[0, 159, 1]], count=159), "do not add up to 160 rows"),
        (tampered([[0, 160, 1]], tensor="row_ids.tables.data-0"), "are neither ranges nor a tensor"),
        (lambda tree: tree["row_ids"].clear(), "names row ids 'tables', which are missing"),
        (lambda tree: tree["row_ids"]["tables"].update(num_rows=159), "its row ids 'tables' 159"),
    ],
)
def test_row_ids_that_are_wrong_are_refused_in_one_sentence(finished, tmp_path, capsys, change, sentence):
    shutil.copytree(finished / NEWEST, tmp_path / "checkpoint")
    edit_manifest(tmp_path / "checkpoint", change)
    with pytest.raises(DamagedFileError) as error:
        CheckpointReader(tmp_path / "checkpoint").positions()
    assert sentence in str(error.value)
    assert main(["inspect", str(tmp_path / "checkpoint"), "--verify"]) == 1
    said = capsys.readouterr().err
    assert sentence in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("how", ["swapped", "bit"])
def test_a_tensor_of_row_ids_that_is_wrong_is_refused(data, irregular, tmp_path, capsys, how):
    shutil.copytree(irregular[0], tmp_path / "run")
    folder = tmp_path / "run" / NEWEST
    chunk = json.loads((folder / "manifest.json").read_text())["tensors"]["row_ids.tables.data-1"]["chunks"][0]
    if how == "swapped":

        def swap(tree):
            first, second = tree["row_ids"]["tables"]["segments"]
            first["tensor"], second["tensor"] = second["tensor"], first["tensor"]

        edit_manifest(folder, swap)
    else:
        content = bytearray((folder / chunk["file"]).read_bytes())
        length = int.from_bytes(content[:8], "little")
        content[8 + length + json.loads(content[8 : 8 + length])[chunk["key"]]["data_offsets"][0]] ^= 1
        (folder / chunk["file"]).write_bytes(content)
    with pytest.raises(DamagedFileError, match="digest does not match" if how == "swapped" else "checksum does not"):
        CheckpointReader(folder).positions()
    capsys.readouterr()
    Trainer(settings(data, optimizer="dense"), tmp_path / "run", fresh=False)
    said = capsys.readouterr().out
    assert "checkpoint of step 8 is refused" in said
    assert "after step 6" in said
