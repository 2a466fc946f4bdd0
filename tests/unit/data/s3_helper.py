"""A real S3 server (moto), and one that is slow, breaks off, hangs and lies."""

import http.client
import http.server
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from xgram_dist.data import storage

SECRET, KEY = "very-secret-value-1234567890", "AKIATESTKEYTESTKEY12"


class Proxy:
    """Passes requests on to the S3 server, and spoils answers as told."""

    def __init__(self, server: tuple[str, int]):
        self.gets: Counter[str] = Counter()
        self.latency = self.seconds_per_byte = 0.0
        self.spoil: Callable[[str, int], str | None] = lambda path, number: None
        """How the nth answer to a GET of a path is spoiled."""
        self.puts: Counter[str] = Counter()
        self.spoil_put: Callable[[str, int], str | None] = lambda path, number: None
        """The same of PUTs: `500`, `hang`, or `lost`: confirmed and forgotten."""
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if self.command == "PUT":
                    proxy.puts[self.path] += 1
                    fault = proxy.spoil_put(self.path, proxy.puts[self.path])
                    if fault == "hang":
                        time.sleep(1.5)
                    if fault is not None:
                        self.send_response(200 if fault == "lost" else 500)
                        self.send_header("Content-Length", "0")
                        self.end_headers()
                        return
                connection = http.client.HTTPConnection(*server)
                connection.request(self.command, self.path, body, dict(self.headers))
                reply = connection.getresponse()
                data = reply.read()
                status, headers = reply.status, dict(reply.getheaders())
                how = None
                if self.command == "GET":
                    proxy.gets[self.path] += 1
                    how = proxy.spoil(self.path, proxy.gets[self.path])
                    time.sleep(proxy.latency + len(data) * proxy.seconds_per_byte)
                if how == "500":
                    status, data = 500, b"<Error><Code>InternalError</Code></Error>"
                elif how == "404":
                    status, data = 404, b"<Error><Code>NoSuchKey</Code></Error>"
                elif how == "corrupt":
                    data = data[:-1] + bytes([data[-1] ^ 1])
                elif how == "short":  # a lie about the length
                    data = data[: len(data) // 2]
                self.send_response(status)
                for name, value in headers.items():
                    if name.lower() not in ("content-length", "transfer-encoding", "connection") and not (
                        how is not None and name.lower().startswith(("etag", "x-amz-checksum"))
                    ):
                        self.send_header(name, value)
                length = headers.get("Content-Length", "0") if self.command == "HEAD" else str(len(data))
                self.send_header("Content-Length", length)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(data[: len(data) // 2] if how == "broken" else data)
                if how == "broken":
                    self.close_connection = True
                    self.connection.close()

            do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = answer

            def log_message(self, *_: Any) -> None:
                pass

        class Server(http.server.ThreadingHTTPServer):
            def handle_error(self, *_: Any) -> None:
                """A client that gave up, or a rank that was killed."""

        self.server = Server(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"


def serve_s3() -> Iterator[tuple[str, int]]:
    """Host and port."""
    server_module = pytest.importorskip("moto.server", reason="moto's S3 server is not installed (extra dev)")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = server_module.ThreadedMotoServer(port=0, verbose=False)
    server.start()
    yield server.get_host_and_port()
    server.stop()


def serve_through_proxy(s3: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """With credentials in the environment, and a bucket `bucket`."""
    made = Proxy(s3)
    for name, value in {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL_S3": made.url,
        "NO_PROXY": "127.0.0.1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(storage, "FIRST_PAUSE_SECONDS", 0.01)
    client = storage._S3Store("bucket", "")._client()
    client.create_bucket(Bucket="bucket")
    yield made
    made.server.shutdown()
