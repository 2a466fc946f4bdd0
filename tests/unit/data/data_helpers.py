"""Small corpora, and a reader of MDS files that shares no code with the package."""

import gzip
import json
import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import zstandard

WORDS = [
    "the",
    "of",
    "table",
    "row",
    "token",
    "vector",
    "gradient",
    "owner",
    "rank",
    "step",
    "while",
    "return",
    "def",
    "class",
    "import",
    "batch",
    "état",
    "数据",
]
SHARED_DATA = Path(__file__).resolve().parents[4] / "shared" / "data"


def make_texts(count: int, seed: int, words: int = 40) -> list[str]:
    chooser = random.Random(seed)
    return [" ".join(chooser.choices(WORDS, k=chooser.randint(3, 2 * words))) for _ in range(count)]


def jsonl(texts: list[str]) -> bytes:
    return b"".join(
        json.dumps({"id": str(i), "text": text, "other": [i]}).encode() + b"\n" for i, text in enumerate(texts)
    )


def write_packed(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.name.endswith(".gz"):
        path.write_bytes(gzip.compress(data))
    elif path.name.endswith((".zst", ".zstd")):
        path.write_bytes(zstandard.ZstdCompressor().compress(data))
    else:
        path.write_bytes(data)
    return path


def read_back(out: Path, split: str, source: str, dtype: str = "uint16") -> np.ndarray:
    """All chunks of a source, [chunks, chunk_tokens], decoded by hand from the MDS files."""
    index = json.loads((out / split / source / "index.json").read_bytes())
    chunks = []
    for shard in index["shards"]:
        packed = (out / split / source / shard["zip_data"]["basename"]).read_bytes()
        raw = zstandard.ZstdDecompressor().decompress(packed, max_output_size=1 << 28)
        count = int(np.frombuffer(raw, "<u4", 1)[0])
        assert count == shard["samples"]
        offsets = np.frombuffer(raw, "<u4", count + 1, 4)
        chunks += [np.frombuffer(raw[a:b], dtype) for a, b in pairwise(offsets)]
    return np.stack(chunks) if chunks else np.zeros((0, 0), dtype)


def tree(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
