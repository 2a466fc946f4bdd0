"""The exchange and the table optimizer, without a backbone, beside other systems doing the same work.

W1      20 tables (10 layers x 2 views) of 75,968 rows x 64, fp32. A rank looks up 8 x 512 Zipf(1.0) tokens in all of
        them; loss = 0.5 * mean square; backward; one step of exact AdamW. The peers (tools/peers) get the same tokens.
W2      151,936 tokens in a 50 % table, 8 micro-batches a step: bytes that cross the wire when a step shares a working
        set, against one for each micro-batch.
growth  W1 at width 16, and the same with 16 times the rows: the same tokens, spread over them.

A measurement is a set of fresh processes; ours and the peers' take turns, round by round, and a ratio is of the
medians of one round. Its median over rounds is the result. Lookup among fetched vectors, loss and their backward pass
are compiled on all sides. Peers are measured as they are installed; the fastest also tuned as ours is: ranks keep to
cores of their own, and the C library keeps freed memory.
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

from xgram_dist.bench.ranks import run_on_ranks
from xgram_dist.config import Config, build_config
from xgram_dist.errors import UserError
from xgram_dist.memory.layout import num_views, routing_settings
from xgram_dist.memory.routing.build import build_routing
from xgram_dist.memory.routing.frequencies import load_frequencies
from xgram_dist.memory.tables import Tables
from xgram_dist.memory.working_set import WorkingSet
from xgram_dist.optim.rows.catch_up import CatchUpAdamW
from xgram_dist.optim.rows.dense import DenseAdamW
from xgram_dist.optim.rows.protocol import RowOptimizer
from xgram_dist.optim.tables import TableOptimizer
from xgram_dist.parallel.device import peak_memory
from xgram_dist.parallel.mesh import single_mesh
from xgram_dist.parallel.ranks import Ranks
from xgram_dist.progress import Progress
from xgram_dist.train.exchange import exchange_figures

ROWS, LAYERS, VIEWS, WIDTH = 75_968, 10, 2, 64
TOKENS = 8 * 512
WARM = 10
PEERS = ("raw", "torchrec", "torchrec-unique", "fsdp", "sparse-adam")
TUNED = " (tuned)"
TWICE = ("raw", "torchrec", "torchrec-unique")
"""Peers that are measured tuned, too: the others are far behind either way."""
SLOW = {"fsdp": 4}
"""Steps of a round for peers that take seconds a step."""


def workload(rows: int, width: int, optimizer: str = "catch_up", **memory: Any) -> Config:
    """W1's tables: one key/value head of the given width."""
    return build_config(
        {
            "name": "bench-exchange",
            "model": {
                "vocabulary": rows,
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
                **memory,
            },
            "train": {"compile": True},
        }
    )


def draw_tokens(steps: int, ranks: int, vocabulary: int, spread: int = 1) -> NDArray[np.int64]:
    """Zipf(1.0) tokens [steps, ranks, TOKENS]; `spread` puts them about that far apart, at every remainder, so that
    each owner has as many of them as before."""
    random = np.random.default_rng(0)
    cumulated = np.cumsum(1.0 / np.arange(1, vocabulary + 1))
    drawn = np.searchsorted(cumulated, random.random((steps, ranks, TOKENS)) * cumulated[-1])
    return drawn.astype(np.int64) * spread + drawn % spread


def step_times(ranks: Ranks, file: str, rows: int, width: int, optimizer: str) -> dict[str, Any]:
    """Milliseconds of W1's steps on this rank, what they moved, and the memory it took."""
    config = workload(rows, width, optimizer)
    before = peak_memory(torch.device("cpu"))
    tables = Tables(config, None, torch.device("cpu"), single_mesh(ranks))
    updates = TableOptimizer(config, tables.store, optimizer)
    tokens = torch.from_numpy(np.load(file)["tokens"][:, ranks.rank])
    milliseconds, losses = [], []
    moved: dict[str, Any] = {}
    ahead = tables.plan(tokens[0])
    phases: dict[str, float] = {}
    for step, _ in enumerate(tokens):
        ranks.all_reduce_sum(torch.zeros(1))  # a barrier
        start = time.perf_counter()
        windows, ahead = ahead.result(), tables.plan(tokens[(step + 1) % len(tokens)])
        working = tables.fetch(windows[0])
        with ranks.phases("compute"):
            losses.append(_lookup(working))
        tables.give_back(working)
        with ranks.phases("update"):
            updates.step(step + 1)
            tables.store.clear_gradients()
        milliseconds.append(1000 * (time.perf_counter() - start))
        ranks.phases.step = step
        if step == WARM:
            ranks.phases.take()
            moved = exchange_figures(config, windows, ranks.rank)
    phases = ranks.phases.take()
    ahead.result()
    tables.close()
    held = sum(state.rows.numel() for state in tables.store.states) * 4
    return {
        "ms": milliseconds[WARM:],
        "losses": losses,
        "moved": moved,
        "phases": phases,
        "peak": peak_memory(torch.device("cpu")) - before,
        "held": held,
    }


class _HalfMeanSquare(torch.autograd.Function):
    """As the peers have it: one pass, so that the loss costs all sides little."""

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


def _lookup(working: WorkingSet) -> float:
    """All tables at once: they lie side by side in the working set, as they do for the peer with one wide table."""
    leaf = working.slabs[0].requires_grad_()
    torch._dynamo.maybe_mark_dynamic(leaf, 0)
    loss = _network(working.slots, leaf)
    loss.backward()
    return float(loss.detach())


def _ours(size: int, file: str, rows: int, width: int, optimizer: str = "catch_up") -> dict[str, Any]:
    results = run_on_ranks(step_times, size, file, rows, width, optimizer)
    slowest = [max(step) for step in zip(*(result["ms"] for result in results), strict=True)]
    moved = [result["moved"] for result in results]
    total = sum(one["bytes_sent"] for one in moved)
    return {
        "ms": slowest,
        "bytes_ratio": total / max(1, sum(one["bytes_bound"] for one in moved)),
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
    if done.returncode:  # some, once in a hundred times, fall over each other when they end
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"peer '{name}' failed twice; its last words: {done.stderr.strip().splitlines()[-1:]}")
    figures: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return figures


def _peers_in(folder: Path | None) -> tuple[str, ...]:
    if folder is None:
        return ()
    if not (folder / "exchange.py").exists():
        raise UserError(f"--peers '{folder}' has no exchange.py; give the folder tools/peers of the repository")
    installed = (folder / ".venv").exists()
    found = [name for name in PEERS if installed or not name.startswith("torchrec")]  # the others need torch alone
    return tuple(name + how for name in found for how in (("", TUNED) if name in TWICE else ("",)))


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
        "ms": {name: round(statistics.median(found), 1) for name, found in medians.items()},
        "ours_over": {name: round(statistics.median(found), 3) for name, found in ratios.items()},
        "ours_over_range": {name: [round(min(found), 3), round(max(found), 3)] for name, found in ratios.items()},
        "bytes_over_bound": round(last["bytes_ratio"], 4),
        "phases_ms": {name.removeprefix("seconds_"): round(ms, 2) for name, ms in last["phases"].items()},
    }


def window_bytes(ranks: Ranks, frequencies: list[float], window: Any) -> dict[str, Any]:
    """What a step of 8 micro-batches moves with this window."""
    vocabulary = len(frequencies)
    config = workload(vocabulary, WIDTH, "dense", compression=0.5, window=window)
    routing = build_routing(np.asarray(frequencies), routing_settings(config), num_views(config))
    tables = Tables(config, routing, torch.device("cpu"), single_mesh(ranks))
    random = np.random.default_rng(ranks.rank)
    cumulated = np.cumsum(frequencies)
    drawn = np.searchsorted(cumulated, random.random((8, 8, 512)) * cumulated[-1]).clip(0, vocabulary - 1)
    windows = tables.plan(torch.from_numpy(drawn.astype(np.int64))).result()
    for part in windows:  # really fetched and returned
        working = tables.fetch(part)
        for leaf in working.values.values():
            leaf.grad = torch.zeros_like(leaf)
        tables.give_back(working)
    tables.close()
    return exchange_figures(config, windows, ranks.rank)


def run_w2(size: int, frequencies: Path | None) -> dict[str, Any]:
    if frequencies is None:
        chances = 1.0 / np.arange(1, 151_937)
    else:
        chances = np.asarray(load_frequencies(frequencies), dtype=np.float64)
    chances = chances / chances.sum()
    found = {}
    for window in ("step", 1):
        results = run_on_ranks(window_bytes, size, chances.tolist(), window)
        found[str(window)] = {
            key: sum(result[key] for result in results) for key in ("bytes_sent", "bytes_bound", "distinct_tokens")
        }
    return {
        "frequencies": "Zipf" if frequencies is None else frequencies.name,
        "bytes_step": found["step"]["bytes_sent"],
        "bytes_micro_batch": found["1"]["bytes_sent"],
        "step_over_micro_batch": round(found["step"]["bytes_sent"] / found["1"]["bytes_sent"], 4),
        "bytes_over_bound": round(found["step"]["bytes_sent"] / found["step"]["bytes_bound"], 4),
    }


def run_growth(size: int, steps: int, rounds: int, factor: int, progress: Progress) -> dict[str, Any]:
    """Time and memory of W1 at width 16 with `factor` times the rows, against without."""
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
        "ms": {str(scale): round(statistics.median(found), 1) for scale, found in times.items()},
        "time_ratio": round(statistics.median(ratios), 3),
        "table_bytes_per_rank": {str(scale): memory[scale][1] for scale in memory},
        "peak_bytes_per_rank": {str(scale): memory[scale][0] for scale in memory},
        "peak_growth_over_table_growth": round(more_peak / more_held, 3),
    }


def run_optimizers(shares: tuple[float, ...], width: int = 1280, rows: int = 30_000) -> dict[str, Any]:
    """Exact AdamW by touching hit rows against a sweep over all, one thread, by the share of rows that are hit."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    random = torch.Generator().manual_seed(0)
    values = torch.randn(rows, width, generator=random)
    settings = 0, (0.9, 0.95), 1e-8, 0.1
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
                side.settle(hit)
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
