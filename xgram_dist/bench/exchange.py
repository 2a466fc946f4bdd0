"""The exchange and the table optimizer, without a backbone, against other systems on the same work.

W1      20 tables (10 layers x 2 views) of 75,968 rows x 64, fp32. A rank looks up 8 x 512 Zipf(1.0) tokens in all of
        them; loss = 0.5 * mean square; backward; one step of exact AdamW. The peers (tools/peers) get the same tokens.
W2      151,936 tokens in a 50 % table, 8 micro-batches per step: bytes sent when a step shares one working set, against
        one working set per micro-batch.
growth  W1 at width 16, against the same with 16 times the rows: the same tokens, spread over all rows.

Every measurement runs in fresh processes. In each round all sides run once; a ratio is a ratio of medians within one
round, and the result is its median over rounds. The lookup in the fetched vectors, the loss and their backward pass are
compiled on all sides. Peers are measured as installed; the fastest also with our tuning: ranks are bound to their own
cores, and the C library retains freed memory.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from xgram_dist.bench.common import run_on_ranks
from xgram_dist.config import Config, build_config
from xgram_dist.console import Progress
from xgram_dist.errors import UserError
from xgram_dist.model.methods.base import table_layout
from xgram_dist.optim.schedule import table_rates
from xgram_dist.parallel.device import peak_memory
from xgram_dist.parallel.mesh import single_mesh
from xgram_dist.parallel.process_group import ProcessGroup
from xgram_dist.tables.exchange import ShardedTables
from xgram_dist.tables.exchange_messages import ShardedWorkingSet
from xgram_dist.tables.frequencies import load_frequencies
from xgram_dist.tables.layout import routing_settings
from xgram_dist.tables.optimizers.adamw import AdamW, DenseAdamW
from xgram_dist.tables.optimizers.adamw_catchup import CatchUpAdamW
from xgram_dist.tables.optimizers.base import RowOptimizer
from xgram_dist.tables.routing_build import build_routing
from xgram_dist.train.profiling import exchange_figures

ROWS, LAYERS, VIEWS, WIDTH = 75_968, 10, 2, 64
TOKENS = 8 * 512
WARM = 10
PEERS = ("raw", "torchrec", "torchrec-unique", "fsdp", "sparse-adam")
TUNED = " (tuned)"
TWICE = ("raw", "torchrec", "torchrec-unique")
"""Peers that are also measured with our tuning; the others are much slower with or without it."""
SLOW = {"fsdp": 4}
"""Measured steps per round of peers that take seconds per step."""


def workload(vocabulary: int, width: int, optimizer: str = "catch_up", **memory: Any) -> Config:
    """W1's tables: one key/value head of the given width."""
    return build_config(
        {
            "name": "bench-exchange",
            "model": {
                "vocabulary": vocabulary,
                "layers": LAYERS,
                "width": width,
                "ffn_width": width,
                "heads": 1,
                "kv_heads": 1,
                "sequence_length": 512,
            },
            "memory": {
                "method": "xgram",
                "compression": 1.0,
                "sites": {"v": {"views": VIEWS}},
                "optimizer": optimizer,
                "overlap": False,  # there is no backbone
                **memory,
            },
            "train": {"compile": True},
        }
    )


def draw_tokens(steps: int, ranks: int, vocabulary: int, spread: int = 1) -> NDArray[np.int64]:
    """Zipf(1.0) tokens [steps, ranks, TOKENS]. `spread` multiplies the ids and varies their remainders, so that every
    rank owns as many of them as without it."""
    random = np.random.default_rng(0)
    cumulated = np.cumsum(1.0 / np.arange(1, vocabulary + 1))
    drawn = np.searchsorted(cumulated, random.random((steps, ranks, TOKENS)) * cumulated[-1])
    return drawn.astype(np.int64) * spread + drawn % spread


def step_times(ranks: ProcessGroup, file: str, rows: int, width: int, optimizer: str) -> dict[str, Any]:
    """Milliseconds of the W1 steps on this rank, exchanged bytes, and memory."""
    config = workload(rows, width, optimizer)
    before = peak_memory(torch.device("cpu"))
    tables = ShardedTables(config, table_layout(config), None, torch.device("cpu"), single_mesh(ranks))
    tokens = torch.from_numpy(np.load(file)["tokens"][:, ranks.rank])
    milliseconds, losses = [], []
    exchanged: dict[str, Any] = {}
    planned = tables.plan(tokens[0])
    phases: dict[str, float] = {}
    for step, _ in enumerate(tokens):
        ranks.all_reduce_sum(torch.zeros(1))  # a barrier
        start = time.perf_counter()
        windows, planned = planned.result(), tables.plan(tokens[(step + 1) % len(tokens)])
        working = tables.fetch(windows[0])
        with ranks.phases("compute"):
            losses.append(look_up(working))
        tables.give_back(working)
        with ranks.phases("update"):
            tables.shards.apply(table_rates(config, step + 1, tables.shards.num_rows))
        milliseconds.append(1000 * (time.perf_counter() - start))
        ranks.phases.step = step
        if step == WARM:
            ranks.phases.take()
            exchanged = exchange_figures(config, windows, ranks.rank)
    phases = ranks.phases.take()
    planned.result()
    tables.close()
    held = sum(state.rows.numel() for state in tables.shards) * 4
    return {
        "ms": milliseconds[WARM:],
        "losses": losses,
        "exchanged": exchanged,
        "phases": phases,
        "peak": peak_memory(torch.device("cpu")) - before,
        "held": held,
    }


class _HalfMeanSquare(torch.autograd.Function):
    """Half the mean square in one pass, as in the peers, so that the loss is cheap on all sides."""

    @staticmethod
    def forward(ctx: Any, vectors: torch.Tensor, numbers: int) -> torch.Tensor:
        ctx.save_for_backward(vectors)
        ctx.numbers = numbers
        return torch.linalg.vector_norm(vectors).square() * (0.5 / numbers)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor, None]:
        (vectors,) = ctx.saved_tensors
        return vectors * (gradients[0] / ctx.numbers), None


@torch.compile
def _network(slots: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
    vectors = F.embedding(slots, leaf)
    loss: torch.Tensor = _HalfMeanSquare.apply(vectors, vectors.numel())  # type: ignore[no-untyped-call]
    return loss


def look_up(working: ShardedWorkingSet) -> float:
    """Look up all tables at once: they are side by side in the working set, as in the peer with one wide table."""
    leaf = working.slabs[0].requires_grad_()
    torch._dynamo.maybe_mark_dynamic(leaf, 0)
    loss = _network(working.slots, leaf)
    loss.backward()
    return float(loss.detach())


def _ours(size: int, file: str, rows: int, width: int, optimizer: str = "catch_up") -> dict[str, Any]:
    results = run_on_ranks(step_times, size, file, rows, width, optimizer)
    slowest = [max(step) for step in zip(*(result["ms"] for result in results), strict=True)]
    exchanged = [result["exchanged"] for result in results]
    total = sum(figures["bytes_sent"] for figures in exchanged)
    return {
        "ms": slowest,
        "bytes_ratio": total / max(1, sum(figures["bytes_bound"] for figures in exchanged)),
        "phases": {name: 1000 * seconds for name, seconds in results[0]["phases"].items()},
        "peak": max(result["peak"] for result in results),
        "held": max(result["held"] for result in results),
        "losses": results[0]["losses"],
    }


def _peer(folder: Path, name: str, file: str) -> dict[str, Any]:
    own = folder / ".venv" / "bin" / "python"
    command = [str(own) if own.exists() else sys.executable, str(folder / "exchange.py")]
    command += ["--peer", name.removesuffix(TUNED), *(["--tuned"] if name.endswith(TUNED) else [])]
    command += ["--tokens", file, "--rows", str(ROWS), "--tables", str(LAYERS * VIEWS), "--width", str(WIDTH)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:  # rarely, the ranks of a peer crash at shutdown
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"peer '{name}' failed twice; the end of its output: {done.stderr.strip().splitlines()[-1:]}")
    figures: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return figures


def _peers_in(folder: Path | None) -> tuple[str, ...]:
    if folder is None:
        return ()
    if not (folder / "exchange.py").exists():
        raise UserError(f"--peers '{folder}' has no exchange.py; give the folder tools/peers of the repository")
    installed = (folder / ".venv").exists()
    names = [name for name in PEERS if installed or not name.startswith("torchrec")]  # the others need only torch
    return tuple(name + suffix for name in names for suffix in (("", TUNED) if name in TWICE else ("",)))


def run_w1(size: int, rounds: int, steps: int, peers: Path | None, progress: Progress) -> dict[str, Any]:
    names = _peers_in(peers)
    medians: dict[str, list[float]] = {name: [] for name in ("ours", *names)}
    last: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="xgram-bench-") as folder:
        files = {}
        for count in {steps, *SLOW.values()}:
            files[count] = f"{folder}/{count}.npz"
            np.savez(files[count], tokens=draw_tokens(WARM + count, size, ROWS))
        for _ in range(rounds):
            last = _ours(size, files[steps], ROWS, WIDTH)
            medians["ours"].append(statistics.median(last["ms"]))
            progress.update()
            for name in names:
                count = SLOW.get(name.removesuffix(TUNED), steps)
                figures = _peer(peers, name, files[count])  # type: ignore[arg-type]
                medians[name].append(statistics.median(figures["ms"]))
                progress.update()
    ratios = {n: [o / p for o, p in zip(medians["ours"], medians[n], strict=True)] for n in names}
    return {
        "ms": {name: round(statistics.median(times), 1) for name, times in medians.items()},
        "ours_over": {name: round(statistics.median(values), 3) for name, values in ratios.items()},
        "ours_over_range": {name: [round(min(values), 3), round(max(values), 3)] for name, values in ratios.items()},
        "bytes_over_bound": round(last["bytes_ratio"], 4),
        "phases_ms": {name.removeprefix("seconds_"): round(ms, 2) for name, ms in last["phases"].items()},
    }


def window_bytes(ranks: ProcessGroup, frequencies: list[float], window: Any) -> dict[str, Any]:
    """What a step of 8 micro-batches exchanges with this window."""
    vocabulary = len(frequencies)
    config = workload(vocabulary, WIDTH, "dense", compression=0.5, window=window)
    routing = build_routing(np.asarray(frequencies), routing_settings(config), table_layout(config).num_views)
    tables = ShardedTables(config, table_layout(config), routing, torch.device("cpu"), single_mesh(ranks))
    random = np.random.default_rng(ranks.rank)
    cumulated = np.cumsum(frequencies)
    drawn = np.searchsorted(cumulated, random.random((8, 8, 512)) * cumulated[-1]).clip(0, vocabulary - 1)
    windows = tables.plan(torch.from_numpy(drawn.astype(np.int64))).result()
    for planned in windows:  # fetch and return them for real
        working = tables.fetch(planned)
        for leaf in working.values.values():
            leaf.grad = torch.zeros_like(leaf)
        tables.give_back(working)
    tables.close()
    return exchange_figures(config, windows, ranks.rank)


def run_w2(size: int, frequencies: Path | None) -> dict[str, Any]:
    if frequencies is None:
        probabilities = 1.0 / np.arange(1, 151_937)
    else:
        probabilities = np.asarray(load_frequencies(frequencies), dtype=np.float64)
    probabilities = probabilities / probabilities.sum()
    totals = {}
    for window in ("step", 1):
        results = run_on_ranks(window_bytes, size, probabilities.tolist(), window)
        totals[str(window)] = {
            key: sum(result[key] for result in results) for key in ("bytes_sent", "bytes_bound", "distinct_tokens")
        }
    return {
        "frequencies": "Zipf" if frequencies is None else frequencies.name,
        "bytes_step": totals["step"]["bytes_sent"],
        "bytes_micro_batch": totals["1"]["bytes_sent"],
        "step_over_micro_batch": round(totals["step"]["bytes_sent"] / totals["1"]["bytes_sent"], 4),
        "bytes_over_bound": round(totals["step"]["bytes_sent"] / totals["step"]["bytes_bound"], 4),
    }


def run_growth(size: int, steps: int, rounds: int, factor: int, progress: Progress) -> dict[str, Any]:
    """Time and memory of W1 at width 16 with `factor` times the rows, against W1 at width 16."""
    times: dict[int, list[float]] = {1: [], factor: []}
    memory: dict[int, tuple[int, int]] = {}
    with tempfile.TemporaryDirectory(prefix="xgram-bench-") as folder:
        for round_number in range(rounds):
            for scale in sorted(times, reverse=bool(round_number % 2)):
                file = f"{folder}/{scale}.npz"
                np.savez(file, tokens=draw_tokens(WARM + steps, size, ROWS, scale))
                result = _ours(size, file, ROWS * scale, 16)
                times[scale].append(statistics.median(result["ms"]))
                memory[scale] = (result["peak"], result["held"])
                progress.update()
    ratios = [large / small for small, large in zip(times[1], times[factor], strict=True)]
    more_peak, more_held = (memory[factor][i] - memory[1][i] for i in range(2))
    return {
        "factor": factor,
        "ms": {str(scale): round(statistics.median(values), 1) for scale, values in times.items()},
        "time_ratio": round(statistics.median(ratios), 3),
        "table_bytes_per_rank": {str(scale): memory[scale][1] for scale in memory},
        "peak_bytes_per_rank": {str(scale): memory[scale][0] for scale in memory},
        "peak_growth_over_table_growth": round(more_peak / more_held, 3),
    }


def run_optimizers(shares: tuple[float, ...], width: int = 1280, rows: int = 30_000) -> dict[str, Any]:
    """Exact AdamW by catch-up against a dense sweep, on one thread, for shares of hit rows."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    random = torch.Generator().manual_seed(0)
    values = torch.randn(rows, width, generator=random)
    settings = 0, AdamW((0.9, 0.95), 1e-8, 0.1)
    sides: dict[str, RowOptimizer] = {
        "dense": DenseAdamW(values.clone(), *settings),
        "catch_up": CatchUpAdamW(values, *settings),
    }
    ratios = {}
    for share in shares:
        taken: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(5):
            hit = torch.randperm(rows, generator=random)[: int(share * rows)].sort()[0]
            gradient = torch.randn(len(hit), width, generator=random)
            for name, side in sides.items():
                start = time.perf_counter()
                side.catch_up(hit)
                side.update(hit, gradient, (1e-3, 1e-3))
                taken[name].append(time.perf_counter() - start)
        ratios[str(share)] = round(statistics.median(taken["catch_up"]) / statistics.median(taken["dense"]), 3)
    torch.set_num_threads(threads)
    return {"catch_up_over_dense_by_share": ratios}


def run_exchange_benchmark(
    sizes: list[int], rounds: int, steps: int, peers: Path | None, frequencies: Path | None
) -> dict[str, Any]:
    measured = (1 + len(_peers_in(peers))) * rounds * len(sizes) + 2 * rounds
    figures: dict[str, Any] = {"w1": {}}
    with Progress(measured, "measurements", "ours and peers in turn") as progress:
        for size in sizes:
            figures["w1"][str(size)] = run_w1(size, rounds, steps, peers, progress)
        figures["growth"] = run_growth(sizes[0], steps, rounds, 16, progress)
    figures["w2"] = run_w2(sizes[0], frequencies)
    figures["optimizers"] = run_optimizers((0.01, 0.03, 0.1, 0.3, 1.0))
    return figures
