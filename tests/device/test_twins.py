"""Training with values on a device of twins: the same numbers as on the CPU.

If one of these fails, the product on a GPU mixes devices, reads a buffer before its collective was waited for, reuses a
send buffer too early, or computes something else than on the CPU.
"""

import socket
from typing import Any

import pytest
from isolated import run_all_isolated
from stub_cuda import reason_to_skip
from twin_run import Case, run_twins

pytestmark = pytest.mark.skipif(reason_to_skip() is not None, reason=str(reason_to_skip()))

TOLERANCE = 2e-6
"""Relative to the largest element. The device updates all rows in one block and catches up current rows too."""

CASES = {
    1: [
        Case(),
        Case({"optimizer": "catch_up", "window": 1}),
        Case({"optimizer": "adagrad", "placement": "host"}),
        *(Case(method=method) for method in ("ple", "retoken", "mort", "stem", "engram", "mole", "scone")),
    ],
    2: [
        Case({"optimizer": "catch_up"}),
        Case({"compression": 1.0, "optimizer": "catch_up"}),
        Case({"compression": 1.0, "wire": "bf16", "optimizer": "lazy"}),
        Case({"window": 1}, method="engram"),
    ],
    4: [
        Case({"wire": "bf16", "optimizer": "dense"}),
        Case({"placement": "host", "optimizer": "adagrad"}, tensor=2),
    ],
}


def run(size: int, cases: list[Case]) -> list[list[dict[str, Any]]]:
    """[rank][case]"""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return run_all_isolated([(run_twins, (rank, size, port, cases)) for rank in range(size)])


@pytest.mark.parametrize("size", CASES)
def test_five_steps_equal_those_of_the_cpu(size: int) -> None:
    for rank, found in enumerate(run(size, CASES[size])):
        for case, result in zip(CASES[size], found, strict=True):
            assert result["differs"] <= TOLERANCE, f"rank {rank}: {case}"
            assert result["faults"] == {}, f"rank {rank}: {case}"


def test_a_read_before_the_wait_is_found() -> None:
    for found in run(2, [Case({"optimizer": "catch_up"}, defect="read before wait")]):
        assert found[0]["differs"] == float("inf")
