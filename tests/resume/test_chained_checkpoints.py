"""A save writes the rows that changed, and every checkpoint of a chain is complete in itself."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from ranks_helper import run_ranks
from test_resume import outcome, run_until
from test_touched_checkpoints import _short_history, check, config_of, on_ranks, whole  # noqa: F401

from xgram_dist.checkpoint import chain
from xgram_dist.checkpoint.folder import checkpoints_at, remove_checkpoint
from xgram_dist.checkpoint.manifest import Manifest
from xgram_dist.checkpoint.reader import CheckpointReader
from xgram_dist.checkpoint.save import StagingBuffers
from xgram_dist.checkpoint.sharded_tensor import CheckpointState
from xgram_dist.cli.main import main
from xgram_dist.train.trainer import Trainer

NAME = "tables.layers.all.ngram.0.rows"


@pytest.fixture
def long_history(monkeypatch: pytest.MonkeyPatch) -> None:
    """No sweep over all rows: each save has few of them."""
    monkeypatch.undo()


def chained(data: Path, *, keep: int = 10, every: int = 2, **train: object):
    config = config_of(data, "engram", "touched")
    checkpoint = config.checkpoint.model_copy(update={"every": every, "keep": keep})
    return config.model_copy(update={"checkpoint": checkpoint})


@pytest.fixture
def run(data: Path, tmp_path: Path, long_history: None) -> Path:
    assert Trainer(chained(data), tmp_path / "run", fresh=False).run() == 0
    return tmp_path / "run"


def test_later_checkpoints_write_what_changed_and_link_the_rest(run: Path) -> None:
    first, second, *_ = checkpoints_at(run)
    old, new = Manifest.read(first), Manifest.read(second)
    (row_set,) = chain.touched_sets(new)
    assert old.version == 3
    assert new.version == 4
    assert new.row_ids[row_set].parts == [1, 1]
    assert new.row_ids[row_set].num_rows > old.row_ids[row_set].num_rows
    (linked,) = [name for name in new.files if name.startswith("rows-") and name in old.files]
    assert os.stat(first / linked).st_ino == os.stat(second / linked).st_ino
    own = [name for name in new.files if name.startswith("rows-") and name not in old.files]
    assert len(own) == 1
    saved = CheckpointReader(second).saved_rows(row_set)
    assert len(saved.rows) <= new.row_ids[row_set].num_rows


def test_every_checkpoint_of_a_chain_has_the_values_of_its_own_step(data: Path, run: Path, tmp_path: Path) -> None:
    """Against a run that saves all rows every time."""
    full = tmp_path / "full"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chain, "MAX_PARTS", 1)
        assert Trainer(chained(data), full, fresh=False).run() == 0
    for one, other in zip(checkpoints_at(run), checkpoints_at(full), strict=True):
        assert one.name == other.name
        assert Manifest.read(other).version == 3
        assert torch.equal(CheckpointReader(one).weight(NAME), CheckpointReader(other).weight(NAME))


def test_older_checkpoints_may_go(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    *older, newest = checkpoints_at(run)
    before = CheckpointReader(newest).weight(NAME)
    for folder in older:
        remove_checkpoint(run, int(folder.name.removeprefix("step-")))
    assert checkpoints_at(run) == [newest]
    assert torch.equal(CheckpointReader(newest).weight(NAME), before)
    assert main(["inspect", str(newest), "--verify"]) == 0
    assert "every checksum matches" in capsys.readouterr().out


def test_a_lost_run_extends_the_chain_that_it_resumes_from(
    data: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chain, "MAX_GROWTH", 100.0)
    config, folder = chained(data), tmp_path / "lost"
    run_until(config, folder, 5, monkeypatch)
    parts = len(Manifest.read(checkpoints_at(folder)[-1]).row_ids["tables.view-0"].parts or [1])
    assert Trainer(config, folder, fresh=False).run() == 0
    assert len(Manifest.read(checkpoints_at(folder)[-1]).row_ids["tables.view-0"].parts or [1]) > parts
    check(folder, run)


def test_damage_in_the_newest_part_leaves_the_checkpoint_before_it(
    data: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = checkpoints_at(run)[-1]
    own = max(name for name in Manifest.read(newest).files if name.startswith("rows-"))
    path = newest / own
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    assert main(["inspect", str(newest), "--verify"]) == 1
    assert own in capsys.readouterr().err
    longer = chained(data)
    longer = longer.model_copy(update={"train": longer.train.model_copy(update={"steps": longer.train.steps + 1})})
    assert Trainer(longer, run, fresh=False).run() == 0
    assert f"checkpoint of step {int(newest.name[5:])} is refused" in capsys.readouterr().out


def test_after_a_failed_save_the_next_one_has_all_rows(
    data: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, failures = chain.link_files, []

    def failing(source: Path, names: list[str], target: Path) -> None:
        if not failures:
            failures.append(target)
            raise OSError(28, "No space left on device")
        link(source, names, target)

    monkeypatch.setattr("xgram_dist.checkpoint.dcp_storage.link_files", failing)
    folder = tmp_path / "failing"
    assert Trainer(chained(data), folder, fresh=False).run() == 0
    versions = [Manifest.read(one).version for one in checkpoints_at(folder)]
    assert versions == [3, 3, *[4] * (len(versions) - 2)]
    assert len(failures) == 1
    check(folder, run)


def test_without_hard_links_files_are_copied(
    data: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*args: object) -> None:
        raise PermissionError("not on this file system")

    monkeypatch.setattr(chain.os, "link", refused)
    assert Trainer(chained(data), tmp_path / "copies", fresh=False).run() == 0
    check(tmp_path / "copies", run)


def test_a_long_chain_is_written_anew(data: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain, "MAX_PARTS", 2)
    assert Trainer(chained(data), tmp_path / "short", fresh=False).run() == 0
    versions = [Manifest.read(one).version for one in checkpoints_at(tmp_path / "short")]
    assert versions == [3 + number % 2 for number in range(len(versions))]
    check(tmp_path / "short", run)


def test_all_rows_of_a_large_disk_are_saved_without_a_copy_in_memory(
    data: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xgram_dist.train.checkpointing.COPY_SHARE", 0.0)
    monkeypatch.setattr(chain, "MAX_PARTS", 2)
    copied, copy = [], StagingBuffers.copy

    def watched(buffers: StagingBuffers, state: CheckpointState) -> CheckpointState:
        copied.append(sum(shard.tensor.shape[0] for one in state.row_tensors().values() for shard in one.shards))
        return copy(buffers, state)

    monkeypatch.setattr(StagingBuffers, "copy", watched)
    config = chained(data)
    memory = config.memory.model_copy(update={"placement": "disk", "folder": str(tmp_path / "rows")})
    assert Trainer(config.model_copy(update={"memory": memory}), tmp_path / "disk", fresh=False).run() == 0
    versions = [Manifest.read(one).version for one in checkpoints_at(tmp_path / "disk")]
    assert versions == [3 + number % 2 for number in range(len(versions))]
    assert len(copied) == versions[:-1].count(4), "a save of all rows has copied them"
    check(tmp_path / "disk", run)


def test_a_chain_of_two_ranks_goes_on_as_one_and_as_three(data: Path, tmp_path: Path) -> None:
    config = chained(data, every=1)
    run_ranks(on_ranks, 2, config, tmp_path / "two", 5)
    shutil.copytree(tmp_path / "two", tmp_path / "other")
    on_ranks(None, config, tmp_path / "two")
    four = config.model_copy(update={"parallel": config.parallel.model_copy(update={"tensor": 2})})
    run_ranks(on_ranks, 4, four, tmp_path / "other")
    losses, weights = outcome(tmp_path / "two")
    for name, expected in outcome(tmp_path / "other")[1].items():
        torch.testing.assert_close(weights[name], expected, rtol=1e-4, atol=1e-5)
    assert Manifest.read(checkpoints_at(tmp_path / "two")[-1]).version == 4
    assert losses


def test_packing_makes_a_copy_that_needs_nothing_else(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "packed"
    assert main(["checkpoint", "pack", str(run), "--out", str(out)]) == 0
    newest = checkpoints_at(run)[-1]
    assert f"step {int(newest.name[5:])} in '{out}'" in capsys.readouterr().out
    assert all(os.stat(path).st_nlink == 1 for path in out.iterdir())
    before = CheckpointReader(newest).weight(NAME)
    shutil.rmtree(run)
    assert torch.equal(CheckpointReader(out).weight(NAME), before)
    assert main(["checkpoint", "pack", str(out), "--out", str(out)]) == 2
    assert "exists; choose another --out" in capsys.readouterr().err


def test_parts_that_do_not_add_up_are_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from xgram_dist.checkpoint.manifest import manifest_checksum

    newest = checkpoints_at(run)[-1]
    tree = json.loads((newest / "manifest.json").read_text())
    tree["row_ids"]["tables.view-0"]["parts"] = [1]
    tree["checksum"] = manifest_checksum(tree)
    (newest / "manifest.json").write_text(json.dumps(tree))
    assert main(["inspect", str(newest)]) == 1
    assert "do not add up to its segments" in capsys.readouterr().err
