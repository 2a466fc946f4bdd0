"""The same checks on a GPU that is there; skipped without one.

pytest tests/device/test_real_gpu.py
"""

import warnings

import pytest
import torch
from twin_run import Case, Run, largest_difference, train

from xgram_dist.parallel.process_group import ProcessGroup

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

TOLERANCE = 1e-3
"""Relative to the largest element, fp32 with TF32 off. AdamW enlarges rounding where a gradient is all but zero."""

CASES = {
    "default": Case(),
    "catch-up in windows": Case({"optimizer": "catch_up", "window": 1}),
    "rows in host memory": Case({"optimizer": "adagrad", "placement": "host"}),
    "zero-copy": Case({"compression": 1.0, "optimizer": "catch_up"}),
    "n-grams": Case(method="engram"),
}


@pytest.mark.parametrize("name", CASES)
def test_five_steps_equal_those_of_the_cpu(name: str) -> None:
    world = ProcessGroup()
    expected = train(CASES[name], torch.device("cpu"), world)
    found = train(CASES[name], torch.device("cuda", 0), world)
    assert largest_difference(found, expected) <= TOLERANCE


def test_a_step_waits_for_the_device_once() -> None:
    run = Run(Case(), torch.device("cuda", 0), ProcessGroup())
    run.step()  # the first one allocates
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [str(warning.message) for warning in caught if "synchronizing CUDA operation" in str(warning.message)]
    assert len(waits) == 1, waits
