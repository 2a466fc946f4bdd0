"""The interface of gloo and NCCL: as the libraries choose it, and refused where other nodes cannot reach it."""

import pytest

from xgram_dist.cluster import interfaces
from xgram_dist.cluster.interfaces import Interface, gloo_interface, local_interfaces, nccl_interfaces
from xgram_dist.cluster.interfaces import unreachable_sentence as unreachable
from xgram_dist.errors import UserError

LO, IB = Interface("lo", "127.0.0.1", "127.0.0.0/8"), Interface("ib0", "10.1.0.7", "10.1.0.0/16")


@pytest.fixture
def machine(monkeypatch):
    """Interfaces of a usual node."""
    found = {"lo": LO, "ib0": IB, "eth0": Interface("eth0", "192.168.0.7", "192.168.0.0/24"), "docker0": LO}
    monkeypatch.setattr(interfaces, "local_interfaces", lambda: found)
    return monkeypatch


def test_the_loopback_of_this_machine_is_found():
    assert local_interfaces()["lo"] == LO


def test_gloo_takes_the_named_interface_or_the_one_of_the_machine_s_name(machine):
    assert gloo_interface({"GLOO_SOCKET_IFNAME": "ib0,eth0"}) == IB
    machine.setattr(interfaces, "_usable_address", lambda host: {"n7": "192.168.0.7"}.get(host, "127.0.1.1"))
    assert gloo_interface({}, "n7").name == "eth0"
    assert gloo_interface({}, "debian").is_loopback
    with pytest.raises(UserError, match=r"GLOO_SOCKET_IFNAME = 'ib9' is not an interface of .* docker0, eth0, ib0, lo"):
        gloo_interface({"GLOO_SOCKET_IFNAME": "ib9"})


def test_a_name_that_does_not_resolve_means_the_loopback():
    assert interfaces._usable_address("no-such-host.invalid") == "127.0.0.1"


@pytest.mark.parametrize(
    ("rule", "names"),
    [
        ("", ["eth0", "ib0"]),
        ("ib", ["ib0"]),
        ("=ib", None),
        ("=eth0,ib0", ["eth0", "ib0"]),
        ("^docker,lo", ["eth0", "ib0"]),
        ("^=ib0", ["docker0", "eth0", "lo"]),
        ("hsn", None),
    ],
)
def test_nccl_filters_by_prefix_exact_name_or_exclusion(machine, rule, names):
    if names is None:
        with pytest.raises(UserError, match=f"NCCL_SOCKET_IFNAME = '{rule}' matches no interface"):
            nccl_interfaces({"NCCL_SOCKET_IFNAME": rule})
    else:
        assert nccl_interfaces({"NCCL_SOCKET_IFNAME": rule}) == names


def test_the_loopback_is_refused_between_nodes_and_fine_on_one():
    assert unreachable({0: IB, 1: LO}, {0: "n1", 1: "n1"}) == ""
    assert unreachable({0: IB, 1: IB}, {0: "n1", 1: "n2"}) == ""
    sentence = unreachable({0: IB, 1: LO}, {0: "n1", 1: "n2"})
    assert sentence.startswith("rank 1 on node n2 would use the loopback (lo 127.0.0.1) for gloo")
    assert "GLOO_SOCKET_IFNAME" in sentence
