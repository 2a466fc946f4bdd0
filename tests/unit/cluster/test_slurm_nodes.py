"""Which nodes a run leaves out, and how long a job has left."""

import json
import math
import time

import pytest

from xgram_dist.cluster.slurm import bad_nodes
from xgram_dist.cluster.slurm.bad_nodes import FAILED, LOST, SLOW, choose_excluded, excluded_nodes, note_node
from xgram_dist.cluster.slurm.commands import seconds_of
from xgram_dist.cluster.slurm.job import choose_nodes
from xgram_dist.cluster.slurm.ranks import Failure


def test_a_node_is_left_out_after_two_failures_or_one_slow_preflight_and_forgotten_after_a_day(tmp_path):
    note_node(tmp_path, "n1", FAILED, "CUDA error: uncorrectable ECC error")
    note_node(tmp_path, "n2", SLOW, "0.02 GB/s at best, the others about 40")
    assert list(excluded_nodes(tmp_path, time.time())) == ["n2"]
    note_node(tmp_path, "n1", LOST, "Slurm says DOWN")
    found = excluded_nodes(tmp_path, time.time())
    assert {node: one.why for node, one in found.items()} == {
        "n1": "failed 2 times, the last: Slurm says DOWN",
        "n2": "slow: 0.02 GB/s at best, the others about 40",
    }
    assert all(0 < one.until - time.time() <= 86_400 for one in found.values())
    assert excluded_nodes(tmp_path, time.time() + 86_401) == {}


def test_an_error_of_the_run_is_not_its_nodes_but_a_lost_node_is(tmp_path):
    for node in ("n1", "n1", "n2", "n2"):
        note_node(tmp_path, node, FAILED, "ValueError: the same everywhere")
    assert excluded_nodes(tmp_path, time.time()) == {}
    for node in ("n3", "n3", "n4", "n4"):
        note_node(tmp_path, node, LOST, "Slurm says DOWN")
    assert list(excluded_nodes(tmp_path, time.time())) == ["n3", "n4"]


def test_lines_that_no_run_wrote_are_left_out(tmp_path):
    note_node(tmp_path, "n1", SLOW, "x")
    with (tmp_path / "slurm" / "nodes.jsonl").open("ab") as file:
        for odd in ("{", "[]", "1", '{"node": 1}', '{"a": ' * 2000):
            file.write(odd.encode() + b"\n")
        for node in ("--wrap=x", "a b", "n2,n3", ""):  # a name becomes a word of a command
            file.write(json.dumps({"node": node, "time": time.time(), "kind": SLOW, "why": ""}).encode() + b"\n")
        for odd_time in (10**400, 1e300, -1, "now", True):
            event = {"node": "n2", "time": odd_time, "kind": SLOW, "why": ""}
            file.write(json.dumps(event).encode() + b"\n")
        file.write(b"\xff\n")
    assert list(excluded_nodes(tmp_path, time.time())) == ["n1"]


def test_a_node_stays_where_the_job_could_not_start_without_it(tmp_path, monkeypatch):
    asked = []

    def could_start(script, exclude):
        asked.append(exclude)
        return exclude.count(",") < 2

    monkeypatch.setattr(bad_nodes, "could_start", could_start)
    assert choose_excluded(tmp_path, "n9", {"n1": None, "n2": None}) == ["n1"]
    assert asked == ["n9,n1,n2", "n9,n1"]


def test_bad_nodes_among_the_given_are_left_idle_where_enough_are_left():
    assert choose_nodes(["a", "b", "c"], [1, 2], {"a"}) == ["b", "c"]
    assert choose_nodes(["a", "b"], [2], {"a"}) == ["a", "b"]


@pytest.mark.parametrize(
    ("status", "error", "own"),
    [
        ("Killed", "", "Killed"),
        ("Exited with exit code 1", "RuntimeError: CUDA error: ECC", "RuntimeError: CUDA error: ECC"),
        ("Exited with exit code 1", "RuntimeError: Connection closed by peer [10.0.0.1]", ""),
        ("Exited with exit code 1", "RuntimeError: [gloo] Timed out waiting 600000ms for recv", ""),
    ],
)
def test_a_rank_that_lost_another_says_nothing_about_its_node(status, error, own):
    assert Failure("n1", "0", status, error).of_its_node == own


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("10", 600),
        ("10:30", 630),
        ("24:00:00", 86_400),
        ("1-00:00:00", 86_400),
        ("1-2", 93_600),
        ("1-2:30", 95_400),
        ("UNLIMITED", math.inf),
        ("Partition_Limit", None),
        ("INVALID", None),
        ("", None),
        ("-1", None),
    ],
)
def test_durations_as_slurm_writes_them(text, seconds):
    assert seconds_of(text) == seconds
