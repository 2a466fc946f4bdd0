"""`--ranks N`: starts N ranks of this command on this machine, and ends them together.

The machine's cores are divided among the ranks. They meet on the loopback device, at a socket that is opened here and
handed to rank 0, and share a token that no other process knows. Output and errors of rank 0 are passed through, errors
half a second late; of the others only the last lines are kept. When a rank fails, the others are killed at once. The
first line then says which rank failed and how, and its last lines follow, so that the cause is not buried under errors
that follow from it. SIGINT, SIGTERM and SIGUSR1 are forwarded to all ranks, which agree on a step to stop after. Ranks
end with this process, however it ends.

Ranks are interpreters of their own, or forks of this process. With `restarts`, ranks that lost one are started again,
with a socket and a token of their own. So are, a few times, ranks of which one says that it has to go back to the last
checkpoint.
"""

import collections
import contextlib
import ctypes
import multiprocessing
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, Any

from xgram_dist.environment import LISTEN_FD, PARENT, TOKEN
from xgram_dist.errors import GO_BACK
from xgram_dist.parallel.forked_rank import SIGNALS, ForkedRank

SHOWN_LINES = 40
"""Of a failed rank's stderr."""
USER_ERROR, INTERRUPTED, BROKEN_PIPE = 2, 130, 141
"""Exit codes: of a `UserError`, of a run that was stopped and saved, and of a reader of stdout that went away."""
MOST_RETURNS = 3
"""How often a run goes back to its last checkpoint by itself. A disk that damages more than that is to be replaced."""
POLL_SECONDS, CAUSE_SECONDS = 0.05, 3.0
ECHO_SECONDS = 0.5
"""By which errors of rank 0 are late. Within it a rank that has ended is noticed, and what follows is not shown."""
CONSEQUENCES = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "or has ended")
"""In the last lines of a rank that failed because another one had."""

Processes = list[subprocess.Popen[bytes] | ForkedRank]


def launch(arguments: list[str], ranks: int, forked: Callable[[int], int] | None = None, restarts: int = 0) -> int:
    """Runs `xgram-dist ARGUMENTS` on `ranks` ranks. Returns the exit code of the first to fail, else of rank 0.

    `forked`: the same as a function of the number of starts before, for ranks that are forks. `restarts`: how often
    ranks are started again after one was killed or crashed; not after a `UserError`, nor when they were asked to stop.
    Later starts do without `--fresh`: they resume.
    """
    processes: Processes = []
    readers: list[_StderrReader] = []
    received: list[int] = []

    def forward(number: int, _: Any) -> None:
        received.append(number)
        _forward_signal(processes, number)

    previous_handlers: dict[int, Any] = {number: signal.signal(number, forward) for number in SIGNALS}
    try:
        restarted = returned = 0
        while True:
            run = None if forked is None else partial(forked, restarted + returned)
            _start(arguments, ranks, processes, readers, run)
            for number in dict.fromkeys(received):  # some ranks had not started
                _forward_signal(processes, number)
            code = _wait(processes, readers, received)
            if code in (0, USER_ERROR, INTERRUPTED, BROKEN_PIPE) or received:
                break
            if code == GO_BACK and returned < MOST_RETURNS:
                returned += 1
                why = f"going back to the last checkpoint, {returned} of {MOST_RETURNS} times"
            elif restarted < restarts:
                restarted += 1
                why = f"restart {restarted} of {restarts}"
            else:
                break
            _end(processes)
            readers.clear()
            arguments = [word for word in arguments if word != "--fresh"]
            _print(f"xgram-dist: starting {ranks} ranks again ({why})")
        return code
    finally:
        _end(processes)
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


def _start(
    arguments: list[str],
    ranks: int,
    processes: Processes,
    readers: "list[_StderrReader]",
    forked: Callable[[], int] | None,
) -> None:
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    environment = {"OMP_NUM_THREADS": str(max(1, num_cores // ranks)), TOKEN: secrets.token_hex(16), **os.environ}
    if Path("/sys/class/net/lo").exists():
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(min(4096, 4 * ranks))  # a rank may connect before rank 0 is ready
        environment |= {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", PARENT: str(os.getpid())}
        environment["MASTER_PORT"] = str(listener.getsockname()[1])
        for rank in range(ranks):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            if rank == 0:
                own[LISTEN_FD] = str(listener.fileno())
            if forked is not None:
                run = partial(_run_fork, forked, None if rank == 0 else listener)
                processes.append(ForkedRank(run, {**environment, **own}, silent=rank != 0))
            else:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "xgram_dist", *arguments],
                        env={**environment, **own},
                        stdout=None if rank == 0 else subprocess.DEVNULL,
                        stderr=subprocess.PIPE,
                        pass_fds=(listener.fileno(),) if rank == 0 else (),
                        start_new_session=True,  # signals of the terminal reach the ranks through this process, once
                    )
                )
            with contextlib.suppress(ProcessLookupError):  # it has ended already; `_wait` reports it
                bind(processes[rank].pid, cores_of(rank, ranks))
    # After the last fork: a fork with threads may copy a lock that one of them holds.
    readers += [_StderrReader(process.stderr, echo=rank == 0) for rank, process in enumerate(processes)]


def _run_fork(run: Callable[[], int], unused: socket.socket | None) -> int:
    end_with_parent(int(os.environ[PARENT]))
    if unused is not None:
        unused.close()
    return run()


def _end(processes: Processes) -> None:
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()
    processes.clear()


class _StderrReader:
    """A thread that reads a rank's stderr. It keeps the last lines; with `echo` also those that are not shown yet."""

    def __init__(self, stream: IO[bytes] | None, echo: bool):
        assert stream is not None
        self._stream, self._echo = stream, echo
        self._lines: collections.deque[str] = collections.deque(maxlen=SHOWN_LINES)
        self._unshown: collections.deque[tuple[float, str]] = collections.deque()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        for line in self._stream:
            text = line.decode(errors="replace")
            self._lines.append(text)
            if self._echo:
                self._unshown.append((time.monotonic(), text))

    def show(self, seconds: float = ECHO_SECONDS) -> None:
        """Prints the lines that are older than `seconds`."""
        until, text = time.monotonic() - seconds, ""
        while self._unshown and self._unshown[0][0] <= until:
            text += self._unshown.popleft()[1]
        if text:
            with contextlib.suppress(OSError):
                sys.stderr.write(text)
                sys.stderr.flush()

    def last_lines(self) -> str:
        """Those that are not shown yet."""
        self._thread.join(timeout=1.0)
        return "".join(text for _, text in self._unshown) if self._echo else "".join(self._lines)


def _forward_signal(processes: Processes, number: int) -> None:
    for process in processes:
        if process.poll() is None:
            process.send_signal(number)


def _wait(processes: Processes, readers: list[_StderrReader], received: list[int]) -> int:
    """Returns the exit code of the run once all ranks have ended, or as soon as one has failed. `received`: signals
    that were forwarded."""
    while True:
        codes = [process.poll() for process in processes]
        failed = [rank for rank, code in enumerate(codes) if code not in (None, 0, INTERRUPTED)]
        if failed:
            break
        readers[0].show()
        if all(code is not None for code in codes):
            readers[0].last_lines()
            readers[0].show(0.0)
            return max(code for code in codes if code is not None)
        time.sleep(POLL_SECONDS)
    stopped = [number for rank in failed for number in received if codes[rank] == -number]
    if stopped:
        how = "Ctrl-C" if stopped[0] == signal.SIGINT else signal.Signals(stopped[0]).name
        _print(f"xgram-dist: stopped by {how} before the ranks were ready to save")
        return INTERRUPTED
    cause = _find_cause(processes, readers, failed)
    code = processes[cause].poll()
    assert code is not None
    lines = readers[cause].last_lines()
    # What rank 0 says about a mistake of the user's is said in full.
    if cause != 0 or code not in (USER_ERROR, BROKEN_PIPE):
        _print(f"xgram-dist: rank {cause} of {len(processes)} {describe_end(code)}" + (":" if lines else ""))
    _print(lines.rstrip())
    return code if code > 0 else 1


def describe_end(code: int) -> str:
    """How a process with this exit code ended, as Popen has it: negative for a signal."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = f" ({signal.Signals(-code).name})"
    except ValueError:
        name = ""
    why = ", by hand or by the system for want of memory" if -code == signal.SIGKILL else ""
    return f"was killed by signal {-code}{name}{why}"


def _print(text: str) -> None:
    if text:
        with contextlib.suppress(OSError):
            print(text, file=sys.stderr, flush=True)


def _find_cause(processes: Processes, readers: list[_StderrReader], failed: list[int]) -> int:
    """The rank that caused the failure: one that was killed or that ended with a `UserError`, else one whose last lines
    do not say that it lost the others. An error may take longer to end its process than the broken connections that
    follow from it, so the others get a moment."""
    until = time.monotonic() + CAUSE_SECONDS
    while True:
        codes = [process.poll() for process in processes]
        for certain in (USER_ERROR, -signal.SIGKILL):
            if certain in codes:
                return codes.index(certain)
        if time.monotonic() > until or None not in codes:
            break
        time.sleep(POLL_SECONDS)
    _forward_signal(processes, signal.SIGKILL)
    later = [rank for rank, code in enumerate(codes) if code not in (None, 0, INTERRUPTED) and rank not in failed]
    for rank in failed + later:
        if not any(words in readers[rank].last_lines() for words in CONSEQUENCES):
            return rank
    return failed[0]


# Children


_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent(parent: int) -> None:
    """Has the system kill this process when its parent, the process `parent`, ends in whatever way. A process
    further down, which merely inherited the variable, is left as it is while `parent` lives."""
    if os.getppid() == parent and sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent and not _is_alive(parent):  # it ended before the call
        os.kill(os.getpid(), signal.SIGKILL)


def end_with_starter() -> None:
    """The same for a process of `multiprocessing`, which knows who started it even where that has ended meanwhile."""
    starter = multiprocessing.parent_process()
    if starter is not None and starter.pid is not None:
        end_with_parent(starter.pid)


def _is_alive(process: int) -> bool:
    """Whether it runs; one that has ended and that nobody has waited for does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text(encoding="latin-1").rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


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
