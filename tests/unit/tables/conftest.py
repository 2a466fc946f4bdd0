import numpy as np
import pytest


@pytest.fixture
def zipf():
    """Counts of 400 tokens, Zipf-like, in a scrambled order of ids, with 40 tokens never seen."""
    counts = np.zeros(400, dtype=np.int64)
    counts[(np.arange(360) * 7) % 400] = 100000 // (np.arange(360) + 1)
    return counts
