"""The runs of a comparison as Slurm jobs: those that were never submitted as one array, ended ones again one by one."""

from pathlib import Path
from typing import Any

from xgram_dist.compare.plan import Plan, PlannedRun
from xgram_dist.compare.state import State
from xgram_dist.slurm import record
from xgram_dist.slurm.commands import ENDED, job_state
from xgram_dist.slurm.site import Site
from xgram_dist.slurm.submit import Request, plan_submission, submit


def submit_all(
    plan: Plan, state: State, site: Site, nodes: str, *, preflight: bool = True, force: bool = False
) -> list[dict[str, Any]]:
    """{run, folder, job, state} of every run that is not complete; `state` is Slurm's, or "submitted" just now."""
    waiting = [run for run in plan.runs if not state.complete(run)]
    fresh = [run for run in waiting if not state.placed(run) and not state.folder(run).exists()]
    found = []
    if fresh:
        folder = _new_array(state.out)
        jobs, folders = _submit([str(state.recipe(run)) for run in fresh], site, nodes, folder, preflight, force)
        for run, job, one in zip(fresh, jobs, folders, strict=True):
            state.place(run, one)
            found.append(_line(run, one, job, "submitted"))
    for run in waiting:
        if run in fresh:
            continue
        folder = state.folder(run).absolute()
        if (folder / record.FOLDER / record.JOBS).exists():
            job = record.read_jobs(folder)["train"]
            now = job_state(job)
            if now is not None and now not in ENDED:
                found.append(_line(run, folder, job, now))
                continue
        (job,), _ = _submit([str(state.recipe(run))], site, nodes, folder, preflight, force)
        found.append(_line(run, folder, job, "submitted"))
    return found


def _submit(
    recipes: list[str], site: Site, nodes: str, folder: Path, preflight: bool, force: bool
) -> tuple[list[str], list[Path]]:
    submission = plan_submission(
        Request(
            recipes=recipes,
            overrides=[],
            sweep=None,
            site=site,
            nodes=nodes,
            folder=folder,
            then_eval=False,
            preflight=preflight,
            force=force,
        )
    )
    return submit(submission), [run.folder for run in submission.runs]


def _new_array(out: Path) -> Path:
    number = 0
    while (out / f"array-{number}").exists():
        number += 1
    return (out / f"array-{number}").absolute()


def _line(run: PlannedRun, folder: Path, job: str, state: str) -> dict[str, Any]:
    return {"run": run.key, "folder": str(folder), "job": job, "state": state}
