"""`bench overlap`: a link as slow as it says, that leaves nothing behind, and two sides that compute the same."""

import json
import os
import socket
import time
from multiprocessing import get_context

import pytest

from xgram_dist.bench import slow_link
from xgram_dist.bench.slow_link import SlowLink
from xgram_dist.cli.main import main

RATE_MBIT, DELAY_MS, SENT = 200, 3.0, 5_000_000
needs_namespaces = pytest.mark.skipif(bool(slow_link.why_not()), reason=slow_link.why_not())


def answer(end):
    end.enter()
    with socket.create_server((end.address, 5000)) as server:
        connection, _ = server.accept()
        with connection:
            connection.sendall(connection.recv(1))
            received = 0
            while received < SENT:
                received += len(connection.recv(1 << 20))
            connection.sendall(b"x")


def ask(end, other, found):
    end.enter()
    limit = time.monotonic() + 10
    while True:
        try:
            connection = socket.create_connection((other.address, 5000), timeout=20)
            break
        except OSError:
            assert time.monotonic() < limit
            time.sleep(0.05)
    with connection:
        start = time.monotonic()
        connection.sendall(b"x")
        connection.recv(1)
        answered = time.monotonic()
        connection.sendall(bytes(SENT))
        connection.recv(1)
        found.put((answered - start, time.monotonic() - answered))


@needs_namespaces
def test_the_link_has_its_delay_and_its_rate_and_leaves_nothing_behind():
    context = get_context("spawn")
    found = context.Queue()
    with SlowLink(RATE_MBIT, DELAY_MS) as link:
        first, second = link.ends
        processes = [
            context.Process(target=answer, args=(first,)),
            context.Process(target=ask, args=(second, first, found)),
        ]
        for process in processes:
            process.start()
        round_trip, seconds = found.get(timeout=60)
        for process in processes:
            process.join()
    assert round_trip > 2 * DELAY_MS / 1000
    assert seconds > 0.8 * SENT * 8 / (RATE_MBIT * 1e6)
    assert not any(os.path.exists(f"/proc/{end.pid}") for end in link.ends)


@needs_namespaces
def test_both_sides_compute_the_same(capfd):
    assert main(["bench", "overlap", "--rounds", "1", "--steps", "1", "--json"]) == 0
    figures = json.loads(capfd.readouterr().out)
    assert figures["same_losses"]
    assert figures["bytes_sent"] > 1e6
    assert 0 < figures["overlapped_exposed_ms"] < figures["overlapped_step_ms"]


def test_without_namespaces_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(slow_link, "why_not", lambda: "network namespaces need Linux and root")
    assert main(["bench", "overlap"]) == 0
    assert "network namespaces need Linux and root" in capsys.readouterr().out
