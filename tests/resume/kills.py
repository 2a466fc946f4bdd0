"""Runs that are killed for real, at moments seen from outside: files that appear, files that a rank has open.

Ranks are stopped first, the moment is looked at again, and only then is anyone killed: so a kill "between files and
rename" was one.
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

RANKS = 2


class Run:
    """`xgram-dist train` on two ranks (or what else is given) in a process of its own; its output goes to a file."""

    def __init__(self, recipe: str, folder: Path, *words: str, command: tuple[str, ...] | None = None, ranks: int = 2):
        self.folder, self.ranks = folder, ranks
        self.log = folder.parent / f"{folder.name}-{time.monotonic_ns()}.log"
        command = command or (sys.executable, "-m", "xgram_dist", "train", "--ranks", str(ranks))
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, recipe, "--folder", str(folder), *words],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def pids(self) -> list[int]:
        """Of the ranks, in order; fewer while they are being started."""
        if self.ranks == 1:
            return [self.process.pid]
        found = []
        with suppress(OSError):
            path = f"/proc/{self.process.pid}/task/{self.process.pid}/children"
            for pid in map(int, Path(path).read_text().split()):
                if b"\0RANK=" in b"\0" + Path(f"/proc/{pid}/environ").read_bytes():
                    found.append(pid)
        return found

    def send(self, number: int, *pids: int) -> None:
        for pid in pids or self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def stop_at(self, moment: Callable[["Run"], bool], timeout: float = 60.0) -> bool:
        """All ranks stopped while `moment` is true; False: the run ended before."""
        end = time.monotonic() + timeout
        while self.process.poll() is None:
            if moment(self) and len(self.pids()) == self.ranks:
                pids = self.pids()
                self.send(signal.SIGSTOP, *pids)
                if moment(self):
                    return True
                self.send(signal.SIGCONT, *pids)
            assert time.monotonic() < end, f"waited {timeout} s for the moment: {self.said()}"
            time.sleep(0.0005)
        return False

    def kill(self, whom: str) -> None:
        """Stopped ranks: the first, the last, or all with their launcher, all at once."""
        pids = self.pids()
        if whom == "all":
            self.send(signal.SIGKILL, self.process.pid, *pids)
        else:
            self.send(signal.SIGKILL, pids[0 if whom == "first" else -1])
            self.send(signal.SIGCONT, *pids)

    def end(self, timeout: float = 60.0) -> int:
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.send(signal.SIGKILL, self.process.pid, *self.pids())
            raise AssertionError(f"the run did not end in {timeout} s: {self.said()}") from None


def unfinished(run: Run) -> list[str]:
    with suppress(FileNotFoundError):
        return [name for name in os.listdir(run.folder / "checkpoints") if name.endswith(".part")]
    return []


def saving(run: Run) -> bool:
    return bool(unfinished(run))


def files_complete(run: Run) -> bool:
    """All is written, the folder has not got its name."""
    return any((run.folder / "checkpoints" / name / "manifest.json").exists() for name in unfinished(run))


def loading(run: Run) -> bool:
    """A rank has a file of a complete checkpoint open."""
    for pid in run.pids():
        with suppress(OSError):
            if "/checkpoints/step-" in Path(f"/proc/{pid}/maps").read_text():
                return True
            for name in os.listdir(f"/proc/{pid}/fd"):
                if "/checkpoints/step-" in os.readlink(f"/proc/{pid}/fd/{name}"):
                    return True
    return False


def training(run: Run) -> bool:
    return "\nstep " in run.said()


def steps_saved(folder: Path) -> list[int]:
    names = os.listdir(folder / "checkpoints") if (folder / "checkpoints").is_dir() else []
    return sorted(int(name.removeprefix("step-")) for name in names if name.startswith("step-"))


@dataclass
class Kill:
    moment: str
    whom: str
    hit: bool
    """The run was there when it was struck; False: it had ended."""
    saved: int
    """Newest step whose checkpoint there was."""
    again: float = 0.0
    """Seconds from the next start to its first step."""


def kill_loop(recipe: str, folder: Path, kills: int, seed: int, tell: Callable[[str], None] = print) -> list[Kill]:
    """Start, kill, start again until all kills are done and the run has come to its end."""
    chooser = random.Random(seed)
    moments: dict[str, Callable[[Run], bool]] = {
        "save": saving,
        "rename": files_complete,
        "load": loading,
        "random": training,
    }
    done: list[Kill] = []
    while True:
        run = Run(recipe, folder)
        start = time.monotonic()
        if len(done) == kills:
            assert run.end(120) == 0, run.said()
            assert "is refused" not in run.said()
            return done
        number = len(done)
        name = list(moments)[number % len(moments)]
        if name == "load" and not steps_saved(folder):
            name = "save"
        whom = ("all", "first", "last")[number % 3]
        if name == "random" and chooser.random() < 0.5:  # any time, also before there is a run to speak of
            at = start + chooser.uniform(0.2, 6.0)
            hit = run.stop_at(lambda run, at=at: time.monotonic() >= at)
        else:
            hit = run.stop_at(moments[name])
            if name == "random" and hit:
                run.send(signal.SIGCONT)
                time.sleep(chooser.uniform(0.0, 0.6))
                hit = run.process.poll() is None
        if hit:
            run.kill(whom)
        code = run.end()
        assert code != 0 or not hit, run.said()
        said = run.said()
        assert "is refused" not in said, said
        assert hit or code == 0, said
        if not hit:  # it came to its end before the moment came
            raise AssertionError(f"the run ended after {number} of {kills} kills; give it more steps\n{said}")
        done.append(Kill(name, whom, hit, max(steps_saved(folder), default=0)))
        tell(f"kill {len(done)} of {kills}: {name}, {whom}; saved up to step {done[-1].saved}")


def contents(checkpoint: Path) -> dict[str, np.ndarray]:
    """Every tensor of a checkpoint: weights, optimizer state, generators."""
    found: dict[str, np.ndarray] = {}
    for file in sorted(checkpoint.glob("rank-*.safetensors")):
        found |= {f"{file.name} {name}": value for name, value in load_file(file).items()}
    return found


def assert_same_end(folder: Path, other: Path) -> None:
    newest = max(steps_saved(folder))
    assert newest == max(steps_saved(other))
    ours, theirs = (contents(path / "checkpoints" / f"step-{newest:08d}") for path in (folder, other))
    assert ours.keys() == theirs.keys()
    assert len(ours) > 20
    for name in ours:
        np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name, strict=True)
