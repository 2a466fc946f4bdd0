"""`bench simulate`: measures and simulates the same layouts, whose bytes agree. Times are not asserted."""

import json

import pytest

from xgram_dist.bench import slow_link
from xgram_dist.bench.simulate import LAYOUTS
from xgram_dist.cli.main import main

needs_namespaces = pytest.mark.skipif(bool(slow_link.why_not()), reason=slow_link.why_not())


@needs_namespaces
def test_measured_and_simulated_layouts(capfd):
    assert main(["bench", "simulate", "--ranks", "2", "--steps", "1", "--json"]) == 0
    figures = json.loads(capfd.readouterr().out)
    assert set(figures["layouts"]) == {f"{name}, 2 ranks" for name in LAYOUTS}
    for one in figures["layouts"].values():
        assert one["measured_ms"] > one["without_limits_ms"] > 0
        assert one["exchange_bytes_simulated"] == pytest.approx(one["exchange_bytes_measured"], rel=0.2), one


def test_without_namespaces_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(slow_link, "why_not", lambda: "network namespaces need Linux and root")
    assert main(["bench", "simulate"]) == 0
    assert "network namespaces need Linux and root" in capsys.readouterr().out


def test_odd_ranks_are_refused(capsys):
    assert main(["bench", "simulate", "--ranks", "3"]) == 2
    assert "even numbers of --ranks" in capsys.readouterr().err
