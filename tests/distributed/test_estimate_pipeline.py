"""Estimates of a pipeline against real ranks: what each holds and sends, how many micro-batches are under way."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from ranks_helper import run_ranks
from test_estimate_memory import Collectives, config_of, routing_of, small_messages

from xgram_dist.estimate.comm import Axes
from xgram_dist.estimate.layout import _plan_rank, bubble_share, plan_layout
from xgram_dist.estimate.memory import micro_batches_under_way
from xgram_dist.estimate.step_time import Machine
from xgram_dist.estimate.traffic import build_traffic, zipf

CPU = torch.device("cpu")
TWO = ["parallel.pipeline=2", "model.layers=4", "train.micro_batch=2"]
CASES = {
    2: [
        [*TWO, "parallel.engine=replicated", "train.global_batch=16"],
        [*TWO, "parallel.engine=replicated", "parallel.virtual_stages=2", "train.global_batch=16"],
        [*TWO, "parallel.engine=replicated", "train.precision=bf16", "memory.wire=bf16", "train.global_batch=8"],
    ],
    4: [
        [*TWO, "parallel.engine=hsdp", "train.global_batch=16"],
        [*TWO, "parallel.engine=replicated", "parallel.tensor=2", "memory.sites.h.views=1", "train.global_batch=8"],
        [*TWO, "parallel.engine=deepspeed", "train.global_batch=16"],
        [*TWO, "parallel.engine=replicated", "parallel.context=2", "train.global_batch=8"],
    ],
}
STEPS = 3


class Sends(Collectives):
    """Of the collectives, and of messages between neighbours."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name == "c10d::send":
            self.bytes["send"] = self.bytes.get("send", 0) + sum(t.numel() * t.element_size() for t in args[0])
        return super().__torch_dispatch__(func, types, args, kwargs)


def measure(world, cases):
    return [measure_case(world, overrides) for overrides in cases]


def measure_case(world, overrides):
    from xgram_dist.engine import build_engine
    from xgram_dist.engine.pipeline import StepOfStages
    from xgram_dist.model.build import build_lookup, build_model
    from xgram_dist.parallel.mesh import build_mesh
    from xgram_dist.train.memory import footprint
    from xgram_dist.train.step import JointOptimizer, train_step
    from xgram_dist.train.trainer import exchange_figures

    config = config_of(overrides, world.size)
    frequencies = zipf(config.model.vocabulary)
    mesh = build_mesh(config, world)
    engine = build_engine(config, build_model(config, CPU, None, mesh), mesh, CPU)
    with small_messages():
        lookup = build_lookup(config, routing_of(config, frequencies), CPU, mesh)
    optimizer = JointOptimizer(config, engine, lookup, mesh)
    draws = np.random.default_rng(mesh.batch.rank)
    micro_batches = config.train.global_batch // mesh.batch.size // config.train.micro_batch
    shape = (micro_batches, config.train.micro_batch, config.model.sequence_length)
    under_way, most, exchanged = set(), [set()], []
    forward, backward = StepOfStages.forward, StepOfStages.outputs

    def watched_forward(self, stage, number, x):
        under_way.add((stage.number, number))
        most[0] = max(most[0], set(under_way), key=len)
        return forward(self, stage, number, x)

    def watched_backward(self, stage, number, *others):
        under_way.discard((stage.number, number))
        return backward(self, stage, number, *others)

    StepOfStages.forward, StepOfStages.outputs = watched_forward, watched_backward
    layers = engine.model.blocks.named_children()
    layers = [int(name) for name, _ in layers]
    for step in range(1, STEPS + 1):
        tokens = torch.from_numpy(draws.choice(len(frequencies), shape, p=frequencies / frequencies.sum()))
        windows = lookup.plan(tokens).result()
        exchanged.append(exchange_figures(config, windows, lookup.shards.rank, 1, layers)["bytes_sent"])
        moved = Sends()
        with moved:
            train_step(config, lookup, optimizer, tokens, windows, step)
    held = footprint(engine, lookup, windows)
    StepOfStages.forward, StepOfStages.outputs = forward, backward
    counts = [sum(number == stage.number for number, _ in most[0]) for stage in engine.model.stages]
    lookup.close()
    engine.close()
    return {
        "at": mesh.pipeline.rank,
        "held": held,
        "sent": moved.bytes,
        "exchanged": float(np.mean(exchanged)),
        "under_way": counts,
    }


@pytest.fixture(scope="module", params=sorted(CASES))
def measured(request):
    """(recipe, ranks, what each rank found)"""
    ranks = request.param
    found = run_ranks(measure, ranks, CASES[ranks], timeout=400)
    return [(case, ranks, [of_rank[n] for of_rank in found]) for n, case in enumerate(CASES[ranks])]


def planned(config, axes):
    frequencies = zipf(config.model.vocabulary)
    traffic = build_traffic(config, frequencies, routing_of(config, frequencies), axes.rows)
    with small_messages():
        return _plan_rank(config, axes, Machine(), traffic, ""), plan_layout(config, axes, Machine(), traffic)


def test_each_stage_holds_and_sends_what_is_planned(measured):
    for overrides, ranks, found in measured:
        config = config_of(overrides, ranks)
        largest = 0.0
        for at in range(2):
            axes = replace(Axes.of(config, ranks), at=at)
            plan, whole = planned(config, axes)
            largest = max(largest, plan.device_bytes)
            held = {one.key: 0.0 for one in plan.allocations}
            for one in plan.allocations:
                held[one.key] += one.bytes
            of_stage = [one for one in found if one["at"] == at]
            pairs = {
                "backbone_optimizer": held["backbone_optimizer"],
                "tables": held["tables"] + held["row_gates"],
                "tables_optimizer": held["table_optimizer"] + held["row_gate_optimizer"],
                "working_set": held["working_set"],
            }
            for key, size in pairs.items():
                if "parallel.tensor=2" in overrides and key == "working_set":
                    continue  # the footprint counts the columns held here, the plan those gathered too
                real = max(one["held"][f"bytes_{key}"] for one in of_stage)
                assert size == pytest.approx(real, rel=0.1), (overrides, at, key)
            for kind in ("send", "all-reduce", "all-gather", "reduce-scatter"):
                expected = sum(message.bytes for message in plan.messages if message.collective == kind)
                real = float(np.mean([one["sent"].get(kind, 0) for one in of_stage]))
                assert expected == pytest.approx(real, rel=0.05, abs=200), (overrides, at, kind)
            if "parallel.tensor=2" not in overrides:
                expected = sum(m.bytes for m in plan.messages if m.collective == "all-to-all")
                real = float(np.mean([one["exchanged"] for one in of_stage]))
                assert expected == pytest.approx(real, rel=0.05), (overrides, at)
        assert whole.device_bytes == largest


def test_as_many_micro_batches_are_under_way_as_planned(measured):
    for overrides, ranks, found in measured:
        config = config_of(overrides, ranks)
        axes = Axes.of(config, ranks)
        micro_batches = config.train.global_batch // axes.data // config.train.micro_batch
        for one in found:
            expected = micro_batches_under_way(config, replace(axes, at=one["at"]), micro_batches)
            assert one["under_way"] == expected, (overrides, one["at"])


def test_the_wait_shrinks_with_micro_batches_and_virtual_stages():
    few, many = (config_of([*TWO, "train.global_batch=16"], 2) for _ in range(2))
    axes = Axes.of(few, 2)
    assert bubble_share(few, axes, 4) == pytest.approx(1 / 4)
    assert bubble_share(many, axes, 8) == pytest.approx(1 / 8)
    looped = config_of([*TWO, "parallel.virtual_stages=2", "train.global_batch=16"], 2)
    assert bubble_share(looped, axes, 4) == pytest.approx(1 / 8)
