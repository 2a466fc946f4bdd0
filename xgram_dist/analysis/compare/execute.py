"""Executes the runs of a comparison: one or a few at once on this machine, or as Slurm jobs.

On this machine each run is a process of its own, and one progress bar covers all. With Slurm, runs that were never
submitted become one job array; runs whose job has ended are submitted again one by one.
"""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from xgram_dist.analysis.compare.runs import Comparison, ComparisonState, PlannedRun
from xgram_dist.analysis.diagnose.figures import FILE, FOLDER
from xgram_dist.checkpoint.folder import list_steps, name_of
from xgram_dist.cluster.slurm.commands import ENDED
from xgram_dist.cluster.slurm.site import Site
from xgram_dist.cluster.slurm.submit import Request, plan_submission, submit
from xgram_dist.cluster.slurm.successor import FOLDER as SLURM
from xgram_dist.cluster.slurm.successor import JOBS, current_job
from xgram_dist.console import Progress
from xgram_dist.environment import PARENT
from xgram_dist.untrusted import open_itself

STOPPED = 130
_STEP = re.compile(r"^step +(\d+)/\d+ ")

OnLine = Callable[[str], None]
Command = Callable[[list[str], Path, OnLine], tuple[int, str]]
"""(arguments of `xgram-dist`, log file, called with each line of output) -> (exit code, last line)"""


def train_all(
    comparison: Comparison,
    state: ComparisonState,
    ranks: int,
    say: Callable[[str], None],
    done: Callable[[], None],
    command: Command | None = None,
    at_once: int = 1,
) -> int:
    """Train the incomplete runs in order, `done` after each. Exit code: 0, 1 if a run failed, 130 if stopped."""
    waiting = [run for run in comparison.runs if not state.complete(run)]
    say(f"{len(comparison.runs)} runs, {len(comparison.runs) - len(waiting)} of them complete: {state.out}")
    if not waiting:
        return 0
    failures = 0
    with Progress(sum(_remaining_steps(run, state) for run in waiting), "steps", "comparing") as progress:

        def start(run: PlannedRun) -> tuple[list[str], OnLine]:
            first = _newest_step(run, state)
            say(f"{run.key}: " + (f"resuming after step {first}" if first else "training"))
            return _train_arguments(run, state, ranks), _StepCounter(first, progress, run.key).on_line

        for run, code, last_line in _execute(waiting, start, state, command, at_once):
            if code == STOPPED:
                say("stopped; run the same command again to resume")
                return STOPPED
            succeeded = code == 0 and state.complete(run)
            reason = last_line or f"exit code {code}"
            state.set_failure(run, None if succeeded else reason)
            if not succeeded:
                failures += 1
                say(f"{run.key} failed: {reason}; its log: {state.log(run)}")
            done()
    return 1 if failures else 0


def diagnose_all(
    comparison: Comparison,
    state: ComparisonState,
    ranks: int,
    sequences: int,
    say: Callable[[str], None],
    command: Command | None = None,
    at_once: int = 1,
) -> int:
    """Diagnose the complete runs whose last step has no figures yet."""
    waiting = [run for run in comparison.runs if state.complete(run) and not _has_figures(run, state)]
    with Progress(len(waiting), "runs", "diagnosing") as progress:

        def start(run: PlannedRun) -> tuple[list[str], OnLine]:
            arguments = ["diagnose", str(state.folder(run)), "--sequences", str(sequences), "--no-pictures"]
            return arguments + (["--ranks", str(ranks)] if ranks > 1 else []), lambda line: None

        for run, code, last_line in _execute(waiting, start, state, command, at_once):
            if code == STOPPED:
                return STOPPED
            if code:
                say(f"{run.key} could not be diagnosed: {last_line}; its log: {state.log(run)}")
            progress.update(1)
    return 0


def _execute(
    runs: list[PlannedRun],
    start: Callable[[PlannedRun], tuple[list[str], OnLine]],
    state: ComparisonState,
    command: Command | None,
    at_once: int,
) -> Iterator[tuple[PlannedRun, int, str]]:
    """(run, exit code, last line) as runs end. `start`: called when a run's turn comes; the arguments of its command.
    None is started after one was stopped."""
    with Processes(threads=max(1, (os.cpu_count() or 1) // at_once) if at_once > 1 else None) as processes:
        command = command or processes.run

        def execute(run: PlannedRun) -> tuple[PlannedRun, int, str]:
            if processes.stopped.is_set():
                return run, STOPPED, ""
            arguments, on_line = start(run)
            code, last = command(arguments, state.log(run), on_line)
            if code == STOPPED:
                processes.stopped.set()
            return run, code, last

        if at_once == 1:
            yield from map(execute, runs)
            return
        with ThreadPoolExecutor(at_once) as pool:
            for future in as_completed([pool.submit(execute, run) for run in runs]):
                yield future.result()


class Processes:
    """`xgram-dist` commands in processes of their own, from several threads. Signals are forwarded to all of them, so
    that they save and end. Made and left on the main thread."""

    def __init__(self, threads: int | None):
        """`threads`: of each process; None: as many as it would take."""
        self._environment = os.environ | {PARENT: str(os.getpid())}  # they end with this process
        if threads is not None:
            self._environment["OMP_NUM_THREADS"] = str(threads)
        self._running: set[subprocess.Popen[str]] = set()
        self._previous: dict[int, Any] = {}
        self.stopped = threading.Event()
        """Set by a signal."""

    def __enter__(self) -> "Processes":
        self._previous = {n: signal.signal(n, self._forward) for n in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *error: object) -> None:
        for process in list(self._running):
            process.kill()
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _forward(self, number: int, frame: Any) -> None:
        self.stopped.set()
        for process in list(self._running):
            process.send_signal(number)

    def run(self, arguments: list[str], log: Path, on_line: OnLine) -> tuple[int, str]:
        log.parent.mkdir(parents=True, exist_ok=True)
        process = subprocess.Popen(
            [sys.executable, "-m", "xgram_dist", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=self._environment,
            start_new_session=True,  # so that a signal of the terminal reaches it once, forwarded
        )
        self._running.add(process)
        last = ""
        try:
            assert process.stdout is not None
            with open(log, "a", encoding="utf-8", opener=open_itself) as file:
                file.write(f"== xgram-dist {' '.join(arguments)}\n")
                for line in process.stdout:
                    file.write(line)
                    file.flush()
                    last = line.strip() or last
                    on_line(line)
            code = process.wait()
            return (STOPPED if code in (-signal.SIGINT, -signal.SIGTERM) else code), last
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            self._running.discard(process)


class _StepCounter:
    """Advances a progress bar by the steps in a run's status lines."""

    def __init__(self, start: int, progress: Progress, key: str):
        self._step, self._progress, self._key = start, progress, key

    def on_line(self, text: str) -> None:
        match = _STEP.match(text)
        if match and int(match[1]) > self._step:
            self._progress.update(int(match[1]) - self._step, run=self._key)
            self._step = int(match[1])


def _train_arguments(run: PlannedRun, state: ComparisonState, ranks: int) -> list[str]:
    arguments = ["train", str(state.write_recipe(run)), "--folder", str(state.folder(run))]
    return arguments + (["--ranks", str(ranks)] if ranks > 1 else [])


def _newest_step(run: PlannedRun, state: ComparisonState) -> int:
    return max(list_steps(state.folder(run)), default=0)


def _remaining_steps(run: PlannedRun, state: ComparisonState) -> int:
    return max(0, run.config.train.steps - _newest_step(run, state))


def _has_figures(run: PlannedRun, state: ComparisonState) -> bool:
    steps = list_steps(state.folder(run))
    return bool(steps) and (state.folder(run) / FOLDER / name_of(steps[-1]) / FILE).is_file()


# ---- as Slurm jobs


def submit_all(
    comparison: Comparison,
    state: ComparisonState,
    site: Site,
    nodes: str,
    *,
    preflight: bool = True,
    force: bool = False,
) -> list[dict[str, Any]]:
    """Submit what is not queued, running or complete. {run, folder, job, state} of every incomplete run; `state` is
    Slurm's, or "submitted"."""
    waiting = [run for run in comparison.runs if not state.complete(run)]
    new = [run for run in waiting if not state.has_folder(run) and not state.folder(run).exists()]
    jobs = []
    if new:
        array = _new_array(state.out)
        ids, folders = _submit([str(state.write_recipe(run)) for run in new], site, nodes, array, preflight, force)
        for run, job, folder in zip(new, ids, folders, strict=True):
            state.set_folder(run, folder)
            jobs.append(_job_entry(run, folder, job, "submitted"))
    for run in waiting:
        if run in new:
            continue
        folder = state.folder(run).absolute()
        if (folder / SLURM / JOBS).exists():
            job, facts = current_job(folder)
            current = None if facts is None else facts["JobState"]
            if current is not None and current not in ENDED:
                jobs.append(_job_entry(run, folder, job, current))
                continue
        (job,), _ = _submit([str(state.write_recipe(run))], site, nodes, folder, preflight, force)
        jobs.append(_job_entry(run, folder, job, "submitted"))
    return jobs


def _submit(
    recipes: list[str], site: Site, nodes: str, folder: Path, preflight: bool, force: bool
) -> tuple[list[str], list[Path]]:
    """(job ids, run folders)"""
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


def _job_entry(run: PlannedRun, folder: Path, job: str, state: str) -> dict[str, Any]:
    return {"run": run.key, "folder": str(folder), "job": job, "state": state}
