"""Worker processes of `prepare`: work units in, progress reports out.

In: units, settings, the tokenizer's file, the engine. Out: an iterator of reports from N processes. Units and reports
are all that crosses between processes: a worker reads its documents and writes its tokens itself. Every worker has its
own pipe and no lock is shared, so that a killed worker cannot block another; its death is the end of its pipe. When the
parent dies, the worker's next report fails and it exits. A worker tokenizes on one thread.
"""

import contextlib
import errno
import gc
import os
import signal
from collections.abc import Iterator
from multiprocessing import connection, forkserver, get_context
from pathlib import Path
from typing import Any

from xgram_dist.data.engines import load_engine
from xgram_dist.data.shards import Report, Settings, WorkUnit, plan_passes, tokenize_units
from xgram_dist.data.tokenizer import Tokenizer
from xgram_dist.errors import UserError


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def start_fork_server() -> None:
    """Start the process that workers are forked from, with `worker_preload` imported."""
    get_context("forkserver").set_forkserver_preload(["xgram_dist.data.worker_preload"])
    forkserver.ensure_running()


def run_units(
    units: list[WorkUnit], settings: Settings, tokenizer: Tokenizer, engine: str, staging: Path, workers: int
) -> Iterator[Report]:
    """Run the units on worker processes and yield their reports; closing the iterator terminates the workers."""
    context = get_context("forkserver")
    pending = list(reversed(plan_passes(units, workers)))
    words = (settings, engine, str(tokenizer.path), tokenizer.end_of_text_name, str(staging))
    pipes: dict[Any, Any] = {}
    try:
        for _ in range(min(workers, len(pending))):
            parent_end, worker_end = context.Pipe()
            process = context.Process(target=_run_worker, args=(worker_end, *words), daemon=True)
            process.start()
            worker_end.close()
            parent_end.send(pending.pop())
            pipes[parent_end] = process
        while pipes:
            ready: list[Any] = connection.wait(list(pipes), timeout=1.0)
            for pipe in ready:
                try:
                    message = pipe.recv()
                except (EOFError, ConnectionError):
                    raise _worker_ended(pipes[pipe], tokenizer) from None
                if isinstance(message, Report):
                    yield message
                elif isinstance(message, BaseException):
                    raise message
                elif pending:
                    pipe.send(pending.pop())
                else:
                    pipe.send(None)
                    pipes.pop(pipe).join()
    finally:
        for process in pipes.values():
            process.terminate()
        for process in pipes.values():
            process.join()


def _worker_ended(process: Any, tokenizer: Tokenizer) -> UserError:
    process.join(5)
    if process.exitcode in (None, -signal.SIGKILL, -signal.SIGTERM):
        return UserError(
            "a worker process was killed, most often because memory ran out; run the same command again with fewer "
            "--workers (finished units are kept)"
        )
    end = f"signal {-process.exitcode}" if process.exitcode < 0 else f"exit code {process.exitcode}"
    return UserError(
        f"a worker process ended with {end} while it used tokenizer '{tokenizer.path}'; try --tokenizer-engine "
        f"huggingface, or another tokenizer"
    )


def _run_worker(
    pipe: Any, settings: Settings, engine_name: str, tokenizer_file: str, end_of_text_name: str, staging: str
) -> None:
    """Body of a worker: tokenize the units of each pass from the pipe until it receives None."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        engine = load_engine(engine_name, Path(tokenizer_file), settings.end_of_text, end_of_text_name)
        gc.collect()
        gc.freeze()  # modules and tokenizer stay; without this, collections go through all of them again and again
        while (units := pipe.recv()) is not None:
            tokenize_units(units, settings, engine, Path(staging), pipe.send)
            pipe.send("done")
    except (EOFError, BrokenPipeError, ConnectionError):
        return  # the parent is gone
    except UserError as error:
        _send_error(pipe, error)
    except OSError as error:
        _send_error(pipe, disk_error(error, staging))


def _send_error(pipe: Any, error: Exception) -> None:
    with contextlib.suppress(OSError):
        pipe.send(error)


def disk_error(error: OSError, folder: str | Path) -> Exception:
    """An OSError as one sentence, with advice for a full disk."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UserError(
            f"no space is left for '{error.filename or folder}'; free some and run the same command again "
            "(finished units are kept)"
        )
    return UserError(f"cannot write under '{folder}': {error}")
