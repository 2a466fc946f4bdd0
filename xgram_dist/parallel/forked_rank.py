"""A rank that is forked from this process, which has imported everything: it starts within a fraction of a second.

Forking is safe while this process has no threads that hold locks and has not initialised a GPU: the launcher imports,
and waits.
"""

import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import IO, NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""That a launcher forwards to its ranks."""


class ForkedRank:
    """As much of a `Popen` as a launcher uses. A signal handler may call it, too."""

    def __init__(self, run: Callable[[], int], environment: dict[str, str], *, silent: bool):
        """`run`: returns the exit code. `silent`: without standard output."""
        sys.stdout.flush()
        sys.stderr.flush()
        reading, writing = os.pipe()
        self.returncode: int | None = None
        previous = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # the handlers of this process are not the rank's
        self.pid = os.fork()
        if self.pid == 0:
            _run(run, environment, writing, silent=silent)
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
        os.close(writing)
        self.stderr: IO[bytes] = os.fdopen(reading, "rb")

    def poll(self) -> int | None:
        if self.returncode is None:
            with contextlib.suppress(ChildProcessError):  # in a signal handler: what it interrupted has the answer
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self) -> int:
        while (code := self.poll()) is None:
            time.sleep(0.005)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _run(run: Callable[[], int], environment: dict[str, str], stderr: int, *, silent: bool) -> NoReturn:
    """In the forked process, which ends here."""
    code = 1
    try:
        os.dup2(stderr, 2)
        os.close(stderr)
        if silent:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.setsid()
        for number in SIGNALS:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        if "OMP_NUM_THREADS" not in os.environ:  # torch reads it once, when it is imported
            import torch

            torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
        os.environ.clear()
        os.environ.update(environment)
        code = run()
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stderr.flush()
        os._exit(code)
