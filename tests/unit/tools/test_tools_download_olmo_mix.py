"""The downloader against a server with the layout and interface of the real one, which is not always well."""

import gzip
import hashlib
import http.server
import json
import threading
import urllib.parse
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zstandard
from tools_helpers import load_tool

from xgram_dist.cli.main import main as xgram_dist

tool = load_tool("download_olmo_mix")
REVISION = "0123456789abcdef"


def lines(name: str, count: int) -> bytes:
    """Documents with fields that differ between sources, as in the real data."""
    odd = [
        {"id": 5, "added": None},
        {"metadata": {"url": "x", "nested": [1, {"a": "b"}]}},
        {"source": "s", "version": 1},
    ]
    texts = [f"{name} document {number} " + "of some words " * (number % 9 + 1) for number in range(count)]
    return b"".join(json.dumps({"text": text, **odd[n % 3]}).encode() + b"\n" for n, text in enumerate(texts))


def packed(path: str, count: int) -> bytes:
    data = lines(path, count)
    return gzip.compress(data) if path.endswith(".gz") else zstandard.ZstdCompressor().compress(data)


FILES = {
    path: packed(path, 150 + 10 * number)
    for number, path in enumerate(
        [
            "data/dclm/raw/hero-run-fasttext_for_HF/filtered/OH_eli5/processed_data/global-shard_01_of_10/0001.jsonl.zstd",
            "data/dclm/raw/hero-run-fasttext_for_HF/filtered/OH_eli5/processed_data/global-shard_02_of_10/0001.jsonl.zstd",
            "data/wiki/wiki-0001.json.gz",
            "data/wiki/wiki-0000.json.gz",
            "data/open-web-math/train/open-web-math-0000.json.gz",
            "data/algebraic-stack/algebraic-stack train 0000.json.gz",
        ]
    )
} | {"README.md": b"words", "data/wiki/notes.txt": b"no documents"}


class FakeServer:
    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()
        self.ranges: list[str] = []
        self.spoil: Callable[[str, int], str | None] = lambda path, number: None
        fake = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                url = urllib.parse.urlsplit(self.path)
                path = urllib.parse.unquote(url.path)
                if path == "/api/datasets/allenai/olmo-mix-1124":
                    self.reply(200, json.dumps({"sha": REVISION}).encode())
                elif path.startswith(f"/api/datasets/allenai/olmo-mix-1124/tree/{REVISION}/data"):
                    self.reply_page(urllib.parse.parse_qs(url.query))
                elif path.startswith(f"/datasets/allenai/olmo-mix-1124/resolve/{REVISION}/"):
                    self.reply_file(path.partition(f"{REVISION}/")[2])
                else:
                    self.reply(404, b"")

            def reply(self, status: int, body: bytes, headers: dict[str, str] | None = None, sent: int = -1) -> None:
                self.send_response(status)
                for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body if sent < 0 else body[:sent])

            def reply_page(self, query: dict[str, list[str]]) -> None:
                first = int(query.get("cursor", ["0"])[0])
                names = sorted(name for name in FILES if name.startswith("data/"))
                entries: list[dict[str, Any]] = [{"type": "directory", "path": "data/wiki", "size": 0}]
                for name in names[first : first + 3]:
                    data = FILES[name]
                    entry: dict[str, Any] = {"type": "file", "path": name, "size": len(data), "oid": "0" * 40}
                    if not name.endswith(".txt"):
                        entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data)}
                    entries.append(entry)
                following = (
                    f'<{fake.url}{urllib.parse.urlsplit(self.path).path}?recursive=true&cursor={first + 3}>; rel="next"'
                )
                self.reply(200, json.dumps(entries).encode(), {"Link": following} if first + 3 < len(names) else {})

            def reply_file(self, name: str) -> None:
                fake.requests[name] += 1
                how, data = fake.spoil(name, fake.requests[name]), FILES[name]
                start = 0
                if "Range" in self.headers and how != "whole":
                    start = int(self.headers["Range"].removeprefix("bytes=").rstrip("-"))
                    fake.ranges.append(name)
                if how in ("500", "403"):
                    self.reply(int(how), b"")
                elif how == "corrupt":
                    self.reply(200, data[:-3] + b"xyz")
                else:
                    sent = (len(data) - start) // 2 if how == "broken" else -1
                    self.reply(206 if start else 200, data[start:], sent=sent)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    monkeypatch.setattr(tool, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    made = FakeServer()
    yield made
    made.close()


def run(server: FakeServer, *words: object) -> int:
    code: int = tool.main([*map(str, words), "--server", server.url])
    return code


def documents() -> list[str]:
    return sorted(name for name in FILES if name.endswith((".zstd", ".gz")))


def test_all_sources_are_downloaded_as_they_are_and_can_be_prepared(server: FakeServer, tmp_path: Path) -> None:
    assert run(server, "--out", tmp_path / "mix") == 0
    found = [path for path in (tmp_path / "mix" / "data").rglob("*") if path.is_file()]
    assert sorted(path.relative_to(tmp_path / "mix").as_posix() for path in found) == documents()
    assert all((tmp_path / "mix" / name).read_bytes() == FILES[name] for name in documents())
    words = ["--mix", str(tmp_path / "mix" / "data"), "--train-bpe", "300", "--chunk-tokens", "64", "--workers", "1"]
    assert xgram_dist(["prepare", *words, "--out", str(tmp_path / "out"), "--json"]) == 0
    record = json.loads((tmp_path / "out" / "dataset.json").read_bytes())
    assert {source["name"]: source["documents"] for source in record["sources"]} == {
        "algebraic-stack": 200,
        "dclm": 150 + 160,
        "open-web-math": 190,
        "wiki": 170 + 180,
    }


def test_sources_and_numbers_of_files_are_chosen_and_unknown_ones_refused(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(server, "--list") == 0
    assert "open-web-math" in capsys.readouterr().out
    assert run(server, "--out", tmp_path, "--source", "wiki", "--files", 1) == 0
    assert [path.name for path in (tmp_path / "data").rglob("*.*")] == ["wiki-0000.json.gz"]
    assert run(server, "--out", tmp_path, "--source", "wikipedia") == 2
    assert "is not one of algebraic-stack, dclm" in capsys.readouterr().err


def test_broken_and_corrupt_answers_are_repeated_and_continued(server: FakeServer, tmp_path: Path) -> None:
    faults = {1: "broken", 2: "500", 3: "broken"}
    server.spoil = lambda name, number: ("corrupt" if number == 1 else None) if "wiki" in name else faults.get(number)
    assert run(server, "--out", tmp_path, "--workers", 2) == 0
    assert all((tmp_path / name).read_bytes() == FILES[name] for name in documents())
    assert any("dclm" in name for name in server.ranges)
    assert not list(tmp_path.rglob("*.part"))


def test_an_interrupted_download_continues_and_whole_files_are_not_fetched_again(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tool, "ATTEMPTS", 1)
    server.spoil = lambda name, number: "broken" if "math" in name else None
    assert run(server, "--out", tmp_path, "--workers", 1) == 2
    assert "run the same command again" in capsys.readouterr().err
    server.spoil = lambda name, number: None
    before = dict(server.requests)
    assert run(server, "--out", tmp_path) == 0
    whole = [name for name in before if "math" not in name]
    assert all(server.requests[name] == 1 for name in whole)
    assert [name for name in server.ranges if "math" in name]
    assert run(server, "--out", tmp_path, "--verify") == 0
    damaged = tmp_path / documents()[0]
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    assert run(server, "--out", tmp_path, "--verify") == 1
    assert f"'{damaged}' is damaged" in capsys.readouterr().err


def test_a_server_that_does_not_continue_files_is_read_from_the_start(server: FakeServer, tmp_path: Path) -> None:
    server.spoil = lambda name, number: "broken" if number == 1 else "whole"
    assert run(server, "--out", tmp_path, "--source", "wiki") == 0
    assert (tmp_path / "data/wiki/wiki-0000.json.gz").read_bytes() == FILES["data/wiki/wiki-0000.json.gz"]


def test_refused_access_is_final_and_names_the_token_but_does_not_show_it(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secretsecret")
    server.spoil = lambda name, number: "403"
    assert run(server, "--out", tmp_path, "--source", "wiki") == 2
    errors = capsys.readouterr().err
    assert "set HF_TOKEN" in errors
    assert "hf_secretsecret" not in errors
    assert max(server.requests.values()) == 1
