from pathlib import Path

import numpy as np
import pytest

SHARED_DATA = Path(__file__).resolve().parents[4] / "shared" / "data"


def _shared(name):
    path = SHARED_DATA / name
    if not path.exists():
        pytest.skip(f"needs {name} in the folder shared/data beside the checkout")
    return path


@pytest.fixture(scope="session")
def real_frequencies_file():
    return _shared("qwen3_olmo_mix_frequencies.npz")


@pytest.fixture(scope="session")
def real_token_map():
    return _shared("xgram_token_map_41B.npz")


@pytest.fixture
def zipf():
    """Counts of 400 tokens, Zipf-like, in a scrambled order of ids, with 40 tokens never seen."""
    counts = np.zeros(400, dtype=np.int64)
    counts[(np.arange(360) * 7) % 400] = 100000 // (np.arange(360) + 1)
    return counts
