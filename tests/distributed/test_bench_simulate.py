"""`bench simulate` measures and simulates the same layouts, whose bytes agree. Times are not compared here."""

import pytest

from xgram_dist.bench import slow_link
from xgram_dist.bench.simulate import LAYOUTS, run_simulate_benchmark
from xgram_dist.cli.main import main

needs_namespaces = pytest.mark.skipif(bool(slow_link.why_not()), reason=slow_link.why_not())


@needs_namespaces
def test_measured_and_simulated_layouts():
    figures = run_simulate_benchmark([2], 1, tuple(LAYOUTS)[1:3], rate_mbit=200)
    assert set(figures["layouts"]) == {"replicated, overlap, 2 ranks", "replicated, tables by node, 2 ranks"}
    for one in figures["layouts"].values():
        assert min(one[key] for key in ("measured_ms", "without_limits_ms", "simulated_ms")) > 0
        assert one["exchange_bytes_simulated"] == pytest.approx(one["exchange_bytes_measured"], rel=0.2), one


def test_without_namespaces_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(slow_link, "why_not", lambda: "network namespaces need Linux and root")
    assert main(["bench", "simulate"]) == 0
    assert "network namespaces need Linux and root" in capsys.readouterr().out


def test_odd_ranks_are_refused(capsys):
    assert main(["bench", "simulate", "--ranks", "3"]) == 2
    assert "even numbers of --ranks" in capsys.readouterr().err
