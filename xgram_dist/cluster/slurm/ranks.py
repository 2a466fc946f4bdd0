"""The ranks of a job: srun's command, how they are asked to save and end, and which of them failed first.

Standard library only.
"""

import argparse
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from xgram_dist.cluster.slurm.commands import rendezvous
from xgram_dist.environment import JOB, STOP_FILE, TOKEN, slurm_cpus
from xgram_dist.errors import BadFileError
from xgram_dist.untrusted import open_itself, read_file

STOPPED_CODE = 130
ANSWER_SECONDS = 3.0
"""For the first rank to answer the file that asks it to stop; then all ranks get the signal."""
ASKED, MAX_ANSWER = "stop", 100
_TASK_FAILED = re.compile(r"^srun: error: (\S+): tasks? ([\d,-]+): (.+)$")
_EXIT_CODE = re.compile(r"Exited with exit code (\d+)")
_TORCHRUN_EXIT_CODE = re.compile(r"^\s*exitcode\s*:\s*(\d+)\b")
_PREEMPTED = re.compile(r"^(slurmstepd|srun)\S*: .*\*\*\* .* DUE TO PREEMPTION")
_ERROR_LINE = re.compile(r"^(?:\[rank(\d+)\]: )?((?:[\w.]+(?:Error|Exception)\b|xgram-dist ).*)$")
_CONSEQUENCE = re.compile(r"timed out|timeout|waited|connection (closed|reset)|broken pipe|not rep|not reach", re.I)


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

    @property
    def of_its_node(self) -> str:
        """What the rank itself ended with; empty if it only lost the others."""
        return "" if _CONSEQUENCE.search(self.error) else self.error or self.status


class Ranks:
    """Of one start."""

    def __init__(self, args: argparse.Namespace, nodes: list[str], job: int, lease: str):
        """`lease`: the name of the run's jobs and which of them this is, for the lease of the run folder."""
        self.args, self.nodes, self.job = args, nodes, job
        self.failure: Failure | None = None
        self.srun_error = ""
        self.refused = False
        self.preempted = False
        """Slurm has said that it ends them for another job's sake."""
        self._lease = lease
        self._stop_file = Path(args.folder) / "slurm" / "stop"
        self._process: subprocess.Popen[str] | None = None
        self._asked = False

    def run(self) -> int:
        """Until they end; srun's exit code."""
        command = self.args.command
        ranks, cpus = self.args.ranks, slurm_cpus()
        master = rendezvous(self.job, self.nodes, self.args.node_suffix)
        srun = ["srun", f"--nodes={len(self.nodes)}", "--kill-on-bad-exit=1", "--nodelist", ",".join(self.nodes)]
        if self.args.launcher == "torchrun":
            endpoint = f"{master['MASTER_ADDR']}:{master['MASTER_PORT']}"
            command = torchrun_command(command, len(self.nodes), ranks, endpoint, str(self.job))
            ranks = 1
        srun += [f"--ntasks={ranks * len(self.nodes)}", f"--ntasks-per-node={ranks}"]
        srun += [f"--cpus-per-task={cpus // ranks}"] if cpus >= ranks else []
        if not self._asked:
            self._write_stop_file("")
        own = {JOB: self._lease, STOP_FILE: str(self._stop_file.absolute()), "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(
            [*srun, *self.args.srun, *command],
            env={TOKEN: secrets.token_hex(16), **os.environ, **master, **own},
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # so that Slurm's signals reach the ranks once, through this process
        )
        if self._asked:  # while srun started
            self._signal()
        assert self._process.stderr is not None
        self._relay_errors(self._process.stderr)
        return self._process.wait()

    def ask_to_stop(self) -> None:
        """Make all ranks save and end. By a file that the first rank looks at, because a program around a rank (a
        container, a shell) may end on the signal, or take it; by the signal where no rank answers."""
        self._asked = True
        self._write_stop_file(ASKED)
        if self._process is not None:
            timer = threading.Timer(ANSWER_SECONDS, self._signal)
            timer.daemon = True
            timer.start()

    def _signal(self) -> None:
        assert self._process is not None
        try:
            answered = read_file(self._stop_file, limit=MAX_ANSWER) != ASKED.encode()
        except (OSError, BadFileError):
            answered = False
        if not answered and self._process.poll() is None:
            self._process.send_signal(signal.SIGUSR1)  # srun passes it on to all ranks

    def _write_stop_file(self, text: str) -> None:
        """In place: on network file systems a file that exists is read anew each time that it is opened."""
        try:
            self._stop_file.parent.mkdir(parents=True, exist_ok=True)
            with open(self._stop_file, "w", encoding="utf-8", opener=open_itself) as file:
                file.write(text)
        except OSError:
            return  # the disk is full: the signal does it

    def _relay_errors(self, stream: IO[str]) -> None:
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
            self.preempted |= _PREEMPTED.match(line) is not None
            if not line.startswith("srun: error:"):
                continue
            self.srun_error = self.srun_error or line.removeprefix("srun: error:").strip()
            failed = _TASK_FAILED.match(line)
            if failed and self.failure is None:
                first_rank = re.split("[,-]", failed[2])[0]
                last_error = errors.get(first_rank, errors.get("", ""))
                self.failure = Failure(failed[1], failed[2], failed[3].strip(), last_error)
        self.refused |= self.failure is not None and self.failure.code == 2


def torchrun_command(command: list[str], nodes: int, ranks: int, endpoint: str, job: str) -> list[str]:
    """The same command, with a torchrun on each node that starts its ranks.

    Slurm sends signals to all processes of a step. USR1 is for the ranks, so the shell makes torchrun ignore it.
    """
    at = command.index("-m")
    torchrun = ["-m", "torch.distributed.run", "--nnodes", str(nodes), "--nproc-per-node", str(ranks)]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", job]
    return ["sh", "-c", "trap '' USR1; exec \"$@\"", "sh", *command[:at], *torchrun, *command[at:]]
