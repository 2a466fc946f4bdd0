"""Fixtures that several folders of tests share."""

import json
import signal
from pathlib import Path

import pytest
from train_helpers import make_documents

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell that starts the tests in the background ignores Ctrl-C, and all that it starts would, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


def _shared(name: str) -> Path:
    path = SHARED_DATA / name
    if not path.exists():
        pytest.skip(f"needs {name} in the folder shared/data beside the checkout")
    return path


@pytest.fixture(scope="session")
def real_frequencies_file() -> Path:
    return _shared("qwen3_olmo_mix_frequencies.npz")


@pytest.fixture(scope="session")
def real_token_map() -> Path:
    return _shared("xgram_token_map_41B.npz")


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of a few documents: chunks of four sequences, a BPE of 300 tokens, a tenth for validation."""
    from xgram_dist.cli.main import main

    folder = tmp_path_factory.mktemp("train-data")
    lines = "".join(json.dumps({"text": text}) + "\n" for text in make_documents(120))
    (folder / "raw.jsonl").write_text(lines, encoding="utf-8")
    words = ["--train-bpe", "300", "--chunk-tokens", "128", "--validation", "0.1", "--workers", "1"]
    assert main(["prepare", "--source", f"web={folder / 'raw.jsonl'}", *words, "--out", str(folder / "out")]) == 0
    return folder / "out"
