"""Two checkouts of this project side by side: the same benchmarks, taking turns in one run.

    python tools/compare_trees.py ../before . --rounds 5

A round is before, after, after, before, so that a machine that slows down or speeds up treats both alike. Prints the
median milliseconds of each side, and the median and range over the rounds of the ratio after / before.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

BENCHMARKS = ("exchange", "step")


def exchange_ms() -> float:
    """Milliseconds of workload W1 of `bench exchange` on two ranks. Runs inside the measured checkout."""
    from xgram_dist.bench.exchange import run_w1

    silent: Any = SimpleNamespace(update=lambda: None)
    return float(run_w1(2, 1, 60, None, silent)["ms"]["ours"])


def step_ms(tree: Path, environment: dict[str, str]) -> float:
    command = [sys.executable, "-m", "xgram_dist", "bench", "step", "--rounds", "3", "--json"]
    return float(json.loads(output_of(command, tree, environment))["xgram_ms"])


def output_of(command: list[str], tree: Path, environment: dict[str, str]) -> str:
    result = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(f"{tree}: {' '.join(command)} failed:\n{result.stderr[-2000:]}")
    return result.stdout


def measure(tree: Path, benchmark: str) -> float:
    environment = {**os.environ, "PYTHONPATH": str(tree.resolve())}
    if benchmark == "step":
        return step_ms(tree, environment)
    return float(output_of([sys.executable, str(Path(__file__).resolve()), "--exchange"], tree, environment))


def main() -> None:
    if sys.argv[1:] == ["--exchange"]:  # the measured process
        print(exchange_ms())
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="checkout before the change")
    parser.add_argument("after", type=Path, help="checkout after it")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each benchmark (default 5)")
    parser.add_argument("--benchmarks", nargs="+", choices=BENCHMARKS, default=BENCHMARKS)
    parser.add_argument("--json", action="store_true", help="print as JSON")
    arguments = parser.parse_args()
    figures = {}
    for benchmark in arguments.benchmarks:
        times: dict[str, list[float]] = {"before": [], "after": []}
        ratios = []
        for number in range(arguments.rounds):
            taken = {"before": 0.0, "after": 0.0}
            for side in ("before", "after", "after", "before"):
                taken[side] += measure(getattr(arguments, side), benchmark) / 2
            for side, milliseconds in taken.items():
                times[side].append(milliseconds)
            ratios.append(taken["after"] / taken["before"])
            print(
                f"{benchmark}: round {number + 1} of {arguments.rounds}: {ratios[-1]:.3f}", file=sys.stderr, flush=True
            )
        figures[benchmark] = {
            **{f"{side}_ms": round(statistics.median(found), 2) for side, found in times.items()},
            "after_over_before": round(statistics.median(ratios), 4),
            "range": [round(min(ratios), 4), round(max(ratios), 4)],
        }
    if arguments.json:
        print(json.dumps(figures, indent=1))
        return
    for benchmark, found in figures.items():
        print(
            f"{benchmark:10} before {found['before_ms']} ms, after {found['after_ms']} ms, ratio "
            f"{found['after_over_before']} (range {found['range'][0]} to {found['range'][1]})"
        )


if __name__ == "__main__":
    main()
