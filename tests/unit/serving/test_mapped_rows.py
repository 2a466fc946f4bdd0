"""Rows of an exported folder, mapped: folders that another release or somebody else made are refused by a sentence."""

import json
import os
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from xgram_dist.errors import BadFileError
from xgram_dist.inference.hf.decoder_tables import Tables
from xgram_dist.serving.mapped_rows import MappedRows, map_rows

NAME, ROWS = "tables.views.0.rows", torch.arange(40.0).reshape(10, 4)


def tables() -> Tables:
    with torch.device("meta"):
        return Tables([{"name": "layers.0.h.0", "rows": 10, "width": 4, "view": 0}], [], 10, "fp32")


def write(folder: Path, file: str = "tables.safetensors", rows: torch.Tensor = ROWS) -> None:
    save_file({NAME: rows}, folder / "tables.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {NAME: file}}))


def test_mapped_rows_are_those_of_the_file(tmp_path: Path) -> None:
    write(tmp_path)
    made = tables()
    map_rows(tmp_path, made)
    assert torch.equal(made.views[0].rows, ROWS)


def test_folders_without_files_of_tables_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadFileError, match="older release exported it; export the checkpoint again"):
        map_rows(tmp_path, tables())


def test_names_outside_of_the_folder_and_other_shapes_are_refused(tmp_path: Path) -> None:
    write(tmp_path, file="../tables.safetensors")
    with pytest.raises(BadFileError, match="which is not a plain name"):
        map_rows(tmp_path, tables())
    write(tmp_path, rows=ROWS[:5].contiguous())
    with pytest.raises(BadFileError, match="does not hold the rows"):
        map_rows(tmp_path, tables())


def header(**changes: object) -> dict[str, object]:
    return {NAME: {"dtype": "F32", "shape": [10, 4], "data_offsets": [0, 160], **changes}}


@pytest.mark.parametrize(
    ("tree", "sentence"),
    [
        ([], "its header is not valid"),
        ({}, f"has no '{NAME}'"),
        ({NAME: 3}, "its header is not valid at"),
        (header(dtype=["F32"]), "its header is not valid at"),
        (header(dtype="F8"), "its header is not valid at"),
        (header(shape=[10.0, 4]), "its header is not valid at"),
        (header(shape="x"), "its header is not valid at"),
        (header(data_offsets=[0]), "its header is not valid at"),
        (header(data_offsets=[-160, 0]), "its header is not valid at"),
        (header(data_offsets=[0, 10**400]), "its header is not valid at"),
        (header(data_offsets=[0, 10**9]), "is truncated or damaged at"),
        (header(shape=[10, 5]), "is truncated or damaged at"),
        (header(dtype="U8", data_offsets=[0, 40]), "does not hold the rows"),
    ],
    ids=repr,
)
def test_headers_that_are_not_ours_are_refused(tmp_path: Path, tree: object, sentence: str) -> None:
    write(tmp_path)
    text = json.dumps(tree).encode()
    (tmp_path / "tables.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(160))
    with pytest.raises(BadFileError, match=sentence):
        map_rows(tmp_path, tables())


@pytest.mark.parametrize("length", [0, 1, 10**6, 2**63, 2**64 - 1])
def test_a_header_of_another_length_than_the_file_allocates_nothing(tmp_path: Path, length: int) -> None:
    write(tmp_path)
    (tmp_path / "tables.safetensors").write_bytes(struct.pack("<Q", length) + b"{}" + bytes(160))
    with pytest.raises(BadFileError, match="its header is missing or truncated"):
        map_rows(tmp_path, tables())


@pytest.mark.parametrize(
    "index",
    [b"", b"\xff", b"[" * 100_000, b"[]", b"{}", b'{"weight_map": []}', b'{"weight_map": {"tables.views.0.rows": 3}}'],
)
def test_indexes_that_are_not_ours_are_refused(tmp_path: Path, index: bytes) -> None:
    write(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_bytes(index)
    with pytest.raises(BadFileError):
        map_rows(tmp_path, tables())


def test_files_behind_links_are_mapped_as_hubs_keep_them_and_pipes_are_not_waited_for(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "tables.safetensors").rename(tmp_path / "blob")
    (tmp_path / "tables.safetensors").symlink_to(tmp_path / "blob")
    made = tables()
    map_rows(tmp_path, made)
    assert torch.equal(made.views[0].rows, ROWS)
    (tmp_path / "tables.safetensors").unlink()
    os.mkfifo(tmp_path / "tables.safetensors")
    with pytest.raises(BadFileError, match="is a named pipe"):
        map_rows(tmp_path, tables())


def test_rows_that_cannot_be_mapped_where_they_begin_are_refused_rather_than_copied(tmp_path: Path) -> None:
    write(tmp_path)
    text = json.dumps(header()).encode()
    text += b" " * (-len(text) % 4 + 1)
    content = ROWS.numpy().tobytes()
    (tmp_path / "tables.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + content)
    with pytest.raises(BadFileError, match="where no F32 can be mapped; export the checkpoint again"):
        map_rows(tmp_path, tables())


def test_files_larger_than_memory_are_mapped(tmp_path: Path) -> None:
    """With a hole for most of the rows: nothing of them is read."""
    rows = 1 << 36
    entry = {"dtype": "F32", "shape": [rows, 4], "data_offsets": [0, 16 * rows]}
    header = json.dumps({NAME: entry}).encode()
    with (tmp_path / "tables.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.seek(16 * (rows - 1), 1)
        file.write(ROWS[1].numpy().tobytes())
    mapped = MappedRows(tmp_path / "tables.safetensors", NAME)
    mapped.read_ahead(torch.tensor([0, rows // 2, rows - 1]))
    assert mapped.rows.shape == (rows, 4)
    assert torch.equal(mapped.rows[rows - 1], ROWS[1])
    assert not mapped.rows[rows // 2].any()
