"""`bench tiers`: its sides compute the same, and it says where no memory limit can be set."""

import itertools
import json

import numpy as np
import pytest
import torch

from xgram_dist.bench import tiers
from xgram_dist.cli.main import main


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(tiers, "ROWS", 400)
    monkeypatch.setattr(tiers, "TOKENS", 60)


def test_all_tiers_train_to_the_same_bits(small, tmp_path):
    drawn = list(tiers.draw_slots("zipf", 6))
    tables = {side: tiers.Table(side, tmp_path) for side in tiers.SIDES}
    for table in tables.values():
        for slots, following in itertools.pairwise(drawn):
            table.step(slots, following, 0.0)
    expected = tables["memory"].storage.records
    assert expected.std() > 0
    for side in ("host", "disk"):
        assert torch.equal(tables[side].storage.records[:400], expected[:400]), side
    for table in tables.values():
        table.storage.close()


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


def test_frequent_rows_have_the_first_slots_and_uniform_ones_do_not():
    zipf, uniform = (np.concatenate(list(tiers.draw_slots(kind, 5))) for kind in ("zipf", "uniform"))
    assert np.median(zipf) < 0.4 * tiers.ROWS < np.median(uniform)
    assert 0.85 < tiers.share_that_fits("zipf") < 0.95
    assert tiers.share_that_fits("uniform") == pytest.approx(0.25, abs=0.01)
