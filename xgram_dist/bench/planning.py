"""Planning at full size: the seconds that one rank of many takes to plan a step, beside the predicted step.

Rank 0's planner runs as it does in training, on this machine's cores. The requests of the other ranks are computed
beforehand, one rank after the other, so rank 0 serves what it would serve. The two all-to-alls are answered from
memory: the time on the wire is not in the figures, the bytes are. Where the machine has fewer cores than a rank has
planning threads, `free_cores` figures say what the same CPU seconds come to with a core for each thread.

Tokens are those of a prepared data set, or independent draws from frequencies. Text repeats its n-grams, draws do not:
with them planning takes longest.

A GPU is stood in for by torch's meta device, whose operations take no time: it puts together the slots of positions and
widens indices to 64 bits. `pin` copies as many bytes in host memory as are copied to pinned memory for a GPU.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xgram_dist.config import Config
from xgram_dist.config.validate import accumulation
from xgram_dist.console import Progress
from xgram_dist.data.dataset import PreparedData
from xgram_dist.data.loader import Loader
from xgram_dist.errors import UserError
from xgram_dist.estimate.comm import Axes
from xgram_dist.estimate.layout import plan_layout
from xgram_dist.estimate.step_time import Machine, StepTime
from xgram_dist.estimate.traffic import build_traffic, zipf
from xgram_dist.model.methods.base import load_recipe, method_of, table_layout
from xgram_dist.model.methods.engram import Engram
from xgram_dist.parallel.context_parallel import ContextAxis
from xgram_dist.parallel.device import MAX_PLANNING_THREADS
from xgram_dist.parallel.process_group import CompletedWork, ProcessGroup
from xgram_dist.tables.exchange_plan import ID_BYTES, ExchangePlanner, Window, WindowRule
from xgram_dist.tables.frequencies import load_frequencies
from xgram_dist.tables.layout import reads_in_place, routing_settings
from xgram_dist.tables.ngrams import Folding, NgramKeys
from xgram_dist.tables.requests import WindowRequest
from xgram_dist.tables.routing import Routing
from xgram_dist.tables.routing_build import build_routing
from xgram_dist.tables.row_sharding import plan_row_sharding

DEVICE = torch.device("meta")
DIVIDED = ("request", "read")
"""Parts that are divided among threads."""
Result = TypeVar("Result")


class AnsweringGroup(ProcessGroup):
    """Rank 0 of many, which receives what was prepared: in turn the answers of a plan's all-to-alls."""

    def __init__(self, size: int):
        super().__init__(0, size)
        self.answers: list[Tensor] = []
        self._next = 0

    def all_to_all(self, sent: Tensor, sent_counts: list[int], received_counts: list[int]) -> tuple[Tensor, Any]:
        self._next += 1
        return self.answers[(self._next - 1) % len(self.answers)], CompletedWork()


class Clock:
    """Wall and CPU seconds by part. CPU seconds are those of all threads of the process."""

    def __init__(self) -> None:
        self.parts: dict[str, dict[str, float]] = {}

    def time(self, name: str, function: Callable[[], Result]) -> Result:
        wall, cpu = time.perf_counter(), time.process_time()
        result = function()
        self.parts[name] = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
        return result


class PlanningBenchmark:
    """The planners of all data ranks of a recipe, and their tokens."""

    def __init__(self, config: Config, ranks: int, frequencies: NDArray[Any], data: Path | None):
        if isinstance(config.memory.window, str) and config.memory.window != "step":
            raise UserError(
                f"memory.window = {config.memory.window}: with a byte budget ranks agree on the windows; "
                f"give bench planning memory.window=step or a number of micro-batches"
            )
        self.config, self.axes, self.frequencies = config, Axes.of(config, ranks), frequencies
        self.shape = (accumulation(config, self.axes.data), config.train.micro_batch, config.model.sequence_length)
        self.layout = table_layout(config)
        if not self.layout.tables:
            raise UserError(f"'{config.name}' has no tables, so nothing is planned")
        self.routing: Routing | None = None
        if self.layout.hashed:
            self.routing = build_routing(frequencies, routing_settings(config), self.layout.num_views)
        self._sharding = plan_row_sharding(self.routing, self.layout.num_rows, self.axes.data)
        self._data = None if data is None else PreparedData.open(data)
        self._keys = self._ngram_keys()
        self.group = AnsweringGroup(self.axes.data)
        self.planner = self.build_planner(self.group)
        self.tokens = self.rank_tokens(0)
        self._pageable = self._pinned = torch.empty(0, dtype=torch.uint8)

    def build_planner(self, group: ProcessGroup) -> ExchangePlanner:
        context = self.axes.context
        return ExchangePlanner(
            self.routing,
            self.layout.slabs,
            self._sharding,
            self.config.model.vocabulary if self._keys is None else self.layout.num_rows,
            WindowRule.of(self.config, self.layout.width),
            group,
            (DEVICE, DEVICE),
            self._keys,
            zero_copy=reads_in_place(self.config, same_device=True),
            context=ContextAxis(group.rank % context, context, "", method_of(self.config).reach),
        )

    def _ngram_keys(self) -> NgramKeys | None:
        """As a run has them; without a data set tokens are not folded."""
        method, vocabulary = method_of(self.config), self.config.model.vocabulary
        if not isinstance(method, Engram):
            return None
        folding = Folding.identity(vocabulary) if self._data is None else method.resolve_keys(self._data)[0]
        assert isinstance(folding, Folding)
        return NgramKeys(method.ngram_hash(), folding.ids)

    def rank_tokens(self, rank: int) -> Tensor:
        """A step's tokens of a rank; those that share sequences have the same."""
        rank //= self.axes.context
        if self._data is not None:
            return self._read(self._data, rank)
        edges = np.cumsum(self.frequencies)
        drawn = np.searchsorted(edges, np.random.default_rng(rank).random(self.shape) * edges[-1], side="right")
        return torch.from_numpy(np.minimum(drawn, len(edges) - 1))

    def _read(self, data: PreparedData, rank: int) -> Tensor:
        train, model = self.config.train, self.config.model
        with Loader(
            data,
            sequence_length=model.sequence_length,
            global_batch=train.global_batch,
            micro_batch=train.micro_batch,
            seed=train.seed,
            weights=self.config.data.weights,
            rank=rank,
            ranks=self.axes.data // self.axes.context,
            prefetch=1,
            vocabulary=model.vocabulary,
        ) as loader:
            return next(loader).tokens

    def prepare_answers(self) -> None:
        """What rank 0 receives: how many keys of each window and slab every rank requests from it, and which."""
        size = self.axes.data
        counts, ids = [], []
        with Progress(size, "ranks", "requests of the other ranks") as progress:
            for rank in range(size):
                planner = self.build_planner(ProcessGroup(rank, size))
                _, requests = planner.request(self.rank_tokens(rank))
                planner.close()
                counts.append([[int(slab.counts[0]) for slab in request.slabs] for request in requests])
                # A rank requests from itself first, then from rank 0.
                for request in requests:
                    for slab in request.slabs:
                        start = 0 if rank == 0 else int(slab.counts[rank])
                        ids.append(slab.keys_P[start : start + int(slab.counts[0])].astype(np.int32))
                progress.update()
        self.group.answers = [torch.tensor(counts), torch.from_numpy(np.concatenate(ids))]

    def plan(self) -> tuple[list[Window], dict[str, dict[str, float]]]:
        """One step's plan, and its seconds by part."""
        clock, planner = Clock(), self.planner
        slices, requests = clock.time("request", lambda: planner.request(self.tokens))
        served, wanted = clock.time("ids", lambda: planner.exchange_ids(requests))
        reads = clock.time("read", lambda: planner.read(wanted))
        windows = clock.time("upload", lambda: planner.upload(slices, requests, served, reads))
        size = uploaded_bytes(requests, windows)
        if self._pinned.numel() < size:
            self._pageable, self._pinned = torch.zeros(2, size, dtype=torch.uint8)
        clock.time("pin", lambda: self._pinned[:size].copy_(self._pageable[:size]))
        return windows, clock.parts

    def predicted_step(self) -> StepTime:
        traffic = build_traffic(self.config, self.frequencies, self.routing, self.axes.data)
        return plan_layout(self.config, self.axes, Machine(), traffic).time


def uploaded_bytes(requests: list[WindowRequest], windows: list[Window]) -> int:
    """Numbers are uploaded as 32 bits, and rows of a step once for all its windows."""
    of_positions = sum(array.nbytes for request in requests for array in request.index.arrays)
    tensors = {id(tensor): tensor for window in windows for slab in window.slabs for tensor in _tensors_in(slab)}
    return of_positions + sum(4 * tensor.numel() for tensor in tensors.values())


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """Of a dataclass and the dataclasses in it."""
    if isinstance(value, Tensor):
        yield value
    elif is_dataclass(value):
        for field in fields(value):
            yield from _tensors_in(getattr(value, field.name))


def run_planning_benchmark(
    recipe: str, overrides: list[str], ranks: int, rounds: int, frequencies: Path | None, data: Path | None
) -> dict[str, Any]:
    config = load_recipe(recipe, overrides)
    vocabulary = config.model.vocabulary
    given = zipf(vocabulary) if frequencies is None else load_frequencies(frequencies, vocabulary)
    bench = PlanningBenchmark(config, ranks, given, data)
    bench.prepare_answers()
    windows, _ = bench.plan()  # the first touches memory for the first time
    measured = [bench.plan()[1] for _ in range(rounds)]
    bench.planner.close()
    parts = {
        name: {kind: statistics.median(parts[name][kind] for parts in measured) for kind in ("wall", "cpu")}
        for name in measured[0]
    }
    step, num_tokens = bench.predicted_step(), bench.tokens.numel()
    wall, cpu = (sum(part[kind] for part in parts.values()) for kind in ("wall", "cpu"))
    divided = sum(parts[name]["cpu"] for name in DIVIDED)
    free_cores = cpu - divided + divided / MAX_PLANNING_THREADS
    remote = [slab.requested[1:] for window in windows for slab in window.slabs]
    return {
        "recipe": config.name,
        "ranks": ranks,
        "tokens_of": str(data or frequencies or "Zipf's law"),
        "cores": len(os.sched_getaffinity(0)),
        "tokens": num_tokens,
        "keys": num_tokens * max(1, method_of(config).num_ngram_keys),
        "windows": len(windows),
        "distinct_keys": sum(window.num_distinct for window in windows),
        "keys_served": sum(sum(slab.served) for window in windows for slab in window.slabs),
        "id_bytes_sent": ID_BYTES * sum(map(sum, remote)),
        "parts": parts,
        "wall_seconds": wall,
        "cpu_seconds": cpu,
        "predicted_step_seconds": step.overlapped,
        "predicted_step_seconds_without_overlap": step.one_by_one,
        "wall_share": wall / step.overlapped,
        "cpu_share": cpu / step.overlapped,
        "free_cores_wall_seconds": free_cores,
        "free_cores_wall_share": free_cores / step.overlapped,
    }
