"""If this fails, goodput counts work twice, or a straggler report names the wrong rank or node."""

import json
from pathlib import Path

import pytest

from xgram_dist.train.starts import StartClock, StartRecord, goodput
from xgram_dist.train.stragglers import straggler_report, straggler_rows


def write_start(run: Path, number: int, **values: object) -> None:
    known = {"nodes": ["a"], "ranks": 1, "parts": {"import": 4.0}, "starting": 4.0, "saving": 1.0, "evaluating": 2.0}
    (run / "starts").mkdir(exist_ok=True)
    (run / "starts" / f"{number:04d}.json").write_text(json.dumps({**known, "ended": None, **values}))


def test_goodput_over_starts_by_hand(tmp_path: Path) -> None:
    """10 steps of 2 s, of which 4 are done again; 30 s of nobody; then 6 steps of 2 s."""
    write_start(tmp_path, 1, begun=1000.0, seen=1027.0, after_step=0, step=10, training=20.0)
    write_start(tmp_path, 2, begun=1057.0, seen=1076.0, after_step=6, step=12, training=12.0, ended="complete")
    found = goodput(tmp_path)
    assert found is not None
    seconds = {kind: found[kind] for kind in ("training", "starting", "saving", "evaluating", "lost", "waiting")}
    expected = {"training": 24.0, "starting": 8.0, "saving": 2.0, "evaluating": 4.0, "lost": 8.0, "waiting": 30.0}
    assert seconds == pytest.approx(expected)
    assert found["total"] == pytest.approx(1076.0 - 1000.0)
    assert found["goodput"] == pytest.approx(24 / 76)
    assert found["starts"][1]["to_first_step"] == pytest.approx(34.0)
    assert found["starts"][1]["parts"] == {"queue": 30.0, "import": 4.0}


def test_a_start_that_never_got_further_than_an_earlier_one(tmp_path: Path) -> None:
    """Steps 1 to 10, then 5 to 7, then 5 to 12: of the first start four steps are kept, of the second none."""
    write_start(tmp_path, 1, begun=0.0, seen=17.0, after_step=0, step=10, training=10.0)
    write_start(tmp_path, 2, begun=17.0, seen=27.0, after_step=4, step=7, training=3.0)
    write_start(tmp_path, 3, begun=27.0, seen=42.0, after_step=4, step=12, training=8.0)
    found = goodput(tmp_path)
    assert found is not None
    assert (found["training"], found["lost"]) == pytest.approx((12.0, 9.0))


def test_a_damaged_record_of_a_start_is_left_out(tmp_path: Path) -> None:
    assert goodput(tmp_path) is None
    write_start(tmp_path, 1, begun=0.0, seen=9.0, after_step=0, step=2, training=2.0)
    (tmp_path / "starts" / "0002.json").write_text("{")
    clock = StartClock()
    clock.mark("python")
    StartRecord(tmp_path, clock, ["a", "a"], 2).write(5, "stopped")
    found = goodput(tmp_path)
    assert found is not None
    assert [(one["step"], one["ranks"], one["ended"]) for one in found["starts"]] == [(2, 1, None), (5, 2, "stopped")]
    assert 0 <= clock.parts["python"] < 3600


def test_the_straggler_is_the_rank_with_most_work_of_its_own() -> None:
    """Rank 2 computes for longest; the others wait for it in the update. Node b is slower by its mean."""
    compute, update = [1.0, 1.1, 3.0, 1.2], [2.5, 2.4, 0.5, 2.3]
    ranks = [
        ("ab"[rank // 2], {"seconds_compute": c, "seconds_update": u})
        for rank, (c, u) in enumerate(zip(compute, update, strict=True))
    ]
    report = straggler_report(ranks)
    assert report["straggler"] == {"rank": 2, "node": "b", "seconds": 3.0, "median": pytest.approx(1.15)}
    assert report["phases"]["update"]["rank"] == 0
    assert report["nodes"]["compute"] == {"node": "b", "seconds": pytest.approx(2.1), "median": pytest.approx(1.575)}
    rows = straggler_rows(json.loads(json.dumps(report)))
    assert rows[0][:3] == ["own work", "2", "b"]
    assert [row[0] for row in rows[1:]] == ["compute", "update"]
    assert straggler_report([ranks[0], ranks[0]])["nodes"] == {}
