"""The first process of a job: starts the ranks, and decides what their end means.

    python -m xgram_dist.slurm.job --folder RUN --ranks 8 -- python -m xgram_dist train RECIPE --folder RUN

| the ranks                                   | the job                                                              |
|---------------------------------------------|----------------------------------------------------------------------|
| end with 0: training is complete            | ends with 0                                                          |
| were asked to stop (USR1, TERM), and saved  | requeues itself; the next start goes on from that checkpoint, unless |
|                                             | too many in a row were stopped before there was a new one            |
| refuse to go on (exit code 2)               | ends with 2: it would be refused again                               |
| end in any other way                        | requeues itself, unless too many starts in a row left no checkpoint  |

A lost node ends this process too; then Slurm requeues the job. A job that was cancelled is not requeued, nor one that
Slurm has meanwhile started anew elsewhere. Standard library alone: this runs outside the ranks' container.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from xgram_dist.checkpoint.folder import found_steps
from xgram_dist.errors import UserError
from xgram_dist.slurm.attempts import COMPLETE, CRASHED, REFUSED, STOPPED, Attempts
from xgram_dist.slurm.commands import hostnames, job_facts, run_command
from xgram_dist.slurm.environment import meeting_place

CANCELLED = "cancelled"
"""A file in RUN/slurm: someone asked for the run to end; no requeue."""
STOPPED_CODE = 130
STOPS = 10
"""In a row, without a new checkpoint. Preemption may end many starts early; a time limit too short ends all of them."""
_FAILED = re.compile(r"^srun: error: (\S+): tasks? ([\d,-]+): (.+)$")
_EXIT_CODE = re.compile(r"Exited with exit code (\d+)")
_CODE_BY_TORCHRUN = re.compile(r"^\s*exitcode\s*:\s*(\d+)\b")
_LAST_WORDS = re.compile(r"^(?:\[rank(\d+)\]: )?((?:[\w.]+(?:Error|Exception)\b|xgram-dist ).*)$")


@dataclass(frozen=True)
class Failure:
    """The first rank that ended badly; the others follow because of it."""

    node: str
    ranks: str
    how: str
    last_words: str

    @property
    def code(self) -> int | None:
        found = _EXIT_CODE.match(self.how)
        return int(found[1]) if found else None

    def __str__(self) -> str:
        if self.code is None:
            return f"rank {self.ranks} on {self.node} ended: {self.how}"
        words = f" ({self.last_words})" if self.last_words else ""
        return f"rank {self.ranks} on {self.node} ended with exit code {self.code}{words}"

    @property
    def stopped(self) -> bool:
        """It was asked to: it saved, or had nothing to save yet."""
        return self.code == STOPPED_CODE or self.how in ("Terminated", "User defined signal 1")


class Job:
    def __init__(self, args: argparse.Namespace):
        self.args, self.folder = args, Path(args.folder)
        self.id, self.restart = os.environ["SLURM_JOB_ID"], int(os.environ.get("SLURM_RESTART_COUNT") or 0)
        self.attempts = Attempts(self.folder, self.id)
        self.process: subprocess.Popen[str] | None = None
        self.stopping = False
        self.failure: Failure | None = None
        self.complaint = ""
        self.refused = False
        self.deciding = threading.Lock()
        self.requeued = False

    def run(self) -> int:
        nodes = hostnames(os.environ["SLURM_JOB_NODELIST"])
        nodes = nodes[: usable_nodes(len(nodes), self.args.counts)]
        step = newest_step(self.folder)
        self.attempts.begin(self.restart, nodes, step)
        if (self.folder / "slurm" / CANCELLED).exists():
            return self.end(STOPPED, "it was cancelled", 130)
        lost = self.attempts.without_progress(step)[:-1]
        if len(lost) > self.args.restarts:
            return self.give_up([one.why() for one in lost])
        begun = f"after step {step}" if step else "from the beginning"
        say(f"job {self.id}, start {self.restart + 1}, on {', '.join(nodes)}: {begun}")
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, self.stop)
        code = self.start(nodes)
        return self.judge(code)

    def start(self, nodes: list[str]) -> int:
        """Run the ranks to their end; srun's exit code."""
        words = self.args.command
        ranks, cpus = self.args.ranks, int(os.environ.get("SLURM_CPUS_PER_TASK") or 0)  # of a node
        place = meeting_place(int(self.id), nodes, self.args.node_suffix)
        srun = ["srun", f"--nodes={len(nodes)}", "--kill-on-bad-exit=1", "--nodelist", ",".join(nodes)]
        if self.args.launcher == "torchrun":
            words = torchrun_words(words, len(nodes), ranks, f"{place['MASTER_ADDR']}:{place['MASTER_PORT']}", self.id)
            ranks = 1
        srun += [f"--ntasks={ranks * len(nodes)}", f"--ntasks-per-node={ranks}"]
        srun += [f"--cpus-per-task={cpus // ranks}"] if cpus >= ranks else []
        self.process = subprocess.Popen(
            [*srun, *self.args.srun, *words],
            env={**os.environ, **place, "PYTHONUNBUFFERED": "1"},
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # Slurm's signals to this process reach the ranks through it, once
        )
        if self.stopping:  # asked while it started
            self.process.send_signal(signal.SIGUSR1)
        assert self.process.stderr is not None
        self.listen(self.process.stderr)
        return self.process.wait()

    def listen(self, stream: IO[str]) -> None:
        """Pass on what the ranks and srun complain of; remember which rank failed first, and of what.

        torch puts `[rank3]: ` before an error that ends a rank; a sentence for the user comes without.
        """
        last_words: dict[str, str] = {}
        for line in stream:
            sys.stderr.write(line)
            sys.stderr.flush()
            if words := _LAST_WORDS.match(line):
                last_words[words[1] or ""] = words[2].strip()[:300]
            code = _CODE_BY_TORCHRUN.match(line)  # of a rank; its own is 1 whatever theirs are
            self.refused |= code is not None and int(code[1]) == 2 and self.args.launcher == "torchrun"
            if not line.startswith("srun: error:"):
                continue
            self.complaint = self.complaint or line.removeprefix("srun: error:").strip()
            found = _FAILED.match(line)
            if found and self.failure is None:
                first = re.split("[,-]", found[2])[0]
                words_of = last_words.get(first, last_words.get("", ""))
                self.failure = Failure(found[1], found[2], found[3].strip(), words_of)

    def stop(self, number: int, _: Any) -> None:
        """USR1 or TERM: all ranks are to save and end."""
        if self.requeued:  # this is Slurm's answer
            os._exit(1)
        if self.stopping or self.deciding.locked():
            return
        self.stopping = True
        self.attempts.signalled()
        say(f"{signal.Signals(number).name}: the ranks are asked to save and end")
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGUSR1)  # srun passes it on to all ranks
        late = threading.Timer(self.args.save_seconds, self.give_up_saving)
        late.daemon = True
        late.start()

    def give_up_saving(self) -> None:
        """A job that its time limit ends is not requeued by Slurm: better to lose steps than the run."""
        if self.deciding.locked():
            return
        say(f"the ranks did not end within {self.args.save_seconds:g} s of the signal")
        self.requeue(STOPPED, f"asked to stop, but the ranks did not end within {self.args.save_seconds:g} s")

    def judge(self, code: int) -> int:
        if code == 0:
            return self.end(COMPLETE, "training is complete", 0)
        why = str(self.failure or self.complaint or f"srun ended with exit code {code}")
        if self.refused or (self.failure is not None and self.failure.code == 2):
            return self.end(REFUSED, f"{why}, which starting again would not change: see the log above it", 2)
        if self.stopping or (self.failure.stopped if self.failure else code == STOPPED_CODE):
            stops = 1 + len(self.attempts.without_progress(newest_step(self.folder), (STOPPED,)))
            if stops < STOPS:
                return self.requeue(STOPPED, "asked to stop")
            reason = f"asked to stop {stops} times in a row before there was a new checkpoint; not requeued: a longer "
            return self.end(STOPPED, f"{reason}--time, or checkpoints more often (checkpoint.every), would help", 1)
        lost = self.attempts.without_progress(newest_step(self.folder))
        if len(lost) > self.args.restarts:
            return self.give_up([*(one.why() for one in lost[:-1]), why])
        if len(lost) > 1:
            wait = self.args.restart_wait * 4.0 ** (len(lost) - 2)
            say(f"{why}; requeue in {wait:g} s: start {len(lost)} in a row without a new checkpoint")
            time.sleep(wait)
        return self.requeue(CRASHED, why)

    def give_up(self, reasons: list[str]) -> int:
        return self.end(
            CRASHED,
            f"{len(reasons)} starts in a row left no new checkpoint, the last: {reasons[-1]}; not requeued: look "
            f"into the log, then submit again",
            1,
        )

    def requeue(self, outcome: str, reason: str) -> int:
        """Slurm ends this process as soon as it has requeued the job, so all is said and written before."""
        if not self.deciding.acquire(blocking=False):  # it is decided already, in another thread
            time.sleep(60)
            return 1
        facts = patient_job_facts(self.id)
        if int(facts.get("Restarts", -1)) != self.restart:
            return self.end(STOPPED, f"{reason}; Slurm has started this job anew, so this start ends", 1)
        if (self.folder / "slurm" / CANCELLED).exists() or facts.get("JobState") == "CANCELLED":
            code = self.end(STOPPED, f"{reason}; cancelled, so not requeued", 130)
            if facts.get("JobState") != "CANCELLED":
                run_command(["scancel", self.id])
                time.sleep(30)
            return code
        self.end(outcome, f"{reason}; requeued", 1)
        self.requeued = True
        try:
            run_command(["scontrol", "requeue", self.id])
        except UserError as error:
            return self.end(outcome, f"{reason}; it could not be requeued: {error}; submit again to go on", 1)
        time.sleep(60)
        return 1

    def end(self, outcome: str, reason: str, code: int) -> int:
        self.attempts.end(outcome, reason)
        say(reason)
        return code


def usable_nodes(given: int, counts: list[int]) -> int:
    """The most of the given nodes that the batch can be divided over."""
    fitting = [count for count in counts or [given] if count <= given]
    if not fitting:
        raise UserError(f"Slurm gave {given} node(s), this run needs one of {counts}")
    return max(fitting)


def newest_step(folder: Path) -> int:
    return max(found_steps(folder), default=0)


def patient_job_facts(job: str) -> dict[str, str]:
    """The controller may be away for a while."""
    for wait in (5, 15, 60, 120):
        try:
            return job_facts(job) or {}
        except UserError as error:
            say(f"{error}; once more in {wait} s")
            time.sleep(wait)
    return job_facts(job) or {}


def torchrun_words(words: list[str], nodes: int, ranks: int, place: str, job: str) -> list[str]:
    """The same command, with a torchrun on each node that starts its ranks.

    Slurm's signals reach all processes of a step. USR1 is for the ranks; torchrun is told to ignore it.
    """
    at = words.index("-m")
    torchrun = ["-m", "torch.distributed.run", "--nnodes", str(nodes), "--nproc-per-node", str(ranks)]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", place, "--rdzv-id", job]
    return ["sh", "-c", "trap '' USR1; exec \"$@\"", "sh", *words[:at], *torchrun, *words[at:]]


def say(text: str) -> None:
    print(f"slurm: {text}", flush=True)


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m xgram_dist.slurm.job", description=__doc__.splitlines()[0])
    parser.add_argument("--folder", required=True, metavar="RUN", help="the run folder")
    parser.add_argument("--ranks", type=int, required=True, metavar="R", help="ranks of a node")
    parser.add_argument("--counts", default="", metavar="1,2,4", help="numbers of nodes the run can use (default: any)")
    parser.add_argument("--restarts", type=int, default=3, metavar="N", help="in a row, without a new checkpoint (3)")
    parser.add_argument("--restart-wait", type=float, default=60.0, metavar="S", help="before the second of them (60)")
    parser.add_argument("--save-seconds", type=float, default=240.0, metavar="S", help="for saving when stopped (240)")
    parser.add_argument("--launcher", choices=("srun", "torchrun"), default="srun")
    parser.add_argument("--node-suffix", default="", metavar="WORD", help="added to a node's name to reach it")
    parser.add_argument("--srun", action="append", default=[], metavar="OPTION", help="more options of srun")
    parser.add_argument("command", nargs="+", metavar="-- COMMAND", help="what a rank runs")
    args = parser.parse_args(words)
    args.counts = [int(count) for count in args.counts.split(",") if count]
    return args


def main() -> int:
    try:
        return Job(parse(sys.argv[1:])).run()
    except UserError as error:
        say(str(error))
        return 2


if __name__ == "__main__":
    sys.exit(main())
