"""From recipes to jobs in the queue: check, snapshot, script, `sbatch`."""

import re
import sys
from dataclasses import dataclass
from pathlib import Path

from xgram_dist.config import Config, load_config
from xgram_dist.errors import UserError
from xgram_dist.slurm import fit, record
from xgram_dist.slurm.commands import submit_script
from xgram_dist.slurm.script import Script, eval_script, train_script
from xgram_dist.slurm.site import Site

_RANGE = re.compile(r"^(\d+)(?:-(\d+))?$")


@dataclass(frozen=True)
class Request:
    recipes: list[str]
    """Several: an array, a task each."""
    overrides: list[str]
    sweep: str | None
    """KEY=V1,V2,...: an array, a task each."""
    site: Site
    nodes: str
    folder: Path | None
    then_eval: bool
    preflight: bool
    force: bool
    """Submit what the plan or the files here speak against."""


@dataclass(frozen=True)
class Run:
    config: Config
    folder: Path
    change: str
    """What sets it apart from the others of an array."""


@dataclass(frozen=True)
class Submission:
    runs: list[Run]
    train: str
    """The script."""
    evals: list[str]
    """Scripts of the evaluations that follow, one a run."""


def plan_submission(request: Request) -> Submission:
    """All that can be refused is refused here; nothing is written."""
    runs = _runs(request)
    site = request.site
    first, last = parse_nodes(request.nodes)
    counts: set[int] = set()
    for run in runs:
        usable = fit.usable_counts(run.config, first, last, site.ranks)
        counts = set(usable) if not counts else counts & set(usable)
        if not request.force:
            fit.check_data(run.config)
            fit.check_memory(run.config, usable, site)
    script = Script(
        name=runs[0].config.name,
        folders=tuple(run.folder for run in runs),
        nodes=request.nodes,
        counts=tuple(sorted(counts)),
        site=site,
        directory=Path.cwd(),
        python=site.python or sys.executable,
        preflight=request.preflight,
    )
    evals = []
    if request.then_eval:
        evals = [eval_script(_alone(script, run), run.config.eval.tasks, _benchmarks(run.config)) for run in runs]
    return Submission(runs, train_script(script), evals)


def _benchmarks(config: Config) -> Path | None:
    """Where the recipe has its benchmarks; a folder that is missing is refused before the queue."""
    if config.eval.data is None:
        return None
    folder = Path(config.eval.data).absolute()
    if not folder.is_dir():
        raise UserError(f"eval.data '{config.eval.data}' is not a folder; --then eval would find no benchmarks there")
    return folder


def submit(submission: Submission) -> list[str]:
    """Into the run folders and into the queue; the id of each run's job."""
    runs = submission.runs
    for run in runs:
        record.check_folder(run.folder, run.config)
    for run in runs:
        record.write_snapshot(run.folder, run.config)
    path = runs[0].folder / record.FOLDER / record.SCRIPT
    path.write_text(submission.train, encoding="utf-8")
    job = submit_script([], str(path))
    jobs = [job] if len(runs) == 1 else [f"{job}_{task}" for task in range(len(runs))]
    for run, one in zip(runs, jobs, strict=True):
        record.write_jobs(run.folder, {"train": one})
    for run, one, text in zip(runs, jobs, submission.evals, strict=False):
        path = run.folder / record.FOLDER / record.EVAL
        path.write_text(text, encoding="utf-8")
        after = submit_script([f"--dependency=afterok:{one}", "--kill-on-invalid-dep=yes"], str(path))
        record.write_jobs(run.folder, {"train": one, "eval": after})
    return jobs


def parse_nodes(text: str) -> tuple[int, int]:
    found = _RANGE.match(text)
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= first <= last:
        raise UserError(f"--nodes {text} is not a number of nodes, nor a range such as 1-2")
    return first, last


def _runs(request: Request) -> list[Run]:
    """One, or those of an array in FOLDER/0, FOLDER/1, ..."""
    tasks = [(recipe, change) for recipe in request.recipes for change in _changes(request.sweep)]
    found = []
    for task, (recipe, change) in enumerate(tasks):
        config = load_config(recipe, [*request.overrides, *([change] if change else [])])
        folder = request.folder or Path("runs") / config.name
        if len(tasks) > 1:
            folder = (request.folder or Path("runs") / f"{load_config(tasks[0][0]).name}-array") / str(task)
            value = re.sub(r"[^A-Za-z0-9._-]+", "-", change.rpartition(".")[2])
            config = config.model_copy(update={"name": f"{config.name}-{value}"[:100] if change else config.name})
        found.append(Run(config, folder.absolute(), change or recipe))
    return found


def _changes(sweep: str | None) -> list[str]:
    if sweep is None:
        return [""]
    key, _, values = sweep.partition("=")
    found = [value for value in values.split(",") if value]
    if not key or len(set(found)) < 2 or len(set(found)) != len(found):
        raise UserError(f"--array {sweep} is not KEY=V1,V2,... with at least two values, each once")
    return [f"{key}={value}" for value in found]


def _alone(script: Script, run: Run) -> Script:
    return Script(**{**vars(script), "folders": (run.folder,), "name": run.config.name})
