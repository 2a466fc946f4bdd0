"""From recipes to jobs in the queue: check, snapshot, script, `sbatch`.

`plan_submission` refuses what would fail later: node counts the batch does not divide over, missing data, a memory
estimate above the site's GPUs. It writes nothing. `submit` writes the run folders and queues the jobs.
"""

import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from xgram_dist.cluster.slurm import run_record as record
from xgram_dist.cluster.slurm.bad_nodes import choose_excluded, exclude_list, excluded_nodes
from xgram_dist.cluster.slurm.commands import submit_script
from xgram_dist.cluster.slurm.script import Script, eval_script, train_script
from xgram_dist.cluster.slurm.site import Site
from xgram_dist.cluster.slurm.successor import FOLDER, move_evaluation, read_jobs, write_jobs
from xgram_dist.config import Config
from xgram_dist.config.schema import parse_bytes
from xgram_dist.config.validate import accumulation, check_degrees, data_ranks
from xgram_dist.errors import UserError
from xgram_dist.files import write_atomically
from xgram_dist.model.methods.base import check_files, load_recipe

_NODE_RANGE = re.compile(r"^(\d+)(?:-(\d+))?$")


@dataclass(frozen=True)
class Request:
    recipes: list[str]
    """Several make a job array with a task for each."""
    overrides: list[str]
    sweep: str | None
    """KEY=V1,V2,...: a job array with a task for each value."""
    site: Site
    nodes: str
    """N, or MIN-MAX."""
    folder: Path | None
    then_eval: bool
    preflight: bool
    force: bool
    """Skip the checks of data and memory."""
    at_once: int | None = None
    """Tasks of the array that may run at the same time; None: all."""


@dataclass(frozen=True)
class SubmittedRun:
    config: Config
    folder: Path
    change: str
    """The override or recipe that distinguishes it within an array."""


@dataclass(frozen=True)
class Submission:
    runs: list[SubmittedRun]
    train: str
    """The training script."""
    site: Site
    evals: list[str]
    """Scripts of the evaluations that follow, one for each run, or none."""


def plan_submission(request: Request) -> Submission:
    runs = _plan_runs(request)
    site = request.site
    if request.at_once is not None and (len(runs) == 1 or request.at_once < 1):
        raise UserError(f"--at-once {request.at_once} is of the tasks of an array, and at least 1")
    first, last = parse_nodes(request.nodes)
    counts: set[int] = set()
    for run in runs:
        usable = usable_node_counts(run.config, first, last, site.ranks)
        counts = set(usable) if not counts else counts & set(usable)
        if not request.force:
            check_data(run.config)
            check_memory(run.config, usable, site)
    script = Script(
        name=runs[0].config.name,
        folders=tuple(run.folder for run in runs),
        nodes=request.nodes,
        counts=tuple(sorted(counts)),
        site=site,
        directory=Path.cwd(),
        python=site.python or sys.executable,
        preflight=request.preflight,
        at_once=request.at_once,
    )
    evals = []
    if request.then_eval:
        evals = [eval_script(_for_run(script, run), run.config.eval.tasks, _benchmarks(run.config)) for run in runs]
    return Submission(runs, train_script(script), site, evals)


def _benchmarks(config: Config) -> Path | None:
    """The folder of the recipe's benchmarks, which must exist; None: they come from the network."""
    if config.eval.data is None:
        return None
    folder = Path(config.eval.data).absolute()
    if not folder.is_dir():
        raise UserError(f"eval.data '{config.eval.data}' is not a folder; --then eval needs the benchmarks there")
    return folder


def submit(submission: Submission) -> list[str]:
    """Write the run folders and queue the jobs; the id of each run's job."""
    for run in submission.runs:
        record.check_folder(run.folder, run.config)
    with record.submitting([run.folder for run in submission.runs]):
        return _submit(submission)


def _submit(submission: Submission) -> list[str]:
    runs = submission.runs
    for run in runs:
        record.check_folder(run.folder, run.config)
    for run in runs:
        record.write_snapshot(run.folder, run.config)
    path = runs[0].folder / FOLDER / record.SCRIPT
    write_atomically(path, submission.train)
    job = submit_script(_exclude(runs, path, submission.site), str(path))
    jobs = [job] if len(runs) == 1 else [f"{job}_{task}" for task in range(len(runs))]
    for run, train_job in zip(runs, jobs, strict=True):
        write_jobs(run.folder, {"train": train_job})
    for run, train_job, text in zip(runs, jobs, submission.evals, strict=False):
        path = run.folder / FOLDER / record.EVAL
        write_atomically(path, text)
        eval_job = submit_script([f"--dependency=afterok:{train_job}", "--kill-on-invalid-dep=yes"], str(path))
        write_jobs(run.folder, {**read_jobs(run.folder), "eval": eval_job})
        move_evaluation(run.folder)
    return jobs


def _exclude(runs: list[SubmittedRun], script: Path, site: Site) -> list[str]:
    """The option of `sbatch` that leaves out what failed earlier jobs of these runs."""
    bad = {node: why for run in runs for node, why in excluded_nodes(run.folder, time.time()).items()}
    chosen = choose_excluded(script, site.excluded, bad)
    return [f"--exclude={exclude_list(site.excluded, chosen)}"] if chosen else []


def parse_nodes(text: str) -> tuple[int, int]:
    """(least, most) of N or MIN-MAX."""
    match = _NODE_RANGE.match(text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= first <= last:
        raise UserError(f"--nodes {text} is not a number of nodes, nor a range such as 1-2")
    return first, last


def _plan_runs(request: Request) -> list[SubmittedRun]:
    """One run, or those of an array in FOLDER/0, FOLDER/1, ..."""
    tasks = [(recipe, change) for recipe in request.recipes for change in _sweep_overrides(request.sweep)]
    runs = []
    for task, (recipe, change) in enumerate(tasks):
        config = load_recipe(recipe, [*request.overrides, *([change] if change else [])])
        folder = request.folder or Path("runs") / config.name
        if len(tasks) > 1:
            folder = (request.folder or Path("runs") / f"{load_recipe(tasks[0][0]).name}-array") / str(task)
            value = re.sub(r"[^A-Za-z0-9._-]+", "-", change.rpartition(".")[2])
            config = config.model_copy(update={"name": f"{config.name}-{value}"[:100] if change else config.name})
        runs.append(SubmittedRun(config, folder.absolute(), change or recipe))
    return runs


def _sweep_overrides(sweep: str | None) -> list[str]:
    """An override for each task; [""] without a sweep."""
    if sweep is None:
        return [""]
    key, _, values = sweep.partition("=")
    listed = [value for value in values.split(",") if value]
    if not key or len(set(listed)) < 2 or len(set(listed)) != len(listed):
        raise UserError(f"--array {sweep} is not KEY=V1,V2,... with at least two different values")
    return [f"{key}={value}" for value in listed]


def _for_run(script: Script, run: SubmittedRun) -> Script:
    return Script(**{**vars(script), "folders": (run.folder,), "name": run.config.name})


# ---- checks before the queue


def usable_node_counts(config: Config, first: int, last: int, ranks: int) -> tuple[int, ...]:
    """Node counts from `first` to `last` over which the recipe's batch and degrees divide; both ends must be among
    them. `ranks`: of a node."""
    counts = []
    for count in range(first, last + 1):
        try:
            check_degrees(config, count * ranks)
            accumulation(config, data_ranks(config, count * ranks))
        except UserError as error:
            if count in (first, last):
                raise UserError(f"on {count} node(s) of {ranks} ranks: {error}") from None
            continue
        counts.append(count)
    return tuple(counts)


def check_data(config: Config) -> None:
    """The data set and the routing exist and belong to the recipe."""
    check_files(config)
    if config.data.path is None:
        return
    from xgram_dist.data.dataset import PreparedData
    from xgram_dist.train.inputs import resolve_routing

    resolve_routing(config, PreparedData.open(config.data.path, "train"))


def check_memory(config: Config, counts: tuple[int, ...], site: Site) -> None:
    """The estimate for the smallest node count fits the site's GPUs. Token frequencies are assumed to follow Zipf's
    law, which is close enough for memory."""
    if site.memory_per_gpu is None or not site.gpus_per_node:
        return
    from xgram_dist.estimate.advice import advise
    from xgram_dist.estimate.comm import Axes
    from xgram_dist.estimate.layout import plan_layout
    from xgram_dist.estimate.step_time import Machine
    from xgram_dist.estimate.traffic import zipf_traffic

    traffic_of = zipf_traffic(config)
    limit, ranks = parse_bytes(site.memory_per_gpu), counts[0] * site.ranks
    axes = Axes.of(config, ranks)
    machine = Machine(bandwidth=site.bandwidth, node_ranks=site.ranks)
    needed = plan_layout(config, axes, machine, traffic_of(axes.rows)).device_bytes
    if needed > limit:
        changes = [advice.change for advice in advise(config, ranks, limit, traffic_of) if advice.fits][:3]
        raise UserError(
            f"the plan needs {needed / 2**30:,.1f} GiB of a GPU on {counts[0]} node(s), the site's have "
            f"memory_per_gpu = {site.memory_per_gpu}; what would help: {'; '.join(changes) or 'more nodes'}; --force "
            f"submits all the same"
        )
