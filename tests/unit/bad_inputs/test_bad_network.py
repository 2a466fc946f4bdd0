"""Ranks that do not meet: one sentence, in time. Strangers at the port of a run are refused."""

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from refusals import check_sentence

from xgram_dist.environment import Place
from xgram_dist.errors import UserError
from xgram_dist.parallel import rendezvous
from xgram_dist.parallel.rendezvous import listen, meet, open_store

LOCAL = "127.0.0.1"


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.socket() as one:
        one.bind((LOCAL, 0))
        one.listen()
        yield one


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind((LOCAL, 0))
        return int(probe.getsockname()[1])


@pytest.fixture(autouse=True)
def _short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "GRACE_SECONDS", 0.2)


def refusal(place: Place, seconds: float) -> UserError:
    with pytest.raises(UserError) as error:
        open_store(place, seconds)
    return error.value


def test_an_address_where_nothing_listens(port: int, capfd: pytest.CaptureFixture[str]) -> None:
    start = time.monotonic()
    error = refusal(Place(1, 2, 1, LOCAL, port), 1.0)
    assert time.monotonic() - start < 3
    check_sentence(error, "rank 1", f"MASTER_ADDR = {LOCAL}, MASTER_PORT = {port}", "refused", "rank 0 has started")
    assert capfd.readouterr() == ("", "")  # no lines of torch's


def test_an_unknown_host(port: int) -> None:
    error = refusal(Place(1, 2, 1, "no-such-host.invalid", port), 1.0)
    check_sentence(error, "MASTER_ADDR = no-such-host.invalid", "the name is not known")


def test_a_listener_that_says_nothing(listener: socket.socket) -> None:
    start = time.monotonic()
    error = refusal(Place(1, 2, 1, LOCAL, listener.getsockname()[1]), 1.0)
    assert time.monotonic() - start < 5
    check_sentence(error, "rank 1 did not reach rank 0", "not the store of a run")


def test_a_listener_that_speaks_http(listener: socket.socket) -> None:
    def answer() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    threading.Thread(target=answer, daemon=True).start()
    error = refusal(Place(1, 2, 1, LOCAL, listener.getsockname()[1]), 2.0)
    check_sentence(error, "rank 1 did not reach rank 0")


def test_a_port_in_use(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    check_sentence(refusal(Place(0, 2, 0, LOCAL, port), 1.0), f"MASTER_PORT = {port}", "in use", "choose a free port")


def test_a_rank_that_never_comes(port: int) -> None:
    place = Place(0, 3, 0, LOCAL, port)
    store = open_store(place, 5.0)
    with pytest.raises(UserError) as error:
        meet(store, place, 0.3)
    check_sentence(error.value, "2 of 3 ranks did not join", "rank 1, 2")


def meeting(*places: Place) -> list[UserError | None]:
    """What each rank is told; None: that it may begin."""
    told: list[UserError | None] = [None] * len(places)
    stores: list[Any] = [None] * len(places)  # kept until the last has read it

    def run(index: int) -> None:
        try:
            stores[index] = open_store(places[index], 5.0)
            meet(stores[index], places[index], 1.0)
        except UserError as error:
            told[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(places))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    return told


def test_ranks_with_one_token_meet(port: int) -> None:
    assert meeting(*(Place(rank, 3, rank, LOCAL, port, token="secret") for rank in range(3))) == [None] * 3


def test_a_rank_with_another_token_is_refused(port: int) -> None:
    first, second = meeting(Place(0, 2, 0, LOCAL, port, token="ours"), Place(1, 2, 1, LOCAL, port, token="theirs"))
    assert first is not None
    assert second is not None
    check_sentence(second, "rank 1", "another run", "XGRAM_DIST_TOKEN")
    check_sentence(first, "1 of 2 ranks did not join")


def test_a_rank_of_a_run_of_another_size_is_refused(port: int) -> None:
    told = meeting(Place(0, 2, 0, LOCAL, port), Place(1, 4, 1, LOCAL, port))
    assert told[1] is not None
    check_sentence(told[1], "another run")


def test_a_stranger_who_writes_a_proof_is_refused(port: int) -> None:
    place = Place(0, 2, 0, LOCAL, port, token="secret")
    store = open_store(place, 5.0)
    open_store(Place(1, 2, 1, LOCAL, port), 5.0).set("proof-1", "guessed")
    with pytest.raises(UserError) as error:
        meet(store, place, 2.0)
    check_sentence(error.value, "called itself rank 1", "XGRAM_DIST_TOKEN")


def test_two_processes_with_one_rank(port: int) -> None:
    told = meeting(*(Place(rank, 3, rank, LOCAL, port) for rank in (0, 1, 1, 2)))
    refused = [error for error in told if error is not None]
    assert len(refused) == 1
    check_sentence(refused[0], "two processes with RANK = 1")


@pytest.mark.parametrize(
    ("address", "bound"), [("127.0.0.1", "127.0.0.1"), ("localhost", "127.0.0.1"), ("192.0.2.1", "::")]
)
def test_rank_0_listens_at_the_address_it_is_known_by(address: str, bound: str, port: int) -> None:
    """192.0.2.1 is no address of this machine, as behind a forwarded port."""
    with socket.socket(fileno=listen(Place(0, 2, 0, address, port))) as one:
        assert one.getsockname()[0] == (bound if bound != "::" or socket.has_dualstack_ipv6() else "0.0.0.0")
