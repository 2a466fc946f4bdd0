"""Two machines on this one, joined by a slow link: a network namespace for each, which one or more ranks enter.

    with SlowLink(rate_mbit=1000, delay_ms=1.0) as link: ...      # a rank calls link.ends[its machine].enter()

Each namespace belongs to a process that does nothing else and dies with this one, so nothing is left behind however
this process ends; the host's own network is not touched. What an end sends is held to the rate by `tc`. The delay is
netem's, where the kernel has it, on a pair of virtual Ethernet devices. Where it does not, each end is a TUN device,
and a thread of this process passes packets from one to the other, each after the delay.
"""

import ctypes
import fcntl
import os
import queue
import shutil
import struct
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from xgram_dist.errors import UserError

NETWORK = "10.201.77"
TOOLS = ("ip", "tc", "unshare", "nsenter", "setpriv")
MTU = 65_000
"""Few and large packets: passing them on costs little."""
_CLONE_NEWNET = 0x40000000  # sched.h
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000  # if_tun.h


def why_not() -> str:
    """Why there can be no such link here; empty where there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not found; install iproute2 and util-linux"
    tried = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True, check=False)
    return "" if tried.returncode == 0 else f"no network namespaces here: {tried.stderr.strip()}"


@dataclass(frozen=True)
class LinkEnd:
    """One of the two namespaces. Plain data: it can be handed to another process."""

    pid: int
    """The process that the namespace belongs to."""
    address: str
    device: str

    def enter(self) -> None:
        """The calling thread, and those it starts from now on, use this network."""
        with Path(f"/proc/{self.pid}/ns/net").open() as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")

    def set_rate(self, rate_mbit: int) -> None:
        """Another rate for what this end sends, where `tc` makes it by tbf. By a process that has entered."""
        discipline = ["tbf", "rate", f"{rate_mbit}mbit", "burst", "192kb", "latency", "50ms"]
        _run(["tc", "qdisc", "replace", "dev", self.device, "root", *discipline])


class SlowLink:
    def __init__(self, rate_mbit: int, delay_ms: float):
        self._rate, self._delay = f"{rate_mbit}mbit", delay_ms
        self._owners: list[subprocess.Popen[bytes]] = []
        self._tunnels: list[int] = []
        self.ends: list[LinkEnd] = []
        self.kind = ""
        """How rate and delay are made."""

    def __enter__(self) -> "SlowLink":
        try:
            for number in range(2):
                self._owners.append(_own_namespace())
                end = LinkEnd(self._owners[-1].pid, f"{NETWORK}.{number + 1}", f"xgram{number}")
                self.ends.append(end)
            self._join()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for owner in self._owners:
            owner.kill()
            owner.wait()
        for tunnel in self._tunnels:
            os.close(tunnel)

    def _join(self) -> None:
        first, second = self.ends
        words = f"ip link add {first.device} type veth peer name {second.device} netns {second.pid}"
        _run(["nsenter", "-t", str(first.pid), "--net", *words.split()])
        netem = ("netem", "rate", self._rate, "delay", f"{self._delay}ms", "limit", "100000")
        if self._limit(first, *netem).returncode == 0:
            self._limit(second, *netem).check_returncode()
            self.kind = "veth, netem for rate and delay"
        else:
            _run(["nsenter", "-t", str(first.pid), "--net", "ip", "link", "del", first.device])
            self._tunnels = [_tunnel(end) for end in self.ends]
            for end in self.ends:
                self._limit(end, "tbf", "rate", self._rate, "burst", "192kb", "latency", "50ms").check_returncode()
            self.kind = "TUN, tbf for the rate, a relay for the delay (this kernel has no netem)"
        for end in self.ends:
            setup = f"ip link set lo up && ip addr add {end.address}/24 dev {end.device} && ip link set {end.device} up"
            _run(["nsenter", "-t", str(end.pid), "--net", "sh", "-c", setup])
        if self._tunnels:
            self._relay(*self._tunnels)
            self._relay(*reversed(self._tunnels))

    def _limit(self, end: LinkEnd, *discipline: str) -> "subprocess.CompletedProcess[str]":
        words = ["nsenter", "-t", str(end.pid), "--net", "tc", "qdisc", "add", "dev", end.device, "root", *discipline]
        return subprocess.run(words, capture_output=True, text=True, check=False)

    def _relay(self, source: int, target: int) -> None:
        """Passes packets on, each `delay` after it was read."""
        packets: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()

        def receive() -> None:
            _raise_priority()
            while True:
                try:
                    packet = os.read(source, MTU + 64)
                except OSError:  # the device is gone
                    return
                packets.put((time.monotonic() + self._delay / 1000, packet))

        def send() -> None:
            _raise_priority()
            while True:
                due, packet = packets.get()
                time.sleep(max(0.0, due - time.monotonic()))
                try:
                    os.write(target, packet)
                except OSError:
                    return

        for work in (receive, send):
            threading.Thread(target=work, daemon=True).start()


def _own_namespace() -> "subprocess.Popen[bytes]":
    """A process in a network namespace of its own."""
    words = ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "sleep", "infinity"]
    owner = subprocess.Popen(words, stdin=subprocess.DEVNULL, start_new_session=True)
    ours, end = os.readlink("/proc/self/ns/net"), time.monotonic() + 10
    while os.readlink(f"/proc/{owner.pid}/ns/net") == ours:
        if owner.poll() is not None or time.monotonic() > end:
            raise UserError("a network namespace could not be made")
        time.sleep(0.01)
    return owner


def _tunnel(end: LinkEnd) -> int:
    """A TUN device in the namespace of `end`, and the file its packets are read from and written to."""
    file = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH22x", end.device.encode(), _IFF_TUN | _IFF_NO_PI))
    _run(["ip", "link", "set", end.device, "netns", str(end.pid)])
    _run(["nsenter", "-t", str(end.pid), "--net", "ip", "link", "set", end.device, "mtu", str(MTU)])
    return file


def _raise_priority() -> None:
    """The relay stands for a network card: it does not wait for a core."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), -20)


def _run(words: list[str]) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"'{' '.join(words)}' failed: {done.stderr.strip()}")
