"""The preflight names who is missing, who differs and who is slow."""

import json
import socket
import threading

import pytest

from xgram_dist.cluster.preflight import Links, RendezvousError, check_in, code_hash, pair_rounds, slow_nodes
from xgram_dist.environment import Place
from xgram_dist.errors import UserError

FACTS = {"code": "c", "config": "k", "data": "d", "routing": "r"}


def call(facts, size, nodes, seconds=20.0):
    """A check-in of threads; what each rank returned or raised."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    found = {}

    def one(rank):
        try:
            found[rank] = check_in(Place(rank, size, 0, "127.0.0.1", port), nodes, facts[rank], seconds)
        except UserError as error:
            found[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in facts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def test_all_ranks_learn_where_all_are():
    found = call({rank: {**FACTS, "node": f"n{1 + rank // 2}"} for rank in range(4)}, 4, ["n1", "n2"])
    assert found == {rank: ["n1", "n1", "n2", "n2"] for rank in range(4)}


def test_a_missing_node_is_named_to_all_who_are_there():
    facts = {rank: {**FACTS, "node": "n1"} for rank in (0, 1, 3)}
    found = call(facts, 4, ["n1", "n2"], seconds=1.5)
    for rank in facts:
        assert isinstance(found[rank], RendezvousError)
        assert found[rank].exit_code == 1  # worth another start
        assert found[rank].nodes == []  # a rank of n2 is there
        assert "1 of 4 ranks did not report within 1.5 s: node n2 (rank 2)" in str(found[rank])


def test_a_rank_that_cannot_reach_the_first_says_so():
    found = call({1: {**FACTS, "node": "n2"}}, 2, ["n1", "n2"], seconds=1.5)
    assert isinstance(found[1], RendezvousError)
    assert "rank 1 on n2 does not reach rank 0 at 127.0.0.1:" in str(found[1])


@pytest.mark.parametrize("what", ["code", "config", "data", "routing"])
def test_a_node_that_differs_is_named_even_when_it_is_the_first(what):
    facts = {rank: {**FACTS, "node": f"n{rank + 1}"} for rank in range(3)}
    facts[0][what] = "other"
    for error in call(facts, 3, ["n1", "n2", "n3"]).values():
        assert error.exit_code == 2
        assert f"rank 0 on node n1 has another {what} (other) than most ({FACTS[what]})" in str(error)


def test_different_gpus_are_named_and_the_run_starts(capsys):
    gpus = ["A100 of 40 GiB", "H100 of 80 GiB", "H100 of 80 GiB"]
    found = call({rank: {**FACTS, "node": f"n{rank + 1}", "gpu": gpus[rank]} for rank in range(3)}, 3, [])
    assert found[0] == ["n1", "n2", "n3"]
    assert (
        "have different GPUs: A100 of 40 GiB on n1; H100 of 80 GiB on n2, n3. All wait for" in capsys.readouterr().out
    )
    call({rank: {**FACTS, "node": f"n{rank + 1}", "gpu": gpus[1]} for rank in range(2)}, 2, [])
    assert "different GPUs" not in capsys.readouterr().out


def test_an_interface_of_gloo_that_other_nodes_do_not_reach_is_refused():
    """torch would wait for minutes and say nothing about the interface."""
    interfaces = [
        {"name": "eth0", "address": "10.0.0.1", "network": ""},
        {"name": "lo", "address": "127.0.1.1", "network": ""},
    ]
    facts = {rank: {**FACTS, "node": f"n{rank + 1}", "gloo": json.dumps(interfaces[rank])} for rank in range(2)}
    for error in call(facts, 2, ["n1", "n2"]).values():
        assert error.exit_code == 2
        assert "preflight: rank 1 on node n2 would use the loopback (lo 127.0.1.1) for gloo" in str(error)


def test_the_hash_of_the_code_is_of_names_and_contents(tmp_path):
    hashes = set()
    for name, content in (("a.py", "x"), ("b.py", "x"), ("a.py", "y")):
        folder = tmp_path / str(len(hashes))
        folder.mkdir()
        (folder / name).write_text(content)
        hashes.add(code_hash(folder))
        (folder / "other.txt").write_text("no code")
        assert code_hash(folder) in hashes
    assert len(hashes) == 3


def test_the_slow_one_of_several_nodes_is_named_and_of_two_none():
    assert slow_nodes({"n1": 40.0, "n2": 41.0, "n3": 5.0, "n4": 39.0}) == ["n3"]
    assert slow_nodes({"n1": 40.0, "n2": 41.0, "n3": 30.0}) == []
    assert slow_nodes({"n1": 40.0, "n2": 5.0}) == []


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 32])
def test_in_every_round_each_node_meets_another_one(count):
    rounds = pair_rounds(count, 3)
    assert len(rounds) == min(3, count - 1 + count % 2)
    for pairs in rounds:
        assert all(pairs[other] == one != other for one, other in pairs.items())
        assert len(pairs) == count - count % 2
    for one in range(count):
        met = [pairs[one] for pairs in rounds if one in pairs]
        assert len(set(met)) == len(met) >= min(2, count - 1)


def test_links_below_the_plan_are_said():
    links = Links(all_to_all=10.0, all_reduce=45.0, nodes={"n1": 40.0, "n2": 39.0, "n3": 4.0})
    said = links.sentences(expected=50.0)
    assert said[0] == "preflight: all-to-all 10 GB/s, all-reduce 45 GB/s a rank (plan: 50)"
    assert "node n3 is slow: 4 GB/s at best, the others about 39" in said[1]
    assert "the links carry 10 GB/s, the plan counts on 50" in said[2]
    assert len(Links(40.0, 45.0, {}).sentences(50.0)) == 1
