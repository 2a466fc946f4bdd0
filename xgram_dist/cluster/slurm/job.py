"""The first process of a job: starts the ranks, and decides what to do when they end.

    python -m xgram_dist.cluster.slurm.job --folder RUN --ranks 8 -- python -m xgram_dist train RECIPE --folder RUN

| the ranks                                   | the job                                                              |
|---------------------------------------------|----------------------------------------------------------------------|
| end with 0: training is complete            | ends with 0                                                          |
| were asked to stop (USR1, TERM), and saved  | requeues itself; the next start resumes from that checkpoint. It     |
|                                             | ends with 1 if too many stops in a row left no new checkpoint        |
| refuse their input (exit code 2)            | ends with 2: a restart would be refused again                        |
| end in any other way                        | requeues itself. It ends with 1 if too many starts in a row left no  |
|                                             | new checkpoint                                                       |

A lost node ends this process too; then Slurm requeues the job. A cancelled job is not requeued, nor one that Slurm has
restarted elsewhere in the meantime. Standard library only: the host's Python runs this, outside the ranks' container.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from xgram_dist.checkpoint.folder import list_steps
from xgram_dist.cluster.slurm.attempts import COMPLETE, CRASHED, REFUSED, STOPPED, AttemptLog
from xgram_dist.cluster.slurm.commands import hostnames, job_facts, rendezvous, run_command
from xgram_dist.errors import UserError

CANCELLED = "cancelled"
"""A file in RUN/slurm, written by `xgram-dist cancel`: the job is not requeued."""
STOPPED_CODE = 130
MAX_STOPS = 10
"""In a row without a new checkpoint. Preemption may end many starts early; a time limit that is too short ends all."""
_TASK_FAILED = re.compile(r"^srun: error: (\S+): tasks? ([\d,-]+): (.+)$")
_EXIT_CODE = re.compile(r"Exited with exit code (\d+)")
_TORCHRUN_EXIT_CODE = re.compile(r"^\s*exitcode\s*:\s*(\d+)\b")
_ERROR_LINE = re.compile(r"^(?:\[rank(\d+)\]: )?((?:[\w.]+(?:Error|Exception)\b|xgram-dist ).*)$")


@dataclass(frozen=True)
class Failure:
    """The first rank that failed; srun ends the others because of it."""

    node: str
    ranks: str
    status: str
    """As srun reports it."""
    error: str
    """The last error the rank printed."""

    @property
    def code(self) -> int | None:
        match = _EXIT_CODE.match(self.status)
        return int(match[1]) if match else None

    def __str__(self) -> str:
        if self.code is None:
            return f"rank {self.ranks} on {self.node} ended: {self.status}"
        error = f" ({self.error})" if self.error else ""
        return f"rank {self.ranks} on {self.node} ended with exit code {self.code}{error}"

    @property
    def stopped(self) -> bool:
        """It ended on request: it saved, or had nothing to save yet."""
        return self.code == STOPPED_CODE or self.status in ("Terminated", "User defined signal 1")


class Job:
    def __init__(self, args: argparse.Namespace):
        self.args, self.folder = args, Path(args.folder)
        self.id, self.restart = os.environ["SLURM_JOB_ID"], int(os.environ.get("SLURM_RESTART_COUNT") or 0)
        self.attempts = AttemptLog(self.folder, self.id)
        self.process: subprocess.Popen[str] | None = None
        self.stopping = False
        self.failure: Failure | None = None
        self.srun_error = ""
        self.refused = False
        self.decision = threading.Lock()  # held by the thread that requeues the job
        self.requeued = False

    def run(self) -> int:
        nodes = hostnames(os.environ["SLURM_JOB_NODELIST"])
        nodes = nodes[: usable_nodes(len(nodes), self.args.counts)]
        step = newest_step(self.folder)
        self.attempts.begin(self.restart, nodes, step)
        if (self.folder / "slurm" / CANCELLED).exists():
            return self.end(STOPPED, "it was cancelled", 130)
        failed = self.attempts.without_progress(step)[:-1]
        if len(failed) > self.args.restarts:
            return self.give_up([attempt.explain() for attempt in failed])
        begun = f"after step {step}" if step else "from the beginning"
        say(f"job {self.id}, start {self.restart + 1}, on {', '.join(nodes)}: {begun}")
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, self.stop)
        code = self.start(nodes)
        return self.decide(code)

    def start(self, nodes: list[str]) -> int:
        """Run the ranks until they end; srun's exit code."""
        command = self.args.command
        ranks, cpus = self.args.ranks, cpus_per_node(os.environ)
        master = rendezvous(int(self.id), nodes, self.args.node_suffix)
        srun = ["srun", f"--nodes={len(nodes)}", "--kill-on-bad-exit=1", "--nodelist", ",".join(nodes)]
        if self.args.launcher == "torchrun":
            endpoint = f"{master['MASTER_ADDR']}:{master['MASTER_PORT']}"
            command = torchrun_command(command, len(nodes), ranks, endpoint, self.id)
            ranks = 1
        srun += [f"--ntasks={ranks * len(nodes)}", f"--ntasks-per-node={ranks}"]
        srun += [f"--cpus-per-task={cpus // ranks}"] if cpus >= ranks else []
        self.process = subprocess.Popen(
            [*srun, *self.args.srun, *command],
            env={**os.environ, **master, "PYTHONUNBUFFERED": "1"},
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # so that Slurm's signals reach the ranks once, through this process
        )
        if self.stopping:  # the signal came while srun started
            self.process.send_signal(signal.SIGUSR1)
        assert self.process.stderr is not None
        self.relay_errors(self.process.stderr)
        return self.process.wait()

    def relay_errors(self, stream: IO[str]) -> None:
        """Copy stderr of the ranks and srun; remember which rank failed first, and with which error.

        `[rank3]: ` stands before an exception that ends a rank; a `UserError` is printed without it.
        """
        errors: dict[str, str] = {}  # by rank; "" for one that is not named
        for line in stream:
            sys.stderr.write(line)
            sys.stderr.flush()
            if error := _ERROR_LINE.match(line):
                errors[error[1] or ""] = error[2].strip()[:300]
            code = _TORCHRUN_EXIT_CODE.match(line)  # of a rank; torchrun itself always fails with 1
            self.refused |= code is not None and int(code[1]) == 2 and self.args.launcher == "torchrun"
            if not line.startswith("srun: error:"):
                continue
            self.srun_error = self.srun_error or line.removeprefix("srun: error:").strip()
            failed = _TASK_FAILED.match(line)
            if failed and self.failure is None:
                first_rank = re.split("[,-]", failed[2])[0]
                last_error = errors.get(first_rank, errors.get("", ""))
                self.failure = Failure(failed[1], failed[2], failed[3].strip(), last_error)

    def stop(self, number: int, _: Any) -> None:
        """Handler of USR1 and TERM: make all ranks save and end."""
        if self.requeued:  # Slurm ends the job it has just requeued
            os._exit(1)
        if self.stopping or self.decision.locked():
            return
        self.stopping = True
        self.attempts.signalled()
        say(f"{signal.Signals(number).name}: asking the ranks to save and end")
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGUSR1)  # srun passes it on to all ranks
        timer = threading.Timer(self.args.save_seconds, self.requeue_unsaved)
        timer.daemon = True
        timer.start()

    def requeue_unsaved(self) -> None:
        """Requeue without waiting for the save any longer: Slurm does not requeue a job that hits its time limit."""
        if self.decision.locked():
            return
        say(f"the ranks did not end within {self.args.save_seconds:g} s of the signal")
        self.requeue(STOPPED, f"asked to stop, but the ranks did not end within {self.args.save_seconds:g} s")

    def decide(self, code: int) -> int:
        if code == 0:
            return self.end(COMPLETE, "training is complete", 0)
        cause = str(self.failure or self.srun_error or f"srun ended with exit code {code}")
        if self.refused or (self.failure is not None and self.failure.code == 2):
            return self.end(REFUSED, f"{cause}; a restart would fail in the same way: see the log above", 2)
        if self.stopping or (self.failure.stopped if self.failure else code == STOPPED_CODE):
            stops = 1 + len(self.attempts.without_progress(newest_step(self.folder), (STOPPED,)))
            if stops < MAX_STOPS:
                return self.requeue(STOPPED, "asked to stop")
            reason = f"asked to stop {stops} times in a row before there was a new checkpoint; not requeued: a longer "
            return self.end(STOPPED, f"{reason}--time, or more frequent checkpoints (checkpoint.every), would help", 1)
        failed = self.attempts.without_progress(newest_step(self.folder))
        if len(failed) > self.args.restarts:
            return self.give_up([*(attempt.explain() for attempt in failed[:-1]), cause])
        if len(failed) > 1:
            wait = self.args.restart_wait * 4.0 ** (len(failed) - 2)
            say(f"{cause}; requeueing in {wait:g} s: start {len(failed)} in a row without a new checkpoint")
            time.sleep(wait)
        return self.requeue(CRASHED, cause)

    def give_up(self, reasons: list[str]) -> int:
        return self.end(
            CRASHED,
            f"{len(reasons)} starts in a row left no new checkpoint, the last: {reasons[-1]}; not requeued: look "
            f"at the log, then submit again",
            1,
        )

    def requeue(self, outcome: str, reason: str) -> int:
        """Slurm ends this process as soon as it has requeued the job, so everything is printed and written before."""
        if not self.decision.acquire(blocking=False):  # the other thread is requeueing
            time.sleep(60)
            return 1
        facts = job_facts_with_retries(self.id)
        if int(facts.get("Restarts", -1)) != self.restart:
            return self.end(STOPPED, f"{reason}; Slurm has restarted this job, so this start ends", 1)
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
            return self.end(outcome, f"{reason}; it could not be requeued: {error}; submit again to resume", 1)
        time.sleep(60)
        return 1

    def end(self, outcome: str, reason: str, code: int) -> int:
        self.attempts.end(outcome, reason)
        say(reason)
        return code


def usable_nodes(given: int, counts: list[int]) -> int:
    """The largest number of the given nodes over which the batch divides. `counts`: those possible; empty: any."""
    usable = [count for count in counts or [given] if count <= given]
    if not usable:
        raise UserError(f"Slurm gave {given} node(s), this run needs one of {counts}")
    return max(usable)


def cpus_per_node(environment: Mapping[str, str]) -> int:
    """CPUs that the ranks of a node share: those asked for, else what the job has on its smallest node; 0: unknown."""
    if asked := environment.get("SLURM_CPUS_PER_TASK"):
        return int(asked)
    given = environment.get("SLURM_JOB_CPUS_PER_NODE", "")  # such as 96(x2),64
    return min((int(part.partition("(")[0]) for part in given.split(",") if part), default=0)


def newest_step(folder: Path) -> int:
    return max(list_steps(folder), default=0)


def job_facts_with_retries(job: str) -> dict[str, str]:
    """Slurm's controller may be unreachable for a while."""
    for wait in (5, 15, 60, 120):
        try:
            return job_facts(job) or {}
        except UserError as error:
            say(f"{error}; trying again in {wait} s")
            time.sleep(wait)
    return job_facts(job) or {}


def torchrun_command(command: list[str], nodes: int, ranks: int, endpoint: str, job: str) -> list[str]:
    """The same command, with a torchrun on each node that starts its ranks.

    Slurm sends signals to all processes of a step. USR1 is for the ranks, so the shell makes torchrun ignore it.
    """
    at = command.index("-m")
    torchrun = ["-m", "torch.distributed.run", "--nnodes", str(nodes), "--nproc-per-node", str(ranks)]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", job]
    return ["sh", "-c", "trap '' USR1; exec \"$@\"", "sh", *command[:at], *torchrun, *command[at:]]


def say(text: str) -> None:
    print(f"slurm: {text}", flush=True)


def parse_arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m xgram_dist.cluster.slurm.job", description=__doc__.splitlines()[0])
    parser.add_argument("--folder", required=True, metavar="RUN", help="the run folder")
    parser.add_argument("--ranks", type=int, required=True, metavar="R", help="ranks per node")
    parser.add_argument("--counts", default="", metavar="1,2,4", help="node counts the run can use (default: any)")
    parser.add_argument(
        "--restarts", type=int, default=3, metavar="N", help="limit in a row without a new checkpoint (3)"
    )
    parser.add_argument(
        "--restart-wait", type=float, default=60.0, metavar="S", help="seconds before the second of these (60)"
    )
    parser.add_argument(
        "--save-seconds", type=float, default=240.0, metavar="S", help="time to save when stopped (240)"
    )
    parser.add_argument("--launcher", choices=("srun", "torchrun"), default="srun")
    parser.add_argument("--node-suffix", default="", metavar="WORD", help="appended to a node's name to reach it")
    parser.add_argument("--srun", action="append", default=[], metavar="OPTION", help="more options of srun")
    parser.add_argument("command", nargs="+", metavar="-- COMMAND", help="what a rank runs")
    args = parser.parse_args(words)
    args.counts = [int(count) for count in args.counts.split(",") if count]
    return args


def main() -> int:
    try:
        return Job(parse_arguments(sys.argv[1:])).run()
    except UserError as error:
        say(str(error))
        return 2


if __name__ == "__main__":
    sys.exit(main())
