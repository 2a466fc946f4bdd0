"""`bench tiers`: its sides compute the same, and it says where no memory limit can be set."""

import json

import pytest
import torch

from xgram_dist.bench import exchange, tiers
from xgram_dist.cli.main import main


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(tiers, "ROWS", 400)
    for module in (tiers, exchange):
        monkeypatch.setattr(module, "TOKENS", 60)
    monkeypatch.setattr(tiers, "workload", without_compiling)
    monkeypatch.setattr(tiers, "look_up", look_up)
    monkeypatch.setattr(tiers, "run_growth", lambda *_: {})


def without_compiling(*arguments, **memory):
    config = exchange.workload(*arguments, **memory)
    return config.model_copy(update={"train": config.train.model_copy(update={"compile": False})})


def look_up(working):
    leaf = working.slabs[0].requires_grad_()
    leaf.square().sum().backward()


def test_all_tiers_train_to_the_same_bits(small, tmp_path):
    sides = {name: tiers.Side(name, tmp_path) for name in tiers.SIDES}
    for side in sides.values():
        side.touch(torch.arange(tiers.ROWS))
        assert len(side.run(tiers.draw("zipf", 6))) == 5
    states = {name: side.tables.shards[0].state_dict() for name, side in sides.items()}
    assert len(states["memory"].row_ids) == 400
    for name in ("host", "disk"):
        for tensor, values in states[name].columns.items():
            expected = states["memory"].columns[tensor][states[name].row_ids]
            assert torch.equal(values, expected), (name, tensor)
    for side in sides.values():
        side.close()


def test_it_says_where_no_memory_limit_can_be_set(small, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tiers, "why_not", lambda: "cgroups need Linux and root")
    assert main(["bench", "tiers", "--json", "--rounds", "1", "--steps", "1", "--folder", str(tmp_path)]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["limited"] == "skipped: cgroups need Linux and root"
    assert set(figures["warm"]["ms"]) == {"memory", "host", "disk"}
    assert not list(tmp_path.iterdir()), "files are left behind"


def test_too_few_steps_are_refused(capsys):
    assert main(["bench", "tiers", "--steps", "0"]) == 2
    assert "bench tiers needs --rounds and --steps of at least 1" in capsys.readouterr().err


def test_the_limit_is_a_quarter_of_the_records(small, tmp_path):
    side = tiers.Side("host", tmp_path)
    side.touch(torch.arange(tiers.ROWS))
    assert sum(shard.records.nbytes for shard in side.tables.shards) == tiers.touched_bytes() == 4 * tiers.limit_bytes()
    side.close()


def test_nine_in_ten_of_the_frequent_tokens_fit():
    zipf, uniform = (torch.cat(tiers.draw(kind, 5)).double().median() for kind in ("zipf", "uniform"))
    assert zipf < 0.05 * tiers.ROWS < 0.4 * tiers.ROWS < uniform
    assert 0.85 < tiers.share_that_fits("zipf") < 0.95
    assert tiers.share_that_fits("uniform") == pytest.approx(0.25, abs=0.01)


def test_the_grown_tables_are_within_the_limits_of_a_recipe():
    assert exchange.workload(tiers.ROWS * tiers.GROWTH, exchange.WIDTH, rows="touched").memory.rows == "touched"
