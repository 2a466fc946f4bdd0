"""Data sets, documents and tokenizers from elsewhere: one sentence each, and nothing is overwritten."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from refusals import check_sentence

from xgram_dist.cli.main import main
from xgram_dist.data import dataset
from xgram_dist.data.dataset import PreparedData
from xgram_dist.data.documents import Rejection, find_files, read_documents
from xgram_dist.data.manifest import read_manifest
from xgram_dist.data.tokenizer import library_faults, load_tokenizer
from xgram_dist.errors import BadFileError, UserError
from xgram_dist.files import private_folder

Change = Callable[[dict[str, Any]], Any]


@pytest.fixture
def copy(data: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(data, tmp_path / "data"))


def edit(path: Path, change: Change) -> None:
    tree = json.loads(path.read_text())
    change(tree)
    path.write_text(json.dumps(tree))


def shard(tree: dict[str, Any]) -> dict[str, Any]:
    return tree["shards"][0]


def names(raw: Any, packed: Any) -> Change:
    def change(tree: dict[str, Any]) -> None:
        shard(tree)["raw_data"]["basename"], shard(tree)["zip_data"]["basename"] = raw, packed

    return change


INDEXES: dict[str, tuple[Change, str]] = {
    "decompresses over the index": (names("index.json", "shard.000000.mds.zstd"), "a shard is 'index.json'"),
    "decompresses over itself": (names("shard.000000.mds.zstd", "shard.000000.mds.zstd"), "a shard is 'shard.000000"),
    "is read from the index": (names("shard.000000.mds", "index.json"), "compressed, 'index.json'"),
    "leads up": (names("../../dataset.json", "x.mds.zstd"), "is no plain file name"),
    "has a newline": (names("shard.mds\n", "shard.mds\n.zstd"), "is no plain file name"),
    "is a number": (names(3, "x"), "'shards.0.raw_data.basename' is 3"),
    "is named twice": (lambda t: t["shards"].append(shard(t)), "it names the shard 'shard.000000.mds' twice"),
    "has another hash": (lambda t: shard(t).update(hashes=["md5"]), "a shard is not of hashed"),
    "has no hash": (lambda t: shard(t)["raw_data"].update(hashes={}), "has no xxh128"),
    "has hashes of a list": (lambda t: shard(t)["raw_data"].update(hashes=[]), "raw_data.hashes' is a list of 0"),
    "has no samples": (lambda t: shard(t).pop("samples"), "'shards.0.samples' is missing"),
    "has samples below zero": (lambda t: shard(t).update(samples=-1), "'shards.0.samples' is -1"),
    "has samples of 1.0": (lambda t: shard(t).update(samples=1.0), "'shards.0.samples' is 1.0"),
    "is larger than its chunks": (lambda t: shard(t)["raw_data"].update(bytes=2**31), "larger than its chunks"),
    "is 10^30 bytes": (lambda t: shard(t)["raw_data"].update(bytes=10**30), "raw_data.bytes' is 1000000"),
    "has no zip data": (lambda t: shard(t).pop("zip_data"), "'shards.0.zip_data' is missing"),
    "is of another format": (lambda t: shard(t).update(format="jsonl"), "a shard is not of hashed"),
    "is text": (lambda t: t.update(shards="x"), "'shards' is 'x'"),
    "is missing": (lambda t: t.pop("shards"), "'shards' is missing"),
}


@pytest.mark.parametrize(("change", "sentence"), INDEXES.values(), ids=INDEXES)
def test_an_index_that_was_tampered_with_overwrites_nothing(copy: Path, change: Change, sentence: str) -> None:
    index = copy / "train" / "web" / "index.json"
    edit(index, change)
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    with pytest.raises(UserError) as caught:
        PreparedData.open(copy).chunk(0, 0)
    assert sentence in str(caught.value)
    assert len(str(caught.value)) < 400
    assert {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()} == before


MANIFESTS: dict[str, tuple[Change, str]] = {
    "end of text 10^18": (lambda t: t.update(end_of_text=10**18), "'end_of_text' should be below the vocabulary"),
    "end of text 10^30": (lambda t: t.update(end_of_text=10**30), "'end_of_text' should be from 0 to"),
    "vocabulary 2^40": (lambda t: t.update(vocabulary=2**40), "'vocabulary' should be at most 65,536 for uint16"),
    "vocabulary below zero": (lambda t: t.update(vocabulary=-1), "'vocabulary' should be from 1 to"),
    "vocabulary is true": (lambda t: t.update(vocabulary=True), "'vocabulary' should be int, is True"),
    "chunks of 2^40": (lambda t: t.update(chunk_tokens=2**40), "'chunk_tokens' should be at most"),
    "dtype is a list": (lambda t: t.update(dtype=[]), "'dtype' should be str, is a list of 0"),
    "dtype float": (lambda t: t.update(dtype="float64"), "'dtype' should be uint16 or uint32"),
    "tokenizer outside": (lambda t: t.update(tokenizer_file="../../x"), "'tokenizer_file' is no plain name"),
    "tokenizer with a newline": (lambda t: t.update(tokenizer_file="t.json\n"), "'tokenizer_file' is no plain name"),
    "no sources": (lambda t: t.pop("sources"), "'sources' is missing"),
    "sources is a number": (lambda t: t.update(sources=3), "'sources' should be list, is 3"),
    "source leads up": (lambda t: t["sources"][0].update(name=".."), "'sources[0].name' is no plain name"),
    "rejected is text": (lambda t: t["sources"][0].update(rejected={"x": "y"}), "rejected' should hold counts"),
    "weight is text": (lambda t: t["sources"][0].update(weight="x"), "weight' should be a number"),
    "version is a list": (lambda t: t.update(version=[]), "'version' should be int, is a list of 0"),
}


@pytest.mark.parametrize(("change", "sentence"), MANIFESTS.values(), ids=MANIFESTS)
def test_a_manifest_of_data_that_is_not_ours_is_one_sentence(copy: Path, change: Change, sentence: str) -> None:
    edit(copy / "dataset.json", change)
    with pytest.raises(UserError) as caught:
        read_manifest(copy)
    assert sentence in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("content", [b"", b"\xff", b"[" * 200_000, b"[]", b'{"format": NaN}'])
@pytest.mark.parametrize("name", ["dataset.json", "train/web/index.json"])
def test_a_file_of_data_that_is_no_json_is_one_sentence(copy: Path, name: str, content: bytes) -> None:
    (copy / name).write_bytes(content)
    with pytest.raises(BadFileError):
        PreparedData.open(copy)


@pytest.mark.parametrize("kind", ["fifo", "link"])
def test_a_tokenizer_of_data_that_is_no_file_is_not_copied_into_checkpoints(copy: Path, kind: str) -> None:
    file = copy / "tokenizer.json"
    file.unlink()
    os.mkfifo(file) if kind == "fifo" else file.symlink_to("/etc/passwd")
    with pytest.raises(BadFileError) as error:
        PreparedData.open(copy)
    check_sentence(error.value, "tokenizer.json' is a ", "not a regular file")


def test_an_end_of_text_of_newlines_is_one_line(copy: Path, capfd: pytest.CaptureFixture[str]) -> None:
    edit(copy / "dataset.json", lambda tree: tree.update(end_of_text_name="\n" * 5000))
    assert main(["frequencies", str(copy), "--vocabulary", "300", "--out", str(copy / "f.npz")]) == 2
    error = capfd.readouterr().err
    assert error.count("\n") == 1
    assert len(error) < 400


def test_a_vocabulary_that_no_file_holds_is_one_sentence(copy: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["frequencies", str(copy), "--vocabulary", "9" * 20, "--out", str(copy / "f.npz")]
    assert main(words) == 2
    assert "is above the limit of" in capfd.readouterr().err
    assert not (copy / "f.npz").exists()


def test_counts_that_are_cut_off_are_one_sentence(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    counts = (copy / "counts.npz").read_bytes()
    (copy / "counts.npz").write_bytes(counts[: len(counts) // 2])
    assert main(["frequencies", str(copy), "--out", str(copy / "f.npz")]) == 2
    assert "is not a readable .npz archive" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["fifo", "dangling link", "device"])
def test_what_is_no_document_file_is_named_and_not_waited_for(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.jsonl"
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero" if kind == "device" else tmp_path / "nothing")
    expected = {
        "fifo": "is a named pipe",
        "device": "is a device",
        "dangling link": "is a link to a file that is missing",
    }
    with pytest.raises(UserError, match=expected[kind]):
        find_files(tmp_path)


def test_a_zstd_bomb_is_unpacked_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """256 MB of zeros in some 10 kB, without a line end: never more than the longest line is held."""
    compressor = zstandard.ZstdCompressor(level=1).compressobj()
    block = bytes(1 << 24)
    packed = b"".join([compressor.compress(block) for _ in range(16)] + [compressor.flush()])
    (tmp_path / "a.jsonl.zst").write_bytes(packed)
    largest = 0
    from xgram_dist.data import documents

    def lines(pieces: Any) -> Any:
        nonlocal largest
        for piece in pieces:
            largest = max(largest, len(piece))
        yield from ()

    monkeypatch.setattr(documents, "_lines", lines)
    assert list(read_documents(tmp_path / "a.jsonl.zst")) == []
    assert 0 < largest <= 160 << 20


def tokenizer_with(data: Path, tmp_path: Path, change: Change) -> Path:
    path = tmp_path / "tokenizer.json"
    shutil.copyfile(data / "tokenizer.json", path)
    edit(path, change)
    return path


TOKENIZERS: dict[str, tuple[Change, str]] = {
    "id 2^31": (lambda t: t["model"]["vocab"].update(x=2**31), "has the token id 2147483648"),
    "id below zero": (lambda t: t["model"]["vocab"].update(x=-1), "has the token id -1"),
    "added id 2^31": (lambda t: t["added_tokens"][0].update(id=2**31), "has the token id 2147483648"),
    "id is text": (lambda t: t["model"]["vocab"].update(x="1"), "has the token id '1'"),
    "no model": (lambda t: t.pop("model"), "is not a tokenizers JSON file"),
}


@pytest.mark.parametrize(("change", "sentence"), TOKENIZERS.values(), ids=TOKENIZERS)
def test_a_tokenizer_that_wants_gigabytes_is_named(data: Path, tmp_path: Path, change: Change, sentence: str) -> None:
    path = tokenizer_with(data, tmp_path, change)
    with pytest.raises(BadFileError, match=sentence) as caught:
        load_tokenizer(path)
    assert str(path) in str(caught.value)


def test_a_pattern_that_backtracks_for_ever_names_the_tokenizer(data: Path, tmp_path: Path) -> None:
    pattern = {"type": "Split", "pattern": {"Regex": "(a|aa|a?)+$"}, "behavior": "Isolated", "invert": False}
    path = tokenizer_with(data, tmp_path, lambda tree: tree.update(pre_tokenizer=pattern))
    with pytest.raises(BadFileError, match="fails: Onig: Regex search error: retry-limit") as caught:
        load_tokenizer(path).encode_batch(["a" * 60 + "b"])
    assert str(path) in str(caught.value)


def test_a_cache_folder_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "theirs")
    (tmp_path / "file").write_text("x")
    for name in ("link", "file"):
        with pytest.raises(UserError, match="is not a folder of this user"):
            private_folder(tmp_path / name)
    assert private_folder(tmp_path / "mine").stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(UserError, match="is not a folder of this user"):
        private_folder(tmp_path / "theirs")


def test_a_lock_is_not_opened_through_a_link_and_empties_nothing(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "x.lock").symlink_to(tmp_path / "precious")
    with pytest.raises(UserError, match="cannot write"), dataset._locked(tmp_path / "x.lock"):
        pass
    assert (tmp_path / "precious").read_text() == "mine"


def test_a_panic_of_the_library_is_one_sentence_and_other_output_is_kept(
    data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rust prints a panic and its stack to standard error."""
    pattern = {"type": "Split", "pattern": {"Regex": "(a|aa|a?)+$"}, "behavior": "Isolated", "invert": False}
    tokenizer = load_tokenizer(tokenizer_with(data, tmp_path, lambda tree: tree.update(pre_tokenizer=pattern)))
    with pytest.raises(BadFileError):
        tokenizer.encode_batch(["a" * 60 + "b"])
    with library_faults("nothing"):
        os.write(2, b"said meanwhile\n")
    assert capfd.readouterr().err == "said meanwhile\n"


def test_a_parquet_column_with_a_name_that_is_no_text_is_a_damaged_file(tmp_path: Path) -> None:
    table = pyarrow.table({"text": ["some text"], "marker": ["x"]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", store_schema=False)
    content = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "b.parquet").write_bytes(content.replace(b"marker", b"m\xffrker"))
    (rejected,) = read_documents(tmp_path / "b.parquet")
    assert isinstance(rejected, Rejection)
