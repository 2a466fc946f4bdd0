"""From the kill of a rank to the first new step, on ranks of this machine, by part.

Two ways in turn, on one run: the command started again, where every rank is a new interpreter that imports everything;
and `train --restarts`, where the launcher forks ranks that have imported everything already. Times are those of the
run's own records (train/starts.py): from the moment of the kill to the end of the first step that follows.
"""

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from xgram_dist.errors import UserError
from xgram_dist.train.starts import read_starts

WAIT_SECONDS = 180.0
DATA = ("prepare", "--train-bpe", "4096", "--chunk-tokens", "1024", "--validation", "0.03", "--out")


def run_restart_benchmark(recipe: str, overrides: list[str], ranks: int, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="xgram-bench-") as scratch:
        folder = Path(scratch)
        if not any(word.startswith(("data.path=", "data.remote=")) for word in overrides):
            subprocess.run([*_command(*DATA), str(folder / "data")], check=True, capture_output=True)
            overrides = [f"data.path={folder / 'data'}", *overrides]
        words = [recipe, *overrides, "train.steps=1000000", "checkpoint.every=2", "train.log_every=1"]
        train = _command("train", *words, "--folder", str(folder / "run"), "--ranks", str(ranks))
        found: dict[str, list[dict[str, float]]] = {"command again": [], "--restarts": []}
        for _ in range(rounds):
            found["command again"].append(_measure(train, folder, again=True))
            found["--restarts"].append(_measure([*train, "--restarts", "1"], folder, again=False))
    figures: dict[str, Any] = {"ranks": ranks, "rounds": rounds}
    for way, times in found.items():
        figures[way] = {part: round(statistics.median(one.get(part, 0.0) for one in times), 3) for part in times[0]}
    figures["ratio"] = round(
        figures["command again"]["kill to first step"] / figures["--restarts"]["kill to first step"], 2
    )
    return figures


def _measure(train: list[str], folder: Path, *, again: bool) -> dict[str, float]:
    """Start, kill the last rank after a checkpoint, and wait for the first new step. `again`: of a new command."""
    before = len(read_starts(folder / "run"))
    process = _start(train, folder)
    try:
        _wait(process, folder, lambda: _trained(folder, before, steps=4))
        ranks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        killed = time.time()
        os.kill(int(ranks[-1]), signal.SIGKILL)
        if again:
            process.wait(WAIT_SECONDS)
            process = _start(train, folder)
        _wait(process, folder, lambda: _trained(folder, before + 1, steps=1))
        start = read_starts(folder / "run")[before + 1]
        end = start["begun"] + start["starting"]
        return {"noticed": start["begun"] - killed, **start["parts"], "kill to first step": end - killed}
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
        process.kill()


def _command(*words: str) -> list[str]:
    return [sys.executable, "-m", "xgram_dist", *words]


def _start(train: list[str], folder: Path) -> subprocess.Popen[bytes]:
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(train, stdout=log, stderr=log)


def _trained(folder: Path, number: int, steps: int) -> bool:
    starts = read_starts(folder / "run")
    return len(starts) > number and starts[number]["step"] >= starts[number]["after_step"] + steps


def _wait(process: subprocess.Popen[bytes], folder: Path, condition: Any) -> None:
    end = time.monotonic() + WAIT_SECONDS
    while not condition():
        if process.poll() is not None or time.monotonic() > end:
            said = (folder / "log").read_text(errors="replace")[-2000:]
            print(said, file=sys.stderr)
            raise UserError("the run of bench restart did not get on; what it said stands above")
        time.sleep(0.02)
