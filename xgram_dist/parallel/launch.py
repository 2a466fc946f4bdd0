"""`--ranks N`: start N ranks of this command on this machine, and end them together.

Cores are shared out among the ranks. The first rank's output is the run's; the others are heard only when they fail.
When a rank fails, the others are ended at once and its last words are shown, so that the first cause is not buried
under their complaints. Ctrl-C, SIGTERM and SIGUSR1 are passed on to all ranks, which agree on a step to stop after.
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
from typing import IO, Any

from xgram_dist.parallel.cores import bind, cores_of

LAST_LINES = 40
REFUSED = 2
"""The exit code of a `UserError`."""


def launch(arguments: list[str], ranks: int) -> int:
    """Run `xgram-dist ARGUMENTS` on `ranks` ranks; the exit code of the first to fail, else of rank 0."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    environment = {"OMP_NUM_THREADS": str(max(1, cores // ranks)), **os.environ}
    environment |= {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "xgram_dist", *arguments],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=None if rank == 0 else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,  # signals of the terminal reach the ranks through us, once
        )
        for rank in range(ranks)
    ]
    for rank, process in enumerate(processes):
        with contextlib.suppress(ProcessLookupError):  # it has ended: that is dealt with below
            bind(process.pid, cores_of(rank, ranks))
    heard = [_Ear(process.stderr, aloud=rank == 0) for rank, process in enumerate(processes)]
    before: dict[int, Any] = {
        number: signal.signal(number, lambda received, _: _pass_on(processes, received))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    }
    try:
        return _wait(processes, heard)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        for number, handler in before.items():
            signal.signal(number, handler)


class _Ear:
    """Reads a rank's stderr: aloud, or only remembering the last lines."""

    def __init__(self, stream: IO[bytes] | None, aloud: bool):
        assert stream is not None
        self.lines: collections.deque[str] = collections.deque(maxlen=LAST_LINES)
        self._stream, self.aloud = stream, aloud
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        for line in self._stream:
            text = line.decode(errors="replace")
            self.lines.append(text)
            if self.aloud:
                sys.stderr.write(text)
                sys.stderr.flush()

    def last_words(self) -> str:
        self._thread.join(timeout=1.0)
        return "".join(self.lines)


def _pass_on(processes: list[subprocess.Popen[bytes]], number: int) -> None:
    for process in processes:
        if process.poll() is None:
            process.send_signal(number)


def _wait(processes: list[subprocess.Popen[bytes]], heard: list[_Ear]) -> int:
    while True:
        codes = [process.poll() for process in processes]
        failed = [rank for rank, code in enumerate(codes) if code not in (None, 0, 130)]
        if failed:
            first = _cause(processes, failed[0])
            words = heard[first].last_words()
            for ear in heard:
                ear.aloud = False
            code = processes[first].poll()
            assert code is not None
            if first != 0:
                how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
                print(f"rank {first} of {len(processes)} {how}:\n{words}".rstrip(), file=sys.stderr)
            _pass_on([p for p in processes if p.poll() is None], signal.SIGKILL)
            return code if code > 0 else 1
        if all(code is not None for code in codes):
            return max(code for code in codes if code is not None)
        time.sleep(0.05)


def _cause(processes: list[subprocess.Popen[bytes]], first: int) -> int:
    """The rank that failed first; but one that refuses with a sentence takes longer to end than others to miss it."""
    until = time.monotonic() + 3.0
    while time.monotonic() < until:
        refused = [rank for rank, process in enumerate(processes) if process.poll() == REFUSED]
        if refused:
            return refused[0]
        if all(process.poll() is not None for process in processes):
            break
        time.sleep(0.05)
    return first
