"""Tables on a rank: rows, what their optimizer keeps, the working set, and what is exchanged around a step."""

from dataclasses import dataclass

from xgram_dist.config.schema import Config
from xgram_dist.memory.layout import (
    RESIDUAL_SITES,
    plan_slabs,
    plan_tables,
    reads_in_place,
    residual_gradients_are_partial,
)
from xgram_dist.plan.axes import Axes
from xgram_dist.plan.messages import Message, message
from xgram_dist.plan.parts import Part
from xgram_dist.plan.traffic import Traffic
from xgram_dist.plan.widths import pieces_width, working_set_width
from xgram_dist.plan.windows import plan_windows

FP32 = 4
ID_BYTES = 4
DENSE_FROM = 0.1
"""Share of rows hit in a step from which `auto` takes the dense optimizer."""
STATE = {"dense": 3, "catch_up": 2, "lazy": 2}
"""Numbers beside each one of a table: two moments; dense keeps a gradient besides. adagrad: one a row and table."""
UPDATE_PASSES = {"dense": 7, "catch_up": 21, "lazy": 19, "adagrad": 11}
"""Reads and writes of each number that an update touches: all of them (dense), or those of the rows that were hit,
which are gathered, updated and put back."""
BUFFERS = {"dense": 0, "catch_up": 5, "lazy": 4, "adagrad": 2}
"""Copies of the rows that were hit, for the update. catch_up in windows has one more, compiled it has one less; and
where a step is one window, another from fetch to update."""
BLOCK_BYTES = 512 * 1024
"""On a CPU they are made block by block, of this size."""
HISTORY_BYTES = 1_200_000
"""catch_up: what each of its optimizers knows of past steps."""
ROW_BYTES = 8
"""The global number of a row held here."""


@dataclass(frozen=True)
class TablesPlan:
    optimizer: str
    parts: list[Part]
    messages: list[Message]
    updated: float
    """Bytes read and written by the update of this rank's rows."""
    moved: float
    """Bytes between host and device in a step, where rows are in host memory."""
    windows: list[int]
    """Micro-batches of each."""
    distinct_tokens: float
    """Of the largest window."""


def plan_rank_tables(config: Config, axes: Axes, micro_batches: int, traffic: Traffic) -> TablesPlan:
    slabs, per_micro = plan_slabs(config, axes.tensor), config.train.micro_batch * config.model.sequence_length
    windows = plan_windows(config, micro_batches, lambda count: traffic.seen(count * per_micro)[0])
    seen = [traffic.seen(count * per_micro) for count in windows]
    largest = max(seen, key=lambda one: one[0])
    share = traffic.touched_share(per_micro * micro_batches * axes.data)
    kind = chosen_optimizer(config, share)
    rows, hit = traffic.rows_held, share * traffic.rows_held
    width, gates = sum(slab.width for slab in slabs), num_gates(config)
    host = config.memory.placement == "host"
    sent = [count * slab.width for count, slab in zip(largest[1], slabs, strict=True)]
    in_place = reads_in_place(config, same_device=not host)
    one_owner = max(largest[1]) <= largest[0] * (1 + 1e-9)  # a token
    vectors_held = largest[0]
    if in_place:  # the rows read here, whoever reads them, and what comes from the others
        vectors_held = hit + (1 - 1 / axes.data) * largest[0]
    parts = [
        Part("tables", FP32 * rows * width + rows * (ROW_BYTES + len(slabs)), host=host),
        Part("row_gates", FP32 * rows * gates, host=host),
        *_optimizer_parts(config, kind, rows, hit, len(windows), axes.tensor, in_place),
        Part("working_set", 2 * FP32 * vectors_held * working_set_width(config, axes.tensor)),
        Part("working_set", 2 * FP32 * vectors_held * pieces_width(config, axes.tensor)),
        Part("exchange_buffers", _on_the_way(config, axes.data, sent, one_owner, in_place), "exchange"),
        Part("hit_gradients", FP32 * hit * (width + gates), "exchange", host),
    ]
    vectors = [sum(of_slab[s] for _, of_slab in seen) for s in range(len(slabs))]
    numbers = sum(count * slab.width for count, slab in zip(vectors, slabs, strict=True))
    return TablesPlan(
        optimizer=kind,
        parts=parts,
        messages=[
            *_exchange(config, axes, sum(vectors), numbers),
            *_over_tensor(config, axes, traffic, [count * per_micro for count in windows]),
        ],
        updated=FP32 * UPDATE_PASSES[kind] * (rows if kind == "dense" else hit) * (width + gates),
        moved=2 * FP32 * numbers if host else 0.0,
        windows=windows,
        distinct_tokens=largest[0],
    )


def _on_the_way(config: Config, ranks: int, sent: list[float], one_owner: bool, in_place: bool) -> float:
    """Bytes of gradients when all have come in; `sent`: numbers of each slab, a rank's own among them."""
    if ranks == 1:
        return 0.0
    wire, elsewhere = wire_bytes(config), 1 - 1 / ranks
    received = wire * sum(sent) * (elsewhere if in_place else 1)
    chosen = 0.0 if one_owner else FP32 * sum(sent)  # else they are sent from where they were added up
    converted = 0.0 if wire == FP32 else wire * elsewhere * sum(sent) + FP32 * max(sent)
    return received + chosen + converted


def wire_bytes(config: Config) -> int:
    return 2 if config.memory.wire == "bf16" else FP32


def num_gates(config: Config) -> int:
    """Of a row, over all tables."""
    return len(plan_tables(config)) if config.memory.row_gates and config.memory.compression < 1 else 0


def chosen_optimizer(config: Config, touched_share: float) -> str:
    if config.memory.optimizer != "auto":
        return config.memory.optimizer
    return "dense" if touched_share >= DENSE_FROM else "catch_up"


def _optimizer_parts(
    config: Config, kind: str, rows: float, hit: float, windows: int, tensor: int, in_place: bool
) -> list[Part]:
    slabs, gates, host = plan_slabs(config, tensor), num_gates(config), config.memory.placement == "host"
    width, optimizers = sum(slab.width for slab in slabs), len(slabs) * (2 if gates else 1)
    if kind == "adagrad":
        state, gate_state = FP32 * rows * len(plan_tables(config)), FP32 * rows * gates
    else:
        state, gate_state = STATE[kind] * FP32 * rows * width, STATE[kind] * FP32 * rows * gates
    hit_bytes, buffers = FP32 * hit * (width + gates), BUFFERS[kind]
    copies = 0.0
    if kind == "catch_up":
        state += (2 * FP32 * rows + HISTORY_BYTES) * optimizers
        buffers += 1 if windows > 1 else -1 if config.train.compile else 0
        copies += hit_bytes if windows == 1 and not in_place else 0
    copies += buffers * (BLOCK_BYTES * optimizers if host else hit_bytes)
    return [
        Part("table_optimizer", state, host=host),
        Part("row_gate_optimizer", gate_state, host=host),
        Part("hit_rows", copies, host=host),
    ]


def _exchange(config: Config, axes: Axes, vectors: float, numbers: float) -> list[Message]:
    """Over the data axis; what a rank owns itself does not travel."""
    elsewhere, wire = (axes.data - 1) / axes.data, wire_bytes(config)
    return [
        Message("token ids", "all-to-all", "data", axes.data, ID_BYTES * vectors * elsewhere),
        Message("table vectors", "all-to-all", "data", axes.data, wire * numbers * elsewhere),
        Message("table gradients", "all-to-all", "data", axes.data, wire * numbers * elsewhere),
    ]


def _over_tensor(config: Config, axes: Axes, traffic: Traffic, windows: list[int]) -> list[Message]:
    """`windows`: tokens of each."""
    if axes.tensor == 1:
        return []
    residual = sum(table.width for table in plan_tables(config) if table.site in RESIDUAL_SITES)
    whole = FP32 * residual * sum(traffic.seen(tokens)[0] for tokens in windows)
    hit = sum(traffic.touched_share(tokens * axes.data) for tokens in windows) * traffic.rows_held
    found = [
        message("residual-site vectors", "all-gather", "tensor", axes, whole),
        message("row-gate gradients", "all-reduce", "tensor", axes, FP32 * hit * num_gates(config)),
    ]
    if residual_gradients_are_partial(config):
        found.append(message("residual-site gradients", "all-reduce", "tensor", axes, whole))
    return found
