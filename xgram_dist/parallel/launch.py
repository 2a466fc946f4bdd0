"""`--ranks N`: starts N ranks of this command on this machine, and ends them together.

The machine's cores are divided among the ranks. Output and errors of rank 0 are passed through; of the others only the
last lines are kept. When a rank fails, the others are killed at once and the failed rank's last lines are shown, so
that the cause is not buried under errors that follow from it. SIGINT, SIGTERM and SIGUSR1 are forwarded to all ranks,
which agree on a step to stop after.
"""

import collections
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any

SHOWN_LINES = 40
"""Of a failed rank's stderr."""
USER_ERROR, INTERRUPTED = 2, 130
"""Exit codes: of a `UserError`, and of a run that was stopped and saved."""
POLL_SECONDS, CAUSE_SECONDS = 0.05, 3.0

Processes = list[subprocess.Popen[bytes]]


def launch(arguments: list[str], ranks: int) -> int:
    """Runs `xgram-dist ARGUMENTS` on `ranks` ranks. Returns the exit code of the first to fail, else of rank 0."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    environment = {"OMP_NUM_THREADS": str(max(1, num_cores // ranks)), **os.environ}
    environment |= {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "xgram_dist", *arguments],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=None if rank == 0 else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,  # signals of the terminal reach the ranks through this process, once
        )
        for rank in range(ranks)
    ]
    for rank, process in enumerate(processes):
        with contextlib.suppress(ProcessLookupError):  # it has ended already; `_wait` reports it
            bind(process.pid, cores_of(rank, ranks))
    readers = [_StderrReader(process.stderr, echo=rank == 0) for rank, process in enumerate(processes)]
    previous_handlers: dict[int, Any] = {
        number: signal.signal(number, lambda received, _: _forward_signal(processes, received))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    }
    try:
        return _wait(processes, readers)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


class _StderrReader:
    """A thread that reads a rank's stderr. It keeps the last lines, and with `echo` passes all of them through."""

    def __init__(self, stream: IO[bytes] | None, echo: bool):
        assert stream is not None
        self.echo = echo
        self._stream = stream
        self._lines: collections.deque[str] = collections.deque(maxlen=SHOWN_LINES)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        for line in self._stream:
            text = line.decode(errors="replace")
            self._lines.append(text)
            if self.echo:
                sys.stderr.write(text)
                sys.stderr.flush()

    def last_lines(self) -> str:
        self._thread.join(timeout=1.0)
        return "".join(self._lines)


def _forward_signal(processes: Processes, number: int) -> None:
    for process in processes:
        if process.poll() is None:
            process.send_signal(number)


def _wait(processes: Processes, readers: list[_StderrReader]) -> int:
    """Returns the exit code of the run once all ranks have ended, or as soon as one has failed."""
    while True:
        codes = [process.poll() for process in processes]
        failed = [rank for rank, code in enumerate(codes) if code not in (None, 0, INTERRUPTED)]
        if failed:
            cause = _find_cause(processes, failed)
            lines = readers[cause].last_lines()
            for reader in readers:
                reader.echo = False
            code = processes[cause].poll()
            assert code is not None
            if cause != 0:
                how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
                print(f"rank {cause} of {len(processes)} {how}:\n{lines}".rstrip(), file=sys.stderr)
            _forward_signal(processes, signal.SIGKILL)
            return code if code > 0 else 1
        if all(code is not None for code in codes):
            return max(code for code in codes if code is not None)
        time.sleep(POLL_SECONDS)


def _find_cause(processes: Processes, failed: list[int]) -> int:
    """The rank that caused the failure: one that ended with a `UserError`, else one of the first that failed; of these
    one that was killed, because an error may follow from that at once. A `UserError` may take longer to end its process
    than the broken connections that follow from it."""
    until = time.monotonic() + CAUSE_SECONDS
    while time.monotonic() < until:
        refused = [rank for rank, process in enumerate(processes) if process.poll() == USER_ERROR]
        if refused:
            return refused[0]
        if all(process.poll() is not None for process in processes):
            break
        time.sleep(POLL_SECONDS)
    return next((rank for rank in failed if (processes[rank].poll() or 0) < 0), failed[0])


# Cores: each rank gets its own, so that ranks do not push each other's threads from core to core.

TOPOLOGY = Path("/sys/devices/system/cpu")


def cores_of(rank: int, ranks: int) -> set[int]:
    """This rank's share of the cores that this process may use: neighbours of one socket, hyperthreads of one core
    together. All cores where ranks outnumber them and cannot share them evenly."""
    cores = sorted(os.sched_getaffinity(0), key=_position) if hasattr(os, "sched_getaffinity") else []
    if len(cores) < ranks and (not cores or ranks % len(cores)):
        return set(cores)
    first = rank * len(cores) // ranks
    return set(cores[first : max(first + 1, (rank + 1) * len(cores) // ranks)])


def bind(process: int, cores: set[int]) -> None:
    """Restricts a process (0: this one), and threads that it starts later, to `cores`; an empty set changes nothing."""
    if cores:
        os.sched_setaffinity(process, cores)


def _position(core: int) -> tuple[int, int, int]:
    """(socket, physical core, core), for sorting."""
    try:
        folder = TOPOLOGY / f"cpu{core}" / "topology"
        return int((folder / "physical_package_id").read_text()), int((folder / "core_id").read_text()), core
    except (OSError, ValueError):
        return 0, core, core
