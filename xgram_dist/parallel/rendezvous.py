"""Where ranks meet: the store at MASTER_ADDR and MASTER_PORT.

torch's TCPStore is a table of keys that rank 0 hosts (under torchrun, its agent) and all ranks connect to. It has no
authentication: who reaches the port may read and write keys. So

- rank 0 listens at the address of MASTER_ADDR alone, where that is an address of its machine; `--ranks` opens the
  socket on the loopback device before any rank starts, so that no other process can take the port;
- every rank proves that it knows the run's token (XGRAM_DIST_TOKEN) before anything else is exchanged. A process of
  another run at the same port, or with the rank of another one, is refused by name.

A store that cannot be reached is an error within `seconds`, and one sentence.
"""

import contextlib
import hashlib
import hmac
import ipaddress
import secrets
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import DistNetworkError, DistStoreError, Store, TCPStore  # type: ignore[attr-defined]

from xgram_dist.environment import TOKEN, Place
from xgram_dist.errors import UserError

START_SECONDS = 300.0
"""How much later than each other ranks may start."""
NAME_SECONDS = 10.0
"""How long an unknown host name is tried again."""
RETRY_SECONDS, POLL_SECONDS, GRACE_SECONDS = 0.2, 0.05, 1.0
LONGEST_LIST = 16


class RendezvousError(UserError):
    """Ranks that did not meet."""

    exit_code = 1  # a restart may succeed


def open_store(place: Place, seconds: float, patience: float = START_SECONDS) -> Store:
    """The store of the ranks. `seconds`: how long it may take to be reached; `patience`: how much longer to wait for an
    answer where a launcher has opened the socket for a rank that is still starting."""
    hosts = place.rank == 0 and not place.agent_store
    if not hosts and not place.launched:
        _wait_until_reachable(place, seconds)
    limit = seconds + (patience if place.launched else 0.0)
    arguments: dict[str, Any] = {
        "host_name": place.address,
        "port": place.port,
        "world_size": place.size,
        "is_master": hosts,
        "timeout": timedelta(seconds=limit),
        "wait_for_workers": False,
    }
    if hosts:
        arguments["master_listen_fd"] = place.listen_fd if place.listen_fd is not None else listen(place)
    try:
        store = _within(limit, lambda: TCPStore(**arguments))
        store.set_timeout(timedelta(seconds=seconds + patience))
        return store
    except TimeoutError:
        problem = "something listens there, but it is not the store of a run"
    except (DistNetworkError, DistStoreError) as error:
        problem = str(error).splitlines()[0][:160]
    raise RendezvousError(f"rank {place.rank} did not reach rank 0 at {_where(place)} within {seconds:g} s ({problem})")


def meet(store: Store, place: Place, seconds: float) -> None:
    """Returns once all ranks have proved that they belong to this run; all ranks call it. `seconds`: to wait for the
    last of them."""
    if store.add(f"rank-{place.rank}", 1) > 1:
        raise RendezvousError(
            f"there are two processes with RANK = {place.rank} at {_where(place)}; give every rank a number of its "
            f"own, and every run a MASTER_PORT of its own"
        )
    if place.rank == 0:
        nonce = secrets.token_hex(16)
        store.set("run", f"{nonce} {_proof(place, nonce, 'run')}")
        refusal = _admit(store, place, nonce, seconds)
        store.set("verdict", f"{_proof(place, nonce, refusal)} {refusal}")
        time.sleep(GRACE_SECONDS if refusal else 0.0)  # the store ends with this process, and others read it
    else:
        nonce, _, proof = _get(store, "run", place, seconds).partition(" ")
        if not hmac.compare_digest(proof.encode(), _proof(place, nonce, "run").encode()):
            raise RendezvousError(
                f"rank {place.rank}: the ranks at {_where(place)} belong to another run, or have another {TOKEN}; give "
                f"this run a MASTER_PORT of its own, and all its ranks the same {TOKEN}"
            )
        store.set(f"proof-{place.rank}", _proof(place, nonce, str(place.rank)))
        proof, _, refusal = _get(store, "verdict", place, seconds + START_SECONDS).partition(" ")
        if not hmac.compare_digest(proof.encode(), _proof(place, nonce, refusal).encode()):
            refusal = f"the store at {_where(place)} was written to by a process that does not belong to this run"
    if refusal:
        raise RendezvousError(refusal)


def _admit(store: Store, place: Place, nonce: str, seconds: float) -> str:
    """On rank 0: waits for the other ranks; empty, or why they are refused."""
    end = time.monotonic() + seconds
    missing = list(range(1, place.size))
    while missing and time.monotonic() < end:
        present = {rank for rank in missing if store.check([f"proof-{rank}"])}
        for rank in present:
            given = store.get(f"proof-{rank}")
            if not hmac.compare_digest(given, _proof(place, nonce, str(rank)).encode()):
                return f"a process that called itself rank {rank} at {_where(place)} does not have this run's {TOKEN}"
        missing = [rank for rank in missing if rank not in present]
        time.sleep(POLL_SECONDS if missing else 0.0)
    if not missing:
        return ""
    names = ", ".join(map(str, missing[:LONGEST_LIST])) + (", ..." if len(missing) > LONGEST_LIST else "")
    return (
        f"{len(missing)} of {place.size} ranks did not join at {_where(place)} within {seconds:g} s: rank {names}; "
        f"look at their output"
    )


def _proof(place: Place, nonce: str, what: str) -> str:
    return hmac.new(place.token.encode(), f"{nonce} {place.size} {what}".encode(), hashlib.sha256).hexdigest()


def _get(store: Store, key: str, place: Place, seconds: float) -> str:
    try:
        store.wait([key], timedelta(seconds=seconds))
        return str(store.get(key), "utf-8", "replace")
    except (DistNetworkError, DistStoreError):
        raise RendezvousError(f"rank {place.rank}: rank 0 at {_where(place)} did not answer, or has ended") from None


# Sockets


def listen(place: Place) -> int:
    """A listening socket at MASTER_ADDR and MASTER_PORT, as a file descriptor that the caller owns."""
    family, host = _interface(place.address)
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6 and host == "::":
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        try:
            listener.bind((host, place.port))
            listener.listen(min(4096, 4 * place.size))
        except OSError as error:
            raise RendezvousError(
                f"rank 0 cannot listen at MASTER_PORT = {place.port} of {host}: {error.strerror}; choose a free port"
            ) from None
        return listener.detach()


def _interface(name: str) -> tuple[int, str]:
    """The address to listen at: that of `name`, if it is the only one and belongs to this machine. Else all: a name
    that this machine resolves to a loopback address, or not at all, may mean another address elsewhere."""
    everywhere = (socket.AF_INET6, "::") if socket.has_dualstack_ipv6() else (socket.AF_INET, "0.0.0.0")
    try:
        found = {(one[0], str(one[4][0])) for one in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
    except OSError:
        return everywhere
    if name == "localhost":
        found = {one for one in found if one[0] == socket.AF_INET} or found
    if len(found) != 1:
        return everywhere
    ((family, address),) = found
    if ipaddress.ip_address(address.partition("%")[0]).is_loopback and name not in ("localhost", address):
        return everywhere
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((address, 0))
        return family, address
    return everywhere


def _wait_until_reachable(place: Place, seconds: float) -> None:
    """Returns once something listens at MASTER_ADDR and MASTER_PORT. TCPStore would retry too, with lines of its own
    about each attempt."""
    start = time.monotonic()
    while True:
        left = seconds - (time.monotonic() - start)
        try:
            socket.create_connection((place.address, place.port), timeout=max(0.1, left)).close()
            return
        except socket.gaierror as error:
            left = min(left, NAME_SECONDS - (time.monotonic() - start))
            problem = f"the name is not known: {error.strerror}"
        except OSError as error:
            problem = error.strerror or str(error)
        if left <= RETRY_SECONDS:
            waited = time.monotonic() - start
            raise RendezvousError(
                f"rank {place.rank} does not reach rank 0 at {_where(place)} after {waited:.0f} s ({problem}); check "
                f"that rank 0 has started, and the two variables"
            )
        time.sleep(RETRY_SECONDS)


def _within(seconds: float, work: Callable[[], Any]) -> Any:
    """What `work` returns; a TimeoutError after `seconds`. A TCPStore waits for ever for a peer that says nothing."""
    outcome: list[tuple[Any, BaseException | None]] = []

    def run() -> None:
        try:
            outcome.append((work(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise TimeoutError
    value, error = outcome[0]
    if error is not None:
        raise error
    return value


def _where(place: Place) -> str:
    return f"MASTER_ADDR = {place.address}, MASTER_PORT = {place.port}"
