"""A small tokenizer and small prepared data sets."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from data_helpers import jsonl, make_texts, write_packed

from xgram_dist.data.prepare import Outcome, Request, Source, prepare
from xgram_dist.data.train_bpe import train_bpe


@pytest.fixture(scope="session")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_bpe(make_texts(300, 1), 320, tmp_path_factory.mktemp("bpe") / "tokenizer.json")


@pytest.fixture
def run_prepare(tmp_path: Path, bpe: Path) -> Callable[..., Outcome]:
    def run(
        sources: dict[str, Path], out: str = "out", weights: dict[str, float] | None = None, **changes: Any
    ) -> Outcome:
        listed = tuple(Source(name, path, (weights or {}).get(name)) for name, path in sources.items())
        fields: dict[str, Any] = {"workers": 2, "tokenizer": bpe, "chunk_tokens": 64, "validation": 0.0, **changes}
        return prepare(Request(out=tmp_path / out, sources=listed, **fields))

    return run


@pytest.fixture(scope="session")
def mixed(tmp_path_factory: pytest.TempPathFactory, bpe: Path) -> Path:
    """A prepared data set of three sources of different sizes, with weights and a validation split."""
    folder = tmp_path_factory.mktemp("mixed")
    sources = []
    for number, (name, count, weight) in enumerate((("large", 900, 0.5), ("middle", 300, 0.3), ("small", 90, 0.2))):
        path = write_packed(folder / "raw" / name / "documents.jsonl.zst", jsonl(make_texts(count, number + 10)))
        sources.append(Source(name, path.parent, weight))
    prepare(
        Request(out=folder / "out", workers=2, sources=tuple(sources), tokenizer=bpe, chunk_tokens=64, validation=0.1)
    )
    return folder / "out"
