"""Inductor's code for an H100: how many kernels the compiled parts of a step take, and what is not a kernel at all.

If one of these fails, a pass over table rows reads memory more often than once, a block takes more kernels than it did,
or a scatter went back to an operation that walks duplicates one after the other, or to atomics. Numbers are in
budgets.py.
"""

import importlib.util
from typing import Any

import pytest
from budgets import BLOCK_KERNELS, COMPILED_TRAFFIC_GB, KERNELS, NO_FALLBACK
from codegen_cases import ROW_PASSES, describe_all
from isolated import run_isolated
from stub_cuda import reason_to_skip
from traffic import fused_gb

pytestmark = [
    pytest.mark.skipif(reason_to_skip() is not None, reason=str(reason_to_skip())),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton (extra dev) for CUDA code"),
]
SEGMENT_SUM = "_embedding_bag_forward_only"


@pytest.fixture(scope="module")
def described() -> dict[str, Any]:
    return run_isolated(describe_all)


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_of_compiled_parts(name: str, described: dict[str, Any]) -> None:
    found = described[name]
    assert len(found["kernels"]) <= KERNELS[name], found["kernels"]
    assert not NO_FALLBACK & set(found["fallbacks"])
    assert found["atomics"] == []
    for kernel, size in found["built"].items():
        assert size > 0, f"{kernel} does not build for sm_90"
    if name in ROW_PASSES:
        assert set(found["built"]) == set(found["kernels"])


@pytest.mark.parametrize("name", BLOCK_KERNELS)
def test_kernels_of_a_block_with_tables(name: str, described: dict[str, Any]) -> None:
    """Forward and backward pass of a block with short convolutions; the gradients of the working set are segment
    sums."""
    for direction, most in BLOCK_KERNELS[name].items():
        found = described[name][direction]
        assert found["launches"] <= most, direction
        assert not NO_FALLBACK & set(found["fallbacks"]), direction
        assert found["atomics"] == [], direction
    assert SEGMENT_SUM in described[name]["backward"]["fallbacks"]


def test_a_scatter_that_falls_back_is_found(described: dict[str, Any]) -> None:
    assert NO_FALLBACK & set(described["scatter"]["fallbacks"])


def test_a_block_that_scatters_gradients_is_found(described: dict[str, Any]) -> None:
    """A plain lookup of table rows: its backward pass walks duplicates, or adds by atomics."""
    backward = described["plain lookup, deterministic"]["backward"]
    assert "index_put_" in NO_FALLBACK & set(backward["fallbacks"])
    assert SEGMENT_SUM not in backward["fallbacks"]
    assert described["plain lookup"]["backward"]["atomics"]


def test_more_kernels_are_found(described: dict[str, Any]) -> None:
    """A block with one more table does not fit the budget of the recipe's."""
    for direction, most in BLOCK_KERNELS["block"].items():
        assert described["block, v and h"][direction]["launches"] > most


def compiled_gb(described: dict[str, Any], block: str) -> dict[str, float]:
    parts = {f"block {direction}": described[block][direction] for direction in ("forward", "backward")}
    parts |= {name: described[name] for name in ("softmax", "loss_gradient")}
    return {name: fused_gb(part["traffic"]) for name, part in parts.items()}


def test_compiled_parts_move_no_more_bytes_than_budgeted(described: dict[str, Any]) -> None:
    found = compiled_gb(described, "block")
    assert {name: size for name, size in found.items() if size > COMPILED_TRAFFIC_GB[name]} == {}
    assert set(found) == set(COMPILED_TRAFFIC_GB)


def test_more_bytes_in_a_compiled_block_are_found(described: dict[str, Any]) -> None:
    """A block that keeps elementwise results for its backward pass."""
    found = compiled_gb(described, "keeps everything")
    for name in ("block forward", "block backward"):
        assert found[name] > COMPILED_TRAFFIC_GB[name]
