"""Runs that are killed for real, at moments seen from outside: files that appear, files that a rank has open.

Ranks are stopped first, the moment is looked at again, and only then is anyone killed: so a kill "between files and
rename" was one.
"""

import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from forked import Zygote
from safetensors.numpy import load_file

RANKS = 2


class Run:
    """`xgram-dist train` in a process of its own; its output goes to a file.

    Started as a user would, or by a zygote (forked.py); or `command`, to which recipe and folder are added.
    """

    def __init__(
        self,
        recipe: str,
        folder: Path,
        *words: str,
        ranks: int = RANKS,
        zygote: Zygote | None = None,
        command: tuple[str, ...] = (sys.executable, "-m", "xgram_dist", "train"),
        **environment: str,
    ):
        self.folder, self.ranks, self.begun = folder, ranks, time.monotonic()
        self.log = Path(recipe).parent / f"{folder.name}-{time.monotonic_ns()}.log"
        several = ("--ranks", str(ranks)) if "torch.distributed.run" not in command else ()
        words = (recipe, "--folder", str(folder), *several, *words)
        self.log.touch()
        if zygote is not None:
            self.process: Any = zygote.start(["train", *words], self.log)
            return
        with self.log.open("wb") as log:
            environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
            self.process = subprocess.Popen([*command, *words], stdout=log, stderr=subprocess.STDOUT, env=environment)

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def pids(self) -> list[int]:
        """Of the ranks, in order; fewer while they are being started."""
        if self.ranks == 1:
            return [self.process.pid]
        with suppress(OSError):
            path = f"/proc/{self.process.pid}/task/{self.process.pid}/children"
            return [int(pid) for pid in Path(path).read_text().split()]
        return []

    def send(self, number: int, *pids: int) -> None:
        for pid in pids or self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def stop_at(self, moment: Callable[["Run"], bool], timeout: float = 240.0) -> bool:
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
        """Stopped ranks: the first, the last, all with their launcher; or the launcher, which takes them along."""
        pids = self.pids()
        if whom == "all ranks":
            self.send(signal.SIGKILL, self.process.pid, *pids)
        elif whom == "the launcher":
            self.send(signal.SIGKILL, self.process.pid)
        else:
            self.send(signal.SIGKILL, pids[0 if whom == "the first" else -1])
            self.send(signal.SIGCONT, *pids)

    def end(self, timeout: float = 240.0) -> int:
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


def compacting(run: Run) -> bool:
    """All rows of a chain that got long are written again, and the new chain has not got its name."""
    checkpoints = run.folder / "checkpoints"
    with suppress(OSError):
        for name in unfinished(run):
            newest = checkpoints / f"step-{last_saved(run.folder):08d}"
            if (checkpoints / name / "manifest.json").exists() and len(parts(newest)) > 1:
                return len(parts(checkpoints / name)) == 1
    return False


def parts(checkpoint: Path) -> set[str]:
    """Of a chain."""
    return {path.name.split(".")[0] for path in checkpoint.glob("rows-*.safetensors")}


def uploading(run: Run) -> bool:
    """And there is a newer one to upload than those before it."""
    return (run.folder / "checkpoints" / ".step-upload").exists()


def fetching(run: Run) -> bool:
    return bool(unfinished(run)) and not steps_saved(run.folder)


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


def wait_until(run: Run, what: Callable[[], bool], timeout: float = 60.0) -> None:
    end = time.monotonic() + timeout
    while not what():
        assert run.process.poll() is None, f"the run has ended: {run.said()}"
        assert time.monotonic() < end, f"waited {timeout} s: {run.said()}"
        time.sleep(0.01)


def training(run: Run) -> bool:
    """There is a checkpoint to resume from."""
    return bool(steps_saved(run.folder)) and "\nstep " in run.said()


def steps_saved(folder: Path) -> list[int]:
    names = os.listdir(folder / "checkpoints") if (folder / "checkpoints").is_dir() else []
    return sorted(int(name.removeprefix("step-")) for name in names if name.startswith("step-"))


MOMENTS: dict[str, Callable[[Run], bool]] = {
    "while training": training,
    "during a save": saving,
    "between files and rename": files_complete,
    "during a load": loading,
    "any time": lambda run: True,
}


CHAIN_MOMENTS = {**MOMENTS, "during a compaction": compacting}
UPLOAD_MOMENTS = {
    "during an upload": uploading,
    "while training": training,
    "between files and rename": files_complete,
}
FETCH = "during a fetch"
"""To an empty disk."""
WHOM = ("all ranks", "the first", "the last", "the launcher")


def last_saved(folder: Path) -> int:
    return max(steps_saved(folder), default=0)


@dataclass
class Kill:
    moment: str
    whom: str
    saved: int
    """Newest step whose checkpoint there was."""


@dataclass
class Killer:
    """Starts a run, kills it, and starts it again."""

    recipe: str
    folder: Path
    seed: int
    zygote: Zygote | None = None
    moments: dict[str, Callable[[Run], bool]] = field(default_factory=lambda: MOMENTS)
    tell: Callable[[str], None] = lambda text: None
    done: list[Kill] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.chooser = random.Random(self.seed)

    def start(self, ranks: int = RANKS) -> Run:
        return Run(self.recipe, self.folder, ranks=ranks, zygote=self.zygote)

    def start_and_kill(self, ranks: int = RANKS, name: str | None = None) -> Kill:
        """Start the run, let it get somewhere, kill it at a moment: by default the next of the list."""
        newest = last_saved(self.folder)
        name = name or list(self.moments)[len(self.done) % len(self.moments)]
        moment = fetching if name == FETCH else self.moments[name]
        if name == "during a load" and not newest:
            name, moment = "during a save", saving
        number = len(self.done)  # every moment meets every victim
        whom = WHOM[(number + number // math.lcm(len(self.moments), len(WHOM))) % len(WHOM)]
        run = self.start(ranks)
        if name == "any time":
            time.sleep(self.chooser.uniform(0.0, 1.5 if self.zygote else 8.0))
        elif name == "while training":
            assert run.stop_at(training), run.said()
            run.send(signal.SIGCONT)
            time.sleep(self.chooser.uniform(0.0, 0.8))
        # Some way on from where it was, so that the run gets somewhere between kills.
        further = name not in ("any time", "while training", "during a load", FETCH)
        goal = newest + 5 * self.chooser.randint(0, 2) if further else 0
        hit = run.stop_at(lambda run: last_saved(self.folder) >= goal and moment(run))
        assert hit, f"the run ended before kill {len(self.done) + 1}, {name}; give it more steps\n{run.said()}"
        return self.kill(run, name, whom)

    def kill(self, run: Run, name: str, whom: str) -> Kill:
        """Ranks that stand still."""
        run.kill(whom)
        assert run.end() != 0, run.said()
        assert "is refused" not in run.said(), run.said()
        self.done.append(Kill(name, whom, last_saved(self.folder)))
        self.tell(f"{name}, {whom}; checkpoint of step {self.done[-1].saved}")
        return self.done[-1]

    def finish(self, ranks: int = RANKS) -> None:
        run = self.start(ranks)
        assert run.end(600) == 0, run.said()
        assert "is refused" not in run.said(), run.said()


def kill_loop(
    recipe: str, folder: Path, kills: int, seed: int, zygote: Zygote | None = None, **more: Any
) -> list[Kill]:
    """Start, kill, start again until all kills are done and the run has come to its end."""
    killer = Killer(recipe, folder, seed, **more)
    for _ in range(kills):
        killer.start_and_kill()
    killer.finish()
    return killer.done


def change_layout(killer: Killer, layouts: list[tuple[int, int]], kills: int) -> list[Kill]:
    """`layouts`: (ranks, the step up to which). The checkpoints of these steps must be kept (checkpoint.keep_every).
    What a start has saved beyond its step is removed, so that runs that are killed at other moments change their ranks
    after the same steps."""
    for number, (ranks, until) in enumerate(layouts):
        share = (number + 1) * kills // len(layouts) - number * kills // len(layouts)
        for _ in range(share):
            killer.start_and_kill(ranks)
        if number + 1 == len(layouts):
            break
        if last_saved(killer.folder) < until:
            run = killer.start(ranks)
            assert run.stop_at(lambda run, until=until: last_saved(killer.folder) >= until), run.said()
            run.kill("all ranks")
            assert run.end() != 0
        assert until in steps_saved(killer.folder)
        for step in steps_saved(killer.folder):
            if step > until:
                shutil.rmtree(killer.folder / "checkpoints" / f"step-{step:08d}")
    killer.finish(layouts[-1][0])
    return killer.done


def contents(checkpoint: Path) -> dict[str, np.ndarray]:
    """Every tensor of a checkpoint: weights, optimizer state, generators."""
    found: dict[str, np.ndarray] = {}
    for file in sorted(checkpoint.glob("rank-*.safetensors")):
        found |= load_file(file)  # names have the offsets of their part
    return found | touched_rows(checkpoint)


def touched_rows(checkpoint: Path) -> dict[str, np.ndarray]:
    """Of each table tensor of a chain, the rows by ascending id, each from the last part that has it."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    files = {file.name: load_file(file) for file in checkpoint.glob("rows-*.safetensors")}

    def assembled(name: str) -> np.ndarray:
        entry = manifest["tensors"][name]
        parts = [(chunk["offsets"], files[chunk["file"]][chunk["key"]]) for chunk in entry["chunks"]]
        whole = np.zeros(entry["shape"], parts[0][1].dtype) if parts else np.zeros(entry["shape"])
        for offsets, part in parts:
            whole[tuple(slice(o, o + n) for o, n in zip(offsets, part.shape, strict=True))] = part
        return whole

    found = {}
    for row_set, record in manifest["row_ids"].items():
        if record["table_rows"] is None:
            continue
        ids = []
        for segment in record["segments"]:
            ranges = segment["ranges"]
            ids += [assembled(segment["tensor"])] if ranges is None else [np.arange(*ends) for ends in ranges]
        last = {int(row): position for position, row in enumerate(np.concatenate(ids))}
        rows = sorted(last)
        found[f"{row_set} ids"] = np.array(rows)
        for name, entry in manifest["tensors"].items():
            if entry["row_ids"] == row_set:
                found[name] = assembled(name)[[last[row] for row in rows]]
    return found


def assert_same_end(folder: Path, other: Path) -> None:
    newest = max(steps_saved(folder))
    assert newest == max(steps_saved(other))
    ours, theirs = (contents(path / "checkpoints" / f"step-{newest:08d}") for path in (folder, other))
    assert ours.keys() == theirs.keys()
    assert len(ours) > 20
    for name in ours:
        np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name, strict=True)
