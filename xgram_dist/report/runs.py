"""Read run folders (train/folder.py) into figures."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xgram_dist.config import Config, load_config
from xgram_dist.errors import UserError

NEEDED = {"train": ("cross_entropy", "tokens_per_second"), "validation": ("loss", "perplexity")}
"""What is read of a record, by its kind."""


@dataclass(frozen=True)
class Run:
    folder: Path
    config: Config
    train: list[dict[str, Any]]
    validation: list[dict[str, Any]]
    end: dict[str, Any] | None
    records: list[dict[str, Any]] = field(default_factory=list)
    """All of them, in the order they were written."""

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [record for record in self.records if record["kind"] == kind]

    @property
    def complete(self) -> bool:
        return bool(self.end and self.end.get("complete"))

    @property
    def tokens_per_step(self) -> int:
        return self.config.train.global_batch * self.config.model.sequence_length


def read_run(folder: Path) -> Run:
    metrics = folder / "metrics.jsonl"
    if not metrics.is_file():
        raise UserError(f"'{folder}' is not a run folder: it has no metrics.jsonl; give the folder of a training")
    try:
        lines = metrics.read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise UserError(f"cannot read '{metrics}': {error.strerror}") from None
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()  # a run that was killed, or is writing this very line
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            kind = record["kind"]
            complete = {"step", *NEEDED.get(kind, ())} <= record.keys()
        except (ValueError, KeyError, TypeError):
            complete = False
        if not complete:
            raise UserError(f"'{metrics}', line {number} is not a metrics record; take the line out to read the rest")
        records.append((kind, record))
    by_kind = {k: [r for kind, r in records if kind == k] for k in ("train", "validation", "end")}
    end = by_kind["end"][-1] if by_kind["end"] else None
    config = load_config(folder / "config.yaml")
    return Run(folder, config, by_kind["train"], by_kind["validation"], end, [record for _, record in records])


def summary(run: Run) -> dict[str, Any]:
    """The figures of one run, None where it has not got there."""
    from xgram_dist.plan.budget import plan_budget

    budget = plan_budget(run.config)
    last = run.validation[-1] if run.validation else {}
    end = run.end or {}
    rate = end.get("tokens_per_second") or (run.train[-1]["tokens_per_second"] if run.train else None)
    return {
        "run": run.config.name,
        "folder": str(run.folder),
        "complete": bool(end.get("complete")),
        "step": max([r["step"] for r in (*run.train, *run.validation)], default=0),
        "steps": run.config.train.steps,
        "validation_perplexity": last.get("perplexity"),
        "tokens_per_second": rate,
        "backbone_parameters": budget.backbone_parameters,
        "table_parameters": budget.table_parameters,
        "rows_hit": end.get("rows_hit"),
        "rows": end.get("rows"),
    }
