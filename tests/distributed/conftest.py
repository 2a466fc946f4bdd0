import json
from pathlib import Path

import pytest
from train_helpers import make_documents

from xgram_dist.cli.main import main

SHARED_DATA = Path(__file__).resolve().parents[3] / "shared" / "data"


@pytest.fixture(scope="session")
def real_frequencies_file():
    path = SHARED_DATA / "qwen3_olmo_mix_frequencies.npz"
    if not path.exists():
        pytest.skip(f"needs {path.name} in the folder shared/data beside the checkout")
    return path


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A data set of a few documents: chunks of four sequences, a BPE of 300 tokens, a tenth for validation."""
    folder = tmp_path_factory.mktemp("ranks-data")
    lines = "".join(json.dumps({"text": text}) + "\n" for text in make_documents(120))
    (folder / "raw.jsonl").write_text(lines, encoding="utf-8")
    words = ["--train-bpe", "300", "--chunk-tokens", "128", "--validation", "0.1", "--workers", "1"]
    assert main(["prepare", "--source", f"web={folder / 'raw.jsonl'}", *words, "--out", str(folder / "out")]) == 0
    return folder / "out"
