"""`dataset.json`: the manifest of a prepared data set.

In: a folder written by `prepare`. Out: frozen dataclasses. Every field is checked when it is read (types, ranges, file
names inside the folder), because the file may come from anywhere. The manifest is written last and atomically: a
folder without it is not a data set.
"""

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from xgram_dist.errors import BadFileError, UserError
from xgram_dist.files import write_atomically
from xgram_dist.untrusted import read_json, shown

MANIFEST = "dataset.json"
FORMAT = "xgram-dist data"
VERSION = 1
PACKED_VERSION = 2
"""Of a data set with padding, which an earlier release would train on."""
MAX_BYTES = 64 << 20
MAX_COUNT = 2**60
MAX_VOCABULARY = 2**27
"""Far above any tokenizer's; arrays of this length fit in memory."""
MAX_CHUNK_TOKENS = 2**28
SPLITS = ("train", "validation")
HASH = "xxh128"  # of shards
SOURCE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class SplitInfo:
    documents: int
    chunks: int
    tokens: int  # in the written chunks
    content: str  # digest of the shards' sizes and hashes, in order
    padding: int = 0  # tokens of the chunks that are padding


@dataclass(frozen=True)
class SourceInfo:
    name: str
    weight: float | None  # share in the mix; None: in proportion to its size
    documents: int
    bytes: int  # of text, UTF-8
    rejected: dict[str, int]
    train: SplitInfo
    validation: SplitInfo

    def split(self, name: str) -> SplitInfo:
        return self.train if name == "train" else self.validation


@dataclass(frozen=True)
class Manifest:
    vocabulary: int
    chunk_tokens: int
    dtype: str
    end_of_text: int
    end_of_text_name: str
    tokenizer_file: str
    tokenizer_sha256: str
    request: str  # digest of the request, by which a rerun recognises finished work
    sources: tuple[SourceInfo, ...]
    sequence_length: int | None = None  # whole documents are packed into sequences of this length; None: joined and cut

    @property
    def fingerprint(self) -> str:
        """Digest of the content: the same tokens in the same chunks under the same names."""
        content = {
            "vocabulary": self.vocabulary,
            "chunk_tokens": self.chunk_tokens,
            "dtype": self.dtype,
            "end_of_text": self.end_of_text,
            "tokenizer": self.tokenizer_sha256,
            "sources": [[s.name, s.train.content, s.validation.content] for s in self.sources],
        }
        if self.sequence_length is not None:
            content["sequence_length"] = self.sequence_length
        return digest(content)

    def write(self, folder: Path) -> None:
        fields = asdict(self)
        sources = fields.pop("sources")
        record = {
            "format": FORMAT,
            "version": VERSION if self.sequence_length is None else PACKED_VERSION,
            "fingerprint": self.fingerprint,
            **fields,
            "sources": list(sources),
        }
        write_atomically(folder / MANIFEST, json.dumps(record, indent=1) + "\n")


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def shards_digest(shards: list[dict[str, Any]]) -> str:
    """Digest of the uncompressed shards, which does not depend on the version of the compressor."""
    return digest([[shard["samples"], shard["raw_data"]["bytes"], shard["raw_data"]["hashes"]] for shard in shards])


class _Reader:
    """Typed access to the fields of a JSON object; errors name the file and the field."""

    def __init__(self, path: Path, record: Any, where: str = ""):
        self.path, self.where = path, where
        if not isinstance(record, dict):
            raise self.fault("", "is not an object")
        self.record = record

    def fault(self, key: str, what: str) -> BadFileError:
        return BadFileError(
            f"'{self.path}' is damaged: field '{self.where}{key}' {what}; run `xgram-dist prepare` again"
        )

    def get(self, key: str, kind: type) -> Any:
        if key not in self.record:
            raise self.fault(key, "is missing")
        value = self.record[key]
        if not isinstance(value, kind) or isinstance(value, bool):
            raise self.fault(key, f"should be {kind.__name__}, is {shown(value)}")
        return value

    def count(self, key: str, least: int = 0) -> int:
        value = self.get(key, int)
        if not least <= value <= MAX_COUNT:
            raise self.fault(key, f"should be from {least} to {MAX_COUNT:,}, is {shown(value)}")
        return int(value)

    def name(self, key: str, pattern: re.Pattern[str]) -> str:
        value = self.get(key, str)
        if not pattern.fullmatch(value):
            raise self.fault(key, f"is no plain name: {shown(value)}")
        return str(value)


def check_file_name(name: Any, path: Path) -> str:
    """A file name read from a file: one plain name without a path."""
    if not isinstance(name, str) or not _FILE_NAME.fullmatch(name):
        raise BadFileError(f"'{path}' is damaged: {shown(name)} is no plain file name; run `xgram-dist prepare` again")
    return name


def read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST
    try:
        record = read_json(path, limit=MAX_BYTES)
    except FileNotFoundError:
        raise UserError(
            f"'{folder}' is not a prepared data set (no {MANIFEST}); make it with `xgram-dist prepare --out {folder}`"
        ) from None
    fields = _Reader(path, record)
    if fields.record.get("format") != FORMAT:
        raise UserError(f"'{path}' was not written by `xgram-dist prepare`; give the folder it wrote")
    if fields.get("version", int) not in (VERSION, PACKED_VERSION):
        raise UserError(
            f"'{path}' has format version {shown(record['version'])}, this release reads up to {PACKED_VERSION}; "
            f"prepare it again"
        )
    dtype = fields.get("dtype", str)
    if dtype not in ("uint16", "uint32"):
        raise fields.fault("dtype", f"should be uint16 or uint32, is {shown(dtype)}")
    manifest = Manifest(
        vocabulary=fields.count("vocabulary", 1),
        chunk_tokens=fields.count("chunk_tokens", 1),
        dtype=dtype,
        end_of_text=fields.count("end_of_text"),
        end_of_text_name=fields.get("end_of_text_name", str),
        tokenizer_file=fields.name("tokenizer_file", _FILE_NAME),
        tokenizer_sha256=fields.get("tokenizer_sha256", str),
        request=fields.get("request", str),
        sources=tuple(_read_source(path, item, i) for i, item in enumerate(fields.get("sources", list))),
        sequence_length=None if fields.record.get("sequence_length") is None else fields.count("sequence_length", 2),
    )
    limit = min(MAX_VOCABULARY, 2**16 if dtype == "uint16" else 2**32)
    if manifest.vocabulary > limit:
        raise fields.fault("vocabulary", f"should be at most {limit:,} for {dtype}, is {manifest.vocabulary:,}")
    if manifest.end_of_text >= manifest.vocabulary:
        raise fields.fault("end_of_text", f"should be below the vocabulary, is {manifest.end_of_text:,}")
    if manifest.chunk_tokens > MAX_CHUNK_TOKENS:
        raise fields.fault("chunk_tokens", f"should be at most {MAX_CHUNK_TOKENS:,}, is {manifest.chunk_tokens:,}")
    names = [source.name for source in manifest.sources]
    if not names or len(set(names)) != len(names):
        raise fields.fault("sources", "should name each source once")
    if fields.get("fingerprint", str) != manifest.fingerprint:
        raise fields.fault("fingerprint", "does not agree with the other fields")
    return manifest


def _read_source(path: Path, item: Any, number: int) -> SourceInfo:
    fields = _Reader(path, item, f"sources[{number}].")
    weight = fields.record.get("weight")
    if weight is not None and (
        not isinstance(weight, int | float) or isinstance(weight, bool) or not 0 <= weight < 1e300
    ):
        raise fields.fault("weight", f"should be a number of at least 0, is {shown(weight)}")
    rejected = fields.get("rejected", dict)
    if not all(type(value) is int and 0 <= value <= MAX_COUNT for value in rejected.values()):
        raise fields.fault("rejected", "should hold counts")
    splits = {}
    for split in SPLITS:
        info = _Reader(path, fields.get(split, dict), f"sources[{number}].{split}.")
        splits[split] = SplitInfo(
            info.count("documents"),
            info.count("chunks"),
            info.count("tokens"),
            info.get("content", str),
            info.count("padding") if "padding" in info.record else 0,
        )
    return SourceInfo(
        name=fields.name("name", SOURCE_NAME),
        weight=None if weight is None else float(weight),
        documents=fields.count("documents"),
        bytes=fields.count("bytes"),
        rejected={str(key): int(value) for key, value in rejected.items()},
        train=splits["train"],
        validation=splits["validation"],
    )
