"""Weights & Biases and MLflow, beside metrics.jsonl and TensorBoard (`train.loggers`).

    training --(one JSON object a line, through a pipe)--> python -m xgram_dist.train.loggers wandb RUN

A logger is a process of its own, so nothing it does can fail training or hold it up: the pipe is never waited for, a
logger that ends or does not keep up is left with one sentence, and its end is waited for by a limit. metrics.jsonl has
every record in any case. When training is killed the pipe closes, and the logger ends its run with what it has.

Keys and servers come from the environment alone, in the variables that the two libraries define. They are written
nowhere, and messages hold the type of a library's error, never its text. Without a key or an answer from the server
records go to files in the run folder.

A run has one id for all its starts (run_dir.py): the id of wandb's run, and a tag of MLflow's.
"""

import importlib.util
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from xgram_dist.config import Config
from xgram_dist.errors import UserError

TENSORBOARD = "tensorboard"
UNSENT_BYTES = 8 << 20
"""Records that wait for a logger, in bytes, above which it is left."""
CLOSE_SECONDS, STOP_SECONDS = 60.0, 5.0
"""How long training waits for a logger at its end; where it was stopped, for example by Slurm, or failed."""
FINISH_SECONDS = 60
"""How long a logger has to end its run when training does not wait for it any more, or was killed."""
CONNECT_SECONDS = 5.0
WANDB_SERVER = "https://api.wandb.ai"
PROJECT = "xgram-dist"
RUN_TAG = "xgram_dist.run_id"
COMPLETE, STOPPED, FAILED = "complete", "stopped", "failed"
PRIVATE = (
    "data.path",
    "data.remote",
    "data.cache",
    "data.stages",
    "memory.folder",
    "memory.routing.file",
    "memory.routing.frequencies",
    "checkpoint.remote",
    "eval.data",
    "parallel.deepspeed",
)
"""Keys of a recipe that may hold paths and addresses; they are not sent."""


# ---- in the training process


def check_installed(config: Config) -> None:
    for name in config.train.loggers:
        if name != TENSORBOARD and importlib.util.find_spec(name) is None:
            raise UserError(
                f"train.loggers names {name}, which is not installed: pip install 'xgram-dist[{name}]', or take it out"
            )


def public_settings(config: Config) -> dict[str, Any]:
    """The recipe by dotted key, without `PRIVATE`."""

    def flatten(tree: dict[str, Any], above: str) -> Iterator[tuple[str, Any]]:
        for name, value in tree.items():
            key = f"{above}{name}"
            if key in PRIVATE:
                continue
            if isinstance(value, dict):
                yield from flatten(value, f"{key}.")
            else:
                yield key, value

    return dict(flatten(config.model_dump(mode="json"), ""))


class LoggerProcess:
    def __init__(self, name: str, folder: Path, config: Config, run_id: str):
        self._name, self._unsent = name, b""
        command = [sys.executable, "-m", "xgram_dist.train.loggers", name, str(folder)]
        environment = {key: value for key, value in os.environ.items() if not key.startswith("XGRAM_DIST_")}
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environment, bufsize=0
            )
        except OSError as error:
            self._leave(f"cannot be started: {error.strerror}")
            return
        assert self._process.stdin is not None
        self._pipe = self._process.stdin.fileno()
        os.set_blocking(self._pipe, False)
        self._send({"id": run_id, "name": config.name, "settings": public_settings(config)})

    def log(self, step: int, numbers: dict[str, float]) -> None:
        if numbers:
            self._send({"step": step, "time": time.time(), "numbers": numbers})

    def close(self, ended: str) -> None:
        """`ended`: how the run did."""
        self._send({"ended": ended})
        deadline = time.monotonic() + (CLOSE_SECONDS if ended == COMPLETE else STOP_SECONDS)
        while self._process is not None and self._unsent and time.monotonic() < deadline:
            select.select([], [self._pipe], [], max(0.0, deadline - time.monotonic()))
            self._flush()
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            _say(f"{self._name} has not ended in time, and is left to itself; metrics.jsonl has every record")

    def _send(self, record: dict[str, Any]) -> None:
        if self._process is not None:
            self._unsent += json.dumps(record).encode() + b"\n"
            self._flush()

    def _flush(self) -> None:
        try:
            while self._unsent:
                self._unsent = self._unsent[os.write(self._pipe, self._unsent) :]
        except BlockingIOError:
            if len(self._unsent) > UNSENT_BYTES:
                self._leave("does not keep up")
        except OSError:
            self._leave("has ended")

    def _leave(self, why: str) -> None:
        said = self._process is not None and self._process.poll() == 1  # by the process itself
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process, self._unsent = None, b""
        if not said:
            _say(f"{self._name} {why}; training goes on without it, and metrics.jsonl has every record")


def _say(text: str, file: Any = None) -> None:
    print(text, file=file or sys.stderr, flush=True)


# ---- in the process of a logger


class Tracker(Protocol):
    def log(self, record: dict[str, Any]) -> None: ...
    def finish(self, ended: str) -> None: ...


class Wandb:
    """One run of wandb. Its own step cannot go back, as a run that resumes does, so ours is a value of its own."""

    def __init__(self, folder: Path, run: dict[str, Any], say: Callable[[str], None]):
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        settings: dict[str, Any] = {
            "console": "off",
            "silent": True,
            "save_code": False,
            "disable_code": True,
            "disable_git": True,
            "x_disable_meta": True,  # of this machine: its name, the user, the command line
            "x_disable_machine_info": True,
            "x_disable_stats": True,
            "x_save_requirements": False,
            "init_timeout": 60,
            "finish_timeout": FINISH_SECONDS / 2,
        }
        arguments: dict[str, Any] = {
            "project": os.environ.get("WANDB_PROJECT", PROJECT),
            "id": run["id"],
            "name": run["name"],
            "dir": str(folder),
            "config": run["settings"],
            "resume": "allow",
        }
        mode = os.environ.get("WANDB_MODE") or self._mode()
        try:
            self._run = wandb.init(**arguments, settings=wandb.Settings(**settings | {"mode": mode}))
        except Exception as error:
            if mode == "offline":
                raise
            say(f"wandb: the server refuses the run ({type(error).__name__}); it is written to files")
            mode = "offline"
            wandb.teardown()  # of its service, for which the run exists
            self._run = wandb.init(**arguments, settings=wandb.Settings(**settings | {"mode": mode}))
        if mode == "offline":
            say(f"wandb: offline, in '{folder / 'wandb'}'; upload with `wandb sync`")
        self._folder, self._online = folder, mode == "online"
        self._remove_logs()
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def _remove_logs(self) -> None:
        """Its own logs, which hold the address of the server when that fails."""
        for log in self._folder.glob("wandb/*/logs/*.log"):
            log.unlink(missing_ok=True)

    @staticmethod
    def _mode() -> str:
        if not os.environ.get("WANDB_API_KEY"):
            return "offline"
        return "online" if answers(os.environ.get("WANDB_BASE_URL", WANDB_SERVER)) else "offline"

    def log(self, record: dict[str, Any]) -> None:
        self._run.log({"step": record["step"], **record["numbers"]})

    def finish(self, ended: str) -> None:
        if ended == STOPPED and self._online:
            self._run.mark_preempting()  # it will be resumed
        self._run.finish(exit_code=0 if ended == COMPLETE else 1)
        self._remove_logs()


class MLflow:
    """One run of MLflow, found again by its tag."""

    def __init__(self, folder: Path, run: dict[str, Any], say: Callable[[str], None]):
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric = Metric
        server = os.environ.get("MLFLOW_TRACKING_URI", "")
        if not server or (server.startswith("http") and not answers(server)):
            server = (folder.resolve() / "mlflow").as_uri()
            say(
                f"MLflow: no server answers; in '{folder / 'mlflow'}'"
                if "MLFLOW_TRACKING_URI" in os.environ
                else f"MLflow: local, in '{folder / 'mlflow'}'"
            )
        self._client = MlflowClient(tracking_uri=server)
        experiment = os.environ.get("MLFLOW_EXPERIMENT_ID") or self._experiment(
            os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        )
        found = self._client.search_runs([experiment], f"tags.`{RUN_TAG}` = '{run['id']}'")
        if found:
            self._run = found[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
            return
        self._run = self._client.create_run(experiment, run_name=run["name"], tags={RUN_TAG: run["id"]}).info.run_id
        params = [Param(key, str(value)[:500]) for key, value in run["settings"].items()]
        for first in range(0, len(params), 100):
            self._client.log_batch(self._run, params=params[first : first + 100])

    def _experiment(self, name: str) -> str:
        found = self._client.get_experiment_by_name(name)
        return found.experiment_id if found is not None else self._client.create_experiment(name)

    def log(self, record: dict[str, Any]) -> None:
        when, step = int(record["time"] * 1000), record["step"]
        metrics = [self._metric(name, float(value), when, step) for name, value in record["numbers"].items()]
        self._client.log_batch(self._run, metrics=metrics)

    def finish(self, ended: str) -> None:
        self._client.set_terminated(self._run, {COMPLETE: "FINISHED", STOPPED: "KILLED", FAILED: "FAILED"}[ended])


TRACKERS: dict[str, Callable[[Path, dict[str, Any], Callable[[str], None]], Tracker]] = {
    "wandb": Wandb,
    "mlflow": MLflow,
}


def answers(address: str) -> bool:
    """Whether something listens at the host of an address, or at the proxy for it."""
    parts = urlsplit(address)
    proxy = urllib.request.getproxies().get(parts.scheme)
    if proxy and not urllib.request.proxy_bypass(parts.hostname or ""):
        parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        with socket.create_connection((parts.hostname or "", port), CONNECT_SECONDS):
            return True
    except (OSError, ValueError):
        return False


def main(words: list[str]) -> int:
    """Log what stdin says. Exit code 1: after a sentence about a failure."""
    name, folder = words[0], Path(words[1])
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(ignored, signal.SIG_IGN)  # it ends when training does
    # Libraries print addresses; only our own sentences are seen.
    screen = os.fdopen(os.dup(2), "w", encoding="utf-8")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    threading.Thread(target=_end_after, args=(os.getppid(),), daemon=True).start()
    lines = (json.loads(line) for line in sys.stdin.buffer if line.endswith(b"\n"))
    ended = FAILED  # unless it says so
    try:
        tracker = TRACKERS[name](folder, next(lines), lambda text: _say(text, screen))
        for record in lines:
            if "ended" in record:
                ended = record["ended"]
                break
            tracker.log(record)
        tracker.finish(ended)
    except Exception as error:
        _say(f"{name}: {type(error).__name__}; training goes on without it, and metrics.jsonl has every record", screen)
        return 1
    return 0


def _end_after(parent: int) -> None:
    """End this process, whatever it waits for, some time after the one that started it."""
    while os.getppid() == parent:
        time.sleep(1)
    time.sleep(FINISH_SECONDS)
    os._exit(0)


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))  # threads of a library may wait for a server
