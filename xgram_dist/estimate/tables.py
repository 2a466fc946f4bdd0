"""Tables on a rank: rows and optimizer state, the working set, the buffers and messages of the exchange.

Expected counts (distinct tokens, vectors, rows hit in a step) come from `Traffic`. The exchange runs on the rows axis:
token ids to the owners, vectors back, gradients to the owners. Where the tables have replicas, their owners tell each
other which rows they touch, and sum the gradients of these. On the tensor axis, vectors of residual sites are
all-gathered and gradients of row gates all-reduced.
"""

from dataclasses import dataclass

import torch

from xgram_dist.config.schema import Config
from xgram_dist.estimate.comm import FP32, Axes, Message, rank_tokens, read_tokens, ring_message
from xgram_dist.estimate.device_traffic import exchange_bytes
from xgram_dist.estimate.exchange import WIRE_BYTES
from xgram_dist.estimate.memory import INT32, INT64, Allocation
from xgram_dist.estimate.touched_rows import TouchedEstimate, plan_touched_rows
from xgram_dist.estimate.traffic import Traffic, plan_window_sizes
from xgram_dist.model.methods.base import method_of, table_layout
from xgram_dist.tables.exchange_plan import id_bytes
from xgram_dist.tables.layout import (
    RESIDUAL_SITES,
    TableLayout,
    plan_layer_groups,
    reads_in_place,
    residual_gradients_are_partial,
)
from xgram_dist.tables.optimizers.base import BLOCK_BYTES
from xgram_dist.tables.optimizers.build import DTYPES, choose_optimizer, rounds_rows, stages_records
from xgram_dist.tables.storage.staging import GROWTH

STATE_PER_ELEMENT = {"dense": 3, "catch_up": 2, "lazy": 2}
"""Numbers beside each element of a table: two moments; dense keeps a gradient too. adagrad: one a row and table."""
UPDATE_PASSES = {"dense": 7, "catch_up": 21, "lazy": 19, "adagrad": 11}
"""Reads and writes of each element that an update touches: all elements (dense), or those of the rows hit in the step,
which are gathered, updated and scattered."""
UPDATE_COPIES = {"dense": 0, "catch_up": 5, "lazy": 4, "adagrad": 2}
"""Copies of the rows hit in the step, for the update. catch_up with several windows has one more, compiled one less;
with one window it has another from fetch to update. On a CPU a copy is one block of BLOCK_BYTES."""
HISTORY_BYTES = 1_200_000
"""catch_up: the past steps that each optimizer remembers, for adamw_catchup.HISTORY steps."""

GPU = torch.device("cuda")
"""The device that is planned for."""
STEPS_ON_DEVICE = 2
"""Staged records: those of a step, and those of the next one."""

PLANNING_SECONDS = {"key": 11e-9, "vector": 25e-9}
"""Of a core: for each key of a position, and for each vector that a rank requests. Measured with `bench planning`."""


@dataclass(frozen=True)
class TableEstimate:
    optimizer: str
    run: TouchedEstimate
    """Rows that the whole run touches."""
    allocations: list[Allocation]
    messages: list[Message]
    update_bytes: float
    """Read and written by the update of this rank's rows."""
    exchange_bytes: float
    """Read and written in device memory by fetch and return."""
    updated_on_host: bool
    host_device_bytes: float
    """Vectors and gradients moved between host and device in a step, if rows are read and updated in host memory."""
    staged_bytes: float
    """Records moved between host and device in a step, while others compute, if rows in host memory are read and
    updated on the device."""
    window_sizes: list[int]
    """Micro-batches of each window."""
    distinct_tokens: float
    """Of the largest window."""
    planning_cpu_seconds: float
    """Of all threads of the host that plan a step, while the step before it trains."""


def plan_rank_tables(config: Config, axes: Axes, micro_batches: int, traffic: Traffic) -> TableEstimate:
    slabs, per_micro_batch = axes.layout(config).slabs, read_tokens(config)
    window_sizes = plan_window_sizes(config, micro_batches, lambda count: traffic.seen(count * per_micro_batch)[0])
    seen = [_seen_by_stage(config, axes, traffic.seen(count * per_micro_batch)) for count in window_sizes]
    distinct, largest_vectors = max(seen, key=lambda window: window[0])
    hit_share = traffic.touched_share(rank_tokens(config) * micro_batches * axes.data)
    optimizer = choose_optimizer(config, hit_share)
    run = plan_touched_rows(config, axes, optimizer, traffic)
    hit_rows = hit_share * traffic.rows_held
    rows = traffic.rows_held * (run.touched / run.rows if run.kept else 1.0)
    width, gates = sum(slab.width for slab in slabs), axes.row_gates(config)
    host = config.memory.placement != "device"
    staged = run.kept and stages_records(config, optimizer, GPU)
    on_host = host and not staged
    staged_bytes = hit_rows * run.record_bytes if staged else 0.0
    slab_elements = [count * slab.width for count, slab in zip(largest_vectors, slabs, strict=True)]
    in_place = reads_in_place(config, same_device=not on_host, replicas=axes.replicas)
    one_owner = max(largest_vectors) <= distinct * (1 + 1e-9)  # each token has one owner
    vectors_held = distinct
    if in_place:  # rows of this rank that any rank reads, and vectors from the others
        vectors_held = hit_rows + (1 - 1 / axes.rows) * distinct
    counters = INT32 * len(slabs) if config.memory.count_updates else 0
    allocations = [
        # with global row ids, hit flags, counters of updates
        Allocation(
            "tables",
            _item_bytes(config.memory.rows_dtype) * rows * width + rows * (INT64 + len(slabs) + counters),
            host=host,
        ),
        Allocation("row_slots", run.slot_bytes if run.kept else 0.0, host=True),
        Allocation("row_gates", FP32 * rows * gates, host=host),
        *_optimizer_allocations(config, optimizer, rows, hit_rows, len(window_sizes), axes, in_place, on_host),
        Allocation("staging", STEPS_ON_DEVICE * staged_bytes),
        Allocation("staging", 2 * GROWTH * staged_bytes, host=True),  # a pinned buffer each way
        Allocation("working_set", 2 * FP32 * vectors_held * _working_set_width(axes.layout(config), axes.tensor)),
        Allocation("working_set", 2 * FP32 * vectors_held * _gathered_columns_width(axes.layout(config), axes.tensor)),
        Allocation("exchange_buffers", _return_bytes(config, axes, slab_elements, one_owner, in_place), "exchange"),
        Allocation("hit_gradients", FP32 * hit_rows * (width + gates), "exchange", on_host),
    ]
    vectors = [sum(of_slab[s] for _, of_slab in seen) for s in range(len(slabs))]
    elements = sum(count * slab.width for count, slab in zip(vectors, slabs, strict=True))
    return TableEstimate(
        optimizer=optimizer,
        run=run,
        allocations=allocations,
        messages=[
            *_exchange_messages(config, axes, sum(vectors), elements),
            *_replicas_messages(config, axes, traffic, micro_batches * per_micro_batch),
            *_tensor_messages(config, axes, traffic, [count * per_micro_batch for count in window_sizes]),
        ],
        update_bytes=FP32 * UPDATE_PASSES[optimizer] * (rows if optimizer == "dense" else hit_rows) * (width + gates),
        exchange_bytes=exchange_bytes(config, axes, hit_rows, sum(distinct for distinct, _ in seen)),
        updated_on_host=on_host,
        host_device_bytes=2 * FP32 * elements if on_host else 0.0,
        staged_bytes=2 * staged_bytes,
        window_sizes=window_sizes,
        distinct_tokens=distinct,
        planning_cpu_seconds=_planning_cpu_seconds(config, micro_batches * per_micro_batch, sum(vectors)),
    )


def _seen_by_stage(config: Config, axes: Axes, seen: tuple[float, list[float]]) -> tuple[float, list[float]]:
    """Of `Traffic.seen`, what this rank's layers ask for: the slabs of their views, or their share of a table that
    serves all layers."""
    distinct, vectors = seen
    if axes.table_stages > 1:
        readers = method_of(config).table_layers()
        share = len(readers.intersection(axes.method(config).held)) / len(readers)
        return share * distinct, [share * count for count in vectors]
    views = {slab.view for slab in axes.layout(config).slabs}
    slabs = table_layout(config).slabs
    return distinct, [count for count, slab in zip(vectors, slabs, strict=True) if slab.view in views]


def _planning_cpu_seconds(config: Config, tokens: int, vectors: float) -> float:
    """`vectors`: those a rank requests; it serves as many."""
    keys = tokens * max(1, method_of(config).num_ngram_keys)
    return keys * PLANNING_SECONDS["key"] + vectors * PLANNING_SECONDS["vector"]


# Memory


def _item_bytes(stored: str) -> int:
    """Of a number of this type."""
    return DTYPES[stored].itemsize


def _optimizer_allocations(
    config: Config,
    optimizer: str,
    rows: float,
    hit_rows: float,
    windows: int,
    axes: Axes,
    in_place: bool,
    on_host: bool,
) -> list[Allocation]:
    """`on_host`: rows are updated there."""
    slabs, gates, host = (
        axes.layout(config).slabs,
        axes.row_gates(config),
        config.memory.placement != "device",
    )
    width, optimizers = sum(slab.width for slab in slabs), len(slabs) * (2 if gates else 1)
    if optimizer == "adagrad":
        state, gate_state = FP32 * rows * len(axes.layout(config).tables), FP32 * rows * gates
    else:
        per_element = STATE_PER_ELEMENT[optimizer]
        state = per_element * _item_bytes(config.memory.moments) * rows * width
        gate_state = per_element * FP32 * rows * gates
        if rounds_rows(config):
            state += INT32 * rows * len(slabs)  # a key of each row
    hit_bytes, copies = FP32 * hit_rows * (width + gates), UPDATE_COPIES[optimizer]
    copy_bytes = 0.0
    if optimizer == "catch_up":
        state += (2 * FP32 * rows + HISTORY_BYTES) * optimizers
        copies += 1 if windows > 1 else -1 if config.train.compile else 0
        copy_bytes += hit_bytes if windows == axes.replicas == 1 and not in_place else 0
    copy_bytes += copies * (BLOCK_BYTES * optimizers if on_host else hit_bytes)
    return [
        Allocation("table_optimizer", state, host=host),
        Allocation("row_gate_optimizer", gate_state, host=host),
        Allocation("hit_rows", copy_bytes, host=on_host),
    ]


def _working_set_width(layout: TableLayout, tensor: int) -> int:
    """Columns of a token's vectors: those of residual sites whole on every rank, those of attention sites of its
    heads."""
    return sum(t.width * (tensor if t.site in RESIDUAL_SITES else 1) for t in layout.tables)


def _gathered_columns_width(layout: TableLayout, tensor: int) -> int:
    """Columns that a rank holds beside the whole vectors that it gathered from them on the tensor axis."""
    return sum(t.width for t in layout.tables if t.site in RESIDUAL_SITES) if tensor > 1 else 0


def _return_bytes(config: Config, axes: Axes, slab_elements: list[float], one_owner: bool, in_place: bool) -> float:
    """Buffers of the return, when all gradients are on their way or when they have arrived, whichever are larger.
    `slab_elements`: of each slab's vectors, local rows included."""
    ranks = axes.rows
    if ranks == 1:
        return 0.0
    wire, elements = WIRE_BYTES[config.memory.wire], sum(slab_elements)
    remote = wire * (1 - 1 / ranks) * elements
    received = remote if in_place else wire * elements
    # A slab that is cut by groups of layers is sent from, and arrives in, buffers of their own.
    cut = len(plan_layer_groups(config, axes.method(config).layout(), ranks)) > 1
    sent = remote
    if wire == FP32 and not one_owner:
        sent = FP32 * elements
    elif wire == FP32 and not cut:  # sent from where they were accumulated
        sent = 0.0
    cast = 0.0 if wire == FP32 else FP32 * max(slab_elements)
    return received + max(sent + (remote if cut else 0.0), cast)


# Messages


def _exchange_messages(config: Config, axes: Axes, vectors: float, elements: float) -> list[Message]:
    """On the rows axis; local rows do not travel."""
    remote, wire = (axes.rows - 1) / axes.rows, WIRE_BYTES[config.memory.wire]
    return [
        Message(
            "token ids", "all-to-all", "rows", axes.rows, id_bytes(table_layout(config).num_rows) * vectors * remote
        ),
        Message("table vectors", "all-to-all", "rows", axes.rows, wire * elements * remote),
        Message("table gradients", "all-to-all", "rows", axes.rows, wire * elements * remote),
    ]


def _replicas_messages(config: Config, axes: Axes, traffic: Traffic, tokens: int) -> list[Message]:
    """`tokens`: of a rank's step."""
    if axes.replicas == 1:
        return []
    slabs = axes.layout(config).slabs
    width = sum(slab.width for slab in slabs) + axes.row_gates(config)
    touched = traffic.touched_share(tokens * axes.rows) * traffic.rows_held
    ids = id_bytes(traffic.rows_held) * touched * len(slabs) * (axes.replicas - 1)
    hit_rows = traffic.touched_share(tokens * axes.data) * traffic.rows_held
    return [
        Message("touched rows of replicas", "all-to-all", "replicas", axes.replicas, ids),
        ring_message("gradients of replicas", "all-reduce", "replicas", axes, FP32 * hit_rows * width),
    ]


def _tensor_messages(config: Config, axes: Axes, traffic: Traffic, window_tokens: list[int]) -> list[Message]:
    if axes.tensor == 1:
        return []
    residual = sum(table.width for table in axes.method(config).layout().tables if table.site in RESIDUAL_SITES)
    vectors = FP32 * residual * sum(_seen_by_stage(config, axes, traffic.seen(n))[0] for n in window_tokens)
    hit_rows = sum(traffic.touched_share(tokens * axes.data) for tokens in window_tokens) * traffic.rows_held
    gates = FP32 * hit_rows * axes.row_gates(config)
    messages = [
        ring_message("residual-site vectors", "all-gather", "tensor", axes, vectors),
        ring_message("row-gate gradients", "all-reduce", "tensor", axes, gates),
    ]
    if residual_gradients_are_partial(config):
        messages.append(ring_message("residual-site gradients", "all-reduce", "tensor", axes, vectors))
    return messages
