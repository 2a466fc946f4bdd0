"""Inductor's code for an H100: how many kernels the compiled parts of a step take, and what is not a kernel at all.

If one of these fails, a pass over table rows reads memory more often than once, or a scatter went back to an operation
that walks duplicates one after the other. Numbers are in budgets.py.
"""

import importlib.util

import pytest
from budgets import KERNELS, NO_FALLBACK
from codegen_cases import ROW_PASSES, describe, describe_defect
from isolated import run_isolated
from stub_cuda import reason_to_skip

pytestmark = [
    pytest.mark.skipif(reason_to_skip() is not None, reason=str(reason_to_skip())),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton (extra dev) for CUDA code"),
]


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_of_compiled_parts(name: str) -> None:
    found = run_isolated(describe, name, True, name in ROW_PASSES)
    assert len(found["kernels"]) <= KERNELS[name], found["kernels"]
    assert not NO_FALLBACK & set(found["fallbacks"])
    assert found["atomics"] == []
    for kernel, size in found["built"].items():
        assert size > 0, f"{kernel} does not build for sm_90"
    if name in ROW_PASSES:
        assert set(found["built"]) == set(found["kernels"])


def test_a_scatter_that_falls_back_is_found() -> None:
    assert NO_FALLBACK & set(run_isolated(describe_defect)["fallbacks"])
