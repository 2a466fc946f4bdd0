"""Checkpoints that nobody saved: one line under 400 characters, nothing outside the folder is read, and a resume takes
the checkpoint before."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from train_helpers import small_config

from xgram_dist.checkpoint.manifest import Manifest, manifest_checksum
from xgram_dist.checkpoint.safetensors_io import DamagedFileError, RawFile
from xgram_dist.cli.main import main
from xgram_dist.train.trainer import Trainer

Change = Callable[[dict[str, Any]], Any]
RANK = "rank-00000.safetensors"
SECRET = "root:x:0:0"


@pytest.fixture
def newest(run: Path) -> Path:
    return run / "checkpoints" / "step-00000004"


def edit_manifest(checkpoint: Path, change: Change) -> None:
    """With a checksum that is right again: what only the schema can refuse."""
    path = checkpoint / "manifest.json"
    tree = json.loads(path.read_text())
    change(tree)
    tree["checksum"] = manifest_checksum(tree)
    path.write_text(json.dumps(tree))


def edit_header(checkpoint: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """The same length, so that the manifest finds the file in its size."""
    path = checkpoint / RANK
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    tree = json.loads(data[8 : 8 + length])
    changed = change(tree)
    text = changed if isinstance(changed, bytes) else json.dumps(tree, separators=(",", ":")).encode()
    assert len(text) <= length
    path.write_bytes(data[:8] + text.ljust(length) + data[8 + length :])


def first(tree: dict[str, Any]) -> dict[str, Any]:
    return tree["tensors"]["backbone.embedding"]


def chunk(tree: dict[str, Any]) -> dict[str, Any]:
    return first(tree)["chunks"][0]


def rename(name: Any) -> Change:
    def change(tree: dict[str, Any]) -> None:
        tree["files"][name] = tree["files"].pop(RANK)
        for entry in tree["tensors"].values():
            for one in entry["chunks"]:
                one["file"] = name

    return change


def nest(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


MANIFESTS: dict[str, tuple[Change, str]] = {
    "version is a list": (lambda t: t.update(version=[1]), "has version a list of 1"),
    "version is true": (lambda t: t.update(version=True), "has version True"),
    "version is 2.0": (lambda t: t.update(version=2.0), "has version 2.0"),
    "tensors is a list": (lambda t: t.update(tensors=[]), "'tensors' has the invalid value a list of 0"),
    "tensors is missing": (lambda t: t.pop("tensors"), "not a complete manifest: 'tensors' is missing"),
    "run is missing": (lambda t: t.pop("run"), "not a complete manifest: 'run' is missing"),
    "run is text": (lambda t: t.update(run="x"), "'run' has the invalid value 'x'"),
    "files is missing": (lambda t: t.pop("files"), "not a complete manifest: 'files' is missing"),
    "row ids are missing": (lambda t: t.pop("row_ids"), "not a complete manifest: 'row_ids' is missing"),
    "size is text": (lambda t: t["files"].update({RANK: "9"}), f"'files.{RANK}' has the invalid value '9'"),
    "size is a float": (lambda t: t["files"].update({RANK: 9.0}), f"'files.{RANK}' has the invalid value 9.0"),
    "size below zero": (lambda t: t["files"].update({RANK: -1}), f"'files.{RANK}' has the invalid value -1"),
    "another size": (lambda t: t["files"].update({RANK: 10**12}), "bytes, not 1,000,000,000,000"),
    "data_ranks 0": (lambda t: t["run"].update(data_ranks=0), "'data_ranks' has the invalid value 0"),
    "data_ranks 1e9": (lambda t: t["run"].update(data_ranks=10**9), "'data_ranks' has the invalid value 1000000000"),
    "ranks is a list": (lambda t: t["run"].update(ranks=[1]), "'ranks' has the invalid value a list of 1"),
    "tensor is 1.0": (lambda t: t["run"].update(tensor=1.0), "'tensor' has the invalid value 1.0"),
    "step below zero": (lambda t: t["run"].update(step=-4), "'step' has the invalid value -4"),
    "step is huge": (lambda t: t["run"].update(step=10**300), "'step' has the invalid value a number of more than 70"),
    "step is missing": (lambda t: t["run"].pop("step"), "not a complete manifest: 'step' is missing"),
    "loss is text": (lambda t: t["run"].update(loss="low"), "'loss' has the invalid value 'low'"),
    "loader is a list": (lambda t: t["run"].update(loader=[]), "'loader' has the invalid value a list of 0"),
    "position is text": (lambda t: t["run"]["loader"].update(position="x"), "'loader.position' has the invalid value"),
    "no fingerprint": (lambda t: t["run"]["loader"].pop("fingerprint"), "'loader.fingerprint' is missing"),
    "tokenizer is text": (lambda t: t["run"].update(tokenizer="x"), "'tokenizer' has the invalid value 'x'"),
    "started from a list": (lambda t: t["run"].update(started_from=[1]), "'started_from' has the invalid value"),
    "recipe is a number": (lambda t: t["run"].update(config=3), "'config' has the invalid value 3"),
    "recipe is no recipe": (lambda t: t["run"].update(config="[1, 2]"), "the recipe in its manifest cannot be read"),
    "recipe is no YAML": (lambda t: t["run"].update(config="{" * 900), "the recipe in its manifest cannot be read"),
    "row sharding is a list": (lambda t: t["run"].update(row_sharding=[1]), "'row_sharding' has the invalid value"),
    "shape 64.0": (lambda t: first(t).update(shape=[64.0, 32]), "'tensors.backbone.embedding.shape.0' has the invalid"),
    "shape is text": (lambda t: first(t).update(shape="x"), "'tensors.backbone.embedding.shape' has the invalid"),
    "shape below zero": (lambda t: first(t).update(shape=[-1, 32]), "shape.0' has the invalid value -1"),
    "shape of 2^70": (lambda t: first(t).update(shape=[2**70, 32]), "shape.0' has the invalid value"),
    "shape beyond its chunks": (lambda t: first(t).update(shape=[10**9, 32]), "does not hold all of 'backbone.embed"),
    "a chunk beyond its file": (
        lambda t: (first(t).update(shape=[10**9, 32]), chunk(t).update(sizes=[10**9, 32])),
        "is larger than its file",
    ),
    "a chunk twice": (lambda t: first(t)["chunks"].append(dict(chunk(t))), "'backbone.embedding' has a chunk twice"),
    "no chunk": (lambda t: first(t).update(chunks=[]), "does not hold all of 'backbone.embedding'"),
    "dtype is a list": (lambda t: first(t).update(dtype=["F32"]), "dtype' has the invalid value a list of 1"),
    "dtype is unknown": (lambda t: first(t).update(dtype="F8"), "has the unknown dtype 'F8'"),
    "offsets below zero": (lambda t: chunk(t).update(offsets=[-1, 0]), "offsets.0' has the invalid value -1"),
    "offsets outside": (lambda t: chunk(t).update(offsets=[9, 9]), "is outside its shape"),
    "checksum is text": (lambda t: chunk(t).update(checksum="x"), "checksum' has the invalid value 'x'"),
    "a chunk in no file": (lambda t: chunk(t).update(file="x"), "is in 'x', which is not listed"),
    "a name that leads up": (rename("../../../../etc/passwd"), "'../../../../etc/passwd', which is not a plain name"),
    "an absolute name": (rename("/dev/zero"), "'/dev/zero', which is not a plain name"),
    "a name with a newline": (rename(RANK + "\n"), f"'{RANK}\\\\n', which is not a plain name"),
    "a name with colours": (rename("\x1b[31mred"), "'\\\\x1b[31mred', which is not a plain name"),
    "a name of 5,000 characters": (rename("x" * 5000), "xxx...', which is not a plain name"),
    "a checksum of no file": (
        lambda t: t["checksums"].update({"passwd": 1}),
        "'passwd' has a checksum, but is not one of its files",
    ),
    "a checksum outside": (lambda t: t["checksums"].update({"../x": 1}), "'../x', which is not a plain name"),
    "row ids that are missing": (lambda t: t["row_ids"].clear(), "names row ids 'tables', which are missing"),
    "a range without a step": (
        lambda t: t["row_ids"]["tables"]["segments"][0].update(ranges=[[0, 9, 0]], tensor=None),
        "have a range without a step",
    ),
    "a range of 10^18": (
        lambda t: t["row_ids"]["tables"]["segments"][0].update(ranges=[[0, 10**18, 1]], tensor=None),
        "of data rank 0 are not",
    ),
    "more rows than bytes": (
        lambda t: t["row_ids"].update(
            more={"num_rows": 10**15, "segments": [{"count": 10**15, "digest": 0, "ranges": [[0, 10**15, 1]]}]}
        ),
        "the row ids 'more' are more than its files can hold",
    ),
    "row ids in a tensor that is missing": (
        lambda t: t["row_ids"]["tables"]["segments"][0].update(ranges=None, tensor="x"),
        "the row ids 'x' are not one chunk",
    ),
    "nested": (lambda t: t.update(more=nest(100)), "is not valid JSON: it is nested deeper than 16 levels"),
}


@pytest.mark.parametrize(("change", "sentence"), MANIFESTS.values(), ids=MANIFESTS)
def test_a_manifest_that_is_not_ours_is_one_short_line(
    newest: Path, change: Change, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    edit_manifest(newest, change)
    capsys.readouterr()
    assert main(["inspect", str(newest), "--verify"]) == 1
    out, err = capsys.readouterr()
    assert sentence.replace("\\\\", "\\") in err
    assert err.count("\n") == 1
    assert len(err) < 400
    assert SECRET not in out + err


RAW_MANIFESTS = {
    "empty": (b"", "is not valid JSON"),
    "not UTF-8": (b"\xff", "byte 0 is not UTF-8"),
    "a list": (b"[]", "is not the manifest of a checkpoint"),
    "nested beyond the parser": (b"[" * 200_000, "nested deeper than 16 levels"),
    "NaN": (b'{"a": NaN}', "NaN is not a number of JSON"),
    "half a character": (b'{"a": "\\ud800"}', "it holds half of a character"),
}


@pytest.mark.parametrize(("content", "sentence"), RAW_MANIFESTS.values(), ids=RAW_MANIFESTS)
def test_a_manifest_that_is_no_json_is_one_sentence(newest: Path, content: bytes, sentence: str) -> None:
    (newest / "manifest.json").write_bytes(content)
    with pytest.raises(DamagedFileError, match=sentence):
        Manifest.read(newest)


@pytest.mark.parametrize("kind", ["folder", "fifo", "device"])
@pytest.mark.parametrize("name", ["manifest.json", RANK])
def test_what_is_no_file_is_neither_opened_nor_waited_for(newest: Path, name: str, kind: str) -> None:
    (newest / name).unlink()
    if kind == "device":
        (newest / name).symlink_to("/dev/zero")
    else:
        (os.mkfifo if kind == "fifo" else os.mkdir)(newest / name)
    with pytest.raises(DamagedFileError, match=r"is a link|not a regular file"):
        Manifest.read(newest)


def entry(tree: dict[str, Any]) -> dict[str, Any]:
    return next(one for name, one in tree.items() if name.startswith("backbone.embedding@"))


HEADERS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "nested": (lambda t: b'{"a":' + b"[" * 1000 + b"]" * 1000 + b"}", "its header is not valid"),
    "nested beyond the parser": (lambda t: b"[" * 5000, "its header is not valid"),
    "a list": (lambda t: b"[]", "its header is not valid"),
    "not UTF-8": (lambda t: b"\xff", "its header is not valid"),
    "offsets are floats": (lambda t: entry(t).update(data_offsets=[0.0, 1.0]), "not valid at 'backbone.embedding@0,0'"),
    "offsets of 400 digits": (lambda t: entry(t).update(data_offsets=[0, 10**400]), "not valid at 'backbone.embedd"),
    "offsets are out of range": (lambda t: entry(t).update(data_offsets=[0, 1e308]), "not valid at"),
    "offsets below zero": (lambda t: entry(t).update(data_offsets=[-4, 0]), "not valid at"),
    "offsets are text": (lambda t: entry(t).update(data_offsets="ab"), "not valid at"),
    "offsets beyond the file": (lambda t: entry(t).update(data_offsets=[0, 10**9]), "truncated or damaged at"),
    "shape 64.0": (lambda t: entry(t).update(shape=[320.0, 32]), "not valid at"),
    "shape is true": (lambda t: entry(t).update(shape=[True]), "not valid at"),
    "shape overflows": (lambda t: entry(t).update(shape=[2**40, 2**40]), "truncated or damaged at"),
    "dtype is a list": (lambda t: entry(t).update(dtype=[]), "not valid at"),
    "dtype is unknown": (lambda t: entry(t).update(dtype="F8"), "not valid at"),
    "a tensor is a number": (lambda t: t.update({"backbone.embedding@0,0": 3}), "not valid at"),
    "the tensor is missing": (lambda t: t.pop("backbone.embedding@0,0"), "has no 'backbone.embedding@0,0'"),
}


@pytest.mark.parametrize(("change", "sentence"), HEADERS.values(), ids=HEADERS)
def test_a_damaged_header_is_one_short_line(
    newest: Path, change: Change, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    edit_header(newest, change)
    capsys.readouterr()
    assert main(["inspect", str(newest), "--verify"]) == 1
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1
    assert len(error) < 400


def test_a_key_of_40000_characters_is_cut(tmp_path: Path) -> None:
    text = json.dumps({"x" * 40_000 + "\n\x1b[2J": 3}).encode()
    (tmp_path / "x").write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(DamagedFileError) as caught:
        RawFile(tmp_path / "x")
    assert len(str(caught.value)) < 400
    assert str(caught.value).isprintable()


FALLBACKS: dict[str, Callable[[Path], Any]] = {
    "nested header": lambda c: edit_header(c, HEADERS["nested beyond the parser"][0]),
    "float offsets": lambda c: edit_header(c, HEADERS["offsets are floats"][0]),
    "data_ranks 0": lambda c: edit_manifest(c, MANIFESTS["data_ranks 0"][0]),
    "random state is no random state": lambda c: edit_manifest(
        c, lambda t: t["tensors"].update({"rng.rank-0": first(t)})
    ),
    "random state is missing": lambda c: edit_manifest(c, lambda t: t["tensors"].pop("rng.rank-0")),
    "recent steps are text": lambda c: edit_manifest(c, lambda t: t["run"].update(recent_steps="xyz")),
}


@pytest.mark.parametrize("damage", FALLBACKS.values(), ids=FALLBACKS)
def test_a_resume_falls_back_to_the_checkpoint_before(
    newest: Path, run: Path, data: Path, damage: Callable[[Path], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    damage(newest)
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    config = small_config(data, checkpoint={"every": 2}, memory={"optimizer": "catch_up"})
    trainer = Trainer(config, run, fresh=False)
    try:
        assert trainer.start == 2
    finally:
        trainer._close(failed=False)
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    out = capsys.readouterr().out
    (complaint,) = [line for line in out.splitlines() if line.startswith("checkpoint of step 4 is refused: ")]
    assert len(complaint) < 450


def test_the_model_card_of_an_export_has_no_path_of_the_data(run: Path, data: Path, tmp_path: Path) -> None:
    assert main(["export", str(run), "--to", "hf", str(tmp_path / "hf")]) == 0
    card = (tmp_path / "hf" / "README.md").read_text()
    assert "global_batch" in card
    assert str(data) not in card
