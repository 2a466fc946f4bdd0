"""Training with values on a device of twins: the same numbers as on the CPU.

If one of these fails, the product on a GPU mixes devices, reads a buffer before its collective was waited for, reuses a
send buffer too early, or computes something else than on the CPU.
"""

import socket
from typing import Any

import pytest
from isolated import run_all_isolated
from stub_cuda import reason_to_skip, stops_the_host
from twin_run import Case, run_twins

pytestmark = pytest.mark.skipif(reason_to_skip() is not None, reason=str(reason_to_skip()))

TOLERANCE = {"fp32": 2e-5, "bf16": 0.1}
"""Relative to the largest element of each tensor: losses, norms, rows, weights, moments. The device updates all rows in
one block and catches up current rows too; engines add gradients in their own order. The reference is fp32."""

HSDP = {"engine": "hsdp"}
STAGED = {"placement": "host", "rows": "touched"}
"""Records in host memory, copied to the device for each step."""


def zero(stage: int) -> dict[str, Any]:
    return {"engine": "deepspeed", "zero_stage": stage}


CASES = {
    1: [
        Case(),
        Case({"optimizer": "catch_up", "window": 1}),
        Case({"optimizer": "adagrad", "placement": "host"}),
        Case({**STAGED, "optimizer": "catch_up"}),
        Case(engine=HSDP),
        *(Case(method=method) for method in ("ple", "retoken", "mort", "stem", "engram", "mole", "scone")),
    ],
    2: [
        Case({"optimizer": "catch_up"}),
        Case({"compression": 1.0, "optimizer": "catch_up"}),
        Case({"compression": 1.0, "wire": "bf16", "optimizer": "lazy"}),
        Case({"window": 1}, method="engram"),
        Case({**STAGED, "window": 1}, method="engram"),
        Case({**STAGED, "optimizer": "lazy", "compression": 1.0}, engine=zero(1)),
        Case({"optimizer": "catch_up"}, engine=HSDP),
        Case(engine=zero(1), precision="bf16"),
        Case({"optimizer": "catch_up"}, engine=zero(2)),
        Case({"optimizer": "lazy"}, engine=zero(3)),
        Case({"optimizer": "catch_up"}, context=2),
        *(Case(method=method, context=2, engine=HSDP) for method in ("mort", "engram", "scone")),
        Case({"optimizer": "catch_up"}, engine={**HSDP, "pipeline": 2}),
        Case(engine={**zero(1), "pipeline": 2}, precision="bf16"),
    ],
    4: [
        Case({"wire": "bf16", "optimizer": "dense"}),
        Case({"placement": "host", "optimizer": "adagrad"}, tensor=2, engine=zero(1)),
        Case(engine={**HSDP, "replicate": 2}),
        Case({"shard": 2, "optimizer": "catch_up"}),
        Case({"optimizer": "catch_up"}, tensor=2, context=2, engine=zero(1)),
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
            assert result["differs"] <= TOLERANCE[case.precision], f"rank {rank}: {case}"
            assert result["faults"] == {}, f"rank {rank}: {case}"


def test_staged_records_do_not_stop_the_training_thread() -> None:
    """Beside it the same tables without staging, whose gradients the host waits for."""

    def stops(found: dict[str, Any]) -> list[Any]:
        copies = [key for key in found["copies"] if stops_the_host(key[1])]
        stopping = [*found["waits"], *copies]
        return [key for key in stopping if key[0][0].startswith("tables/") and key[0][1] != "__init__"]

    cases = [Case({**STAGED, "optimizer": "catch_up"}), Case({"placement": "host", "optimizer": "catch_up"})]
    staged, unstaged = run(1, cases)[0]
    assert stops(staged) == []
    assert stops(unstaged) != []


def test_defects_are_found() -> None:
    """A buffer of the exchange, or of an engine, that is read before its collective was waited for; weights that an
    engine does not gather again after an update."""
    cases = [
        Case({"optimizer": "catch_up"}, defect="read before wait"),
        Case(engine=HSDP, defect="stale weights"),
        Case(engine=zero(3), defect="the engine reads before wait"),
    ]
    for found in run(2, cases):
        exchange, stale, engine = (result["differs"] for result in found)
        assert exchange == engine == float("inf")
        assert stale > 10 * TOLERANCE["fp32"]
