"""Memory tiers of table rows: device memory, host memory and disk, on the same steps in one run.

A step reads the records of its distinct rows, computes, and updates them by AdamW. The tables are a view of W1
(bench/exchange.py): 10 tables of width 64 side by side and 75,968 rows; a record holds values, two moments and
bookkeeping, 7,712 bytes. A step has 4,096 tokens. All rows have been touched before the first measured step.

warm       everything fits in memory, and there is no compute to hide behind: step time of host and disk over that of a
           plain tensor. The sides take turns of some steps; the first step of a turn is not counted. The CPU time of
           the training thread is given, too: it does not depend on what else the machine does.
limited    the disk tier in a cgroup with a quarter of the touched bytes, and beside it without a limit; with and
           without prefetch. Computing is a pause of 300 ms: as with a GPU, the CPU is free meanwhile. Tokens are
           Zipf(1.0), of which about nine in ten fall on rows that fit; or uniform, of which one in four does. Exposed
           time is what a step takes beyond its compute. A wait is exposed time in addition to that of an unlimited
           step.

Every side of `limited` runs in a fresh process. Figures are medians over steps.
"""

import itertools
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xgram_dist.bench.exchange import LAYERS, ROWS, TOKENS, WIDTH
from xgram_dist.bench.memory_limit import MemoryLimit, why_not
from xgram_dist.console import Progress
from xgram_dist.tables.storage import RecordStorage, open_storage
from xgram_dist.tables.storage.memory import DeviceStorage

VALUES = LAYERS * WIDTH
RECORD = 3 * VALUES + 8
TOUCHED_BYTES = 4 * RECORD * ROWS
LIMIT = TOUCHED_BYTES // 4
COMPUTE_SECONDS = 0.3
SIDES = ("memory", "host", "disk")
WARM = 5
BLOCK = 64
"""Records updated at a time: they stay in the CPU's cache."""
CPU = torch.device("cpu")

Slots = NDArray[np.int64]


def draw_slots(kind: str, steps: int) -> Iterator[Slots]:
    """The distinct slots of each step, ascending. Slots are given to rows in the order in which they are first hit, so
    that slot and frequency go together, though not strictly."""
    random = np.random.default_rng(0)
    weights = 1.0 / np.arange(1, ROWS + 1) if kind == "zipf" else np.ones(ROWS)
    order = np.argsort(random.exponential(size=ROWS) / weights)
    slot_of = np.empty(ROWS, np.int64)
    slot_of[order] = np.arange(ROWS)
    cumulated = np.cumsum(weights)
    for _ in range(steps):
        drawn = np.searchsorted(cumulated, random.random(TOKENS) * cumulated[-1])
        yield np.unique(slot_of[drawn])


def share_that_fits(kind: str) -> float:
    """Of the tokens, how many hit the most frequent rows that the memory limit has room for."""
    weights = 1.0 / np.arange(1, ROWS + 1) if kind == "zipf" else np.ones(ROWS)
    return float(weights[: LIMIT // (4 * RECORD)].sum() / weights.sum())


class Table:
    """Rows in one tier, trained step by step."""

    def __init__(self, side: str, folder: Path):
        self.storage: RecordStorage
        if side == "memory":
            self.storage = DeviceStorage(RECORD, ROWS, CPU)
        else:
            self.storage = open_storage(side, RECORD, ROWS, CPU, folder, "bench")
        self.storage.ensure(ROWS)
        for slots in np.array_split(np.arange(ROWS), 64):
            with self.storage.writing(slots):
                self.storage.records[torch.from_numpy(slots)] = 0.01
        self._gradient = torch.randn(TOKENS, VALUES, generator=torch.Generator().manual_seed(0))

    def step(self, slots: Slots, following: Slots | None, compute_seconds: float) -> float:
        """One step; its seconds. `following`: the slots of the next step, to be prefetched."""
        start = time.perf_counter()
        index = torch.from_numpy(slots)
        if following is not None:
            self.storage.prefetch(following)
        vectors = self.storage.records[:, :VALUES].index_select(0, index)
        if compute_seconds:
            time.sleep(compute_seconds)
        with self.storage.writing(slots):
            self._update(index, vectors)
        return time.perf_counter() - start

    def _update(self, index: Tensor, values_RW: Tensor) -> None:
        """AdamW on values and moments, block by block, as the table optimizers do."""
        for start in range(0, len(index), BLOCK):
            index_B = index[start : start + BLOCK]
            records_B = self.storage.records.index_select(0, index_B)
            gradient_BW = self._gradient[start : start + len(index_B)]
            first_BW, second_BW = records_B[:, VALUES : 2 * VALUES], records_B[:, 2 * VALUES : 3 * VALUES]
            first_BW.lerp_(gradient_BW, 0.1)
            second_BW.mul_(0.95).addcmul_(gradient_BW, gradient_BW, value=0.05)
            moved_BW = values_RW[start : start + BLOCK].mul_(1 - 1e-4)
            moved_BW.addcdiv_(first_BW, second_BW.sqrt().add_(1e-8), value=-1e-3)
            records_B[:, :VALUES] = moved_BW
            self.storage.records.index_copy_(0, index_B, records_B)


def run_warm(rounds: int, steps: int, folder: Path, progress: Progress) -> dict[str, Any]:
    tables = {side: Table(side, folder) for side in SIDES}
    drawn = list(draw_slots("zipf", rounds * (steps + 1) + 1))
    wall: dict[str, list[float]] = {side: [] for side in SIDES}
    cpu: dict[str, list[float]] = {side: [] for side in SIDES}
    for number in range(rounds):
        first = number * (steps + 1)
        for side, table in tables.items():
            times = []
            for slots, following in itertools.pairwise(drawn[first : first + steps + 2]):
                before = time.thread_time()
                seconds = table.step(slots, following, 0.0)
                times.append((1000 * seconds, 1000 * (time.thread_time() - before)))
            wall[side].append(statistics.median(seconds for seconds, _ in times[1:]))
            cpu[side].append(statistics.median(seconds for _, seconds in times[1:]))
            progress.update()
    for table in tables.values():
        table.storage.close()
    return {
        "ms": {side: round(statistics.median(values), 2) for side, values in wall.items()},
        "over_memory": {side: _ratio(wall[side], wall["memory"]) for side in SIDES[1:]},
        "cpu_ms": {side: round(statistics.median(values), 2) for side, values in cpu.items()},
        "cpu_over_memory": {side: _ratio(cpu[side], cpu["memory"]) for side in SIDES[1:]},
    }


def _ratio(values: list[float], references: list[float]) -> float:
    """The median over rounds."""
    return round(statistics.median(one / other for one, other in zip(values, references, strict=True)), 3)


def _limited_side(file: str, kind: str, steps: int, prefetch: bool, limit: MemoryLimit | None, folder: str) -> None:
    """In a process of its own: figures of one side, as JSON in `file`."""
    torch.set_num_threads(1)
    if limit is not None:
        limit.enter()
    table = Table("disk", Path(folder))
    drawn = list(draw_slots(kind, WARM + steps + 1))
    seconds = [
        table.step(slots, following if prefetch else None, COMPUTE_SECONDS)
        for slots, following in itertools.pairwise(drawn)
    ][WARM:]
    figures = {
        "ms": 1000 * statistics.median(seconds),
        "slowest_ms": 1000 * max(seconds),
        "peak_bytes": 0 if limit is None else limit.peak(),
        "rows": statistics.mean(len(slots) for slots in drawn),
    }
    table.storage.close()
    Path(file).write_text(json.dumps(figures), encoding="utf-8")


def _in_fresh_process(*arguments: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="xgram-bench-") as folder:
        file = f"{folder}/figures"
        process = multiprocessing.get_context("spawn").Process(target=_limited_side, args=(file, *arguments))
        process.start()
        process.join()
        if process.exitcode:
            return {"failed": f"ended with exit code {process.exitcode}"}
        figures: dict[str, Any] = json.loads(Path(file).read_text(encoding="utf-8"))
        return figures


def run_limited(kind: str, steps: int, folder: Path, progress: Progress) -> dict[str, Any]:
    sides: dict[str, dict[str, Any]] = {}
    for name, prefetch, limited in (
        ("unlimited", True, False),
        ("limited", True, True),
        ("limited_without_prefetch", False, True),
    ):
        if limited:
            with MemoryLimit(LIMIT) as limit:
                sides[name] = _in_fresh_process(kind, steps, prefetch, limit, str(folder))
        else:
            sides[name] = _in_fresh_process(kind, steps, prefetch, None, str(folder))
        progress.update()
    failed = {name: side["failed"] for name, side in sides.items() if "failed" in side}
    if failed:
        return {"failed": failed}
    exposed = {name: side["ms"] - 1000 * COMPUTE_SECONDS for name, side in sides.items()}
    waits = {name: max(0.0, exposed[name] - exposed["unlimited"]) for name in exposed}
    return {
        "hits_that_fit": round(share_that_fits(kind), 3),
        "rows_of_a_step": round(sides["limited"]["rows"]),
        "ms": {name: round(side["ms"], 1) for name, side in sides.items()},
        "slowest_ms": {name: round(side["slowest_ms"], 1) for name, side in sides.items()},
        "exposed_ms": {name: round(ms, 1) for name, ms in exposed.items()},
        "over_unlimited": round(sides["limited"]["ms"] / sides["unlimited"]["ms"], 3),
        "over_unlimited_without_prefetch": round(sides["limited_without_prefetch"]["ms"] / sides["unlimited"]["ms"], 3),
        "waits_hidden_share": round(1 - waits["limited"] / max(1e-9, waits["limited_without_prefetch"]), 3),
        "peak_bytes": sides["limited"]["peak_bytes"],
        "under_limit": sides["limited"]["peak_bytes"] <= LIMIT,
    }


def run_tiers_benchmark(rounds: int, steps: int, folder: Path) -> dict[str, Any]:
    """`folder`: on the disk to measure."""
    reason = why_not()
    kinds = () if reason else ("zipf", "uniform")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with (
        tempfile.TemporaryDirectory(prefix="xgram-bench-", dir=folder) as scratch,
        Progress(rounds * len(SIDES) + 3 * len(kinds), "measurements", "sides in turn") as progress,
    ):
        figures: dict[str, Any] = {
            "touched_bytes": TOUCHED_BYTES,
            "warm": run_warm(rounds, steps, Path(scratch), progress),
            "limit_bytes": LIMIT,
        }
        for kind in kinds:
            figures[f"limited_{kind}"] = run_limited(kind, 2 * steps, Path(scratch), progress)
    torch.set_num_threads(threads)
    if reason:
        figures["limited"] = f"skipped: {reason}"
    return figures
