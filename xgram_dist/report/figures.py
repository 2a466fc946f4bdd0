"""What a run's records add up to: rates, phases, memory, exchange, restarts. None where they do not say."""

from pathlib import Path
from typing import Any

from xgram_dist.report.chart import Point
from xgram_dist.report.runs import Run

MEMORY_PARTS = ("backbone", "backbone_optimizer", "tables", "tables_optimizer", "working_set")
EXCHANGE = {
    "distinct_tokens": "distinct tokens",
    "windows": "windows",
    "vectors_received": "vectors received",
    "vectors_sent": "vectors sent",
    "bytes_sent": "bytes sent",
    "bytes_received": "bytes received",
    "bytes_bound": "bytes no exchange could do without",
    "imbalance": "busiest owner against the mean",
}


def curve(run: Run, kind: str, key: str, *, by_tokens: bool = True) -> list[Point]:
    """A key of the records of a kind, against tokens (in millions) or steps."""
    unit = run.tokens_per_step / 1e6 if by_tokens else 1
    return [
        (record["step"] * unit, float(record[key]))
        for record in run.of(kind)
        if isinstance(record.get(key), int | float)
    ]


def average(run: Run, key: str) -> float | None:
    """Of the `train` records, a step counting as much as another. The first record is left out where there are others:
    it compiles and allocates."""
    known = [(weight, r[key]) for weight, r in _weighted(run) if isinstance(r.get(key), int | float)]
    total = sum(weight for weight, _ in known)
    return sum(weight * value for weight, value in known) / total if total else None


def _weighted(run: Run) -> list[tuple[int, dict[str, Any]]]:
    """Records with the steps since the one before."""
    found = []
    before = 0
    for record in run.train:
        found.append((max(1, record["step"] - before), record))
        before = record["step"]
    return found[1:] if len(found) > 1 else found


def phases(run: Run) -> dict[str, float]:
    """Mean seconds a step, by phase, longest first."""
    names = dict.fromkeys(key for record in run.train for key in record if key.startswith("seconds_"))
    found = {name.removeprefix("seconds_"): average(run, name) for name in names}
    known = {name: value for name, value in found.items() if value is not None}
    return dict(sorted(known.items(), key=lambda item: -item[1]))


def memory(run: Run) -> list[dict[str, Any]]:
    """The last record of each rank."""
    found = {record.get("rank", 0): record for record in run.of("memory")}
    return [found[rank] for rank in sorted(found)]


def peak_memory(run: Run) -> int | None:
    """Of the rank that holds most."""
    return max((r["bytes_peak"] for r in memory(run) if r.get("bytes_peak")), default=None)


def exchange(run: Run) -> dict[str, float]:
    """Means a step, of the first rank."""
    found = {key: average(run, key) for key in EXCHANGE}
    return {key: value for key, value in found.items() if value is not None}


def starts(run: Run) -> list[int]:
    """Steps at which the program was started anew: the clock of the records begins again there."""
    found, before, step = [], 0.0, 0
    for record in run.records:
        seconds = record.get("seconds")
        if isinstance(seconds, int | float):
            if seconds < before:
                found.append(step)
            before = seconds
        step = record["step"]
    return found


def tokens_per_second(run: Run) -> float | None:
    """Over the whole run where it has ended, else of the last record."""
    rate = (run.end or {}).get("tokens_per_second") or (run.train[-1]["tokens_per_second"] if run.train else None)
    return float(rate) if rate else None


def final_validation(run: Run) -> float | None:
    """Loss of the last validation of a run that is complete."""
    return run.validation[-1]["loss"] if run.complete and run.validation else None


def evaluations(run: Path) -> list[dict[str, Any]]:
    """What `eval` left in the run folder: {name, scores} of each file that can be read."""
    import json

    found: list[dict[str, Any]] = []
    for file in sorted((run / "eval").glob("*.json")):
        try:
            ours = json.loads(file.read_text(encoding="utf-8"))["xgram_dist"]
            scores = {str(k): float(v) for k, v in ours["scores"].items()}
            found.append({"file": file.name, "scores": scores})
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            found.append({"file": file.name, "scores": None})
    return found
