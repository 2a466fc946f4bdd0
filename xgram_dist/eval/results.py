"""Running the harness, and what is made of its results: files, the paper's table, runs side by side."""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xgram_dist.errors import UserError
from xgram_dist.eval.suite import COLUMNS, PAPER, paper_rows
from xgram_dist.whole_file import write_whole

FOLDER = "eval"
BOOTSTRAP = 1000
"""Resamplings for the errors of metrics without a formula for them."""


FEWSHOT_SEED = 1234
"""lm-eval's own."""


def run_harness(model: Any, tasks: Any, limit: int | None) -> dict[str, Any]:
    """lm-eval's results, on the first rank; the others follow. Nobody's random numbers are touched."""
    from lm_eval import evaluate

    for task in tasks.loaded["tasks"].values():
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=FEWSHOT_SEED)
    try:
        with _bars_off():
            found = evaluate(
                lm=model, task_dict=tasks.loaded, limit=limit, log_samples=False, bootstrap_iters=BOOTSTRAP
            )
    finally:
        model.crew.dismiss()
    assert found is not None
    return dict(found)


@contextlib.contextmanager
def _bars_off() -> Iterator[None]:
    """lm-eval's bars, one a task; ours says how far the work is."""
    from lm_eval.api import model, task

    shown = model.tqdm, task.tqdm
    model.tqdm = task.tqdm = lambda items, **_: items
    try:
        yield
    finally:
        model.tqdm, task.tqdm = shown


def task_score(values: dict[str, Any]) -> tuple[str, float] | None:
    """(metric, value) that stands for a task: accuracy by length-normalised likelihood where there is one."""
    plain = {
        key.split(",")[0]: value
        for key, value in values.items()
        if "," in key and "_stderr" not in key and isinstance(value, int | float)
    }
    for metric in ("acc_norm", "acc"):
        if metric in plain:
            return metric, 100 * plain[metric]
    return next(iter(plain.items()), None)


def benchmark_scores(results: dict[str, Any]) -> dict[str, float]:
    """Scores by task, subtasks of groups left out, and the paper's average where all of it is there."""
    inside = {name for members in results.get("group_subtasks", {}).values() for name in members}
    found = {}
    for task, values in {**results["results"], **results.get("groups", {})}.items():
        score = task_score(values)
        if score is not None and task not in inside:
            found[task] = score[1]
    averaged = [one.name for one in PAPER if one.averaged]
    if all(name in found for name in averaged):
        found["average"] = sum(found[name] for name in averaged) / len(averaged)
    return found


@dataclass(frozen=True)
class Evaluated:
    """A finished evaluation."""

    name: str
    backbone_parameters: int
    table_parameters: int
    results: dict[str, Any]

    @property
    def scores(self) -> dict[str, float]:
        return benchmark_scores(self.results)

    def write(self, path: Path) -> None:
        """lm-eval's own JSON, with a key of ours."""
        from lm_eval.utils import handle_non_serializable

        ours = {
            "name": self.name,
            "backbone_parameters": self.backbone_parameters,
            "table_parameters": self.table_parameters,
            "scores": self.scores,
        }
        text = json.dumps({**self.results, "xgram_dist": ours}, indent=1, default=handle_non_serializable)
        write_whole(path, text)

    @staticmethod
    def read(path: Path) -> "Evaluated":
        """A file of `write`, or a run folder: its newest."""
        if path.is_dir():
            files = sorted((path / FOLDER).glob("*.json"))
            if not files:
                raise UserError(f"'{path}' has no evaluation in {FOLDER}/; make one with `xgram-dist eval {path}`")
            path = files[-1]
        try:
            tree = json.loads(path.read_text(encoding="utf-8"))
            ours = tree.pop("xgram_dist")
            sizes = int(ours["backbone_parameters"]), int(ours["table_parameters"])
            made = Evaluated(str(ours["name"]), *sizes, tree)
            _ = made.scores
        except OSError as error:
            raise UserError(f"cannot read '{path}': {error.strerror}; give a run folder or a file of eval") from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UserError(f"'{path}' is not a file of `xgram-dist eval`") from None
        return made


def comparison(runs: list[Evaluated], *, paper: bool) -> tuple[list[str], list[list[str]]]:
    """(header, rows): a line a run, in the paper's columns and then what else was run; the paper's lines below."""
    suite = {one.name: one.column for one in PAPER}
    extra = [name for run in runs for name in run.scores if name not in suite and name != "average"]
    ran = {name for run in runs for name in run.scores}
    columns = [name for name in suite if name in ran or (paper and suite[name] in COLUMNS)] + list(dict.fromkeys(extra))
    with_average = paper or "average" in ran
    header = ["run", "parameters", *(suite.get(name, name) for name in columns), *(["Avg."] if with_average else [])]
    rows = []
    for run in runs:
        scores = run.scores
        tables = f"+{_size(run.table_parameters)}" if run.table_parameters else ""
        cells = [_shown(scores.get(name)) for name in columns]
        average = [_shown(scores.get("average"))] if with_average else []
        rows.append([run.name, _size(run.backbone_parameters) + tables, *cells, *average])
    for line in paper_rows(runs[0].backbone_parameters) if paper else ():
        cells = [_shown(line.scores.get(suite.get(name, ""))) for name in columns]
        rows.append([f"paper: {line.method}", line.parameters, *cells, f"{line.average:.1f}"])
    return header, rows


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _size(parameters: int) -> str:
    return f"{parameters / 1e9:.2f}B" if parameters >= 1e8 else f"{parameters / 1e6:.1f}M"
