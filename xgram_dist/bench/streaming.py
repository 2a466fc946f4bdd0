"""Training from object storage over a slow link: how often a step waits for its batch.

A data set is read with prefetching through an empty cache from an S3 server of this machine that answers each request
after a latency and shares a bandwidth among all answers. Steps come at the rate of a run that consumes `rate` tokens a
second: between two batches the benchmark sleeps, as long as a step would compute. Blocks of shards are small here (1
million tokens, not 168), so that a run of a minute passes many.

Out: steps that waited for their batch longer than `NOTICED`, the longest wait, all waits as a share of the time; and
the same of a run that reads the folder itself, since other programs delay the steps of both. The first batch is apart:
nothing can be prefetched before it.
"""

import http.server
import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from xgram_dist.console import Progress
from xgram_dist.data import corpus
from xgram_dist.data.dataset import PreparedData
from xgram_dist.data.documents import Document, read_documents
from xgram_dist.data.loader import Loader
from xgram_dist.data.prepare import Request, Source, prepare
from xgram_dist.data.train_bpe import train_bpe
from xgram_dist.data.workers import available_cores
from xgram_dist.parallel.launch import end_with_starter

NOTICED = 0.001
_SEQUENCE_LENGTH, _BATCH, _PREFETCH = 256, 64, 4
_COPIES = 4  # of the embedded corpus, so that a run does not come to a second epoch
_PIECE = 1 << 16


def run_streaming_benchmark(
    rate: float, *, seconds: float = 30.0, latency: float = 0.02, bytes_per_second: float = 50e6
) -> dict[str, Any]:
    tokens_per_step = _SEQUENCE_LENGTH * _BATCH
    steps = max(2, round(seconds * rate / tokens_per_step))
    with tempfile.TemporaryDirectory(prefix="xgram-bench-") as scratch:
        folder = Path(scratch)
        embedded = corpus.write_corpus(folder / "corpus").values()
        tokenizer = train_bpe(_texts(next(iter(embedded))), 4096, folder / "tokenizer.json")
        sources = tuple(Source(f"{path.stem}-{copy}", path) for path in embedded for copy in range(_COPIES))
        request = Request(
            folder / "data", available_cores(), sources=sources, tokenizer=tokenizer, chunk_tokens=_SEQUENCE_LENGTH
        )
        epoch = sum(source.train.tokens for source in prepare(request).manifest.sources)
        with _slow_server(folder, latency, bytes_per_second) as (address, fetched):
            data = PreparedData.open(None, remote=address, cache=folder / "cache")
            first, *waits = _waits(data, steps, tokens_per_step / rate)
            objects, size = fetched()
        local = _waits(PreparedData.open(folder / "data"), steps, tokens_per_step / rate)[1:]
    return {
        "tokens_per_second": rate,
        "latency_ms": 1000 * latency,
        "megabytes_per_second": bytes_per_second / 1e6,
        "steps": len(waits),
        "epochs": round(steps * tokens_per_step / epoch, 2),
        "objects_fetched": objects,
        "megabytes_fetched": round(size / 1e6, 1),
        "first_batch_seconds": round(first, 3),
        **{
            f"{name}_{key}": value
            for name, some in (("s3", waits), ("folder", local))
            for key, value in _of(some).items()
        },
        "s3_waited_share": round(sum(waits) / (sum(waits) + len(waits) * tokens_per_step / rate), 5),
    }


def _of(waits: list[float]) -> dict[str, Any]:
    return {
        "steps_that_waited": sum(wait > NOTICED for wait in waits),
        "median_wait_ms": round(1000 * statistics.median(waits), 3),
        "longest_wait_ms": round(1000 * max(waits), 3),
    }


def _texts(file: Path) -> list[str]:
    return [item.text for item in read_documents(file) if isinstance(item, Document)]


def _waits(data: PreparedData, steps: int, step_seconds: float) -> list[float]:
    """Seconds that each batch was waited for."""
    waits = []
    with (
        Loader(
            data,
            sequence_length=_SEQUENCE_LENGTH,
            global_batch=_BATCH,
            micro_batch=_BATCH // 4,
            seed=0,
            prefetch=_PREFETCH,
        ) as loader,
        Progress(steps, "steps", "training from object storage") as progress,
    ):
        for _ in range(steps):
            start = time.perf_counter()
            next(loader)
            waits.append(time.perf_counter() - start)
            time.sleep(step_seconds)
            progress.update()
    return waits


@contextmanager
def _slow_server(folder: Path, latency: float, bytes_per_second: float) -> Iterator[tuple[str, Any]]:
    """The address of `folder/data`, and a function of what was fetched: number of objects, bytes."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, str(folder), latency, bytes_per_second), daemon=True)
    process.start()
    environment = {
        "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{ours.recv()}",
        "AWS_ACCESS_KEY_ID": "bench",
        "AWS_SECRET_ACCESS_KEY": "bench",
        "AWS_DEFAULT_REGION": "us-east-1",
        "NO_PROXY": "127.0.0.1",
    }
    before = {name: os.environ.get(name) for name in environment}
    os.environ |= environment

    def fetched() -> tuple[int, int]:
        ours.send("fetched")
        objects, size = ours.recv()
        return objects, size

    try:
        yield "s3://data", fetched
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
        process.terminate()
        process.join()


def _serve(pipe: Any, folder: str, latency: float, bytes_per_second: float) -> None:
    """Body of the server: S3's GET of the objects below `folder`, the first part of the path being the bucket."""
    end_with_starter()
    link = threading.Lock()
    free_at, objects, size = 0.0, 0, 0

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            nonlocal free_at, objects, size
            path = Path(folder) / self.path.partition("?")[0].lstrip("/")
            content = path.read_bytes() if path.is_file() else b"<Error><Code>NoSuchKey</Code></Error>"
            time.sleep(latency)
            self.send_response(200 if path.is_file() else 404)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            for start in range(0, len(content), _PIECE):
                piece = content[start : start + _PIECE]
                with link:
                    free_at = max(free_at, time.monotonic()) + len(piece) / bytes_per_second
                    wait = free_at - time.monotonic()
                time.sleep(max(0.0, wait))
                self.wfile.write(piece)
            with link:
                objects, size = objects + 1, size + len(content)

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    pipe.send(server.server_address[1])
    while True:
        pipe.recv()
        with link:
            pipe.send((objects, size))
