"""The engines beside bare loops (overhead.py), and tables of their own beside FSDP around everything (layout.py).

A round is a set of fresh processes in which the sides take turns, step by step, from the same weights on the same
tokens (turns.py).
"""

from pathlib import Path
from typing import Any

from xgram_dist.bench.engine.layout import layout_figures, layout_frequencies, layout_round
from xgram_dist.bench.engine.overhead import overhead_figures, overhead_round
from xgram_dist.bench.engine.turns import ENGINES, Measured
from xgram_dist.bench.ranks import run_on_ranks
from xgram_dist.progress import Progress


def run_engine_benchmark(
    size: int, rounds: int, steps: int, vocabulary: int, scale: int, frequencies: Path | None
) -> dict[str, Any]:
    chances = layout_frequencies(frequencies, vocabulary).tolist()
    measured = {name: Measured() for name in (*ENGINES, "layout")}
    with Progress(rounds * len(measured), "rounds", "sides in turn") as progress:
        for _ in range(rounds):
            for name in ENGINES:
                measured[name].add(run_on_ranks(overhead_round, size, name, steps))
                progress.update()
            measured["layout"].add(run_on_ranks(layout_round, size, chances, scale, steps))
            progress.update()
    return {
        "ranks": size,
        "rounds": rounds,
        "steps": steps,
        "overhead": {name: overhead_figures(measured[name]) for name in ENGINES},
        "paper_layout": {
            "vocabulary": vocabulary,
            "scale": scale,
            "frequencies": "Zipf" if frequencies is None else frequencies.name,
            **layout_figures(measured["layout"], size),
        },
    }
