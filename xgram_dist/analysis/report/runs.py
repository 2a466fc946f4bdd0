"""Run folders (train/run_dir.py) as figures: records, means over steps, memory, restarts, loss curves.

A figure is None if the records do not hold it.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xgram_dist.analysis.report.chart import Point
from xgram_dist.config import Config, load_config
from xgram_dist.errors import BadFileError, UserError, optional_package
from xgram_dist.train.metrics_file import FILE, number, read_metrics
from xgram_dist.untrusted import read_json


@dataclass(frozen=True)
class Run:
    folder: Path
    config: Config
    train: list[dict[str, Any]]
    validation: list[dict[str, Any]]
    end: dict[str, Any] | None
    records: list[dict[str, Any]] = field(default_factory=list)
    """All records, in the order they were written."""

    def records_of(self, kind: str) -> list[dict[str, Any]]:
        return [record for record in self.records if record["kind"] == kind]

    @property
    def complete(self) -> bool:
        return bool(self.end and self.end.get("complete"))

    @property
    def tokens_per_step(self) -> int:
        return self.config.train.global_batch * self.config.model.sequence_length


def read_run(folder: Path) -> Run:
    metrics = folder / FILE
    try:
        found = read_metrics(metrics)
    except FileNotFoundError:
        raise UserError(f"'{folder}' is not a run folder: it has no {FILE}; give the folder of a run") from None
    if complaint := found.complaint(metrics):
        print(complaint, file=sys.stderr)
    by_kind = {k: [r for r in found.records if r["kind"] == k] for k in ("train", "validation", "end")}
    end = by_kind["end"][-1] if by_kind["end"] else None
    config = load_config(folder / "config.yaml")
    return Run(folder, config, by_kind["train"], by_kind["validation"], end, found.records)


def summary(run: Run) -> dict[str, Any]:
    """The figures of one run; None for those it does not have yet."""
    from xgram_dist.estimate.flops import plan_budget

    budget = plan_budget(run.config)
    last = run.validation[-1] if run.validation else {}
    end = run.end or {}
    return {
        "run": run.config.name,
        "folder": str(run.folder),
        "complete": bool(end.get("complete")),
        "step": max([r["step"] for r in (*run.train, *run.validation)], default=0),
        "steps": run.config.train.steps,
        "validation_perplexity": last.get("perplexity"),
        "tokens_per_second": tokens_per_second(run),
        "backbone_parameters": budget.backbone_parameters,
        "table_parameters": budget.table_parameters,
        "rows_hit": number(end, "rows_hit"),
        "rows": number(end, "rows"),
    }


MEMORY_PARTS = ("backbone", "backbone_optimizer", "tables", "tables_optimizer", "working_set")
EXCHANGE = {
    "distinct_tokens": "distinct tokens",
    "windows": "windows",
    "vectors_received": "vectors received",
    "vectors_sent": "vectors sent",
    "bytes_sent": "bytes sent",
    "bytes_received": "bytes received",
    "bytes_bound": "lower bound of bytes for any exchange",
    "imbalance": "busiest owner relative to the mean",
}


def curve(run: Run, kind: str, key: str, *, by_tokens: bool = True) -> list[Point]:
    """A key of the records of a kind, against tokens (in millions) or steps."""
    unit = run.tokens_per_step / 1e6 if by_tokens else 1
    return [
        (record["step"] * unit, float(value))
        for record in run.records_of(kind)
        if (value := number(record, key)) is not None
    ]


def average(run: Run, key: str) -> float | None:
    """Mean over steps from the `train` records. The first record, which compiles and allocates, is left out if there
    are others."""
    known = [(weight, value) for weight, r in _weighted(run) if (value := number(r, key)) is not None]
    total = sum(weight for weight, _ in known)
    return sum(weight * value for weight, value in known) / total if total else None


def _weighted(run: Run) -> list[tuple[int, dict[str, Any]]]:
    """Each record with the number of steps since the previous one."""
    weighted = []
    before = 0
    for record in run.train:
        weighted.append((max(1, record["step"] - before), record))
        before = record["step"]
    return weighted[1:] if len(weighted) > 1 else weighted


def phases(run: Run) -> dict[str, float]:
    """Mean seconds a step, by phase, longest first."""
    names = dict.fromkeys(key for record in run.train for key in record if key.startswith("seconds_"))
    means = {name.removeprefix("seconds_"): average(run, name) for name in names}
    known = {name: value for name, value in means.items() if value is not None}
    return dict(sorted(known.items(), key=lambda item: -item[1]))


def memory(run: Run) -> list[dict[str, Any]]:
    """The last record of each rank."""
    of_rank = {number(record, "rank") or 0: record for record in run.records_of("memory")}
    return [of_rank[rank] for rank in sorted(of_rank)]


def peak_memory(run: Run) -> int | None:
    """Of the rank with the highest peak."""
    peaks = [int(peak) for record in memory(run) if (peak := number(record, "bytes_peak"))]
    return max(peaks, default=None)


def exchange(run: Run) -> dict[str, float]:
    """Means over steps, of the first rank."""
    means = {key: average(run, key) for key in EXCHANGE}
    return {key: value for key, value in means.items() if value is not None}


def restarts(run: Run) -> list[int]:
    """The last step before each restart. A restart shows as `seconds` falling back."""
    steps, before, step = [], 0.0, 0
    for record in run.records:
        seconds = number(record, "seconds")
        if seconds is not None:
            if seconds < before:
                steps.append(step)
            before = seconds
        step = record["step"]
    return steps


def tokens_per_second(run: Run) -> float | None:
    """Over the whole run if it has ended, else of the last record."""
    rate = number(run.end or {}, "tokens_per_second") or (run.train[-1]["tokens_per_second"] if run.train else None)
    return float(rate) if rate else None


def final_validation(run: Run) -> float | None:
    """Loss of the last validation of a complete run."""
    return run.validation[-1]["loss"] if run.complete and run.validation else None


def evaluations(run: Path) -> list[dict[str, Any]]:
    """Results of `eval` in the run folder: {file, scores}; scores are None if a file cannot be read."""
    results: list[dict[str, Any]] = []
    for file in sorted((run / "eval").glob("*.json")):
        try:
            ours = read_json(file)["xgram_dist"]
            scores = {str(k): float(v) for k, v in ours["scores"].items()}
            results.append({"file": file.name, "scores": scores})
        except (OSError, BadFileError, ValueError, OverflowError, KeyError, TypeError, AttributeError):
            results.append({"file": file.name, "scores": None})
    return results


PICTURE_FORMATS = (".png", ".svg", ".pdf")


def draw_losses(runs: list[Run], file: Path) -> None:
    """Training loss (thin) and validation loss (dots) against tokens, one colour a run."""
    if file.suffix.lower() not in PICTURE_FORMATS:
        raise UserError(f"picture '{file}' must end in {', '.join(PICTURE_FORMATS)}")
    with optional_package("a picture of losses", "plots"):
        import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=130)
    for place, run in enumerate(runs):
        millions = run.config.train.global_batch * run.config.model.sequence_length / 1e6
        colour = f"C{place}"
        points = [r for r in run.train if r["cross_entropy"] is not None]
        axes.plot([r["step"] * millions for r in points], [r["cross_entropy"] for r in points], colour, lw=1, alpha=0.6)
        checks = [r for r in run.validation if r["loss"] is not None]
        label = run.config.name
        if checks and checks[-1]["perplexity"] is not None:
            label += f": validation perplexity {checks[-1]['perplexity']:.2f}"
        axes.plot(
            [r["step"] * millions for r in checks],
            [r["loss"] for r in checks],
            colour,
            marker="o",
            ms=5,
            lw=1.8,
            label=label,
        )
    axes.set_xlabel("million tokens")
    axes.set_ylabel("cross-entropy (nats a token)")
    axes.set_title("Loss: training (thin) and validation (dots)")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.tight_layout()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot write the picture '{file}': {error}") from None
    finally:
        plt.close(figure)
