"""How far a comparison is: OUT/compare.json, and the run folders themselves.

compare.json      where runs are that are not in runs/, and why runs failed
recipes/          the recipe of each run, resolved
runs/             a run folder each; array-N/ of those that were submitted together
logs/             what each run said
compare.html, compare.md, results.json
A run is complete when its metrics say so, and then never repeated. One that is not goes on from its checkpoint.
"""

import json
from pathlib import Path
from typing import Any

from xgram_dist.compare.plan import Plan, PlannedRun
from xgram_dist.config import Config, dump_config, load_config
from xgram_dist.errors import UserError
from xgram_dist.report.runs import Run, read_run
from xgram_dist.whole_file import write_whole

FILE = "compare.json"


class State:
    def __init__(self, out: Path):
        self.out = out
        self._tree: dict[str, Any] = {"folders": {}, "failures": {}}
        file = out / FILE
        if file.exists():
            try:
                tree = json.loads(file.read_text(encoding="utf-8"))
                self._tree = {key: dict(tree[key]) for key in self._tree}
            except (OSError, ValueError, KeyError, TypeError):
                raise UserError(f"'{file}' is not the state of a comparison; choose another --out") from None

    def folder(self, run: PlannedRun) -> Path:
        return self.out / self._tree["folders"].get(run.key, f"runs/{run.key}")

    def placed(self, run: PlannedRun) -> bool:
        """Whether it was given a place by `place`."""
        return run.key in self._tree["folders"]

    def place(self, run: PlannedRun, folder: Path) -> None:
        self._tree["folders"][run.key] = str(folder.absolute().relative_to(self.out.absolute()))
        self._write()

    def failure(self, run: PlannedRun) -> str | None:
        found = self._tree["failures"].get(run.key)
        return None if found is None else str(found)

    def failed(self, run: PlannedRun, reason: str | None) -> None:
        """None: it did not, after all."""
        if reason is None and run.key not in self._tree["failures"]:
            return
        self._tree["failures"].pop(run.key, None)
        if reason is not None:
            self._tree["failures"][run.key] = reason
        self._write()

    def recipe(self, run: PlannedRun) -> Path:
        """Its resolved recipe, written."""
        file = self.out / "recipes" / f"{run.key}.yaml"
        write_whole(file, dump_config(run.config))
        return file

    def log(self, run: PlannedRun) -> Path:
        return self.out / "logs" / f"{run.key}.txt"

    def read(self, run: PlannedRun) -> Run | None:
        """What it has left so far; None: nothing."""
        folder = self.folder(run)
        return read_run(folder) if (folder / "metrics.jsonl").is_file() else None

    def complete(self, run: PlannedRun) -> bool:
        found = self.read(run)
        return found is not None and found.complete

    def check(self, plan: Plan) -> None:
        """Refuse folders that hold a run of another recipe."""
        for run in plan.runs:
            file = self.folder(run) / "config.yaml"
            if not file.is_file():
                continue
            held = load_config(file)
            change = _difference(held, run.config)
            if change is not None:
                raise UserError(
                    f"'{self.folder(run)}' holds a run with {change}; choose another --out, or remove that folder"
                )

    def _write(self) -> None:
        write_whole(self.out / FILE, json.dumps(self._tree, indent=1) + "\n")


def _difference(held: Config, planned: Config) -> str | None:
    """The first key in which they differ, in words."""
    old, new = flat(held), flat(planned)
    for key in sorted(old.keys() | new.keys()):
        if old.get(key) != new.get(key):
            return f"{key} = {old.get(key)}, but {new.get(key)} is asked for now"
    return None


def flat(config: Config) -> dict[str, Any]:
    """Every key with dots, and its value."""

    def walk(tree: Any, prefix: str) -> dict[str, Any]:
        if not isinstance(tree, dict) or not tree:
            return {prefix: tree}
        return {k: v for name, below in tree.items() for k, v in walk(below, f"{prefix}.{name}".lstrip(".")).items()}

    return walk(config.model_dump(mode="json"), "")
