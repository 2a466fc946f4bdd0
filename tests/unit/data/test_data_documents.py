import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from data_helpers import jsonl, make_texts, write_packed
from hypothesis import given
from hypothesis import strategies as st

from xgram_dist.data import documents
from xgram_dist.data.documents import Document, Rejection, find_files, parse_line, read_documents
from xgram_dist.errors import UserError

NAMES = ["a.json.gz", "a.jsonl.gz", "a.jsonl.zst", "a.jsonl.zstd", "a.json.zst", "a.jsonl"]


def texts_of(path: Path, part: int = 0, parts: int = 1) -> list[str]:
    return [item.text for item in read_documents(path, part, parts) if isinstance(item, Document)]


def rejections_of(path: Path) -> list[Rejection]:
    return [item for item in read_documents(path) if isinstance(item, Rejection)]


@pytest.mark.parametrize("name", NAMES)
def test_every_format_gives_the_texts_in_order(tmp_path: Path, name: str) -> None:
    texts = make_texts(200, 3)
    assert texts_of(write_packed(tmp_path / name, jsonl(texts))) == texts


def test_parquet_gives_the_texts_in_order_whatever_its_string_type(tmp_path: Path) -> None:
    texts = make_texts(200, 3)
    kinds = [
        pyarrow.string(),
        pyarrow.large_string(),
        pyarrow.binary(),
        pyarrow.dictionary(pyarrow.int32(), pyarrow.string()),
    ]
    for number, kind in enumerate(kinds):
        column = pyarrow.array(texts).cast(kind) if number < 3 else pyarrow.array(texts).dictionary_encode()
        path = tmp_path / f"{number}.parquet"
        pyarrow.parquet.write_table(pyarrow.table({"id": range(200), "text": column}), path, row_group_size=70)
        assert texts_of(path) == texts


def test_files_at_any_depth_are_found_in_one_order(tmp_path: Path) -> None:
    for name in ("b/x.jsonl", "a/deep/er/y.json.gz", "a/z.jsonl.zstd", "c.parquet", "a/notes.txt", ".hidden/q.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    found = [path.relative_to(tmp_path).as_posix() for path in find_files(tmp_path)]
    assert found == ["a/deep/er/y.json.gz", "a/z.jsonl.zstd", "b/x.jsonl", "c.parquet"]


def test_a_source_without_documents_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no document file"):
        find_files(tmp_path)
    with pytest.raises(UserError, match="does not exist"):
        find_files(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["a.jsonl.zst", "a.json.gz", "a.jsonl", "a.parquet"])
def test_parts_together_are_the_whole_file_once(tmp_path: Path, name: str) -> None:
    texts = make_texts(1000, 4, words=3)
    path = tmp_path / name
    if name.endswith("parquet"):
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=333)
    else:
        write_packed(path, jsonl(texts))
    numbered = [item for part in range(3) for item in read_documents(path, part, 3)]
    assert [item.text for item in sorted(numbered, key=lambda item: item.line) if isinstance(item, Document)] == texts


def test_each_bad_line_is_named_by_reason_and_line_and_the_good_ones_are_kept(tmp_path: Path) -> None:
    lines = [
        b'{"text": "good one"}',
        b'{"text": "cut of',
        b'{"id": 3}',
        b'{"text": null}',
        b'{"text": ""}',
        b'{"text": " \\n "}',
        b'{"text": 7}',
        b'{"text": "bad \xff byte"}',
        b"[1, 2]",
        b"",
        b'{"text": "half a pair: \\ud83d"}',
        b'{"text": "good two"}',
    ]
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b"\n".join(lines))
    assert texts_of(path) == ["good one", "good two"]
    assert [(item.reason, item.line) for item in rejections_of(path)] == [
        (documents.BROKEN, 2),
        (documents.MISSING, 3),
        (documents.MISSING, 4),
        (documents.EMPTY, 5),
        (documents.EMPTY, 6),
        (documents.NOT_TEXT, 7),
        (documents.INVALID, 8),
        (documents.BROKEN, 9),
        (documents.BROKEN, 11),
    ]
    assert str(rejections_of(path)[0]).startswith(f"{path}:2: broken JSON")


@pytest.mark.parametrize("name", ["a.json.gz", "a.jsonl.zst"])
@pytest.mark.parametrize("parts", [1, 3])
def test_a_truncated_archive_keeps_its_whole_lines_and_is_told_once(tmp_path: Path, name: str, parts: int) -> None:
    texts = make_texts(5000, 5)
    path = write_packed(tmp_path / name, jsonl(texts))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    items = [item for part in range(parts) for item in read_documents(path, part, parts)]
    good = sorted((item for item in items if isinstance(item, Document)), key=lambda item: item.line)
    bad = [item for item in items if isinstance(item, Rejection)]
    assert 0 < len(good) < 5000
    assert [item.text for item in good] == texts[: len(good)]
    assert [(item.reason, item.line) for item in bad] == [(documents.TRUNCATED, len(good) + 1)]


@pytest.mark.parametrize("name", ["a.json.gz", "a.jsonl.zst", "a.parquet"])
def test_a_file_that_is_not_what_its_name_says_is_one_rejection(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"this is no archive at all, not in the least")
    assert [item.reason for item in rejections_of(path)] == [documents.DAMAGED]


def test_a_file_of_several_zstd_frames_is_read_to_its_end(tmp_path: Path) -> None:
    texts = make_texts(300, 6)
    frames = [zstandard.ZstdCompressor().compress(jsonl(texts[i : i + 100])) for i in (0, 100, 200)]
    (tmp_path / "a.jsonl.zst").write_bytes(b"".join(frames))
    assert texts_of(tmp_path / "a.jsonl.zst") == texts


def test_parquet_rows_without_text_or_with_bad_bytes_are_rejected(tmp_path: Path) -> None:
    column = pyarrow.array([b"good", None, b"\xff\xfe", b""], pyarrow.binary())
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"body": ["x", "y"]}), tmp_path / "b.parquet")
    reasons = [item.reason for item in rejections_of(tmp_path / "a.parquet")]
    assert reasons == [documents.MISSING, documents.INVALID, documents.EMPTY]
    assert [item.reason for item in rejections_of(tmp_path / "b.parquet")] == [documents.MISSING] * 2


def test_a_line_beyond_the_limit_is_skipped_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "MAX_LINE_BYTES", 100)
    (tmp_path / "a.jsonl").write_bytes(jsonl(["first", "x" * 1000, "last"]))
    assert texts_of(tmp_path / "a.jsonl") == ["first", "last"]
    assert [(item.reason, item.line) for item in rejections_of(tmp_path / "a.jsonl")] == [(documents.TOO_LONG, 2)]


@given(st.binary(max_size=80))
def test_no_line_can_raise(line: bytes) -> None:
    assert isinstance(parse_line(line, "file", 1), Document | Rejection | None)


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_any_text_survives_the_way_through_json(text: str) -> None:
    item = parse_line(json.dumps({"text": text}).encode(), "file", 1)
    assert item == (Document(text, 1) if text.strip() else Rejection(documents.EMPTY, "file", 1))
