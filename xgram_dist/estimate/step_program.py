"""The program of an optimizer step, as a run executes it: what each rank computes, sends and waits for, in order.

    for each window     fetch      owners gather and send vectors          all-to-all
                        compute    for each micro-batch: blocks forward, head, blocks backward, with the collectives of
                                   the engine and of the tensor axis around each block
                        return     gradients of vectors to the owners      all-to-all
    update              replicas of the tables, joint norm, tables, backbone

The next step is planned on the host meanwhile. With `memory.overlap` vectors travel in groups of layers: those of the
next step leave between the two updates, the first forward pass waits layer by layer, and gradients leave during the
last backward pass. FSDP and ZeRO 2 and 3 gather a block's parameters one block ahead, and reduce gradients during the
backward pass; ZeRO 1 and the replicated engine reduce after it.

Bytes of the engine and the tensor axis are those of `plan`, times are those of `plan`; they are divided among blocks.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from xgram_dist.config.schema import Config
from xgram_dist.engine.deepspeed import deepspeed_config
from xgram_dist.errors import UserError
from xgram_dist.estimate.comm import Axes, Axis, Collective, Message
from xgram_dist.estimate.exchange import WIRE_BYTES
from xgram_dist.estimate.layout import LayoutEstimate
from xgram_dist.estimate.links import AllToAll, Links, Ring, Times, Transfer, ranks_of_groups
from xgram_dist.estimate.requests import Requests, WindowLoad
from xgram_dist.estimate.shapes import numel, parameter_shapes
from xgram_dist.estimate.simulate import Clock, Pending
from xgram_dist.model.methods.base import table_layout
from xgram_dist.tables.exchange_plan import id_bytes
from xgram_dist.tables.layout import plan_layer_groups

BACKWARD_SHARE = {False: 2 / 3, True: 3 / 4}
"""Of the work of a block, by whether activations are recomputed."""


def check_simulated(config: Config) -> None:
    for key in ("context", "pipeline"):
        degree = getattr(config.parallel, key)
        if degree > 1:
            raise UserError(f"parallel.{key} = {degree} cannot be simulated yet; leave it at 1")


@dataclass(frozen=True)
class Work:
    """Seconds of a rank's device in a step; of all ranks, or of each."""

    forward: float | Times
    """Of a block and micro-batch."""
    backward: float | Times
    head: float | Times
    """Of a micro-batch: the loss, forward and backward."""
    fetch: float | Times
    """Of all windows: owners gather vectors."""
    give_back: float | Times
    """Owners add up gradients."""
    tables_update: float | Times = 0.0
    backbone_update: float | Times = 0.0
    staging: float = 0.0
    """Records copied between host and device while others compute."""
    planning: float = 0.0
    """On the host, a step ahead."""
    engine_overlaps: bool = True
    """Whether collectives of the engine run beside compute, where the engine is made for it. On a CPU they do not."""

    @staticmethod
    def of(config: Config, layout: LayoutEstimate, requests: Requests | None, host_threads: int) -> "Work":
        """As `plan` estimates it, with the load of each owner."""
        time = layout.time
        seconds = {part.name: part.matmul + part.memory for part in time.parts}
        blocks = layout.micro_batches * config.model.layers
        backward = BACKWARD_SHARE[config.train.activation_checkpointing]
        in_blocks = seconds["blocks"] + seconds.get("extraction", 0.0)
        staging = next((part.host for part in time.parts if part.name == "staging of table rows"), 0.0)
        tables = layout.tables
        served: float | Times = 1.0
        hit: float | Times = 1.0
        if requests is not None:
            served, hit = requests.served, requests.hit
        return Work(
            forward=(1 - backward) * in_blocks / blocks,
            backward=(backward * in_blocks + seconds.get("scatter", 0.0)) / blocks,
            head=seconds["head"] / layout.micro_batches,
            fetch=served * (seconds.get("exchange", 0.0) / 2),
            give_back=served * (seconds.get("exchange", 0.0) / 2),
            # Rows hit in a step; a dense sweep goes over all rows, of which every rank has as many.
            tables_update=time.tables_update * (1.0 if tables is None or tables.optimizer == "dense" else hit),
            backbone_update=time.update - time.tables_update + time.host,
            staging=staging,
            planning=0.0 if tables is None else tables.planning_cpu_seconds / host_threads,
        )


class StepProgram:
    """Call it with a clock, and with the fetch that the step before has sent ahead; it returns that of the next one."""

    def __init__(
        self,
        config: Config,
        axes: Axes,
        links: Links,
        layout: LayoutEstimate,
        work: Work,
        requests: Requests | None,
    ):
        check_simulated(config)
        self._config, self._axes, self._links, self._layout, self._work = config, axes, links, layout, work
        self._layers, self._micro_batches = config.model.layers, layout.micro_batches
        self._windows = [layout.micro_batches]
        self._groups: list[list[int]] = []
        self._overlap = False
        self._fetches: list[list[Transfer]] = [[]]
        self._returns: list[list[Transfer]] = [[]]
        self._ids: Transfer | None = None
        if layout.tables is not None:
            assert requests is not None
            self._windows = layout.tables.window_sizes
            self._overlap = config.memory.overlap and axes.rows > 1
            self._exchange(requests)
        self._collectives()
        self._engine()

    # What is sent

    def _exchange(self, requests: Requests) -> None:
        config, tables = self._config, table_layout(self._config)
        self._groups = plan_layer_groups(config, tables, self._axes.rows)
        total = sum(table.width for table in tables.tables)
        shares = [sum(t.width for t in tables.tables if t.layer in layers) / total for layers in self._groups]
        wire, groups = WIRE_BYTES[config.memory.wire], ranks_of_groups(self._axes, "rows")
        self._fetches, self._returns = [], []
        for load in requests.windows:
            served, requested = _sides(load)
            scaled = [(_scale(served, wire * share), _scale(requested, wire * share)) for share in shares]
            self._fetches.append([AllToAll("table vectors", groups, s, r, self._links) for s, r in scaled])
            self._returns.append([AllToAll("table gradients", groups, r, s, self._links) for s, r in scaled])
        width = sum(slab.width for slab in table_layout(config, self._axes.tensor).slabs)
        of_id = id_bytes(tables.num_rows) * len(tables.slabs) / width
        self._ids = AllToAll(
            "token ids",
            groups,
            _scale(_total([_sides(load)[1] for load in requests.windows]), of_id),
            _scale(_total([_sides(load)[0] for load in requests.windows]), of_id),
            self._links,
        )

    def _collectives(self) -> None:
        """Those of the tensor axis and of the tables, which wait for nobody but each other."""
        messages = self._layout.messages
        tensor = [m for m in messages if m.axis == "tensor" and m.name != "norm and loss"]
        passes = 2 * self._layers * self._micro_batches
        self._block = [self._ring(replace(m, bytes=m.bytes / passes)) for m in tensor if not m.of_tables]
        windows = len(self._windows)
        of_window = [self._ring(replace(m, bytes=m.bytes / windows)) for m in tensor if m.of_tables]
        self._after_fetch = [one for one in of_window if one.name == "residual-site vectors"]
        self._after_return = [one for one in of_window if one.name != "residual-site vectors"]
        self._replicas = [self._ring(m) for m in messages if m.name == "gradients of replicas"]
        self._norm = [self._ring(m) for m in messages if m.name == "norm and loss"]

    def _engine(self) -> None:
        """Messages of the backbone's engine, by when they are sent."""
        config = self._config
        names = {"norm and loss"}
        messages = [m for m in self._layout.messages if not m.of_tables and m.axis != "tensor" and m.name not in names]
        shapes = parameter_shapes(config, self._axes.tensor)
        blocks = [float(numel(block)) for block in shapes.blocks]
        root, head = float(numel(shapes.root)), float(numel(shapes.head))
        engine, stage = config.parallel.engine, config.parallel.zero_stage
        each = engine == "hsdp" or (engine == "deepspeed" and stage == 3)
        self._engine_overlaps = self._work.engine_overlaps and (each or (engine == "deepspeed" and stage == 2))
        again = config.parallel.reshard
        if engine == "deepspeed" and stage == 3:
            zero = deepspeed_config(config, self._axes.data)["zero_optimization"]
            again = sum(blocks) + root + head > zero["stage3_max_live_parameters"]
        micro_batches = self._micro_batches
        self._gathers: dict[tuple[str, int], list[Ring]] = {}
        self._reductions: dict[int, list[Ring]] = {}
        """By block; the head's is number `layers`, the embedding's number -1."""
        self._reduced_each = engine == "deepspeed" and stage > 1
        self._after_backward: list[Ring] = []
        self._after_update: list[Ring] = []
        for message in messages:
            if message.collective == "all-gather" and each:
                weights = {("forward", layer): block for layer, block in enumerate(blocks)}
                weights["forward", 0] += root + head
                if again:
                    weights |= {("backward", layer): block for layer, block in enumerate(blocks)}
                whole = sum(weights.values()) * micro_batches
                for key, weight in weights.items():
                    part = replace(message, bytes=message.bytes * weight / whole)
                    self._gathers.setdefault(key, []).append(self._ring(part))
            elif message.collective == "all-gather":
                self._after_update.append(self._ring(message))
            elif each or self._reduced_each:
                units = dict(enumerate(blocks)) | {len(blocks): head, -1: root}
                whole = sum(units.values()) * (micro_batches if self._reduced_each else 1)
                for layer, weight in units.items():
                    part = replace(message, bytes=message.bytes * weight / whole)
                    self._reductions.setdefault(layer, []).append(self._ring(part))
            else:
                self._after_backward.append(self._ring(message))

    def _ring(self, message: Message) -> Ring:
        axis: Axis = message.axis
        collective: Collective = message.collective
        names = {"parameters": "gathering parameters", "gradients": "reducing gradients", "norm and loss": "joint norm"}
        name = names.get(message.name, message.name)
        if axis == "tensor" and not message.of_tables and message.name != "norm and loss":
            name = "tensor axis"
        return Ring(name, collective, ranks_of_groups(self._axes, axis), message.bytes, self._links)

    # What is done

    def __call__(self, clock: Clock, fetched: list[Pending] | None) -> list[Pending] | None:
        planned = self._plan(clock)
        staged = clock.now + self._work.staging
        for window, size in enumerate(self._windows):
            vectors = fetched if fetched is not None else self._fetch(clock, window)
            fetched = None
            for number in range(size):
                first, last = number == 0, number == size - 1
                returned = self._micro_batch(
                    clock,
                    vectors if first else [],
                    window if last else None,
                    last_of_step=last and window == len(self._windows) - 1,
                )
            self._give_back(clock, window, returned)
        for ring in (*self._replicas, *self._norm):
            clock.wait(clock.send(ring))
        clock.work("updating tables", self._work.tables_update)
        clock.wait_until("staging of table rows", staged)
        ahead = None
        if self._layout.tables is not None:
            clock.wait_until("planning", planned)
            if self._overlap and len(self._windows) == 1:
                ahead = self._fetch(clock, 0)
        clock.work("updating the backbone", self._work.backbone_update)
        for ring in self._after_update:
            clock.wait(clock.send(ring))
        return ahead

    def _plan(self, clock: Clock) -> Times:
        """The next step. When it is done."""
        planned = clock.plan("planning", self._work.planning)
        return planned if self._ids is None else clock.send(self._ids, planned, "host").end

    def _fetch(self, clock: Clock, window: int) -> list[Pending]:
        if self._layout.tables is None:
            return []
        clock.work("gathering vectors", self._work.fetch * (self._windows[window] / self._micro_batches))
        return [clock.send(message) for message in self._fetches[window]]

    def _receive(self, clock: Clock, vectors: list[Pending]) -> None:
        """The next message of a fetch."""
        clock.wait(vectors.pop(0))
        if not vectors:
            for ring in self._after_fetch:
                clock.wait(clock.send(ring))

    def _micro_batch(
        self, clock: Clock, vectors: list[Pending], returning: int | None, *, last_of_step: bool
    ) -> list[Pending]:
        """`vectors`: to be waited for. `returning`: the window whose last micro-batch this is. The gradients of vectors
        that are under way."""
        if vectors and not self._overlap:
            self._receive(clock, vectors)
        layers, work, reductions = range(self._layers), self._work, list[Pending]()
        starts = {group[0]: number for number, group in enumerate(self._groups)}
        gathered = self._gather_ahead(clock, "forward")
        for layer in layers:
            gathered(layer)
            if vectors and layer in starts:
                self._receive(clock, vectors)
            clock.work("forward", work.forward)
            self._tensor(clock)
        clock.work("head and loss", work.head)
        self._reduce(clock, self._layers, reductions, last_of_step)
        returned: list[Pending] = []
        gathered = self._gather_ahead(clock, "backward")
        for layer in reversed(layers):
            gathered(layer)
            clock.work("backward", work.backward)
            self._tensor(clock)
            self._reduce(clock, layer, reductions, last_of_step)
            if self._overlap and returning is not None and layer in starts:
                returned.append(clock.send(self._returns[returning][starts[layer]]))
        self._reduce(clock, -1, reductions, last_of_step)
        if last_of_step:
            for ring in self._after_backward:
                clock.wait(clock.send(ring))
        for pending in reductions:
            clock.wait(pending)
        return returned

    def _gather_ahead(self, clock: Clock, direction: str) -> "Callable[[int], None]":
        """A block's parameters are gathered while the one before it computes."""
        layers = range(self._layers) if direction == "forward" else reversed(range(self._layers))
        waiting = [layer for layer in layers if (direction, layer) in self._gathers]
        under_way: dict[int, list[Pending]] = {}

        def ask() -> None:
            if waiting:
                layer = waiting.pop(0)
                under_way[layer] = [clock.send(ring) for ring in self._gathers[direction, layer]]

        def receive(layer: int) -> None:
            if layer not in under_way:
                ask()
            if self._engine_overlaps:
                ask()
            for pending in under_way.pop(layer, []):
                clock.wait(pending)

        return receive

    def _reduce(self, clock: Clock, layer: int, reductions: list[Pending], last_of_step: bool) -> None:
        if not (last_of_step or self._reduced_each):
            return
        reduced: Times | None = None
        for ring in self._reductions.get(layer, []):  # within shards first, then over replicas
            pending = clock.send(ring, reduced)
            reduced = pending.end
            if self._engine_overlaps:
                reductions.append(pending)
            else:
                clock.wait(pending)

    def _tensor(self, clock: Clock) -> None:
        for ring in self._block:
            clock.wait(clock.send(ring))

    def _give_back(self, clock: Clock, window: int, returned: list[Pending]) -> None:
        if self._layout.tables is None:
            return
        for pending in returned or [clock.send(message) for message in self._returns[window]]:
            clock.wait(pending)
        for ring in self._after_return:
            clock.wait(clock.send(ring))
        clock.work("adding up gradients", self._work.give_back * (self._windows[window] / self._micro_batches))


Side = tuple[Times, Times]
"""(to or from other nodes, within the node)"""


def _sides(load: WindowLoad) -> tuple[Side, Side]:
    """(served, requested)"""
    return (load.served_far, load.served_near), (load.requested_far, load.requested_near)


def _scale(side: Side, factor: float) -> Side:
    return side[0] * factor, side[1] * factor


def _total(sides: list[Side]) -> Side:
    return np.sum([far for far, _ in sides], axis=0), np.sum([near for _, near in sides], axis=0)
