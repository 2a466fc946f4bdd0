"""Results of an evaluation: scores, the file in RUN/eval/, and tables beside the paper's."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NotRequired

from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from xgram_dist.errors import BadFileError, UserError
from xgram_dist.eval.paper_suite import CATEGORIES, COLUMNS, PAPER, paper_rows
from xgram_dist.files import write_atomically
from xgram_dist.untrusted import read_json

FOLDER = "eval"
MAX_SCORE = 1e12
"""Larger ones are damage, and could not be summed."""
_Parameters = Annotated[int, Field(strict=True, ge=0, le=10**18)]


class _Ours(TypedDict):
    name: str
    backbone_parameters: _Parameters
    table_parameters: _Parameters


class _File(TypedDict):
    """What is read of lm-eval's JSON, and of our key in it."""

    xgram_dist: _Ours
    results: dict[str, dict[str, Any]]
    groups: NotRequired[dict[str, dict[str, Any]]]
    group_subtasks: NotRequired[dict[str, list[str]]]
    configs: NotRequired[dict[str, dict[str, Any]]]


def task_score(values: dict[str, Any]) -> tuple[str, float] | None:
    """(metric, value) that stands for a task: acc_norm, else acc, in per cent; else its first metric."""
    metrics = {
        key.split(",")[0]: value
        for key, value in values.items()
        if "," in key and "_stderr" not in key and isinstance(value, int | float) and abs(value) <= MAX_SCORE
    }
    for metric in ("acc_norm", "acc"):
        if metric in metrics:
            return metric, 100 * metrics[metric]
    return next(iter(metrics.items()), None)


def benchmark_scores(results: dict[str, Any]) -> dict[str, float]:
    """Scores by task or group, without the subtasks of groups, and the paper's average if all its tasks were run."""
    subtasks = {name for members in results.get("group_subtasks", {}).values() for name in members}
    scores = {}
    for task, values in {**results["results"], **results.get("groups", {})}.items():
        score = task_score(values)
        if score is not None and task not in subtasks:
            scores[task] = score[1]
    categories = [task_score(results.get("groups", {}).get(name, {})) for name in CATEGORIES]
    if "mmlu" in scores and all(categories):
        scores["mmlu"] = sum(score[1] for score in categories if score is not None) / len(CATEGORIES)
    averaged = [benchmark.name for benchmark in PAPER if benchmark.averaged]
    if all(name in scores for name in averaged):
        scores["average"] = sum(scores[name] for name in averaged) / len(averaged)
    return scores


@dataclass(frozen=True)
class EvaluationResult:
    name: str
    backbone_parameters: int
    table_parameters: int
    results: dict[str, Any]
    """lm-eval's own."""

    @property
    def scores(self) -> dict[str, float]:
        return benchmark_scores(self.results)

    def write(self, path: Path) -> None:
        """lm-eval's JSON, with one more key."""
        from xgram_dist.eval.lm_eval_adapter import results_json

        ours = {
            "name": self.name,
            "backbone_parameters": self.backbone_parameters,
            "table_parameters": self.table_parameters,
            "scores": self.scores,
        }
        write_atomically(path, results_json({**self.results, "xgram_dist": ours}))

    @staticmethod
    def read(path: Path) -> "EvaluationResult":
        """From a file of `write`, or the newest in a run folder."""
        if path.is_dir():
            files = sorted((path / FOLDER).glob("*.json"))
            if not files:
                raise UserError(f"'{path}' has no evaluation in {FOLDER}/; make one with `xgram-dist eval {path}`")
            path = files[-1]
        try:
            tree = read_json(path, follow=True)
            TypeAdapter(_File).validate_python(tree)
        except OSError as error:
            raise UserError(f"cannot read '{path}': {error.strerror}; give a run folder or a file of eval") from None
        except (BadFileError, ValidationError):
            raise BadFileError(f"'{path}' is not a file of `xgram-dist eval`") from None
        ours = tree.pop("xgram_dist")
        result = EvaluationResult(ours["name"], ours["backbone_parameters"], ours["table_parameters"], tree)
        if not result.scores:
            raise BadFileError(f"'{path}' holds no score; evaluate the run again with `xgram-dist eval`")
        return result


def comparison_table(runs: list[EvaluationResult], *, paper: bool) -> tuple[list[str], list[list[str]]]:
    """(header, rows): a row a run, in the paper's columns and then the other tasks; with `paper`, its rows below."""
    suite = {benchmark.name: benchmark.column for benchmark in PAPER}
    extra = [name for run in runs for name in run.scores if name not in suite and name != "average"]
    ran = {name for run in runs for name in run.scores}
    columns = [name for name in suite if name in ran or (paper and suite[name] in COLUMNS)] + list(dict.fromkeys(extra))
    with_average = paper or "average" in ran
    header = ["run", "parameters", *(suite.get(name, name) for name in columns), *(["Avg."] if with_average else [])]
    rows = []
    for run in runs:
        scores = run.scores
        tables = f"+{_format_size(run.table_parameters)}" if run.table_parameters else ""
        cells = [_format_score(scores.get(name)) for name in columns]
        average = [_format_score(scores.get("average"))] if with_average else []
        rows.append([run.name, _format_size(run.backbone_parameters) + tables, *cells, *average])
    for line in paper_rows(runs[0].backbone_parameters) if paper else ():
        cells = [_format_score(line.scores.get(suite.get(name, ""))) for name in columns]
        rows.append([f"paper: {line.method}", line.parameters, *cells, f"{line.average:.1f}"])
    return header, rows


def scoring_table(run: EvaluationResult) -> tuple[list[str], list[list[str]]]:
    """(header, rows): shots, split and metric behind each of the paper's columns, and where lm-eval cannot follow."""
    results, rows = run.results, []
    for benchmark in PAPER:
        config = results.get("configs", {}).get("mmlu_anatomy" if benchmark.task == "mmlu" else benchmark.name)
        score = task_score({**results["results"], **results.get("groups", {})}.get(benchmark.name, {}))
        if config is None or score is None:
            continue
        split = config.get("test_split") or config.get("validation_split")
        by_category = benchmark.task == "mmlu" and all(name in results.get("groups", {}) for name in CATEGORIES)
        metric = f"{score[0]}, mean of {len(CATEGORIES)} categories" if by_category else score[0]
        rows.append([benchmark.column, str(config.get("num_fewshot") or 0), str(split), metric, benchmark.note])
    return ["column", "shots", "split", "metric", ""], rows


def _format_score(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _format_size(parameters: int) -> str:
    return f"{parameters / 1e9:.2f}B" if parameters >= 1e8 else f"{parameters / 1e6:.1f}M"
