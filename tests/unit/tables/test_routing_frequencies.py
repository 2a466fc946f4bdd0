"""The frequency file: what is read, what is filled up, what is refused."""

import numpy as np
import pytest

from xgram_dist.errors import UserError
from xgram_dist.tables.frequencies import load_frequencies


@pytest.fixture
def write(tmp_path):
    def write(**arrays):
        np.savez(tmp_path / "f.npz", **arrays)
        return tmp_path / "f.npz"

    return write


def test_counts_become_shares_and_other_arrays_do_not_matter(write):
    path = write(counts=np.array([1, 3, 0], dtype=np.uint32), note=np.array(["x"], dtype=object))
    assert load_frequencies(path).tolist() == [0.25, 0.75, 0.0]


def test_probabilities_are_taken_as_they_are(write):
    assert load_frequencies(write(p=np.array([0.25, 0.75], dtype=np.float32))).tolist() == [0.25, 0.75]


def test_a_larger_vocabulary_is_filled_up_with_zeros(write):
    assert load_frequencies(write(counts=np.array([1, 1])), vocabulary=4).tolist() == [0.5, 0.5, 0, 0]


def test_a_smaller_vocabulary_is_refused(write):
    with pytest.raises(UserError, match=r"vocabulary is 1, but .* holds 2 tokens; it must be at least 2"):
        load_frequencies(write(counts=np.array([1, 1])), vocabulary=1)


@pytest.mark.parametrize(
    ("arrays", "sentence"),
    [
        ({"p": np.array([0.5, 0.4])}, "'p' sums to 0.9; it must sum to 1 within 0.0001"),
        ({"p": np.array([50.0, 50.0])}, "'p' sums to 100; it must sum to 1"),
        ({"p": np.array([1.5, -0.5])}, "'p' is -0.5 for token 1; it must be finite and at least 0"),
        ({"p": np.array([np.nan, 1.0])}, "'p' is nan for token 0"),
        ({"counts": np.array([2, -2])}, "'counts' is -2 for token 1"),
        ({"counts": np.array([0, 0])}, "'counts' sums to 0"),
        ({"counts": np.array([1.0, 2.0])}, "'counts' has type float64; it must hold integers"),
        ({"p": np.array([1, 0])}, "'p' has type int64; it must hold floats"),
        ({"p": np.array([[0.5, 0.5]])}, "at most one dimension"),
        ({"p": np.array([1.0], dtype=object)}, "has type object"),
        ({"q": np.array([1.0])}, "holds neither `counts` nor `p`"),
        ({"p": np.array([1.0]), "counts": np.array([1])}, "holds both"),
    ],
)
def test_impossible_files_are_named(write, arrays, sentence):
    with pytest.raises(UserError, match=sentence):
        load_frequencies(write(**arrays))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"there is no file .*none\.npz; give the path of a frequency file"):
        load_frequencies(tmp_path / "none.npz")
