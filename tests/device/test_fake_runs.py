"""Training steps of full-size models on a GPU that is not there: what would stop the host, or NCCL.

If one of these fails, the product waits for the device where it need not, or gives a collective memory that NCCL
refuses. Numbers and allowed waits are in budgets.py.
"""

from typing import Any
from unittest import mock

import pytest
from budgets import LOGGED_WAITS, TRAFFIC_GB, unexpected
from fake_run import run_fake, run_mutated, run_traffic
from isolated import run_isolated
from stub_cuda import reason_to_skip
from traffic import by_part, over_budget

pytestmark = pytest.mark.skipif(reason_to_skip() is not None, reason=str(reason_to_skip()))

SMALLER = ("0.73b/xgram-1x-50.yaml", 16, ["train.global_batch=128"])
LARGER = ("1.15b/xgram-4x-50.yaml", 32, ["train.global_batch=256"])
"""The paper's recipes with one micro-batch of each rank a step."""

SMALL = ["model.layers=2", "model.vocabulary=20000", "model.sequence_length=256"]
SMALL += ["train.micro_batch=2", "train.global_batch=16"]
HOST_ROWS = ["memory.placement=host", "memory.optimizer=adagrad", "memory.window=1"]
VARIANTS = {
    "hsdp, tensor, host rows, adagrad, windows": (
        "0.73b/xgram-1x-50.yaml",
        8,
        ["parallel.engine=hsdp", "parallel.replicate=2", "parallel.tensor=2", *HOST_ROWS],
    ),
    "stage 1, tensor with sequence parallelism, catch-up": (
        "0.73b/xgram-1x-50.yaml",
        4,
        ["parallel.tensor=2", "parallel.sequence_parallel=true", "memory.optimizer=catch_up", "train.global_batch=8"],
    ),
    "stage 2, zero-copy rows, bf16 wire": (
        "0.73b/ple-1x.yaml",
        4,
        ["parallel.zero_stage=2", "memory.wire=bf16", "memory.rows_dtype=bf16", "memory.moments=bf16"],
    ),
    "stage 3, byte budget, dense": (
        "0.73b/xgram-1x-50.yaml",
        4,
        ["parallel.zero_stage=3", "memory.window=20MB", "memory.optimizer=dense"],
    ),
    "replicas of the tables, catch-up": (
        "0.73b/xgram-1x-50.yaml",
        8,
        ["memory.shard=2", "memory.optimizer=catch_up"],
    ),
    "context, catch-up": (
        "0.73b/xgram-1x-50-32k.yaml",
        8,
        ["model.sequence_length=512", "parallel.engine=hsdp", "memory.optimizer=catch_up"],
    ),
    "context, tensor with sequence parallelism": (
        "0.73b/xgram-1x-50.yaml",
        4,
        ["parallel.context=2", "parallel.tensor=2", "parallel.sequence_parallel=true", "train.global_batch=4"],
    ),
    "replicated, n-grams, lazy": (
        "0.73b/engram-1x.yaml",
        2,
        ["parallel.engine=replicated", "memory.optimizer=lazy", "memory.engram.rows=20000", "train.global_batch=8"],
    ),
    "every output checked": (
        "0.73b/xgram-1x-50.yaml",
        4,
        ["parallel.engine=replicated", "train.check_finite=layers", "model.layers=1"],
    ),
}


@pytest.fixture(scope="module")
def full_size() -> dict[str, Any]:
    """A step of the 0.73B model on 16 ranks, and one with a defect in each part."""
    return run_isolated(run_traffic, *SMALLER, True)


def test_a_step_of_the_smaller_model_waits_for_the_device_once(full_size: dict[str, Any]) -> None:
    assert unexpected(full_size["ledger"], []) == []


def test_a_step_of_the_larger_model_waits_for_the_device_once() -> None:
    assert unexpected(run_isolated(run_fake, *LARGER)["step"], []) == []


def test_each_part_of_a_step_moves_no_more_bytes_than_budgeted(full_size: dict[str, Any]) -> None:
    assert over_budget(full_size["by_place"], TRAFFIC_GB) == []
    assert sorted(by_part(full_size["by_place"])) == sorted(TRAFFIC_GB)


def test_one_more_copy_in_any_part_of_a_step_is_found(full_size: dict[str, Any]) -> None:
    found = over_budget(full_size["mutated"], TRAFFIC_GB)
    assert sorted(line.split(":")[0] for line in found) == sorted(TRAFFIC_GB)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_engine_and_placement_waits_only_where_allowed(name: str) -> None:
    """In the trainer's loop: batch, step, agreement of the ranks; every so many steps a status line."""
    recipe, ranks, words = VARIANTS[name]
    found = run_isolated(run_fake, recipe, ranks, [*SMALL, *words])
    assert unexpected(found["step"], words) == []
    assert unexpected(found["logged"], words, LOGGED_WAITS) == []


MUTATED = ["parallel.engine=replicated", "parallel.tensor=2", "memory.placement=host"]
MUTATED += ["model.layers=1", "train.global_batch=4"]


def test_defects_are_found() -> None:
    """Each check fails on the defect it is for."""
    found = run_isolated(run_mutated, "0.73b/xgram-1x-50.yaml", 4, [*SMALL, *MUTATED])
    assert unexpected(found.pop("none"), MUTATED) == []
    reported = {name: " ".join(unexpected(step, MUTATED)) for name, step in found.items()}
    assert reported == {
        "the host reads a loss": mock.ANY,
        "torch.tensor on the device": mock.ANY,
        "pageable copy": mock.ANY,
        "blocking copy": mock.ANY,
        "host tensor to NCCL": mock.ANY,
        "the loop reads the loss": mock.ANY,
        "ranks agree on the device": mock.ANY,
        "gaps": mock.ANY,
    }
    assert "host wait: reads numbers at ('engine/replicated.py', 'loss')" in reported["the host reads a loss"]
    loop = "host wait: reads numbers at ('train/trainer.py', '_run_step')"
    assert loop in reported["the loop reads the loss"]
    assert "host wait: reads numbers at ('train/trainer.py', '_agree')" in reported["ranks agree on the device"]
    assert "torch.tensor(..., device): a blocking copy" in reported["torch.tensor on the device"]
    assert "copy: to device, async, pageable" in reported["pageable copy"]
    assert "copy: to device, blocking, pinned" in reported["blocking copy"]
    assert "over nccl was given a tensor on cpu" in reported["host tensor to NCCL"]
    assert "over nccl was given a tensor that is not contiguous" in reported["gaps"]
