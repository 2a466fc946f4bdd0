import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from train_helpers import make_documents

from xgram_dist.cli.main import main


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of a few documents: chunks of four sequences, a BPE of 300 tokens, a tenth for validation."""
    folder = tmp_path_factory.mktemp("train-data")
    lines = "".join(json.dumps({"text": text}) + "\n" for text in make_documents(120))
    (folder / "raw.jsonl").write_text(lines, encoding="utf-8")
    words = ["--train-bpe", "300", "--chunk-tokens", "128", "--validation", "0.1", "--workers", "1"]
    assert main(["prepare", "--source", f"web={folder / 'raw.jsonl'}", *words, "--out", str(folder / "out")]) == 0
    return folder / "out"


@pytest.fixture(autouse=True)
def determinism_as_before() -> Iterator[None]:
    """Training asks torch for repeatable algorithms; other tests must not notice."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
