"""Memory tiers of table rows: device memory, host memory and disk, on the same steps in one run.

Every side trains the tables of W1 (bench/exchange.py) as a training step does: plan a step ahead, fetch, look up, loss
and backward, give back, exact AdamW. One rank, one thread, 4,096 tokens a step, 20 tables of 75,968 rows x 64 side by
side. "memory" keeps all rows as tensors (`memory.rows: all`); host and disk keep records of touched rows, 15.4 kB each,
which the CPU updates where they lie.
All rows have been touched before the first measured step.

warm       everything fits in memory, and there is no compute to hide behind: step time of host and disk over that of
           memory. The sides take turns of some steps; the first step of a turn is not counted.
limited    the disk tier in a cgroup with a quarter of the touched bytes, and beside it without a limit; with and
           without prefetch. Computing takes 300 ms more, a pause: as with a GPU, the CPU is free meanwhile. Tokens are
           Zipf(1.0), of which about nine in ten fall on rows that fit; or uniform, of which one in four does. A wait is
           time in addition to that of an unlimited step. Code is compiled before the process enters the cgroup; what
           training allocates counts.
growth     1,000 times the logical rows, and the same tokens spread over them: step time, and memory of the process.

Every side of `limited` and `growth` runs in a fresh process. Figures are medians over steps.
"""

import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xgram_dist.bench.exchange import ROWS, TOKENS, WIDTH, draw_tokens, look_up, workload
from xgram_dist.bench.memory_limit import MemoryLimit, why_not
from xgram_dist.console import Progress
from xgram_dist.model.methods.base import table_layout
from xgram_dist.optim.schedule import table_rates
from xgram_dist.parallel.device import peak_memory, retain_freed_host_memory
from xgram_dist.parallel.launch import end_with_starter
from xgram_dist.parallel.mesh import single_mesh
from xgram_dist.parallel.process_group import ProcessGroup
from xgram_dist.tables.exchange import ShardedTables
from xgram_dist.tables.optimizers.build import TableOptimizerSettings
from xgram_dist.tables.records import WORD, record_width
from xgram_dist.tables.storage.disk import DiskStorage
from xgram_dist.tables.touched_shard import TouchedShard

COMPUTE_SECONDS = 0.3
SIDES = ("memory", "host", "disk")
WARM = 5
GROWTH = 1000
CPU = torch.device("cpu")


def touched_bytes() -> int:
    """Records of all rows: values, two moments, bookkeeping."""
    config = workload(ROWS, WIDTH)
    settings = TableOptimizerSettings.of(config, None, ROWS, "catch_up")
    fields = [
        settings.record_fields(slab.width, len(slab.tables), gated=False, counted=False)
        for slab in table_layout(config).slabs
    ]
    return WORD * ROWS * sum(record_width(of_slab) for of_slab in fields)


def limit_bytes() -> int:
    return touched_bytes() // 4


def draw(kind: str, steps: int) -> list[Tensor]:
    """The tokens of each step."""
    if kind == "zipf":
        return list(torch.from_numpy(draw_tokens(steps, 1, ROWS)[:, 0]))
    random = np.random.default_rng(0)
    return [torch.from_numpy(random.integers(0, ROWS, TOKENS)) for _ in range(steps)]


def share_that_fits(kind: str) -> float:
    """Of the tokens, how many hit the most frequent rows that the memory limit has room for."""
    weights = 1.0 / np.arange(1, ROWS + 1) if kind == "zipf" else np.ones(ROWS)
    return float(weights[: ROWS // 4].sum() / weights.sum())


class Side:
    """Tables in one tier, trained step by step."""

    def __init__(self, side: str, folder: Path, *, scale: int = 1, prefetch: bool = True):
        """`scale`: times the logical rows."""
        tier: dict[str, Any] = {"rows": "all"}
        if side != "memory":
            tier = {"rows": "touched", "placement": side}
        if side == "disk":
            tier["folder"] = tempfile.mkdtemp(dir=folder)
        self._config = workload(ROWS * scale, WIDTH, **tier)
        self.tables = ShardedTables(self._config, table_layout(self._config), None, CPU, single_mesh(ProcessGroup()))
        self._number = 0
        for shard in self.tables.shards:
            if isinstance(shard, TouchedShard) and isinstance(shard.records.storage, DiskStorage):
                shard.records.storage.reads_ahead = prefetch

    def touch(self, tokens: Tensor) -> None:
        """Train these rows once."""
        for some in tokens.split(TOKENS):
            self.run([some, some[:1]])

    def run(self, tokens: list[Tensor], compute_seconds: float = 0.0) -> list[float]:
        """The seconds of a step for each of the tokens but the last, which is only planned."""
        seconds, planned = [], self.tables.plan(tokens[0])
        for following in tokens[1:]:
            start = time.perf_counter()
            self._number += 1
            windows, planned = planned.result(), self.tables.plan(following)
            working = self.tables.fetch(windows[0])
            look_up(working)
            if compute_seconds:
                time.sleep(compute_seconds)
            self.tables.give_back(working)
            self.tables.shards.apply(table_rates(self._config, self._number, self.tables.shards.num_rows))
            seconds.append(time.perf_counter() - start)
        planned.result()
        return seconds

    def close(self) -> None:
        self.tables.close()


def run_warm(rounds: int, steps: int, folder: Path, progress: Progress) -> dict[str, Any]:
    sides = {name: Side(name, folder) for name in SIDES}
    for side in sides.values():
        side.touch(torch.arange(ROWS))
    drawn = draw("zipf", rounds * (steps + 1) + 1)
    wall: dict[str, list[float]] = {name: [] for name in SIDES}
    for number in range(rounds):
        tokens = drawn[number * (steps + 1) : (number + 1) * (steps + 1) + 1]
        for name in SIDES if number % 2 else reversed(SIDES):
            wall[name].append(1000 * statistics.median(sides[name].run(tokens)[1:]))
            progress.update()
    for side in sides.values():
        side.close()
    ratios = {name: [a / b for a, b in zip(wall[name], wall["memory"], strict=True)] for name in SIDES[1:]}
    return {
        "ms": {name: round(statistics.median(values), 2) for name, values in wall.items()},
        "over_memory": {name: round(statistics.median(values), 3) for name, values in ratios.items()},
        "over_memory_range": {name: [round(min(v), 3), round(max(v), 3)] for name, v in ratios.items()},
    }


def _set_up_as_training() -> None:
    torch.set_num_threads(1)
    retain_freed_host_memory()


# In processes of their own: figures of one side, as JSON in `file`.


def _limited_side(file: str, kind: str, steps: int, prefetch: bool, limit: MemoryLimit | None, folder: str) -> None:
    end_with_starter()
    _set_up_as_training()
    compiled = Side("disk", Path(folder))
    compiled.run(draw("zipf", WARM))
    compiled.close()
    if limit is not None:
        limit.enter()
    side = Side("disk", Path(folder), prefetch=prefetch)
    side.touch(torch.arange(ROWS))
    seconds = side.run(draw(kind, WARM + steps + 1), COMPUTE_SECONDS)[WARM:]
    figures = {
        "ms": 1000 * statistics.median(seconds),
        "slowest_ms": 1000 * max(seconds),
        "peak_bytes": 0 if limit is None else limit.peak(),
    }
    side.close()
    Path(file).write_text(json.dumps(figures), encoding="utf-8")


def _grown_side(file: str, scale: int, steps: int, folder: str) -> None:
    torch.set_num_threads(1)
    side = Side("host", Path(folder), scale=scale)
    tokens = list(torch.from_numpy(draw_tokens(WARM + steps + 1, 1, ROWS, scale)[:, 0]))
    seconds = side.run(tokens)[WARM:]
    records = sum(shard.records.nbytes for shard in side.tables.shards if isinstance(shard, TouchedShard))
    figures = {"ms": 1000 * statistics.median(seconds), "peak_bytes": peak_memory(CPU), "record_bytes": records}
    side.close()
    Path(file).write_text(json.dumps(figures), encoding="utf-8")


def _in_fresh_process(work: Callable[..., None], *arguments: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="xgram-bench-") as folder:
        file = f"{folder}/figures"
        process = multiprocessing.get_context("spawn").Process(target=work, args=(file, *arguments))
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
            with MemoryLimit(limit_bytes()) as limit:
                sides[name] = _in_fresh_process(_limited_side, kind, steps, prefetch, limit, str(folder))
        else:
            sides[name] = _in_fresh_process(_limited_side, kind, steps, prefetch, None, str(folder))
        progress.update()
    failed = {name: side["failed"] for name, side in sides.items() if "failed" in side}
    if failed:
        return {"failed": failed}
    ms = {name: side["ms"] for name, side in sides.items()}
    waits = {name: max(0.0, ms[name] - ms["unlimited"]) for name in ms}
    return {
        "hits_that_fit": round(share_that_fits(kind), 3),
        "ms": {name: round(value, 1) for name, value in ms.items()},
        "slowest_ms": {name: round(side["slowest_ms"], 1) for name, side in sides.items()},
        "exposed_ms": {name: round(value - 1000 * COMPUTE_SECONDS, 1) for name, value in ms.items()},
        "over_unlimited": round(ms["limited"] / ms["unlimited"], 3),
        "over_unlimited_without_prefetch": round(ms["limited_without_prefetch"] / ms["unlimited"], 3),
        "waits_hidden_share": round(1 - waits["limited"] / max(1e-9, waits["limited_without_prefetch"]), 3),
        "peak_bytes": sides["limited"]["peak_bytes"],
        "under_limit": sides["limited"]["peak_bytes"] <= limit_bytes(),
    }


def run_growth(rounds: int, steps: int, folder: Path, progress: Progress) -> dict[str, Any]:
    found: dict[int, list[dict[str, Any]]] = {1: [], GROWTH: []}
    for number in range(rounds):
        for scale in sorted(found, reverse=bool(number % 2)):
            found[scale].append(_in_fresh_process(_grown_side, scale, 2 * steps, str(folder)))
            progress.update()
    failed = [side["failed"] for sides in found.values() for side in sides if "failed" in side]
    if failed:
        return {"failed": failed[0]}
    ratios = {
        key: statistics.median(more[key] / less[key] for less, more in zip(found[1], found[GROWTH], strict=True))
        for key in ("ms", "peak_bytes", "record_bytes")
    }
    return {
        "rows": {str(scale): ROWS * scale for scale in found},
        "ms": {str(scale): round(statistics.median(one["ms"] for one in sides), 1) for scale, sides in found.items()},
        "time_ratio": round(ratios["ms"], 3),
        "memory_ratio": round(ratios["peak_bytes"], 3),
        "record_bytes_ratio": round(ratios["record_bytes"], 3),
    }


def run_tiers_benchmark(rounds: int, steps: int, folder: Path) -> dict[str, Any]:
    """`folder`: on the disk to measure."""
    reason = why_not()
    kinds = () if reason else ("zipf", "uniform")
    grown = -(-rounds // 3)
    threads = torch.get_num_threads()
    _set_up_as_training()
    with (
        tempfile.TemporaryDirectory(prefix="xgram-bench-", dir=folder) as scratch,
        Progress(rounds * len(SIDES) + 3 * len(kinds) + 2 * grown, "measurements", "sides in turn") as progress,
    ):
        figures: dict[str, Any] = {
            "touched_bytes": touched_bytes(),
            "warm": run_warm(rounds, steps, Path(scratch), progress),
            "limit_bytes": limit_bytes(),
        }
        for kind in kinds:
            figures[f"limited_{kind}"] = run_limited(kind, 2 * steps, Path(scratch), progress)
        figures["growth"] = run_growth(grown, steps, Path(scratch), progress)
    torch.set_num_threads(threads)
    if reason:
        figures["limited"] = f"skipped: {reason}"
    return figures
