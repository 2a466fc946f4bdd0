"""Checkpoint saves and loads against plain files on the same disk, and the memory a load takes.

speed   Tables with AdamW and a small backbone on some ranks. Each round writes one plain file of the same size (one
        process, large blocks, flushed at the end), saves synchronously, saves asynchronously, loads, and reads the
        checkpoint's files as plain files. The page cache is dropped before each read, and rounds alternate which read
        comes first, since a disk may cache what it has just read. Ratios are within one round; the result is their
        median.
memory  The peak memory of a rank during a load, beyond what it held before, and its share of the state.
reshard One table of 1 GiB, saved on 4 ranks and loaded on 2, and saved on 2 and loaded on 4. Every row is compared with
        its initial value, which is a function of its index.
"""

import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from xgram_dist.bench.common import run_on_ranks, synthetic_facts
from xgram_dist.checkpoint.folder import FOLDER, name_of
from xgram_dist.checkpoint.load import load_checkpoint
from xgram_dist.checkpoint.save import Saver, SaveResult
from xgram_dist.checkpoint.sharded_tensor import CheckpointState, training_state
from xgram_dist.config import Config, build_config
from xgram_dist.config.schema import CheckpointConfig
from xgram_dist.console import Progress
from xgram_dist.engine import build_engine
from xgram_dist.engine.base import ParameterShard
from xgram_dist.model.build import build_model
from xgram_dist.model.methods.base import table_layout
from xgram_dist.parallel.device import peak_memory
from xgram_dist.parallel.mesh import single_mesh
from xgram_dist.parallel.process_group import ProcessGroup
from xgram_dist.tables.exchange import ShardedTables
from xgram_dist.tables.initial_rows import initial_rows

BLOCK_BYTES = 8 << 20
CPU = torch.device("cpu")


def workload(vocabulary: int, layers: int, width: int, optimizer: str) -> Config:
    """Tables of one view at site v, as wide as the model."""
    model = {"vocabulary": vocabulary, "layers": layers, "width": width, "ffn_width": width, "heads": 1, "kv_heads": 1}
    model["sequence_length"] = 512
    memory = {"method": "xgram", "compression": 1.0, "sites": {"v": {"views": 1}}, "optimizer": optimizer}
    return build_config(
        {"name": "bench-checkpoint", "model": model, "memory": memory, "parallel": {"engine": "replicated"}}
    )


SPEED = workload(65_536, 24, 64, "dense")
RESHARD = workload(1 << 20, 1, 256, "adagrad")


class NoBackbone:
    """The part of an engine that a checkpoint uses, for states of tables only."""

    step_count = 0

    def __init__(self, config: Config):
        self.config = config

    def parameter_shards(self) -> list[ParameterShard]:
        return []

    def after_load(self) -> None:
        pass


class Bench:
    """The state of a rank, saved and loaded as in training."""

    def __init__(self, ranks: ProcessGroup, config: Config, folder: Path, backbone: bool):
        self.ranks, self.mesh, self.folder = ranks, single_mesh(ranks), folder
        self.tables = ShardedTables(config, table_layout(config), None, CPU, self.mesh)
        self.engine: Any = NoBackbone(config)
        if backbone:
            self.engine = build_engine(config, build_model(config, CPU, 0, self.mesh), self.mesh, CPU)
        self.saver = Saver(folder, CheckpointConfig(keep=1), ranks)

    def state(self) -> CheckpointState:
        return training_state(self.engine, self.tables.shards, self.mesh)

    def share(self) -> int:
        """Bytes of the state that this rank holds."""
        return sum(shard.tensor.nbytes for tensor in self.state().tensors.values() for shard in tensor.shards)

    def save(self, step: int, *, wait: bool) -> SaveResult:
        facts = synthetic_facts(self.engine.config, step, self.ranks.size, self.tables.shards)
        saves = self.saver.save(self.state(), facts, [], wait=wait) or self.saver.finished_saves(wait=True)
        if saves[-1].error is not None:
            raise RuntimeError(str(saves[-1]))
        return saves[-1]

    def load(self, step: int) -> float:
        """Seconds until the slowest rank is done."""
        self.barrier()
        start = time.perf_counter()
        load_checkpoint(self.folder / FOLDER / name_of(step), self.engine, self.tables.shards, None, self.mesh)
        self.barrier()
        return time.perf_counter() - start

    def barrier(self) -> None:
        if self.ranks.size > 1:
            dist.barrier(self.ranks.group)

    def close(self) -> None:
        self.saver.close()
        self.tables.close()


def _drop_page_cache(paths: list[Path]) -> None:
    """Drop the files from the page cache, so that reading them reads the disk."""
    for path in paths:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _plain_write(path: Path, size: int) -> float:
    block = memoryview(os.urandom(BLOCK_BYTES))
    start = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for position in range(0, size, BLOCK_BYTES):
            file.write(block[: min(BLOCK_BYTES, size - position)])
        os.fsync(file.fileno())
    return time.perf_counter() - start


def _plain_read(paths: list[Path]) -> float:
    block = bytearray(BLOCK_BYTES)
    start = time.perf_counter()
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(block):
                pass
    return time.perf_counter() - start


def measure_speed(ranks: ProcessGroup, path: str, rounds: int) -> dict[str, Any]:
    folder, plain = Path(path), Path(path) / "plain"
    bench = Bench(ranks, SPEED, folder, backbone=True)
    seconds: list[dict[str, float]] = []
    bench.save(1, wait=True)
    first = bench.save(2, wait=False)
    size = int(ranks.all_reduce_integers(first.bytes, 0)[0])
    with Progress(rounds, "rounds", "speed") if ranks.first else _Silent() as progress:
        for number in range(rounds):
            timing = {}
            bench.barrier()
            if ranks.first:
                timing["plain_write"] = _plain_write(plain, size)
                plain.unlink()
            bench.barrier()
            timing["save"] = bench.save(3 + 2 * number, wait=True).seconds
            later = bench.save(4 + 2 * number, wait=False)
            timing["blocked"], timing["in_background"] = later.blocked, later.seconds
            files = sorted((folder / FOLDER / name_of(4 + 2 * number)).iterdir())
            for what in ("plain_read", "load") if number % 2 else ("load", "plain_read"):
                bench.barrier()
                if ranks.first:
                    _drop_page_cache(files)
                    if what == "plain_read":
                        timing[what] = _plain_read(files)
                bench.barrier()
                if what == "load":
                    timing[what] = bench.load(4 + 2 * number)
            seconds.append(timing)
            progress.update(1)
    bench.close()
    return {"bytes": size, "rounds": seconds}


class _Silent:
    def __enter__(self) -> "_Silent":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, amount: float) -> None:
        pass


def save_once(ranks: ProcessGroup, path: str, config: str) -> int:
    bench = Bench(ranks, _named(config), Path(path), backbone=config == "speed")
    bench.save(1, wait=True)
    bench.close()
    return bench.share()


def measure_load(ranks: ProcessGroup, path: str, config: str) -> dict[str, int]:
    """Memory of a load into a state that is already built, in a process that has saved nothing."""
    bench = Bench(ranks, _named(config), Path(path), backbone=config == "speed")
    for state in bench.tables.shards:
        state.rows.zero_()
    before = _start_peak()
    bench.load(1)
    extra = peak_memory(CPU) - before
    wrong = 0
    for state in bench.tables.shards:
        for table in state.slab.tables:
            for start in range(0, len(state.row_ids), 1 << 14):
                rows = state.row_ids[start : start + (1 << 14)]
                expected = initial_rows(rows, table.width, 0.02, 0, table.name, 0)
                held = state.rows[start : start + (1 << 14), state.slab.columns()[table.name]]
                wrong += int((expected != held).any(dim=1).sum())
    bench.close()
    return {"extra": extra, "share": bench.share(), "wrong_rows": wrong}


def _named(config: str) -> Config:
    return SPEED if config == "speed" else RESHARD


def _start_peak() -> int:
    """Reset the peak memory of this process; the bytes held now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return peak_memory(CPU)


def _memory(path: Path, config: str, saving: int, loading: int) -> dict[str, Any]:
    path = path / f"{config}-{saving}-{loading}"
    run_on_ranks(save_once, saving, str(path), config)
    results = run_on_ranks(measure_load, loading, str(path), config)
    shutil.rmtree(path)
    worst = max(results, key=lambda result: result["extra"])
    return {
        "extra_mb": round(worst["extra"] / 1e6, 1),
        "own_share_mb": round(worst["share"] / 1e6, 1),
        "limit_mb": round((1.2 * worst["share"] + (256 << 20)) / 1e6, 1),
        "wrong_rows": sum(result["wrong_rows"] for result in results),
    }


def run_checkpoint_benchmark(ranks: int, rounds: int, folder: Path | None) -> dict[str, Any]:
    """`folder` is on the disk to measure (default: the current folder)."""
    with tempfile.TemporaryDirectory(prefix=".xgram-bench-", dir=folder or Path.cwd()) as name:
        path = Path(name)
        speed = run_on_ranks(measure_speed, ranks, name, rounds)[0]
        figures = _speed_figures(speed["bytes"], speed["rounds"])
        figures["ranks"] = ranks
        figures["load_memory"] = _memory(path, "speed", ranks, ranks)
        table = RESHARD.model.vocabulary * RESHARD.model.width * 4
        figures["table_mb"] = round(table / 1e6, 1)
        figures["reshard_4_to_2"] = _memory(path, "reshard", 4, 2)
        figures["reshard_2_to_4"] = _memory(path, "reshard", 2, 4)
    return figures


def _speed_figures(size: int, rounds: list[dict[str, float]]) -> dict[str, Any]:
    def ratio(over: str, under: str) -> tuple[float, list[float]]:
        values = sorted(timing[over] / timing[under] for timing in rounds)
        return round(statistics.median(values), 4), [round(values[0], 4), round(values[-1], 4)]

    figures: dict[str, Any] = {"bytes": size, "rounds": len(rounds)}
    for name in ("plain_write", "save", "plain_read", "load"):
        figures[f"{name}_mb_s"] = round(size / 1e6 / statistics.median(timing[name] for timing in rounds), 1)
    for name in ("save", "blocked", "in_background"):
        figures[f"{name}_ms"] = round(1000 * statistics.median(timing[name] for timing in rounds), 1)
    for name, pair in {
        "save_over_plain_write": ("plain_write", "save"),
        "load_over_plain_read": ("plain_read", "load"),
        "blocked_over_save": ("blocked", "save"),
    }.items():
        figures[name], figures[f"{name}_range"] = ratio(*pair)
    return figures
