"""`xgram-dist train` started by forking a process that has already imported everything.

A start costs five seconds of imports on each rank; tests that start runs dozens of times do it this way. What runs is
the command line with its real launcher; only its `Popen` forks instead of starting an interpreter.

    python forked.py     reads requests as JSON lines: {"start": words, "log": path, "cwd": path} or {"poll": pid}
"""

import json
import os
import subprocess
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from xgram_dist.parallel.forked_rank import ForkedRank


class Zygote:
    """The other end, in the test."""

    def __init__(self, *, deepspeed: bool = False) -> None:
        """`deepspeed`: import it too, which takes seconds."""
        self._process = subprocess.Popen(
            [sys.executable, __file__, *(["deepspeed"] if deepspeed else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self, words: list[str], log: Path, cwd: Path | None = None) -> "Forked":
        return Forked(self, self._ask({"start": words, "log": str(log), "cwd": None if cwd is None else str(cwd)}))

    def poll(self, pid: int) -> int | None:
        return self._ask({"poll": pid})

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.kill()
        self._process.wait()

    def _ask(self, question: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


class Forked:
    """As much of a Popen as is needed."""

    def __init__(self, zygote: Zygote, pid: int):
        self.pid, self.returncode, self._zygote = pid, None, zygote

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._zygote.poll(self.pid)
        return self.returncode

    def wait(self, timeout: float) -> int:
        import time

        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.005)
        assert self.returncode is not None
        return self.returncode


class ForkingPopen(ForkedRank):
    """`subprocess.Popen([python, "-m", "xgram_dist", *words], env=...)` of parallel/launch.py, by forking."""

    def __init__(self, command: list[str], *, env: dict[str, str], stdout: int | None, **_: Any):
        from xgram_dist.cli.main import main

        super().__init__(lambda: main(command[3:]), env, silent=stdout == subprocess.DEVNULL)


def run(words: list[str]) -> None:
    """The command in this process, which ends with it."""
    from xgram_dist.cli.main import main

    try:
        code = main(words)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def serve() -> None:
    import torch._inductor.compile_fx
    import torch.utils.tensorboard

    import xgram_dist.cli.train
    import xgram_dist.train.trainer  # noqa: F401
    from xgram_dist.parallel import launch

    if sys.argv[1:] == ["deepspeed"]:
        from xgram_dist.engine.deepspeed_internals import import_deepspeed

        before = dict(os.environ)
        import_deepspeed(torch.device("cpu"))
        os.environ.clear()
        os.environ.update(before)
    # Of the launcher alone: torch.compile starts its compiler with the real one.
    launch.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": ForkingPopen})  # type: ignore[assignment]
    for line in sys.stdin:
        question = json.loads(line)
        if "poll" in question:
            pid, status = os.waitpid(question["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        elif (answer := os.fork()) == 0:
            log = os.open(question["log"], os.O_WRONLY | os.O_CREAT)
            for stream in (1, 2):
                os.dup2(log, stream)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            if question["cwd"] is not None:
                os.chdir(question["cwd"])
            run(question["start"])
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve()
