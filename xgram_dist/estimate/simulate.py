"""A discrete-event run of an optimizer step over all ranks and links.

Each rank has four resources: its device, its card to the network, its link within the node, and its host, which plans
ahead. An event is the start or the end of a phase on a resource. Work on a device starts when what came before it has
ended. A transfer between nodes takes the network, one within nodes the link; it starts on a rank when it has been asked
for and that is free, in the order of the program, and ends as its links allow (`links.py`). Waiting is what a device
does until a transfer has ended; it is told apart into waiting for ranks that have not asked for the transfer, and for
the bytes.

The order of events of a rank is that of the program (`step_program.py`), the same on all ranks. So the run goes through
the program once, and treats an event of all ranks at a time.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from xgram_dist.estimate.links import Times, Transfer

Lane = Literal["device", "network", "node", "host"]
OTHERS = "waiting for other ranks"


@dataclass(frozen=True)
class Event:
    """A phase on the ranks that a `Recorder` follows."""

    lane: Lane
    name: str
    start: Times
    end: Times


class Recorder:
    """Keeps the events of some ranks, for a timeline."""

    def __init__(self, ranks: list[int]):
        self.ranks = ranks
        self.start = np.zeros(len(ranks))
        """Of the step, on each of these ranks."""
        self.events: list[Event] = []

    def add(self, lane: Lane, name: str, start: Times, end: Times) -> None:
        start, end = start[self.ranks], end[self.ranks]
        if (end > start).any():
            self.events.append(Event(lane, name, start, end))


@dataclass(frozen=True)
class Pending:
    """A transfer under way."""

    name: str
    last_asked: Times
    """When the last rank of each rank's group had asked for it."""
    end: Times


class Stragglers:
    """How much longer than planned each rank works."""

    def __init__(self, ranks: int, slow: dict[int, float] | None = None, jitter: float = 0.0, seed: int = 0):
        """`slow`: factor by rank. `jitter`: standard deviation of the logarithm of a factor that is drawn for each
        phase of work and rank; its mean is one."""
        self.factors = np.ones(ranks)
        for rank, factor in (slow or {}).items():
            self.factors[rank] = factor
        self._jitter, self._random = jitter, np.random.default_rng(seed)

    def __call__(self) -> Times:
        if not self._jitter:
            return self.factors
        drawn = self._random.normal(-(self._jitter**2) / 2, self._jitter, len(self.factors))
        factors: Times = self.factors * np.exp(drawn)
        return factors


class Clock:
    """The time of every rank, and what it was spent on."""

    def __init__(self, ranks: int, stragglers: Stragglers | None = None, recorder: Recorder | None = None):
        self.now = np.zeros(ranks)
        self.spent: dict[str, Times] = {}
        """Seconds of each rank's device, by phase."""
        self.far, self.near = np.zeros(ranks), np.zeros(ranks)
        """Bytes that each rank sent to other nodes, and within its node."""
        self.transferring: dict[str, float] = {}
        """Seconds that transfers of a name took from their last start to their end on the last rank, hidden or not."""
        self.bytes: dict[str, float] = {}
        """Sent by all ranks, by transfer."""
        self._free: dict[Lane, Times] = {lane: np.zeros(ranks) for lane in ("network", "node", "host")}
        self._stragglers = stragglers or Stragglers(ranks)
        self.recorder = recorder

    def work(self, name: str, seconds: float | Times) -> None:
        """On the device."""
        if np.any(seconds):
            self._advance(name, self.now + seconds * self._stragglers())

    def plan(self, name: str, seconds: float | Times) -> Times:
        """Begins now, on the host, or when it is free. When it will be done."""
        start = np.maximum(self.now, self._free["host"])
        self._free["host"] = start + seconds
        self._record("host", name, start, self._free["host"])
        return self._free["host"]

    def send(self, transfer: Transfer, ready: Times | None = None, lane: Lane | None = None) -> Pending:
        """Asks for a transfer now, or when it is `ready`. Transfers of a lane follow one another."""
        lane = lane or ("network" if transfer.between_nodes else "node")
        asked = self.now if ready is None else ready
        start = np.maximum(asked, self._free[lane])
        end = transfer.ends(start)
        self._free[lane] = end
        self.far += transfer.far
        self.near += transfer.near
        self.bytes[transfer.name] = self.bytes.get(transfer.name, 0.0) + float((transfer.far + transfer.near).sum())
        last_start = transfer.last_of_group(start)
        seconds = float((end - last_start).max())
        self.transferring[transfer.name] = self.transferring.get(transfer.name, 0.0) + seconds
        self._record(lane, transfer.name, np.maximum(start, last_start), end)
        return Pending(transfer.name, transfer.last_of_group(asked), end)

    def wait(self, pending: Pending) -> None:
        self._advance(OTHERS, np.maximum(self.now, np.minimum(pending.last_asked, pending.end)))
        self._advance(pending.name, np.maximum(self.now, pending.end))

    def wait_until(self, name: str, when: Times) -> None:
        self._advance(name, np.maximum(self.now, when))

    def _advance(self, name: str, end: Times) -> None:
        self.spent.setdefault(name, np.zeros(len(end)))
        self.spent[name] += end - self.now
        self._record("device", name, self.now, end)
        self.now = end

    def _record(self, lane: Lane, name: str, start: Times, end: Times) -> None:
        if self.recorder is not None:
            self.recorder.add(lane, name, start, end)


@dataclass(frozen=True)
class SimulatedStep:
    """A step of a run in full swing: from the end of the step before it, on the slowest rank."""

    seconds: float
    spent: dict[str, Times]
    """Of each rank's device, by phase, in the order in which they first occur. They sum to its step."""
    far: Times
    near: Times
    transferring: dict[str, float]
    bytes: dict[str, float]
    start: Times
    end: Times

    @property
    def waiting(self) -> Times:
        """Of each rank, for others."""
        return self.spent.get(OTHERS, np.zeros(len(self.end)))

    def order(self) -> list[int]:
        """Ranks, the one that waits least for others first: it holds them up."""
        return [int(rank) for rank in np.argsort(self.waiting, kind="stable")]

    def as_dict(self) -> dict[str, Any]:
        phases = {
            name: {"mean": float(seconds.mean()), "largest": float(seconds.max())}
            for name, seconds in self.spent.items()
        }
        return {
            "seconds": self.seconds,
            "phases": phases,
            "transferring": self.transferring,
            "bytes": self.bytes,
            "bytes_between_nodes": {"mean": float(self.far.mean()), "largest": float(self.far.max())},
            "bytes_within_nodes": {"mean": float(self.near.mean()), "largest": float(self.near.max())},
        }


Program = Callable[[Clock, Any], Any]
"""Runs a step; what a step hands to the next one goes in and out: a fetch that is under way."""


def simulate_step(
    program: Program, ranks: int, stragglers: Callable[[], Stragglers], recorded: list[int] | None = None
) -> tuple[SimulatedStep, Recorder]:
    """The second of two steps: only that one begins with what the step before has sent ahead. `recorded`: ranks whose
    events are kept."""
    recorder = Recorder(recorded or [])
    clock = Clock(ranks, stragglers())
    handed_on = program(clock, None)
    start = clock.now.copy()
    before = {name: seconds.copy() for name, seconds in clock.spent.items()}
    far, near, transferring, sent = clock.far.copy(), clock.near.copy(), dict(clock.transferring), dict(clock.bytes)
    recorder.start = start[recorder.ranks]
    clock.recorder = recorder if recorded else None
    program(clock, handed_on)
    spent = {name: seconds - before.get(name, 0.0) for name, seconds in clock.spent.items()}
    step = SimulatedStep(
        seconds=float(clock.now.max() - start.max()),
        spent={name: seconds for name, seconds in spent.items() if seconds.any()},
        far=clock.far - far,
        near=clock.near - near,
        transferring={name: seconds - transferring.get(name, 0.0) for name, seconds in clock.transferring.items()},
        bytes={name: size - sent.get(name, 0.0) for name, size in clock.bytes.items()},
        start=start,
        end=clock.now,
    )
    return step, recorder
