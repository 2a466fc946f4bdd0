"""Runs a function in a process of its own, which has the stand-in for a CUDA device and has imported the package.

A fork server imports once; each call forks from it. What the function changes in torch ends with its process.
"""

import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

TIMEOUT = 400.0

_server = forkserver.ForkServer()  # not the one that data workers are forked from
_server.set_forkserver_preload(["isolated_preload"])


def _child(function: Callable[..., Any], arguments: tuple[Any, ...], answer: Connection) -> None:
    import isolated_preload  # noqa: F401  where the fork server could not

    try:
        answer.send((True, function(*arguments)))
    except BaseException:
        answer.send((False, traceback.format_exc()))
    os._exit(0)  # threads of torch may be left


def run_isolated(function: Callable[..., Any], *arguments: Any) -> Any:
    """What `function(*arguments)` returns; plain data only."""
    return run_all_isolated([(function, arguments)])[0]


def run_all_isolated(calls: list[tuple[Callable[..., Any], tuple[Any, ...]]]) -> list[Any]:
    """Several at once, for the ranks of a run."""
    context = multiprocessing.get_context("forkserver")
    connect, before = forkserver.connect_to_new_process, os.environ.get("PYTHONPATH", "")
    package = Path(__file__).resolve().parents[2]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), str(package), before])
    forkserver.connect_to_new_process = _server.connect_to_new_process
    running = []
    try:
        for function, arguments in calls:
            reading, writing = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(function, arguments, writing), daemon=True)
            process.start()
            writing.close()
            running.append((process, reading))
        return [_answer(process, reading) for process, reading in running]
    finally:
        forkserver.connect_to_new_process = connect
        os.environ["PYTHONPATH"] = before
        for process, _ in running:
            process.kill()
            process.join()


def _answer(process: Any, reading: Connection) -> Any:
    assert reading.poll(TIMEOUT), f"no answer in {TIMEOUT:.0f} s"
    try:
        fine, value = reading.recv()
    except EOFError:
        raise AssertionError("the process died") from None
    assert fine, value
    return value
