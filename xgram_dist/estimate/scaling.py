"""A recipe simulated on some ranks, and layouts of it on more and more ranks.

In a sweep the recipe's batch stays. Where its micro-batches do not divide over the ranks, smaller ones are taken.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xgram_dist.config.schema import Config
from xgram_dist.config.validate import accumulation, check
from xgram_dist.errors import UserError
from xgram_dist.estimate.comm import Axes
from xgram_dist.estimate.layout import LayoutEstimate, plan_layout
from xgram_dist.estimate.links import Latency, Links
from xgram_dist.estimate.requests import Requests, draw_requests
from xgram_dist.estimate.simulate import OTHERS, Recorder, SimulatedStep, Stragglers, simulate_step
from xgram_dist.estimate.step_program import StepProgram, Work, check_simulated
from xgram_dist.estimate.step_time import Machine
from xgram_dist.estimate.traffic import Traffic, build_traffic
from xgram_dist.tables.routing import Routing

HOST_THREADS = 8
"""That plan a step, at most (tables/requests.py)."""
COMPUTE = ("forward", "backward", "head and loss")
TABLES = (
    "gathering vectors",
    "table vectors",
    "table gradients",
    "adding up gradients",
    "residual-site vectors",
    "residual-site gradients",
    "row-gate gradients",
    "gradients of replicas",
    "planning",
    "staging of table rows",
    "updating tables",
)
ENGINE = ("gathering parameters", "reducing gradients", "tensor axis", "joint norm", "updating the backbone")
PARTS = {"compute": COMPUTE, "tables": TABLES, "backbone": ENGINE, "others": (OTHERS,)}

LAYOUTS: dict[str, dict[str, Any]] = {
    "replicated": {"parallel.engine": "replicated"},
    "ZeRO 1": {"parallel.engine": "deepspeed", "parallel.zero_stage": 1},
    "ZeRO 2": {"parallel.engine": "deepspeed", "parallel.zero_stage": 2},
    "ZeRO 3": {"parallel.engine": "deepspeed", "parallel.zero_stage": 3, "train.compile": False},
    "HSDP": {"parallel.engine": "hsdp"},
    "HSDP, overlap": {"parallel.engine": "hsdp", "memory.overlap": True},
    "HSDP, tables by node": {"parallel.engine": "hsdp", "memory.shard": "node"},
    "HSDP, by node, overlap": {"parallel.engine": "hsdp", "memory.shard": "node", "memory.overlap": True},
}
"""HSDP shards the backbone over the ranks of a node, and has a replica on each."""


class Trace:
    """Where the tokens of a step come from, and what was drawn of them. Of one recipe's tables."""

    def __init__(self, frequencies: NDArray[Any] | None, routing: Routing | None, seed: int = 0):
        """`frequencies`: None for a recipe without tables."""
        self.frequencies, self.routing, self.seed = frequencies, routing, seed
        self._traffic: dict[int, Traffic] = {}
        self._drawn: dict[Any, Requests] = {}

    def traffic(self, config: Config, rows: int) -> Traffic:
        """`rows`: ranks that hold the tables once."""
        assert self.frequencies is not None
        if rows not in self._traffic:
            self._traffic[rows] = build_traffic(config, self.frequencies, self.routing, rows)
        return self._traffic[rows]

    def requests(
        self, config: Config, axes: Axes, sizes: list[int], node_ranks: int, progress: Callable[[], None]
    ) -> Requests:
        """Layouts that differ in the backbone alone see the same tokens. `sizes`: micro-batches of each window."""
        assert self.frequencies is not None
        key = (axes.data, axes.rows, axes.tensor, config.train.micro_batch, tuple(sizes), node_ranks)
        if key not in self._drawn:
            traffic = self.traffic(config, axes.rows)
            self._drawn[key] = draw_requests(
                config, axes, self.frequencies, self.routing, traffic, sizes, node_ranks, self.seed, progress
            )
        return self._drawn[key]


@dataclass(frozen=True)
class Network:
    machine: Machine
    latency: Latency
    uplink: float | None = None
    """Of a node, in GB/s."""


@dataclass(frozen=True)
class Simulation:
    layout: LayoutEstimate
    links: Links
    requests: Requests | None
    step: SimulatedStep
    recorder: Recorder

    def part(self, name: str) -> float:
        """Seconds of a step, mean over ranks: `compute`, `tables`, `backbone` or `others`."""
        return sum(float(self.step.spent[phase].mean()) for phase in PARTS[name] if phase in self.step.spent)

    @property
    def bound(self) -> str:
        """The phase that takes most, beside compute."""
        others = {name: float(s.mean()) for name, s in self.step.spent.items() if name not in COMPUTE}
        return max(others, key=lambda name: others[name]) if others else ""

    def as_dict(self) -> dict[str, Any]:
        axes, step = self.layout.axes, self.step.as_dict()
        return {
            "ranks": axes.world,
            "nodes": self.links.num_nodes,
            "data": axes.data,
            "tensor": axes.tensor,
            "replicate": axes.replicate,
            "replicas": axes.replicas,
            "micro_batches": self.layout.micro_batches,
            **step,
            "parts": {name: self.part(name) for name in PARTS},
            "bound": self.bound,
            "planned_seconds": {
                "one_by_one": self.layout.time.one_by_one,
                "overlapped": self.layout.time.overlapped,
            },
            "imbalance": None if self.requests is None else self.requests.imbalance,
            "device_bytes": self.layout.device_bytes,
            "host_bytes": self.layout.host_bytes,
        }


def simulate_recipe(
    config: Config,
    ranks: int,
    network: Network,
    trace: Trace,
    slow: dict[int, float] | None = None,
    jitter: float = 0.0,
    rows_of_timeline: int = 0,
    progress: Callable[[], None] = lambda: None,
) -> Simulation:
    """`slow`: factor of work by rank. `rows_of_timeline`: ranks whose events are kept. `progress`: called once for each
    rank of the data axis and window."""
    check_simulated(config)
    config, axes = place(config, ranks, network.machine)
    links = Links.of(network.machine, ranks, network.latency, network.uplink)
    layout, requests = plan_and_draw(config, axes, network.machine, trace, progress)
    work = Work.of(config, layout, requests, HOST_THREADS)
    program = StepProgram(config, axes, links, layout, work, requests)

    def stragglers() -> Stragglers:
        return Stragglers(ranks, slow, jitter, trace.seed)

    step, recorder = simulate_step(program, ranks, stragglers)
    if rows_of_timeline:
        _, recorder = simulate_step(program, ranks, stragglers, choose_ranks(step, slow or {}, rows_of_timeline))
    return Simulation(layout, links, requests, step, recorder)


def place(config: Config, ranks: int, machine: Machine) -> tuple[Config, Axes]:
    """`memory.shard: node` as a number of ranks of this machine's nodes."""
    if config.memory.shard == "node":
        per_node = min(ranks, machine.node_ranks)
        shard = max(1, per_node // config.parallel.tensor)
        config = _change(config, {"memory.shard": shard})
    return config, Axes.of(config, ranks)


def plan_and_draw(
    config: Config, axes: Axes, machine: Machine, trace: Trace, progress: Callable[[], None] = lambda: None
) -> tuple[LayoutEstimate, Requests | None]:
    if trace.frequencies is None:
        return plan_layout(config, axes, machine, None), None
    layout = plan_layout(config, axes, machine, trace.traffic(config, axes.rows))
    assert layout.tables is not None
    return layout, trace.requests(config, axes, layout.tables.window_sizes, machine.node_ranks, progress)


def choose_ranks(step: SimulatedStep, slow: dict[int, float], count: int) -> list[int]:
    """Ranks to look at: the slow ones, then the one that waits least, the median, the one that waits most, and others
    evenly between."""
    order = step.order()
    places = [0, len(order) // 2, len(order) - 1]
    places += [int(place) for place in np.linspace(0, len(order) - 1, count)]
    chosen = list(dict.fromkeys([*sorted(slow), *(order[place] for place in places)]))[:count]
    return sorted(chosen, key=order.index)


# Layouts on more and more ranks


@dataclass(frozen=True)
class ScalingRow:
    layout: str
    simulation: Simulation
    micro_batch: int
    efficiency: float
    """Speed-up over the fewest ranks of the layout, divided by the ratio of ranks."""

    def as_dict(self) -> dict[str, Any]:
        found = self.simulation.as_dict()
        return {"layout": self.layout, "micro_batch": self.micro_batch, "efficiency": self.efficiency, **found}


def sweep(
    config: Config,
    ranks: list[int],
    layouts: list[str],
    network: Network,
    trace: Trace,
    progress: Callable[[], None] = lambda: None,
) -> list[ScalingRow]:
    """`progress`: called once for each number of ranks and layout."""
    rows = []
    for name in layouts:
        first: tuple[int, float] | None = None
        for count in ranks:
            changed = fit(config, name, count, network.machine)
            if changed is not None:
                simulation = simulate_recipe(changed, count, network, trace)
                seconds = simulation.step.seconds
                first = first or (count, seconds)
                efficiency = first[0] * first[1] / (count * seconds)
                rows.append(ScalingRow(name, simulation, changed.train.micro_batch, efficiency))
            progress()
    if not rows:
        raise UserError(
            f"train.global_batch = {config.train.global_batch} divides over none of the ranks "
            f"{', '.join(map(str, ranks))}; change one of the two"
        )
    return rows


def fit(config: Config, layout: str, ranks: int, machine: Machine) -> Config | None:
    """The recipe with this layout on so many ranks; None where its batch does not divide over them."""
    keys = dict(LAYOUTS[layout])
    tensor, batch = config.parallel.tensor, config.train.global_batch
    data = ranks // tensor
    if ranks % tensor or batch % data:
        return None
    of_rank = batch // data
    keys["train.micro_batch"] = max(n for n in range(1, config.train.micro_batch + 1) if of_rank % n == 0)
    if keys["parallel.engine"] == "hsdp":
        shard = max(1, min(data, machine.node_ranks // tensor))
        if data % shard:
            return None
        keys["parallel.replicate"] = data // shard
    else:
        keys["parallel.replicate"] = 1
    if keys["parallel.engine"] != "deepspeed":
        keys["parallel.offload"] = False
    try:
        changed = _change(config, keys)
        check(changed)
        _, axes = place(changed, ranks, machine)
        accumulation(changed, axes.data)
    except UserError:
        return None
    return changed


def _change(config: Config, keys: dict[str, Any]) -> Config:
    for path, value in keys.items():
        section, key = path.split(".")
        updated = getattr(config, section).model_copy(update={key: value})
        config = config.model_copy(update={section: updated})
    return config
