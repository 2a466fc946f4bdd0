"""Planning runs on the host while the step before trains. If this fails, the GPU waits for plans.

CPU seconds are counted, of all threads: they do not depend on how many cores a machine has, and little on what else
runs on it. The least of some plans is taken.
"""

from pathlib import Path

import pytest
from budgets import PLANNING_SHARE

from xgram_dist.bench.planning import PlanningBenchmark
from xgram_dist.estimate.traffic import zipf
from xgram_dist.model.methods.base import load_recipe

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
ROUNDS = 6
MANY_HEADS = ["memory.engram.heads=8", "memory.engram.width=2048", "memory.engram.rows=200000"]
"""16 keys per position and layer, as in DeepSeek's Engram; the recipe has 4."""
REDUCED = {
    "1.15b/engram-4x.yaml": ["train.micro_batch=1", "train.global_batch=64", *MANY_HEADS],
    "1.15b/xgram-4x-50.yaml": ["train.micro_batch=4", "train.global_batch=128"],
}
"""One or two micro-batches of each rank a step. Planning takes time in proportion to the tokens; the predicted step as
well, or it is longer."""


@pytest.mark.parametrize("recipe", REDUCED)
def test_the_cpu_seconds_of_planning_are_below_the_predicted_step(recipe: str) -> None:
    config = load_recipe(RECIPES / recipe, REDUCED[recipe])
    bench = PlanningBenchmark(config, 32, zipf(config.model.vocabulary), None)
    bench.prepare_answers()
    plans = [bench.plan() for _ in range(ROUNDS)]
    bench.planner.close()
    for windows, _ in plans:  # the other ranks were asked, and asked
        assert all(min(slab.requested) > 0 and min(slab.served) > 0 for window in windows for slab in window.slabs)
    cpu_seconds = min(sum(part["cpu"] for part in parts.values()) for _, parts in plans)
    step = bench.predicted_step().overlapped
    assert cpu_seconds < PLANNING_SHARE * step, f"{cpu_seconds:.3f} CPU s for a step of {step:.3f} s"
