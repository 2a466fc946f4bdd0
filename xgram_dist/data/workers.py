"""Worker processes of `prepare`: units in, reports out.

In: units, settings, the tokenizer's file. Out: an iterator of reports while N processes work. Every worker has a
pipe of its own: no lock is shared, so a killed worker cannot block another; it shows as the end of its pipe. When
the parent dies, the worker's next report fails and it ends. One thread a process: the processes are the
parallelism.
"""

import contextlib
import errno
import os
import signal
from collections.abc import Iterator
from multiprocessing import connection, forkserver, get_context
from pathlib import Path
from typing import Any

from xgram_dist.data.units import Report, Settings, Unit, process_unit
from xgram_dist.errors import UserError


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def start_server() -> None:
    """Start the process workers are forked from; what they import is imported there once, and inherited."""
    get_context("forkserver").set_forkserver_preload(["xgram_dist.data.units", "tokenizers"])
    forkserver.ensure_running()


def run_units(
    units: list[Unit], settings: Settings, tokenizer: Path, end_of_text: str, staging: Path, workers: int
) -> Iterator[Report]:
    """Process the units, yielding reports; closing the iterator ends the workers at once."""
    context = get_context("forkserver")
    waiting = list(reversed(units))
    pipes: dict[Any, Any] = {}
    try:
        for _ in range(min(workers, len(units))):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_work, args=(theirs, settings, str(tokenizer), end_of_text, str(staging)), daemon=True
            )
            process.start()
            theirs.close()
            ours.send(waiting.pop())
            pipes[ours] = process
        while pipes:
            ready: list[Any] = connection.wait(list(pipes), timeout=1.0)
            for pipe in ready:
                try:
                    message = pipe.recv()
                except (EOFError, ConnectionError):
                    raise UserError(
                        "a worker process ended without a word, most often for want of memory; run the same "
                        "command again with fewer --workers (finished parts are kept)"
                    ) from None
                if isinstance(message, Report):
                    yield message
                elif isinstance(message, BaseException):
                    raise message
                elif waiting:
                    pipe.send(waiting.pop())
                else:
                    pipe.send(None)
                    pipes.pop(pipe).join()
    finally:
        for process in pipes.values():
            process.terminate()
        for process in pipes.values():
            process.join()


def _work(pipe: Any, settings: Settings, tokenizer_file: str, end_of_text: str, staging: str) -> None:
    """The worker: units from the pipe until None."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from xgram_dist.data.tokenizer import load_tokenizer

    try:
        tokenizer = load_tokenizer(tokenizer_file, end_of_text)
        while (unit := pipe.recv()) is not None:
            process_unit(unit, settings, tokenizer, Path(staging), pipe.send)
            pipe.send("done")
    except (EOFError, BrokenPipeError, ConnectionError):
        return  # the parent is gone
    except UserError as error:
        _tell(pipe, error)
    except OSError as error:
        _tell(pipe, disk_error(error, staging))


def _tell(pipe: Any, error: Exception) -> None:
    with contextlib.suppress(OSError):
        pipe.send(error)


def disk_error(error: OSError, folder: str | Path) -> Exception:
    """A full disk as one sentence; any other error as it is."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UserError(
            f"no space is left for '{error.filename or folder}'; free some and run the same command again "
            "(finished parts are kept)"
        )
    return UserError(f"cannot write under '{folder}': {error}")
