"""Memory, wire and time of a recipe on so many ranks: formulas against the model, against numbers by hand, and the
command. What real ranks hold and move is in tests/distributed/test_estimate_memory.py."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tiny_models as tiny
import torch

from xgram_dist.cli.main import main
from xgram_dist.cli.plan import MACHINE
from xgram_dist.config import load_config
from xgram_dist.config.validate import accumulation
from xgram_dist.errors import UserError
from xgram_dist.estimate.advice import advise, recommend
from xgram_dist.estimate.comm import Axes, Message, merge_messages, ring_bytes, ring_message
from xgram_dist.estimate.device_traffic import plan_compute_parts
from xgram_dist.estimate.flops import block_flops_per_token, plan_budget
from xgram_dist.estimate.layout import compare_layouts, compare_update_places, group_size, paper_layout, plan_layout
from xgram_dist.estimate.memory import Allocation, block_activation_bytes, peak_bytes, plan_activations
from xgram_dist.estimate.shapes import parameter_shapes, shard_numel
from xgram_dist.estimate.step_time import Machine, model_step_flops
from xgram_dist.estimate.tables import HISTORY_BYTES
from xgram_dist.estimate.traffic import build_traffic, plan_window_sizes, zipf
from xgram_dist.tables.frequencies import load_frequencies

RECIPES = Path(__file__).resolve().parents[3] / "recipes"
SMALL_4X = RECIPES / "0.73b" / "xgram-4x-100.yaml"
ALL_SITES = {
    "h": {"views": 3, "kernels": [3, 1, 2]},
    "qk": {"views": 1, "kernels": [2]},
    "v": {"views": 2, "kernels": [3, 5]},
    "o": {"views": 2, "kernels": [4], "layers": [1]},
}


def recipe(*overrides, file=SMALL_4X):
    return load_config(file, list(overrides))


def planned(config, ranks, frequencies=None, machine=None):
    axes = Axes.of(config, ranks)
    traffic = None
    if config.memory.method != "vanilla":
        assert config.memory.compression == 1
        frequencies = zipf(config.model.vocabulary) if frequencies is None else frequencies
        traffic = build_traffic(config, frequencies, None, axes.data)
    return plan_layout(config, axes, machine or Machine(), traffic)


def sizes(layout, *, host=False):
    found = {}
    for allocation in layout.allocations:
        if allocation.host == host:
            found[allocation.key] = found.get(allocation.key, 0) + allocation.bytes
    return found


# Shapes and activations, against the model.


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("extraction", [{}, {"shared": True}, {"gate": False}, {"enabled": False}])
def test_shapes_are_those_of_the_model(tensor, extraction):
    sites = {"h": {"views": 3}, "v": {"views": 2}} if "shared" in extraction else ALL_SITES
    config = tiny.config(memory={"sites": sites, "extraction": extraction}, parallel={"tensor": tensor})
    ranks = SimpleNamespace(rank=0, size=tensor, group=SimpleNamespace(group_name=""))
    model = tiny.model(config, tensor=ranks)
    real = sorted(tuple(p.shape) for p in model.parameters())
    shapes = parameter_shapes(config, tensor)
    assert sorted(shapes.all) == real
    assert shapes.numel == sum(p.numel() for p in model.parameters())
    for planned_block, block in zip(shapes.blocks, model.blocks, strict=True):
        assert sorted(planned_block) == sorted(tuple(p.shape) for p in block.parameters())
    assert shapes.head == (tuple(model.head.weight.shape),)
    assert sorted(shapes.method) == sorted(tuple(p.shape) for block in model.blocks for p in block.sites.parameters())


def test_shapes_are_built_once_for_one_network():
    config = recipe()
    shapes = parameter_shapes(config, 2)
    changed = config.model_copy(update={"train": config.train.model_copy(update={"micro_batch": 4})})
    assert parameter_shapes(changed, 2) is shapes
    assert parameter_shapes(config, 1) is not shapes
    assert parameter_shapes(recipe("model.layers=2"), 2) is not shapes


def test_shards_are_cut_by_the_first_dimension_and_rounded_up():
    assert shard_numel(((10, 3), (8,), (2,)), 4) == 3 * 3 + 2 + 1


def saved_bytes(config, tokens):
    """Bytes that autograd keeps between forward and backward, without parameters, buffers and the working set."""
    model = tiny.model(config)
    model.compute_dtype = torch.bfloat16 if config.train.precision == "bf16" else torch.float32
    values, slots, lookup = {}, tokens, None
    if config.memory.method != "vanilla":
        lookup = tiny.tables(config)
        working = tiny.fetch(lookup, tokens[None])
        values, slots = working.values, working.slots[0]
    known = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), *values.values())}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        # The estimate counts weights cast to bf16 with the backbone.
        cast = tensor.dim() == 2 and tensor.dtype == torch.bfloat16 and tensor.shape[0] != tokens.numel()
        if storage.data_ptr() not in known and not cast:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.loss(tokens, slots, values, torch.tensor(1.0, dtype=torch.float64))
    if lookup is not None:
        lookup.close()
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "memory",
    [
        {"method": "vanilla"},
        {"sites": ALL_SITES},
        {"sites": ALL_SITES, "extraction": {"gate": False}},
        {"sites": ALL_SITES, "extraction": {"norm": False}},
        {"sites": ALL_SITES, "extraction": {"enabled": False}},
    ],
)
@pytest.mark.parametrize("recomputed", [False, True])
def test_activations_are_what_autograd_keeps(precision, memory, recomputed):
    model = {"layers": 2, "width": 64, "ffn_width": 112, "sequence_length": 48, "loss_chunk": 64}
    train = {"precision": precision, "micro_batch": 3, "global_batch": 3, "activation_checkpointing": recomputed}
    config = tiny.config(model=model, memory=memory, train=train)
    found = {allocation.key: allocation.bytes for allocation in plan_activations(config, Axes(1))}["activations"]
    if recomputed:  # one block of them is there in backward only
        found -= max(block_activation_bytes(config, layer, 1) for layer in range(2)) * 3 * 48
    real = saved_bytes(config, tiny.tokens(config, 3, 48))
    head = config.model.vocabulary * config.model.width * 4  # its gradient is formed in forward
    assert found == pytest.approx(real - head, rel=0.03)


# Engines, tables, messages: numbers by hand.


def test_the_history_of_catch_up_has_its_size():
    from xgram_dist.tables.optimizers import adamw_catchup, catchup_math
    from xgram_dist.tables.optimizers.adamw import AdamW

    adamw = AdamW((0.9, 0.95), 1e-8, 0.1)
    history = catchup_math.MissedSteps(adamw, adamw_catchup.HISTORY, 1, torch.float32, tiny.CPU)
    held = sum(t.nbytes for t in vars(history).values() if isinstance(t, torch.Tensor))
    assert held == pytest.approx(HISTORY_BYTES, rel=0.1)


def test_deepspeed_keys_of_the_recipe_change_the_estimate():
    stage_3 = ["parallel.zero_stage=3", "train.compile=false"]
    plain = sizes(planned(recipe(*stage_3), 16))
    keys = "{reduce_bucket_size: 10000000, stage3_max_live_parameters: 300000000}"
    tuned = sizes(planned(recipe(*stage_3, f"parallel.deepspeed={{zero_optimization: {keys}}}"), 16))
    assert plain["backbone_buffers"] - tuned["backbone_buffers"] == 4 * (50_000_000 - 10_000_000)
    assert tuned["backbone_compute"] == 2 * 300_000_000
    assert plain["backbone_compute"] > 2 * 700_000_000
    with pytest.raises(UserError, match=r"train\.compile"):
        planned(recipe("parallel.zero_stage=3", "train.compile=true"), 16)


def test_degrees_that_do_not_divide_are_refused_by_name():
    from xgram_dist.config.validate import check_degrees

    check_degrees(tiny.config(parallel={"tensor": 2}), 4)
    with pytest.raises(UserError, match=r"3 rank\(s\) are not a multiple of parallel.tensor = 2"):
        check_degrees(tiny.config(parallel={"tensor": 2}), 3)
    config = tiny.config(parallel={"tensor": 8})
    with pytest.raises(UserError, match=r"model\.\w+ = \d+ is not divisible by parallel.tensor = 8"):
        check_degrees(config, 8)


def test_bytes_of_rings():
    assert ring_bytes("all-reduce", 800, 8) == 1400
    assert ring_bytes("all-gather", 800, 8) == ring_bytes("reduce-scatter", 800, 8) == 700
    assert ring_message("gradients", "all-reduce", "shard", Axes(8, 1, 4), 100).bytes == 100
    a, b = Message("a", "all-gather", "data", 2, 3.0), Message("b", "all-gather", "data", 2, 0.0)
    assert merge_messages([a, b, a]) == [Message("a", "all-gather", "data", 2, 6.0)]


def test_the_peak_is_the_largest_phase_beside_what_is_permanent():
    allocations = [
        Allocation("a", 5),
        Allocation("b", 3, "compute"),
        Allocation("c", 4, "compute"),
        Allocation("d", 6, "exchange"),
        Allocation("e", 9, host=True),
    ]
    assert peak_bytes(allocations) == 12
    assert peak_bytes(allocations, host=True) == 9


def test_axes():
    axes = Axes.of(recipe("parallel.engine=hsdp", "parallel.replicate=4", "parallel.tensor=2"), 64)
    assert (axes.data, axes.shard, axes.world) == (32, 8, 64)
    assert [axes.span(axis) for axis in ("tensor", "shard", "data", "replicate")] == [2, 16, 64, 64]
    with pytest.raises(UserError, match="48 rank"):
        Axes.of(recipe("parallel.engine=hsdp", "parallel.replicate=5"), 48)


def test_the_paper_s_small_model_on_16_ranks():
    parameters = 726_325_248 + 645_170
    found = sizes(planned(recipe(), 16))
    assert found["backbone_parameters"] == pytest.approx(parameters * (2 + 4 / 16))
    assert found["backbone_gradients"] == 4 * parameters
    assert found["backbone_optimizer"] == pytest.approx(8 * parameters / 16)
    rows = 9.335e9 / 16 * 4
    assert found["tables"] == pytest.approx(rows, rel=1e-3)
    assert found["table_optimizer"] == pytest.approx(3 * rows, rel=1e-3)  # dense: two moments and a gradient
    assert "row_gates" not in found
    wire = {(m.name, m.collective): m.bytes for m in planned(recipe(), 16).messages}
    assert wire["gradients", "all-reduce"] == pytest.approx(2 * 15 / 16 * 4 * parameters)
    assert wire["parameters", "all-gather"] == pytest.approx(15 / 16 * 2 * parameters)
    assert wire["table vectors", "all-to-all"] == wire["table gradients", "all-to-all"]


def test_engines_differ_as_they_should():
    engine = {
        name: planned(recipe(*words), 16)
        for name, words in {
            "1": [],
            "2": ["parallel.zero_stage=2"],
            "3": ["parallel.zero_stage=3", "train.compile=false"],
            "offload": ["parallel.offload=true"],
            "hsdp": ["parallel.engine=hsdp"],
            "replicated": ["parallel.engine=replicated"],
        }.items()
    }
    gradients = {name: sizes(layout).get("backbone_gradients", 0) for name, layout in engine.items()}
    assert gradients["1"] == gradients["hsdp"] == gradients["replicated"]
    assert gradients["2"] == pytest.approx(gradients["1"] / 16)
    assert gradients["3"] == pytest.approx(gradients["2"], rel=1e-4)
    assert sizes(engine["offload"], host=True)["backbone_optimizer"] == sizes(engine["1"])["backbone_optimizer"]
    assert engine["offload"].time.host > 0
    assert engine["offload"].time.update > engine["1"].time.update
    reduced = {n: sum(m.bytes for m in one.messages if m.name == "gradients") for n, one in engine.items()}
    assert reduced["2"] == pytest.approx(8 * reduced["1"])  # each micro-batch
    assert reduced["hsdp"] == pytest.approx(reduced["1"] / 2, rel=0.01)
    gathered = {n: sum(m.bytes for m in one.messages if m.name == "parameters") for n, one in engine.items()}
    assert gathered["replicated"] == 0
    assert gathered["hsdp"] > gathered["3"] > 8 * gathered["1"]  # hsdp gathers blocks twice a micro-batch


def test_table_optimizers_and_places():
    base = sizes(planned(recipe(), 16))["tables"]
    for kind, factor in {"dense": 3, "lazy": 2, "catch_up": 2}.items():
        found = sizes(planned(recipe(f"memory.optimizer={kind}"), 16))
        assert found["table_optimizer"] == pytest.approx(factor * base, rel=1e-3)
    assert sizes(planned(recipe("memory.optimizer=adagrad"), 16))["table_optimizer"] == 4 * 50 * 151_936 / 16
    layout = planned(recipe("memory.placement=host"), 16)
    assert sizes(layout, host=True)["tables"] == base
    assert "tables" not in sizes(layout)
    assert "working_set" in sizes(layout)
    assert layout.time.host > 0


def test_touched_rows_are_staged_on_the_device_or_updated_on_the_host():
    """All tokens are equally frequent, so that counts are known."""
    words = ["memory.placement=host", "memory.rows=touched", "memory.optimizer=catch_up"]
    frequencies = np.ones(151_936)
    device, host = (planned(recipe(*words, f"memory.update={place}"), 16, frequencies) for place in ("device", "host"))
    tokens = recipe().train.global_batch * recipe().model.sequence_length
    step_bytes = (1 - (1 - 1 / 151_936) ** tokens) * 151_936 / 16 * device.tables.run.record_bytes
    assert sizes(device)["staging"] == pytest.approx(2 * step_bytes, rel=1e-3), (
        "the records of a step and of the next one"
    )
    assert sizes(device, host=True)["staging"] == pytest.approx(2 * 1.25 * step_bytes, rel=1e-3), (
        "a pinned buffer each way"
    )
    assert "staging" not in sizes(host) | sizes(host, host=True)
    assert sizes(device, host=True)["tables"] == sizes(host, host=True)["tables"]
    assert "hit_rows" in sizes(device)
    assert "hit_rows" in sizes(host, host=True)
    staged = {part.name: part for part in device.time.parts}["staging of table rows"]
    assert staged.host == pytest.approx(2 * step_bytes / 25e9, rel=1e-3)
    updates = {name: {p.name: p for p in one.time.parts}["update"] for name, one in (("d", device), ("h", host))}
    assert updates["d"].host == 0 < updates["h"].host
    auto = planned(recipe(*words), 16, frequencies)
    assert not auto.tables.updated_on_host
    kept = planned(recipe("memory.placement=host"), 16, frequencies)
    assert kept.tables.updated_on_host, "rows that are all kept are updated where they lie"


def test_the_places_of_the_update_are_compared():
    words = ["memory.placement=host", "memory.optimizer=catch_up"]
    config = recipe(*words, "memory.rows=touched", "memory.update=host")
    axes, machine = Axes.of(config, 16), Machine()
    traffic = build_traffic(config, zipf(config.model.vocabulary), None, axes.data)
    found = compare_update_places(config, axes, machine, traffic)
    assert found["host"].time == plan_layout(config, axes, machine, traffic).time
    assert found["device"].time.overlapped < found["host"].time.overlapped
    assert found["device"].device_bytes > found["host"].device_bytes
    assert compare_update_places(recipe(*words), axes, machine, traffic) is None, "all rows are kept"
    assert compare_update_places(recipe(), axes, machine, traffic) is None


def test_tensor_parallelism_cuts_tables_by_columns():
    one, two = planned(recipe(), 16), planned(recipe("parallel.tensor=2", "train.micro_batch=4"), 32)
    assert sizes(two)["tables"] == pytest.approx(sizes(one)["tables"] / 2, rel=1e-3)
    names = {m.name for m in two.messages if m.axis == "tensor"}
    assert names == {
        "residual-site vectors",
        "norms of q and k",
        "loss",
        "activations",
        "norms of vectors",
        "norm and loss",
    }
    parts = planned(recipe("parallel.tensor=2", "parallel.sequence_parallel=true", "train.micro_batch=4"), 32)
    assert sizes(parts)["activations"] < sizes(two)["activations"]
    volume = {
        name: sum(m.bytes for m in layout.messages if m.name == "activations")
        for name, layout in (("sum", two), ("parts", parts))
    }
    assert volume["parts"] == pytest.approx(volume["sum"], rel=0.1)


def test_windows():
    config, traffic = recipe(), build_traffic(recipe(), zipf(151_936), None, 16)

    def distinct(micro_batches):
        return traffic.seen(65_536 * micro_batches)[0]

    assert plan_window_sizes(config, 8, distinct) == [8]
    assert plan_window_sizes(recipe("memory.window=3"), 8, distinct) == [3, 3, 2]
    assert plan_window_sizes(recipe("memory.window=100"), 8, distinct) == [8]
    size = 8 * 61_440 * distinct(4)
    assert plan_window_sizes(recipe(f"memory.window={size / 1e9 + 0.01:.3f}GB"), 8, distinct) == [4, 4]
    assert plan_window_sizes(recipe("memory.window=1MB"), 8, distinct) == [1] * 8
    one, all_at_once = planned(recipe("memory.window=1"), 16), planned(recipe(), 16)
    assert sizes(one)["working_set"] < 0.5 * sizes(all_at_once)["working_set"]
    assert one.wire_bytes > all_at_once.wire_bytes


def test_the_working_set_with_the_real_frequencies(real_frequencies_file):
    frequencies = load_frequencies(real_frequencies_file, 151_936)
    layout = planned(recipe(), 16, frequencies)
    assert layout.tables.distinct_tokens == pytest.approx(35_896, abs=1)
    read_here = (1 - (1 - frequencies / frequencies.sum()) ** (1024 * 8192)).sum() / 16  # by any rank
    assert sizes(layout)["working_set"] == pytest.approx(2 * 4 * (35_896 * 15 / 16 + read_here) * 61_440, rel=1e-4)
    windows = planned(recipe("memory.window=8"), 16, frequencies)  # nothing is held for others
    assert sizes(windows)["working_set"] == pytest.approx(2 * 4 * 35_896 * 61_440, rel=1e-4)


# Time.


def test_time_is_bytes_over_bandwidth_and_flops_over_speed():
    config = recipe(file=RECIPES / "0.73b" / "vanilla.yaml")
    machine = Machine(bandwidth=10, node_bandwidth=100, memory_bandwidth=1000, flops=100, utilisation=0.5)
    layout = planned(config, 16, machine=machine)
    budget = plan_budget(config)
    tokens = 8_388_608 / 16
    assert model_step_flops(config, layout.axes) == 3 * budget.backbone_flops_per_token * tokens
    time = layout.time
    parts = {part.name: part for part in plan_compute_parts(config, layout.axes, 8, 0)}
    scores = 2 * 10 * 1536 * 8192  # a token's, forward; backward computes them once more
    flops = sum(part.matmul_flops + part.attention_flops for part in parts.values())
    assert flops == (3 * budget.backbone_flops_per_token + block_flops_per_token(config) + 0.5 * scores) * tokens
    assert parts["blocks"].attention_flops == 4.5 * scores * tokens
    products = (flops + parts["blocks"].attention_flops) / 50e12  # attention at half the speed
    assert time.compute == pytest.approx(products + sum(part.bytes for part in parts.values()) / 1e12)
    assert sum(part.seconds for part in time.parts) == pytest.approx(time.one_by_one)
    assert time.mfu == pytest.approx(3 * budget.backbone_flops_per_token * tokens / time.one_by_one / 100e12)
    assert time.mfu_full_attention / time.mfu == pytest.approx(1 + scores / budget.backbone_flops_per_token)
    assert time.wire == pytest.approx(layout.wire_bytes / 10e9)
    assert time.update == pytest.approx(7 * 4 * budget.backbone_parameters / 16 / 1e12)
    assert time.one_by_one == pytest.approx(time.compute + time.wire + time.update)
    assert time.overlapped == pytest.approx(max(time.compute, time.wire) + time.update)
    assert planned(config, 8, machine=machine).time.wire == pytest.approx(planned(config, 8).wire_bytes / 100e9)
    head, blocks = (
        [plan_compute_parts(recipe(*words), Axes(16), 8, 0)[n].matmul_flops for n in (0, 1)]
        for words in ([], ["train.activation_checkpointing=false"])
    )
    assert head[0] == blocks[0]  # the head is not computed again
    assert head[1] / blocks[1] == pytest.approx(4 / 3)


# Other layouts.


def test_the_paper_s_layout():
    layout = paper_layout(recipe(), 16, Machine())
    assert (layout.axes.replicate, layout.axes.shard) == (2, 8)
    found, numbers = sizes(layout), 9.335e9
    assert found["tables"] == pytest.approx(4 * numbers / 8, rel=1e-3)
    assert found["table_gradients"] == found["tables"]
    assert found["table_optimizer"] == 2 * found["tables"]
    assert found["gathered"] > 2 * 2 * numbers / 10
    wire = {(m.name, m.collective): m.bytes for m in layout.messages}
    assert wire["table parameters", "all-gather"] == pytest.approx(8 * 2 * 2 * numbers * 7 / 8, rel=1e-3)
    assert wire["table gradients", "reduce-scatter"] == pytest.approx(8 * 4 * numbers * 7 / 8, rel=1e-3)
    assert wire["table gradients", "all-reduce"] == pytest.approx(4 * numbers / 8, rel=1e-3)
    assert [group_size(ranks) for ranks in (1, 2, 6, 8, 12, 16, 1024)] == [1, 2, 6, 8, 6, 8, 8]


def test_layouts_are_of_the_same_ranks():
    config = recipe("parallel.tensor=2", "train.micro_batch=4")
    axes = Axes.of(config, 64)
    layouts = compare_layouts(config, axes, Machine(), build_traffic(config, zipf(151_936), None, axes.data))
    assert [layout.axes.world for layout in layouts] == [64] * 3
    assert [layout.axes.tensor for layout in layouts] == [1, 2, 2]
    paper, stage_1, hsdp = layouts
    assert paper.wire_bytes > 5 * stage_1.wire_bytes / 2
    assert stage_1.tables.allocations == hsdp.tables.allocations
    # 128 ranks do not share the batch by 8: the paper's layout is left out.
    odd = recipe("parallel.tensor=2", "train.micro_batch=8", "train.global_batch=256")
    assert accumulation(odd, 32) == 1
    left = compare_layouts(odd, Axes(32, 2), Machine(), build_traffic(odd, zipf(151_936), None, 32))
    assert len(left) == 2


def test_advice_names_keys_that_help_and_what_they_leave():
    config = recipe()

    def traffic_of(data):
        return build_traffic(config, zipf(151_936), None, data)

    now = planned(config, 16).device_bytes
    found = {one.change: one for one in advise(config, 16, 0.7 * now, traffic_of)}
    assert "memory.window=1" in found
    assert found["memory.window=1"].device_bytes == planned(recipe("memory.window=1"), 16).device_bytes
    assert found["memory.window=1"].fits == (found["memory.window=1"].device_bytes <= 0.7 * now)
    assert all(one.device_bytes < now for one in found.values())
    assert list(found) == sorted(found, key=lambda name: found[name].device_bytes)
    assert found["--ranks 32"].device_bytes == planned(config, 32).device_bytes
    assert not any("activation_checkpointing" in name for name in found)  # it is on


def test_recommendations_are_faster_and_fit():
    """The paper's recipe recomputes its blocks although the memory of an H100 holds their activations."""
    config = recipe(file=RECIPES / "0.73b" / "vanilla.yaml")
    found = recommend(config, Axes(16), Machine(), 80e9, lambda _: None)
    now = planned(config, 16)
    assert found
    assert all("train.activation_checkpointing=false" in one.change for one in found[:1])
    assert found == sorted(found, key=lambda one: one.seconds)
    for one in found:
        assert one.seconds < 0.98 * now.time.one_by_one
        assert one.device_bytes <= 0.9 * 80e9
        changed = planned(recipe(*one.change.split(), file=RECIPES / "0.73b" / "vanilla.yaml"), 16)
        assert (changed.time.one_by_one, changed.device_bytes) == (one.seconds, one.device_bytes)
    small = recommend(config, Axes(16), Machine(), 20e9, lambda _: None)
    assert {one.change for one in small} < {one.change for one in found}


def test_the_bottleneck_is_named():
    machine = Machine(bandwidth=0.1, node_bandwidth=0.1)
    assert planned(recipe(file=RECIPES / "0.73b" / "vanilla.yaml"), 16).time.bottleneck.name == "blocks"
    slow = planned(recipe(), 16, machine=machine).time.bottleneck
    assert (slow.name, slow.bound) == ("exchange", "network")


# The command.


def command(capsys, *words):
    assert main(["plan", str(SMALL_4X), "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_has_it_all(capsys, real_frequencies_file):
    words = ["--ranks", "16", "--frequencies", str(real_frequencies_file), "--memory-per-rank", "40GB"]
    found = command(capsys, *words, "--bandwidth", "25", "--flops", "312", "--utilisation", "0.5")
    machine = Machine(bandwidth=25, flops=312, utilisation=0.5)
    frequencies = load_frequencies(real_frequencies_file, 151_936)
    layout = planned(recipe(), 16, frequencies, machine)
    assert found["layout"]["device_bytes"] == layout.device_bytes
    assert found["layout"]["wire_bytes"] == layout.wire_bytes
    assert found["layout"]["seconds"] == layout.time.as_dict()
    assert {one["key"]: one["bytes"] for one in found["layout"]["memory"]} == sizes(layout)
    assert found["machine"]["bandwidth"] == 25
    assert (found["memory_per_rank"], found["fits"]) == (40e9, False)
    assert found["advice"][0]["device_bytes"] < layout.device_bytes
    assert [one["name"].split(":")[0].split(" ")[0] for one in found["layouts"]] == ["the", "DeepSpeed", "HSDP"]
    assert found["layouts"][1]["device_bytes"] == layout.device_bytes
    assert command(capsys, *words[:-1], "200GB")["fits"] is True
    assert command(capsys)["fits"] is None


def test_the_text_says_the_same(capsys):
    words = ["plan", str(SMALL_4X), "--ranks", "16", "--memory-per-rank", "40GB"]
    found = command(capsys, *words[2:])
    assert main(words) == 0
    text = capsys.readouterr().out
    lines = {line.split("  ")[0]: line for line in text.splitlines()}
    assert f"{found['layout']['device_bytes'] / 1e9:.2f} GB" in lines["peak"]
    assert f"{found['layout']['wire_bytes'] / 1e9:.2f} GB" in lines["total"]
    assert f"{found['layout']['seconds']['one_by_one']:.2f} s" in lines["total, without overlap"]
    assert f"{found['layouts'][0]['wire_bytes'] / 1e9:.2f} GB" in lines["the paper's: FSDP 2 x 8 over all"]
    assert "does not fit 40.00 GB" in text
    assert "memory.window=1" in text
    assert "no frequencies given: tokens by Zipf's law" in text
    assert main([*words[:-1], "1TB"]) == 0
    assert "fits 1,000.00 GB, with" in capsys.readouterr().out


def test_a_recipe_without_tables(capsys):
    assert main(["plan", str(RECIPES / "tiny" / "vanilla.yaml"), "--ranks", "2"]) == 0
    text = capsys.readouterr().out
    assert "working set" not in text
    assert "Zipf" not in text


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--tensor", "5", "--ranks", "10"], "model.heads = 12 is not divisible by parallel.tensor = 5"),
        (["--tensor", "4", "--ranks", "6"], "6 rank(s) are not a multiple of parallel.tensor = 4"),
        (["--tensor", "0"], "parallel.tensor = 0: must be greater than 0"),
        (["--ranks", "256"], "train.global_batch = 1024 is not a whole multiple of train.micro_batch = 8 x 256 ranks"),
        (["--ranks", "0"], "--ranks 0 is not from 1 to 16384"),
        (["--memory-per-rank", "80"], "--memory-per-rank 80 is not a size such as 80GB or 80GiB"),
        (["--bandwidth", "-1"], "--bandwidth -1 is not a number of GB/s above 0"),
        (["--node-bandwidth", "inf"], "--node-bandwidth inf is not a number of GB/s above 0"),
        (["--host-bandwidth", "0"], "--host-bandwidth 0 is not a number of GB/s above 0"),
        (["--memory-bandwidth", "nan"], "--memory-bandwidth nan is not a number of GB/s above 0"),
        (["--flops", "0"], "--flops 0 is not a number of TFLOP/s above 0"),
        (["--utilisation", "1.5"], "--utilisation 1.5 is not above 0 and at most 1"),
        (["--utilisation", "nan"], "--utilisation nan is not above 0 and at most 1"),
    ],
)
def test_mistakes_are_one_sentence(words, sentence, capsys):
    assert main(["plan", str(SMALL_4X), *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert sentence in captured.err
    assert captured.err.count("\n") == 1


def test_an_answer_needs_no_heavy_library_but_torch(real_frequencies_file):
    script = (
        "import sys\nfrom xgram_dist.cli.main import main\n"
        f"main(['plan', {str(RECIPES / '1.15b' / 'xgram-4x-50.yaml')!r}, '--ranks', '1024', 'train.micro_batch=1', "
        f"'--memory-per-rank', '8GB', '--frequencies', {str(real_frequencies_file)!r}])\n"
        "print(sorted({'deepspeed', 'streaming', 'matplotlib'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "changes that help" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


def test_help_names_the_defaults_and_imports_no_torch():
    script = (
        "import sys\nfrom xgram_dist.cli.main import main\n"
        "try:\n    main(['plan', '--help'])\nexcept SystemExit:\n    pass\n"
        "print('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    text = " ".join(done.stdout.split())
    assert done.stdout.splitlines()[-1] == "False"
    for key in MACHINE:
        assert f"(default {getattr(Machine(), key):g})" in MACHINE[key]
        assert f"--{key.replace('_', '-')}" in text


def test_zipf():
    assert zipf(4) == pytest.approx(np.array([1, 1 / 2, 1 / 3, 1 / 4]))
