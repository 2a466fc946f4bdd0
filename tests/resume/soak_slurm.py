"""Jobs on the Slurm of the tests whose ranks and nodes are killed: part of soak.py.

Each job has two nodes of eight and a rank on each, and is killed a few times; its end is that of a run without Slurm.
"""

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cluster import Cluster, wait_for
from kills import MOMENTS, Kill, last_saved
from slurm_helpers import (
    assert_same_weights,
    log,
    starts,
    submit,
    undisturbed,
    wait_for_end,
    wait_for_start,
    write_recipe,
    write_site,
)

from xgram_dist.cluster.slurm.attempts import read_attempts
from xgram_dist.cluster.slurm.commands import ENDED, job_facts, job_state, run_command

RANK = "paced.py -m xgram_dist train"
"""In the command line of a rank, and of nothing else."""
KILLS_PER_JOB = 6
PACE = 0.1
STEPS_PER_KILL = 50
HITS = (
    ("a rank", "while training"),
    ("a node", "while training"),
    ("a rank", "during a save"),
    ("a rank", "during a requeue"),
    ("the batch host", "during a save"),
    ("a rank", "during a load"),
    ("the batch host", "during a requeue"),
    ("all ranks", "while training"),
    ("a node", "during a load"),
)
SECONDS = 400.0
"""For whatever is waited for: a start takes half a minute where other work has the cores."""


def run(folder: Path, data: Path, kills: int, tell: Callable[[str], None], record: Callable[[Kill], None]) -> None:
    folder.mkdir()
    folder.chmod(0o755)
    steps = STEPS_PER_KILL * min(kills, KILLS_PER_JOB)
    recipe = write_recipe(folder, data, steps=steps, log_every=1)
    expected = undisturbed(recipe, folder / "undisturbed", 2)
    before = os.environ["PATH"]
    with Cluster(folder / "cluster", nodes=8) as cluster:
        os.environ["PATH"] = f"{folder}/cluster/bin:{before}"
        try:
            done = 0
            while done < kills:
                place = folder / f"job-{done}"
                place.mkdir()
                site = write_site(place, pace=PACE, time="300", restarts=50)
                job = JobUnderFire(
                    cluster, submit(recipe, site, place / "run", "--nodes", "2", "--no-preflight"), place / "run"
                )
                share = min(KILLS_PER_JOB, kills - done)
                for number in range(done, done + share):
                    kill = job.hit(*HITS[number % len(HITS)], random.Random(number))
                    tell(f"{kill.moment}, {kill.whom}; checkpoint of step {kill.saved}")
                    record(kill)
                done += share
                assert wait_for_end(job.id, job.folder, SECONDS) == "COMPLETED", job.said()
                assert_same_weights(job.folder, expected)
        finally:
            os.environ["PATH"] = before


class JobUnderFire:
    """Looks like `kills.Run` to the moments."""

    def __init__(self, cluster: Cluster, job: str, folder: Path):
        self.cluster, self.id, self.folder = cluster, job, folder

    def said(self) -> str:
        return f"{job_facts(self.id)}\n{log(self.folder)}"

    def nodes(self) -> list[str]:
        return read_attempts(self.folder)[-1].nodes

    def pids(self) -> list[int]:
        return [pid for node in self.nodes() for pid in self.cluster.processes(node, RANK)]

    def hit(self, whom: str, moment: str, chooser: random.Random) -> Kill:
        """Kill, and wait until the run has started again."""
        begun = starts(self.folder)
        newest = last_saved(self.folder)
        wait_for_start(self.folder, max(1, begun), SECONDS)
        if moment == "during a load":  # of the start that follows a kill
            self.wait(lambda: last_saved(self.folder) > newest)
            begun = starts(self.folder)
            self.send(signal.SIGKILL, self.pids()[-1:])
            wait_for_start(self.folder, begun + 1, SECONDS)
            self.stop_at(moment)
            begun += 1
        elif moment == "during a requeue":
            self.wait(lambda: last_saved(self.folder) > newest)
            run_command(["scancel", "--batch", "--signal=USR1", self.id])
            if whom == "a rank":  # while it saves, or ends
                self.wait(lambda: self.is_asked(begun))
            else:
                self.wait(
                    lambda: (job_facts(self.id) or {}).get("JobState") != "RUNNING" or starts(self.folder) > begun
                )
        else:
            self.wait(lambda: last_saved(self.folder) > newest)
            if moment == "while training":
                time.sleep(chooser.uniform(0.0, 1.0))
            self.stop_at(moment)
        saved = last_saved(self.folder)
        self.kill(whom)
        wait_for_start(self.folder, begun + 1, SECONDS)
        return Kill(moment, whom, saved)

    def is_asked(self, number: int) -> bool:
        attempts = read_attempts(self.folder)
        return len(attempts) > number or attempts[number - 1].signalled is not None

    def stop_at(self, moment: str) -> None:
        """All ranks stand still in the moment."""
        ends = time.monotonic() + SECONDS
        while time.monotonic() < ends:
            assert job_state(self.id) not in ENDED, self.said()
            pids = self.pids()
            for _ in range(200 if len(pids) == 2 else 0):
                look: Any = Still(self.folder, pids)
                if MOMENTS[moment](look) if moment != "while training" else True:
                    self.send(signal.SIGSTOP, pids)
                    if moment == "while training" or MOMENTS[moment](look):
                        return
                    self.send(signal.SIGCONT, pids)
                time.sleep(0.001)
            time.sleep(0.02)
        raise AssertionError(f"waited {SECONDS} s for a moment {moment}: {self.said()}")

    def kill(self, whom: str) -> None:
        pids, nodes = self.pids(), self.nodes()
        if whom in ("a node", "the batch host"):
            node = nodes[0 if whom == "the batch host" else -1]
            self.cluster.lose(node)
            self.send(signal.SIGCONT, pids)
            self.wait(lambda: self.is_down(node))
            self.cluster.boot(node)
        else:
            self.send(signal.SIGKILL, pids if whom == "all ranks" else pids[-1:])
            self.send(signal.SIGCONT, pids)

    def is_down(self, node: str) -> bool:
        return "DOWN" in self.cluster.run("scontrol", "show", "node", node)

    def send(self, number: int, pids: list[int]) -> None:
        for pid in pids:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue

    def wait(self, condition: Callable[[], bool]) -> None:
        wait_for(condition, SECONDS, self.said)


class Still:
    """The processes that a moment looks at."""

    def __init__(self, folder: Path, pids: list[int]):
        self.folder, self._pids = folder, pids

    def pids(self) -> list[int]:
        return self._pids
