from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def determinism_as_before() -> Iterator[None]:
    """Training asks torch for repeatable algorithms; other tests must not notice."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
