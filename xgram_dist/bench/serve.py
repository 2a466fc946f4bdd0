"""The cost of tables in a served model: X-gram in vLLM against the same backbone without tables, in turn.

Both models (width 512, 6 layers; X-gram at 50 %, two value views) are saved and exported as a user would. Each runs in
an engine of vLLM of its own (serve_engine.py), in fp32, while the others wait. A round is first, second,
second, first; its ratio is of two sums, and the result is the median over rounds.

decode    time a step in which 1, 8 or 32 sequences each get a token
prefill   time until 4 prompts of 448 tokens have their first tokens
limited   decode with the tables in a cgroup with room for a quarter of them. Their file is one that no other process
          reads, and out of the page cache at first. What the engine had allocated before does not count.
start     time to build an engine, not compiled, with these tables, and with tables of 200 times the rows: a file of
          that size with nothing written to it but its header

The backbone is made to walk through the vocabulary: greedy decoding gives every token once before any comes again. So
every token reads rows that no recent one has read, which is the worst case for caches; and both models give the same
tokens, which is checked.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch

from xgram_dist.bench.generate import saved_checkpoint
from xgram_dist.bench.memory_limit import MemoryLimit, why_not
from xgram_dist.bench.step import LENGTH, step_config
from xgram_dist.console import Progress
from xgram_dist.errors import UserError
from xgram_dist.inference.export import INDEX, TABLES, export_hf
from xgram_dist.inference.model import HOST
from xgram_dist.model.build import build_model
from xgram_dist.model.transformer import Transformer

DECODE = (1, 8, 32)
PROMPT, NEW_TOKENS = 32, 33
PREFILL = 4, 448
LONGEST = 256
"""Tokens of a sequence while warming up."""
MORE_ROWS = 200
LIMITED_SHARE = 0.25
OPTIONS = {
    "max_num_seqs": max(DECODE),
    "max_model_len": LENGTH,
    "block_size": 32,
    "num_gpu_blocks_override": 256,
    "kv_cache_memory_bytes": 1 << 28,
}
"""The cache has as many blocks as the largest batch needs, so that warming up touches all of it."""


class ServedModel:
    """An engine in a process of the environment of serving."""

    def __init__(self, python: Path, folder: Path, eager: bool = False):
        options = {**OPTIONS, "enforce_eager": eager}
        variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
        self._log = folder.with_name(f"{folder.name}.log")
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [str(python), "-m", "xgram_dist.bench.serve_engine", str(folder), json.dumps(options)],
                env={**os.environ, **variables},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        self.start_seconds: float = self._answer()["start_seconds"]

    def run(self, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
        return self._ask({"prompts": prompts, "new_tokens": new_tokens})

    def enter(self, limit: MemoryLimit) -> None:
        self._ask({"cgroup": str(limit.folder)})

    def _ask(self, command: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            said = self._log.read_text(errors="replace").strip()[-2000:]
            print(said, file=sys.stderr)
            raise UserError("the engine of bench serve ended; what it said stands above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __enter__(self) -> "ServedModel":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Workload:
    """Prompts of the benchmark, and the tokens that must follow them."""

    def __init__(self, vocabulary: int):
        self.next_token = np.random.default_rng(0).permutation(vocabulary)
        self._random = np.random.default_rng(1)

    def prompts(self, count: int, length: int) -> list[list[int]]:
        drawn: list[list[int]] = self._random.integers(0, len(self.next_token), (count, length)).tolist()
        return drawn

    @torch.no_grad()
    def teach(self, model: Transformer) -> None:
        """The likeliest token after t is `next_token[t]`."""
        assert model.embedding is not None
        assert model.head is not None
        random = torch.Generator().manual_seed(0)
        signs = torch.randint(0, 2, model.embedding.shape, generator=random) * 2.0 - 1
        model.embedding.copy_(4 * signs)
        model.head.weight[torch.from_numpy(self.next_token)] = signs / model.embedding.shape[1]

    def check(self, prompts: list[list[int]], made: list[list[int]]) -> None:
        for prompt, tokens in zip(prompts, made, strict=True):
            before = [prompt[-1], *tokens[:-1]]
            assert tokens == self.next_token[before].tolist(), "the served model gives other tokens"


def measure(sides: dict[str, ServedModel], work: Workload, number: int, prefill: bool) -> dict[str, dict[str, float]]:
    """Milliseconds of each side by workload, in round `number`: a step of decoding, or the prompts' first tokens."""
    first, second = sides if number % 2 else reversed(sides)
    taken: dict[str, dict[str, float]] = {name: {} for name in sides}
    jobs = [(f"decode_{count}", count, PROMPT, NEW_TOKENS) for count in DECODE]
    if prefill:
        jobs.append(("prefill", *PREFILL, 1))
    for job, count, length, new_tokens in jobs:
        for name in (first, second, second, first):
            prompts = work.prompts(count, length)
            figures = sides[name].run(prompts, new_tokens)
            work.check(prompts, figures["tokens"])
            seconds = figures["prefill"] if new_tokens == 1 else figures["decode"] / figures["steps"]
            taken[name][job] = taken[name].get(job, 0.0) + 500 * seconds
    return taken


def compare(
    sides: dict[str, ServedModel], work: Workload, rounds: int, progress: Progress, prefill: bool = True
) -> dict[str, Any]:
    """The second side over the first."""
    for side in sides.values():
        for _ in range(2):
            side.run(work.prompts(max(DECODE), LONGEST - NEW_TOKENS), NEW_TOKENS)
    found = []
    for number in range(rounds):
        found.append(measure(sides, work, number, prefill))
        progress.update()
    base, ours = sides
    ratios = {job: [one[ours][job] / one[base][job] for one in found] for job in found[0][base]}
    return {
        "ms": {
            name: {job: round(statistics.median(one[name][job] for one in found), 2) for job in ratios}
            for name in sides
        },
        "ratio": {job: round(statistics.median(values), 3) for job, values in ratios.items()},
        "ratio_quartiles": {
            job: [round(q, 3) for q in statistics.quantiles(values, n=4)[::2]] for job, values in ratios.items()
        },
    }


def run_serve_benchmark(
    python: Path, rounds: int, vocabulary: int, scratch: Path, compiled: bool = True
) -> dict[str, Any]:
    """`scratch`: a folder on the disk to measure."""
    if not python.exists():
        raise UserError(
            f"'{python}' does not exist; make the environment of serving with `make serving`, or give the "
            "interpreter of another one with --python"
        )
    work = Workload(vocabulary)
    reason = why_not()
    with (
        tempfile.TemporaryDirectory(prefix="xgram-bench-", dir=scratch) as made,
        Progress(rounds * (1 if reason else 2) + 4, "rounds", "the backbone and X-gram in turn") as progress,
    ):
        folder = Path(made)
        table_bytes = {name: _exported(name, work, vocabulary, folder) for name in ("vanilla", "xgram")}["xgram"]
        figures: dict[str, Any] = {
            "vocabulary": vocabulary,
            "table_bytes": table_bytes,
            "compiled": compiled,
            "rounds": rounds,
        }
        figures["start"] = _starts(python, folder, progress)
        with ServedModel(python, folder / "vanilla", not compiled) as vanilla:
            with ServedModel(python, folder / "xgram", not compiled) as xgram:
                sides = {"vanilla": vanilla, "xgram": xgram}
                figures |= compare(sides, work, rounds, progress)
            if reason:
                figures["limited"] = f"skipped: {reason}"
            else:
                limit = MemoryLimit(int(LIMITED_SHARE * table_bytes))
                try:
                    figures["limited"] = _limited(python, folder, vanilla, compiled, work, rounds, limit, progress)
                except UserError as error:  # want of memory, as a rule: the other figures stand
                    figures["limited"] = str(error)
    return figures


def _exported(method: str, work: Workload, vocabulary: int, folder: Path) -> int:
    """Bytes of its tables."""
    frequencies = 1.0 / (np.arange(vocabulary) + 10.0)
    config = step_config(method, vocabulary, False)
    model = build_model(config, HOST)
    work.teach(model)
    run = folder / f"{method}-run"
    checkpoint = saved_checkpoint(config, model, frequencies / frequencies.sum(), run)
    written = export_hf(checkpoint, folder / method, "fp32", stock=False)
    shutil.rmtree(run)
    return int(written["table_bytes"])


def _limited(
    python: Path,
    folder: Path,
    vanilla: ServedModel,
    compiled: bool,
    work: Workload,
    rounds: int,
    limit: MemoryLimit,
    progress: Progress,
) -> dict[str, Any]:
    shutil.copytree(folder / "xgram", folder / "limited")
    for file in (folder / "limited").glob("tables*"):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with limit, ServedModel(python, folder / "limited", not compiled) as limited:
        limited.run(work.prompts(max(DECODE), LONGEST - NEW_TOKENS), NEW_TOKENS)
        limited.enter(limit)
        figures = compare({"vanilla": vanilla, "limited": limited}, work, rounds, progress, prefill=False)
        return {"limit_bytes": limit.num_bytes, "peak_bytes": limit.peak(), **figures}


def _starts(python: Path, folder: Path, progress: Progress) -> dict[str, Any]:
    large = folder / "large"
    large.mkdir()
    for file in (folder / "xgram").iterdir():
        if not file.name.startswith("tables"):
            shutil.copyfile(file, large / file.name)
    config = json.loads((large / "config.json").read_text(encoding="utf-8"))
    for table in config["tables"]:
        table["rows"] *= MORE_ROWS
    (large / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for name in set(json.loads((large / INDEX).read_text(encoding="utf-8"))["weight_map"].values()):
        if name.startswith("tables"):
            _write_without_rows(folder / "xgram" / name, large / name)
    seconds: dict[str, list[float]] = {"xgram": [], "large": []}
    for _ in range(2):
        for name, times in seconds.items():
            with ServedModel(python, folder / name, eager=True) as engine:
                times.append(engine.start_seconds)
            progress.update()
    best = {name: min(times) for name, times in seconds.items()}
    shutil.rmtree(large)
    return {
        "seconds": round(best["xgram"], 2),
        "seconds_with_200_times_the_rows": round(best["large"], 2),
        "ratio": round(best["large"] / best["xgram"], 3),
    }


def _write_without_rows(source: Path, target: Path) -> None:
    """The same tensors with more rows, all of them a hole of the file."""
    with source.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    end = 0
    for name, entry in header.items():
        if name.startswith(TABLES):
            begin, stop = entry["data_offsets"]
            entry["shape"][0] *= MORE_ROWS
            entry["data_offsets"] = [end, end + (stop - begin) * MORE_ROWS]
            end = entry["data_offsets"][1]
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with target.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        file.truncate(8 + len(encoded) + end)
