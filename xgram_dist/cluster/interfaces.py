"""Network interfaces: which one gloo uses on this machine, which ones NCCL may use.

gloo takes GLOO_SOCKET_IFNAME, else the address that the machine's name resolves to, else the loopback. Where a name
resolves to 127.0.1.1, as installers write it to /etc/hosts, ranks of other machines cannot connect, and the process
group fails after minutes without a word about the cause. NCCL filters interfaces by NCCL_SOCKET_IFNAME.
Standard library only.
"""

import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from xgram_dist.errors import UserError

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
_SIOCGIFADDR, _SIOCGIFNETMASK = 0x8915, 0x891B  # linux/sockios.h
_NCCL_IGNORES = ("lo", "docker")
"""Prefixes that NCCL takes only if nothing else is there."""


@dataclass(frozen=True)
class Interface:
    name: str
    address: str
    """IPv4; empty: none."""
    network: str
    """As 10.0.0.0/24; empty: not known."""

    @property
    def is_loopback(self) -> bool:
        return self.name == "lo" or self.address.startswith("127.") or self.address == "::1"

    def __str__(self) -> str:
        return f"{self.name} {self.address}".strip()


def local_interfaces() -> dict[str, Interface]:
    """By name."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            address, mask = _ioctl(probe, name, _SIOCGIFADDR), _ioctl(probe, name, _SIOCGIFNETMASK)
            network = str(ipaddress.ip_network(f"{address}/{mask}", strict=False)) if address and mask else ""
            found[name] = Interface(name, address, network)
    return found


def _ioctl(probe: socket.socket, name: str, request: int) -> str:
    try:
        answer = fcntl.ioctl(probe.fileno(), request, struct.pack("256s", name[:15].encode()))
    except OSError:
        return ""
    return socket.inet_ntoa(answer[20:24])


def gloo_interface(environment: Mapping[str, str] = os.environ, host: str | None = None) -> Interface:
    """The interface that gloo uses in this process. `host`: this machine's name."""
    interfaces = local_interfaces()
    named = environment.get(GLOO, "").split(",")[0]
    if named:
        if named not in interfaces:
            raise UserError(
                f"{GLOO} = '{named}' is not an interface of {socket.gethostname()}, which has "
                f"{', '.join(sorted(interfaces))}; correct it, or the interface of the site file"
            )
        return interfaces[named]
    address = _usable_address(host or socket.gethostname())
    by_address = {one.address: one for one in interfaces.values()}
    return by_address.get(address, Interface("lo" if address.startswith("127.") else "", address, ""))


def _usable_address(host: str) -> str:
    """The first address of the name that a socket can bind, as gloo looks for it; else the loopback."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return "127.0.0.1"
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
                return str(address[0])
        except OSError:
            continue
    return "127.0.0.1"


def nccl_interfaces(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Names that NCCL may use for its sockets: a list of prefixes; exact names after "=", none of them after "^"."""
    names = sorted(local_interfaces())
    rule = environment.get(NCCL, "")
    if not rule:
        usual = [name for name in names if not name.startswith(_NCCL_IGNORES)]
        return usual or names
    exclude, exact = rule.startswith("^"), rule.lstrip("^").startswith("=")
    words = [word for word in rule.lstrip("^=").split(",") if word]
    matches = [name for name in names if any(name == word if exact else name.startswith(word) for word in words)]
    chosen = [name for name in names if name not in matches] if exclude else matches
    if not chosen:
        raise UserError(
            f"{NCCL} = '{rule}' matches no interface of {socket.gethostname()}, which has {', '.join(names)}; correct "
            f"it, or the interface of the site file"
        )
    return chosen


def unreachable_sentence(interfaces: Mapping[int, Interface], nodes: Mapping[int, str]) -> str:
    """Names the first rank that other machines cannot reach over gloo; empty if there is none. Both by rank."""
    if len(set(nodes.values())) < 2:
        return ""
    for rank, interface in interfaces.items():
        if interface.is_loopback:
            return (
                f"rank {rank} on node {nodes[rank]} would use the loopback ({interface}) for gloo, which other nodes "
                f"do not reach; name the network interface in {GLOO}, or as interface in the site file"
            )
    return ""
