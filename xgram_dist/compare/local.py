"""Training one run after the other on this machine, each in a process of its own, with one account of the time left."""

import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from xgram_dist.checkpoint.folder import found_steps, name_of
from xgram_dist.compare.plan import Plan, PlannedRun
from xgram_dist.compare.state import State
from xgram_dist.diagnose.files import FILE, FOLDER
from xgram_dist.progress import Progress

STOPPED = 130
_STEP = re.compile(r"^step +(\d+)/\d+ ")

Command = Callable[[list[str], Path, Callable[[str], None]], tuple[int, str]]
"""(words of the command line, log file, what to do with each line) -> (exit code, last line)."""


def train_all(
    plan: Plan,
    state: State,
    ranks: int,
    say: Callable[[str], None],
    done: Callable[[], None],
    command: Command | None = None,
) -> int:
    """What is not complete, in order; `done` after each. 0, 1 where a run failed, 130 when stopped."""
    command = command or run_command
    waiting = [run for run in plan.runs if not state.complete(run)]
    say(f"{len(plan.runs)} runs, {len(plan.runs) - len(waiting)} of them complete: {state.out}")
    if not waiting:
        return 0
    failures = 0
    with Progress(sum(_left(run, state) for run in waiting), "steps", "comparing") as progress:
        for run in waiting:
            before = _step(run, state)
            say(f"{run.key}: " + (f"going on after step {before}" if before else "training"))
            code, words = command(_train(run, state, ranks), state.log(run), _Steps(before, progress, run.key).line)
            if code == STOPPED:
                say("stopped; the same command goes on from here")
                return STOPPED
            good = code == 0 and state.complete(run)
            state.failed(run, None if good else words or f"exit code {code}")
            if not good:
                failures += 1
                say(f"{run.key} failed: {words or f'exit code {code}'}; all it said: {state.log(run)}")
            done()
    return 1 if failures else 0


def diagnose_all(
    plan: Plan, state: State, ranks: int, sequences: int, say: Callable[[str], None], command: Command | None = None
) -> int:
    """Figures of the complete runs that have none of their last step yet."""
    command = command or run_command
    waiting = [run for run in plan.runs if state.complete(run) and not _diagnosed(run, state)]
    with Progress(len(waiting), "runs", "diagnosing") as progress:
        for run in waiting:
            words = ["diagnose", str(state.folder(run)), "--sequences", str(sequences), "--no-pictures"]
            words += ["--ranks", str(ranks)] if ranks > 1 else []
            code, last = command(words, state.log(run), lambda line: None)
            if code == STOPPED:
                return STOPPED
            if code:
                say(f"{run.key} could not be diagnosed: {last}; all it said: {state.log(run)}")
            progress.update(1)
    return 0


def run_command(words: list[str], log: Path, heard: Callable[[str], None]) -> tuple[int, str]:
    """`xgram-dist WORDS` in a process of its own. Signals are passed on to it, once; it saves and ends."""
    log.parent.mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen(
        [sys.executable, "-m", "xgram_dist", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # signals of the terminal reach it through us, once
    )
    before: dict[int, Any] = {
        number: signal.signal(number, lambda received, _: process.send_signal(received))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    last = ""
    try:
        assert process.stdout is not None
        with log.open("a", encoding="utf-8") as file:
            file.write(f"== xgram-dist {' '.join(words)}\n")
            for line in process.stdout:
                file.write(line)
                file.flush()
                last = line.strip() or last
                heard(line)
        code = process.wait()
        return (STOPPED if code in (-signal.SIGINT, -signal.SIGTERM) else code), last
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        for number, handler in before.items():
            signal.signal(number, handler)


class _Steps:
    """The steps that a run's status lines tell of."""

    def __init__(self, before: int, progress: Progress, key: str):
        self._at, self._progress, self._key = before, progress, key

    def line(self, text: str) -> None:
        found = _STEP.match(text)
        if found and int(found[1]) > self._at:
            self._progress.update(int(found[1]) - self._at, run=self._key)
            self._at = int(found[1])


def _train(run: PlannedRun, state: State, ranks: int) -> list[str]:
    words = ["train", str(state.recipe(run)), "--folder", str(state.folder(run))]
    return words + (["--ranks", str(ranks)] if ranks > 1 else [])


def _step(run: PlannedRun, state: State) -> int:
    return max(found_steps(state.folder(run)), default=0)


def _left(run: PlannedRun, state: State) -> int:
    return max(0, run.config.train.steps - _step(run, state))


def _diagnosed(run: PlannedRun, state: State) -> bool:
    steps = found_steps(state.folder(run))
    return bool(steps) and (state.folder(run) / FOLDER / name_of(steps[-1]) / FILE).is_file()
