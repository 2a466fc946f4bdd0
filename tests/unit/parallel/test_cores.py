"""If these fail, ranks of one machine push each other off their cores, or leave cores unused."""

import os

import pytest

from xgram_dist.parallel import launch as cores


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Makes the machine one with these cores: {core: (socket, number there)}."""

    def make(where):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(where))
        monkeypatch.setattr(cores, "TOPOLOGY", tmp_path)
        for core, (socket, number) in where.items():
            folder = tmp_path / f"cpu{core}" / "topology"
            folder.mkdir(parents=True)
            (folder / "physical_package_id").write_text(f"{socket}\n")
            (folder / "core_id").write_text(f"{number}\n")

    return make


@pytest.mark.parametrize(("count", "ranks"), [(2, 2), (8, 1), (8, 3), (7, 7), (64, 8)])
def test_every_core_belongs_to_one_rank_and_shares_differ_by_at_most_one(machine, count, ranks):
    machine({core: (0, core) for core in range(count)})
    shares = [cores.cores_of(rank, ranks) for rank in range(ranks)]
    assert set().union(*shares) == set(range(count))
    assert sum(len(share) for share in shares) == count
    assert max(len(share) for share in shares) - min(len(share) for share in shares) <= 1


def test_halves_of_a_core_and_cores_of_a_socket_stay_together(machine):
    machine({core: (core // 2 % 2, core % 2) for core in range(8)})  # 0 and 4 are halves of one, as 1 and 5 are
    assert [cores.cores_of(rank, 2) for rank in range(2)] == [{0, 1, 4, 5}, {2, 3, 6, 7}]
    assert [cores.cores_of(rank, 4) for rank in range(4)] == [{0, 4}, {1, 5}, {2, 6}, {3, 7}]


def test_ranks_that_outnumber_cores_share_them_evenly_or_not_at_all(machine):
    machine({core: (0, core) for core in (3, 5)})
    assert [cores.cores_of(rank, 4) for rank in range(4)] == [{3}, {3}, {5}, {5}]
    assert [cores.cores_of(rank, 3) for rank in range(3)] == [{3, 5}] * 3


def test_a_machine_that_does_not_tell_where_its_cores_are_has_them_in_order(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(cores, "TOPOLOGY", tmp_path / "nothing")
    assert cores.cores_of(1, 2) == {2, 3}
