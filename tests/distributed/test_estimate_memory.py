"""The estimates against real ranks: bytes that live tensors hold, and bytes that collectives and the exchange move.

Starting processes costs more than these steps, so each number of ranks puts many cases through one start.
"""

import contextlib
import gc
import math
import sys
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks_helper import run_ranks
from torch.utils._python_dispatch import TorchDispatchMode
from train_helpers import apply_step, small_config

import xgram_dist.tables.layout as layout_module
from xgram_dist.config import load_config
from xgram_dist.estimate.comm import Axes, ring_bytes
from xgram_dist.estimate.layout import plan_layout
from xgram_dist.estimate.step_time import Machine
from xgram_dist.estimate.traffic import build_traffic, zipf
from xgram_dist.model.methods.base import table_layout
from xgram_dist.tables.frequencies import load_frequencies
from xgram_dist.tables.layout import routing_settings
from xgram_dist.tables.routing_build import build_routing

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "tiny" / "xgram.yaml"
CPU = torch.device("cpu")
LEARNS = {"parallel.zero_stage=3", "memory.placement=host"}
"""Settings of which the first step says little: stage 3 plans its gathers in it, buffers are made at its end."""
COLLECTIVES = {
    "allreduce_": "all-reduce",
    "all_reduce": "all-reduce",
    "_allgather_base_": "all-gather",
    "allgather_": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
}
DRAWS = 8
"""Of a step's tokens, over which the exchange is averaged; a step is made of the last."""
REAL_RUN = 2
"""Ranks of the run that is trained."""
BF16, RECOMPUTED = "train.precision=bf16", "train.activation_checkpointing=true"


def deepspeed(stage, **keys):
    tuned = ", ".join(f"{key}: {value}" for key, value in {"reduce_bucket_size": 50_000, **keys}.items())
    return [
        "parallel.engine=deepspeed",
        f"parallel.zero_stage={stage}",
        f"parallel.deepspeed={{zero_optimization: {{{tuned}}}}}",
    ]


HSDP, REPLICATED = ["parallel.engine=hsdp"], ["parallel.engine=replicated"]
TENSOR = ["parallel.tensor=2", "memory.sites.h.views=1"]
LARGER = ["train.micro_batch=8", "train.global_batch=16"]
SEQUENCE = [*TENSOR, "parallel.sequence_parallel=true"]
CONTEXT = ["parallel.context=2", "model.sequence_length=256"]
HOST = [*REPLICATED, "memory.placement=host"]
CASES = {
    1: [REPLICATED, HSDP, [*deepspeed(1), BF16], [*deepspeed(3), BF16]],
    2: [
        [*REPLICATED, BF16, "memory.window=1"],
        [*HSDP, BF16, RECOMPUTED],
        [*HSDP, "parallel.reshard=false", "memory.compression=1"],
        deepspeed(1),
        [*deepspeed(1), BF16],
        [*deepspeed(1), BF16, "parallel.offload=true"],
        [*deepspeed(2), BF16],
        [*deepspeed(3), BF16],
        [*deepspeed(3, stage3_max_live_parameters=500_000), BF16, "parallel.offload=true"],
        [*REPLICATED, *TENSOR, *LARGER],
        [*REPLICATED, *SEQUENCE, *LARGER, RECOMPUTED],
        [*REPLICATED, *CONTEXT, RECOMPUTED],
        [*HSDP, *CONTEXT, BF16],
        [*HOST, "memory.optimizer=catch_up"],
        [*HOST, "memory.optimizer=catch_up", "memory.rows_dtype=bf16", "memory.moments=bf16"],
        [*HOST, "memory.optimizer=lazy", "memory.window=1"],
        [*HOST, "memory.optimizer=adagrad", "memory.wire=bf16"],
    ],
    4: [
        [*HSDP, "parallel.replicate=2", BF16],
        [*HOST, "memory.shard=2", "memory.optimizer=catch_up"],
        [*REPLICATED, "memory.shard=1", "memory.optimizer=dense", "memory.window=1"],
        deepspeed(1),
        [*deepspeed(1), BF16, *SEQUENCE],
        [*deepspeed(3), *TENSOR, RECOMPUTED],
        [*deepspeed(1), *TENSOR, *CONTEXT],
        [*REPLICATED, *CONTEXT, "memory.shard=2"],
    ],
}


def config_of(overrides, ranks):
    tensor = 2 if "parallel.tensor=2" in overrides else 1
    sharers = tensor * (2 if "parallel.context=2" in overrides else 1)
    batch = ["train.micro_batch=2", f"train.global_batch={4 * ranks // sharers}", "model.sequence_length=128"]
    return load_config(RECIPE, ["model.layers=2", "memory.overlap=true", *batch, *overrides])


def routing_of(config, frequencies):
    if config.memory.compression == 1:
        return None
    return build_routing(frequencies, routing_settings(config), table_layout(config).num_views)


def planned(config, ranks, frequencies):
    axes = Axes.of(config, ranks)
    traffic = build_traffic(config, frequencies, routing_of(config, frequencies), axes.rows)
    with small_messages():
        return plan_layout(config, axes, Machine(), traffic)


def small_messages():
    """A message for each layer, as in a model of full size."""
    return mock.patch.object(layout_module, "MESSAGE_BYTES", 1)


# On the ranks.


class Collectives(TorchDispatchMode):
    """Bytes that leave this rank, by collective, as rings move them."""

    def __init__(self):
        super().__init__()
        self.bytes = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        space, name = func._schema.name.split("::")
        if space in ("c10d", "_c10d_functional") and name in COLLECTIVES:
            kind, tensors = COLLECTIVES[name], _tensors(args[:2])
            size, ranks = max(t.numel() * t.element_size() for t in tensors), _group(args).size()
            if name in ("allgather_", "all_gather_into_tensor"):
                size *= ranks
            self.bytes[kind] = self.bytes.get(kind, 0) + ring_bytes(kind, size, ranks)
        return func(*args, **(kwargs or {}))


def _tensors(things):
    if isinstance(things, torch.Tensor):
        return [things]
    return [t for thing in things for t in _tensors(thing)] if isinstance(things, list | tuple) else []


def _group(args):
    for argument in args:
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
            return dist.ProcessGroup.unbox(argument)
    return dist.distributed_c10d._resolve_process_group(args[-1])


def new_bytes():
    """Of tensors made since `gc.freeze`, of which gc knows no more than that. The least of some looks: a message that
    has just been sent may not have been let go of yet."""
    least = math.inf
    for _ in range(4):
        gc.collect()
        tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
        held = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for tensor in tensors
            if type(tensor).__name__ != "DTensor"
        }
        least = min(least, sum(held.values()))
        del tensors
        time.sleep(0.05)
    return least


def working_bytes(working):
    """Of vectors and gradients; some vectors share their memory."""
    leaves = list(working.values.values())
    tensors = [*leaves, *(leaf.grad for leaf in leaves)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def return_bytes(lookup, working):
    """Give the working set back; bytes held when all gradients are on their way, or when they have arrived and none has
    been accumulated yet, whichever are more."""
    before, found = new_bytes(), []
    step, slab = lookup.shards[0].step, working._slabs[0]

    def watched(act):
        def measure_and_act(*arguments):
            found.append(new_bytes() - before)
            act(*arguments)

        return measure_and_act

    step.add_gradient, slab.receive_gradients = watched(step.add_gradient), watched(slab.receive_gradients)
    lookup.give_back(working)
    del step.add_gradient, slab.receive_gradients
    return max(found)


def measure(world, cases):
    return [measure_case(world, overrides) for overrides in cases]


def measure_case(world, overrides):
    """Bytes held while micro-batches add up, those of the working set, and bytes moved in a later step."""
    from xgram_dist.engine import build_engine
    from xgram_dist.model.build import build_lookup, build_model
    from xgram_dist.parallel.mesh import build_mesh
    from xgram_dist.tables.optimizers.build import choose_optimizer
    from xgram_dist.train.profiling import exchange_figures
    from xgram_dist.train.step import JointOptimizer

    config = config_of(overrides, world.size)
    frequencies = zipf(config.model.vocabulary)
    gc.collect()
    gc.freeze()
    mesh = build_mesh(config, world)
    model = build_model(config, CPU, None, mesh)
    engine = build_engine(config, model, mesh, CPU)
    del model
    kind = choose_optimizer(config, touched_share=1.0)
    with small_messages():
        routing = routing_of(config, frequencies)
        lookup = build_lookup(config, routing, CPU, mesh, optimizer=kind)
    optimizer = JointOptimizer(config, engine, lookup, mesh)
    found = {}
    steps = 2 if LEARNS & set(overrides) else 1
    draws = np.random.default_rng(mesh.batch.rank)
    shape = (2, config.train.micro_batch, config.model.sequence_length)
    sent = []
    for _ in range(DRAWS):
        tokens = torch.from_numpy(draws.choice(len(frequencies), shape, p=frequencies / frequencies.sum()))
        windows = lookup.plan(tokens).result()
        sent.append(exchange_figures(config, windows, mesh.rows.rank)["bytes_sent"])
    found["exchanged"] = sum(sent) / len(sent)
    for step in range(1, steps + 1):
        done = 0
        windows = lookup.plan(tokens).result()
        moved = Collectives()
        with moved if step == steps else contextlib.nullcontext():
            for window in windows:
                working = lookup.fetch(window)
                for one, slots in zip(tokens[window.micro_batches], working.slots, strict=True):
                    loss, _ = engine.loss(one, slots, working.values, torch.ones((), dtype=torch.float64))
                    done += 1
                    engine.backward(loss / len(tokens), last=done == len(tokens))
                    del loss
                    if done == 1 and step == steps:
                        found |= {"held": new_bytes(), "working": working_bytes(working)}
                found["returning"] = return_bytes(lookup, working)
            apply_step(optimizer, step, torch.zeros(()))
        found["moved"] = moved.bytes
        del working, window, windows
    lookup.close()
    engine.close()
    return found


def train(world, data, folder):
    """A real run; what each rank's exchange moved in each step, and what it says of memory."""
    from xgram_dist.train import trainer as loop
    from xgram_dist.train.memory import footprint

    trainer = loop.Trainer(run_config(data, world.size), Path(folder) / f"run-{world.size}", True, world)
    moved, held = [], []
    kept = loop.exchange_figures

    def listen(config, windows, *others):
        figures = kept(config, windows, *others)
        moved.append(figures["bytes_sent"])
        held.append(footprint(trainer.engine, trainer.lookup, windows))
        return figures

    loop.exchange_figures = listen
    try:
        assert trainer.run() == 0
    finally:
        loop.exchange_figures = kept
    return moved, held[-1]


def run_config(data, ranks):
    return small_config(data, train={"global_batch": 24 * ranks, "micro_batch": 8, "steps": 4, "log_every": 1})


def on_ranks(world, cases, data, folder):
    return measure(world, cases), train(world, data, folder) if world.size == REAL_RUN else None


# The comparison.


@pytest.fixture(scope="module", params=sorted(CASES))
def measured(request, data, tmp_path_factory):
    """(number of ranks, [(recipe, what each rank found)], [what each rank's run said])"""
    ranks = request.param
    results = run_ranks(on_ranks, ranks, CASES[ranks], data, str(tmp_path_factory.mktemp("runs")), timeout=240)
    cases = [[cases[number] for cases, _ in results] for number in range(len(CASES[ranks]))]
    return ranks, list(zip(CASES[ranks], cases, strict=True)), [run for _, run in results]


def test_memory_is_within_a_tenth(measured):
    ranks, cases, _ = measured
    for overrides, found in cases:
        layout = planned(config_of(overrides, ranks), ranks, zipf(4096))
        always = sum(one.bytes for one in layout.allocations if one.phase == "step")
        held = max(one["held"] for one in found)
        report(ranks, overrides, "held", always, held)
        assert always == pytest.approx(held, rel=0.1), overrides
        working = sum(one.bytes for one in layout.allocations if one.key == "working_set")
        mean = np.mean([one["working"] for one in found])
        report(ranks, overrides, "working set", working, mean)
        assert working == pytest.approx(mean, rel=0.1), overrides


def test_what_gradients_take_on_their_way_is_within_a_tenth(measured):
    ranks, cases, _ = measured
    for overrides, found in cases:
        layout = planned(config_of(overrides, ranks), ranks, zipf(4096))
        buffers = sum(one.bytes for one in layout.allocations if one.key == "exchange_buffers")
        mean = np.mean([one["returning"] for one in found])
        report(ranks, overrides, "on the way", buffers, mean)
        assert buffers == pytest.approx(mean, rel=0.1, abs=1000), overrides


def test_collectives_are_within_a_twentieth(measured):
    ranks, cases, _ = measured
    for overrides, found in cases:
        layout = planned(config_of(overrides, ranks), ranks, zipf(4096))
        for kind in set(COLLECTIVES.values()):
            expected = sum(m.bytes for m in layout.messages if m.collective == kind)
            moved = np.mean([one["moved"].get(kind, 0) for one in found])
            report(ranks, overrides, kind, expected, moved)
            assert expected == pytest.approx(moved, rel=0.05, abs=100), (overrides, kind)


def test_the_exchange_is_within_a_twentieth(measured):
    ranks, cases, _ = measured
    for overrides, found in cases:
        if "parallel.tensor=2" in overrides:
            continue
        layout = planned(config_of(overrides, ranks), ranks, zipf(4096))
        expected = sum(m.bytes for m in layout.messages if m.collective == "all-to-all" and m.axis == "rows")
        moved = np.mean([one["exchanged"] for one in found])
        report(ranks, overrides, "exchange", expected, moved)
        assert expected == pytest.approx(moved, rel=0.05), overrides


@pytest.mark.parametrize("measured", [REAL_RUN], indirect=True)
def test_a_real_run_moves_and_holds_what_is_planned(measured, data):
    ranks, _, runs = measured
    config = run_config(data, ranks)
    layout = planned(config, ranks, load_frequencies(data / "counts.npz", config.model.vocabulary))
    expected = sum(m.bytes for m in layout.messages if m.collective == "all-to-all")
    moved = np.mean([bytes_sent for run, _ in runs for bytes_sent in run])
    report(ranks, ["train"], "exchange", expected, moved)
    assert expected == pytest.approx(moved, rel=0.05)
    held = {one.key: one.bytes for one in layout.allocations}
    pairs = {
        "backbone": held["backbone_parameters"],
        "backbone_optimizer": held["backbone_optimizer"],
        "tables": held["tables"] + held["row_gates"],
        "tables_optimizer": held["table_optimizer"] + held["row_gate_optimizer"],
        "working_set": held["working_set"],
    }
    for key, size in pairs.items():
        largest = max(of_rank[f"bytes_{key}"] for _, of_rank in runs)
        report(ranks, ["train"], key, size, largest)
        assert size == pytest.approx(largest, rel=0.1), key


def report(ranks, overrides, what, plan, real):
    words = " ".join(overrides).replace("parallel.", "")
    ratio = f"{plan / real:.3f}" if real else "-"
    print(f"{ranks} ranks, {words}: {what} {plan:,.0f} / {real:,.0f} = {ratio}", file=sys.stderr)
