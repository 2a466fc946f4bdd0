"""Weights & Biases and MLflow: the real libraries, without a server, with one that hangs, and with one that refuses."""

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel
from train_helpers import read_metrics, small_config

from xgram_dist.checkpoint.folder import checkpoints_at
from xgram_dist.checkpoint.manifest import Manifest
from xgram_dist.config import Config
from xgram_dist.config.load import build_config
from xgram_dist.train import loggers
from xgram_dist.train.loggers import PRIVATE, LoggerProcess, public_settings
from xgram_dist.train.run_dir import RUN_ID, settle_run_id
from xgram_dist.train.trainer import Trainer

SECRET, HOST = "local-5ecre70123456789012345678901234567890123", "tracking.invalid"
MODEL = {"vocabulary": 8, "layers": 1, "width": 8, "ffn_width": 8, "heads": 2, "kv_heads": 1, "sequence_length": 8}


@pytest.fixture(autouse=True)
def keys_and_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a machine without network: the names of both servers cannot be resolved."""
    for name in [name for name in os.environ if name.startswith(("WANDB_", "MLFLOW_")) or name.endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(loggers, "CLOSE_SECONDS", 300.0)  # of a machine with much else to do
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    monkeypatch.setenv("WANDB_BASE_URL", f"http://{HOST}")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://someone:{SECRET}@{HOST}")


def records_of(file: Path) -> Iterator[bytes]:
    """Of a .wandb file, a log in the form of LevelDB: blocks of 32 KiB of (checksum, length, kind, part)."""
    content = file.read_bytes()
    assert content[:4] == b":W&B"
    place, record = 7, b""
    while place + 7 <= len(content):
        if (place % 32768) > 32768 - 7:
            place += -place % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", content, place)
        record += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def logged_by_wandb(run: Path) -> dict[str, list[dict[str, Any]]]:
    """Folder of a start -> what it logged, in the messages of wandb's own protocol."""
    from wandb.proto import wandb_internal_pb2

    found: dict[str, list[dict[str, Any]]] = {}
    for file in sorted(run.glob("wandb/offline-run-*/*.wandb"), key=lambda file: file.stat().st_mtime):
        rows = found.setdefault(file.parent.name, [])
        for data in records_of(file):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return found


def mlflow_client(run: Path) -> Any:
    from mlflow.tracking import MlflowClient

    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    return MlflowClient(tracking_uri=(run / "mlflow").as_uri())


def mlflow_runs(run: Path) -> list[Any]:
    client = mlflow_client(run)
    experiment = client.get_experiment_by_name("xgram-dist")
    return [] if experiment is None else list(client.search_runs([experiment.experiment_id]))


def test_two_starts_are_one_run_in_both_loggers_and_nothing_holds_a_key(
    data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    for steps in (2, 4):  # the second start resumes
        config = small_config(data, train={"steps": steps, "loggers": ["tensorboard", "wandb", "mlflow"]})
        assert Trainer(config, run, fresh=False).run() == 0
    expected = [(record["step"], record["loss"]) for record in read_metrics(run, "train")]
    assert [step for step, _ in expected] == [1, 2, 3, 4]
    run_id = (run / RUN_ID).read_text().strip()
    assert Manifest.read(checkpoints_at(run)[-1]).run["run_id"] == run_id

    starts = logged_by_wandb(run)
    assert [name.rpartition("-")[2] for name in starts] == [run_id] * 2
    rows = [row for one in starts.values() for row in one if "train/loss" in row]
    assert [(row["step"], row["train/loss"]) for row in rows] == expected

    (found,) = mlflow_runs(run)
    assert (found.info.run_name, found.info.status) == (config.name, "FINISHED")
    assert found.data.tags[loggers.RUN_TAG] == run_id
    assert found.data.params["memory.method"] == "xgram"
    history = mlflow_client(run).get_metric_history(found.info.run_id, "train/loss")
    assert sorted((metric.step, metric.value) for metric in history) == expected

    assert list(run.glob("tensorboard/events*"))
    captured = capfd.readouterr()
    files = b"".join(path.read_bytes() for path in run.rglob("*") if path.is_file())
    for text in (SECRET, HOST):
        assert text.encode() not in files
        assert text not in captured.out + captured.err
    assert captured.err.count("wandb: offline") == 2
    assert captured.err.count("MLflow: no server answers") == 2


@contextmanager
def serving(status: int | None) -> Iterator[str]:
    """The address of a server that refuses everything with a status; None: that never answers."""
    over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            if status is None:
                over.wait()
                return
            self.send_response(status)
            self.end_headers()
            self.wfile.write(f'{{"error_code": "PERMISSION_DENIED", "message": "{HOST}"}}'.encode())

        do_GET = do_POST

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        over.set()
        server.shutdown()
        server.server_close()


def test_servers_that_never_answer_leave_training_as_it_is(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loggers, "CLOSE_SECONDS", 0.5)
    plain = small_config(data, train={"loggers": []})
    assert Trainer(plain, tmp_path / "plain", fresh=False).run() == 0
    with serving(None) as address:
        monkeypatch.setenv("WANDB_BASE_URL", address)
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        config = small_config(data, train={"loggers": ["wandb", "mlflow"]})
        assert Trainer(config, tmp_path / "logged", fresh=False).run() == 0
    losses = [[record["loss"] for record in read_metrics(tmp_path / run, "train")] for run in ("plain", "logged")]
    assert losses[0] == losses[1]
    assert read_metrics(tmp_path / "logged", "end")[0]["complete"]
    assert not (tmp_path / "plain" / "tensorboard").exists()
    errors = capfd.readouterr().err
    assert errors.count("has not ended in time, and is left to itself; metrics.jsonl has every record") == 2


def end_of(process: LoggerProcess) -> None:
    assert process._process is not None
    process._process.wait(timeout=60)


def config_of(name: str = "small") -> Config:
    return build_config({"name": name, "model": MODEL})


def test_servers_that_refuse_cost_a_sentence_without_their_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with serving(403) as address:
        monkeypatch.setenv("WANDB_BASE_URL", address)
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        both = [LoggerProcess(name, tmp_path, config_of(), "0123456789abcdef") for name in ("wandb", "mlflow")]
        for one in both:
            one.log(1, {"train/loss": 2.5})
        end_of(both[1])
        both[1].log(2, {"train/loss": 2.25})
        for one in both:
            one.close(loggers.COMPLETE)
    errors = capfd.readouterr().err.splitlines()
    assert sorted(errors)[0].startswith("mlflow: ")
    assert "training goes on without it" in sorted(errors)[0]
    # wandb keeps its records in files.
    assert [row["train/loss"] for rows in logged_by_wandb(tmp_path).values() for row in rows] == [2.5]
    files = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert address.removeprefix("http://").encode() not in files
    assert not [line for line in errors if address.removeprefix("http://") in line or HOST in line or SECRET in line]


def test_a_logger_that_is_killed_or_falls_behind_is_left_with_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loggers, "UNSENT_BYTES", 1 << 16)
    killed, stopped = (LoggerProcess("mlflow", tmp_path / name, config_of(), "0" * 16) for name in "ab")
    assert killed._process is not None
    assert stopped._process is not None
    killed._process.kill()
    killed._process.wait()
    os.kill(stopped._process.pid, signal.SIGSTOP)
    for step in range(3000):
        killed.log(step, {"train/loss": 1.0})
        stopped.log(step, {"train/loss": 1.0})
    for one in (killed, stopped):
        one.close(loggers.COMPLETE)
    errors = capfd.readouterr().err.splitlines()
    assert [line.partition(";")[0] for line in errors] == ["mlflow has ended", "mlflow does not keep up"]


KILLED = """
import os, signal, sys, time
from pathlib import Path
from xgram_dist.config.load import build_config
from xgram_dist.train.loggers import LoggerProcess
logger = LoggerProcess("mlflow", Path(sys.argv[1]), build_config({"name": "killed", "model": %r}), "f" * 16)
logger.log(1, {"train/loss": 3.0})
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_logger_of_a_killed_run_ends_it_and_the_next_start_goes_on_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    done = subprocess.run([sys.executable, "-c", KILLED % MODEL, str(tmp_path)], stderr=subprocess.PIPE)
    assert done.returncode == -signal.SIGKILL
    (found,) = mlflow_runs(tmp_path)  # stderr is closed when the logger has ended
    assert (found.info.status, found.data.metrics) == ("FAILED", {"train/loss": 3.0})
    again = LoggerProcess("mlflow", tmp_path, config_of("killed"), "f" * 16)
    again.log(2, {"train/loss": 2.0})
    again.close(loggers.COMPLETE)
    (found,) = mlflow_runs(tmp_path)
    assert (found.info.status, found.data.metrics) == ("FINISHED", {"train/loss": 2.0})


def test_a_run_that_is_stopped_is_marked_in_both_loggers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loggers, "STOP_SECONDS", 300.0)
    both = [LoggerProcess(name, tmp_path, config_of(), "e" * 16) for name in ("wandb", "mlflow")]
    for one in both:
        one.log(1, {"train/loss": 2.0})
        one.close(loggers.STOPPED)
    assert [found.info.status for found in mlflow_runs(tmp_path)] == ["KILLED"]
    assert [row["step"] for rows in logged_by_wandb(tmp_path).values() for row in rows] == [1]
    assert len(capfd.readouterr().err.splitlines()) == 2  # where both write


def test_a_run_id_lasts_until_a_fresh_start(tmp_path: Path) -> None:
    first = settle_run_id(tmp_path, None, fresh=False)
    assert len(first) == 16
    assert settle_run_id(tmp_path, None, fresh=False) == first  # killed before its first checkpoint
    assert settle_run_id(tmp_path, "0123456789abcdef", fresh=False) == "0123456789abcdef"  # on an empty disk
    assert settle_run_id(tmp_path, None, fresh=False) == "0123456789abcdef"
    assert settle_run_id(tmp_path, None, fresh=True) not in (first, "0123456789abcdef")
    (tmp_path / RUN_ID).write_text("../../elsewhere")
    assert len(settle_run_id(tmp_path, None, fresh=False)) == 16


def texts(model: type[BaseModel], above: str = "") -> Iterator[str]:
    """Keys of free text, which may hold paths and addresses."""
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from texts(kind, f"{above}{name}.")
        elif str in (kind, *get_args(kind)):
            yield above + name


def test_no_key_that_may_hold_a_path_or_an_address_is_sent() -> None:
    assert {*texts(Config)} - {"name"} <= set(PRIVATE) | {"memory.window", "eval.tasks"}
    tree = {"name": "small", "model": MODEL, "data": {"path": "/secret"}, "checkpoint": {"remote": "s3://secret/x"}}
    sent = public_settings(build_config(tree))
    assert "secret" not in json.dumps(sent)
    assert sent["model.width"] == 8


def test_a_proxy_is_asked_in_place_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not loggers.answers("https://tracking.invalid")
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{proxy.getsockname()[1]}")
        assert loggers.answers("https://tracking.invalid")
        assert not loggers.answers("http://tracking.invalid")
    started = time.monotonic()
    assert not loggers.answers("https://tracking.invalid")
    assert time.monotonic() - started < 60
