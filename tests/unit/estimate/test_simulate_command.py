"""`xgram-dist simulate`: its figures as text and JSON, its page, and what it refuses."""

import html
import itertools
import json
import re
from pathlib import Path

import pytest

from xgram_dist.cli.main import main
from xgram_dist.cli.simulate import LATENCIES
from xgram_dist.estimate.links import Latency

RECIPES = Path(__file__).resolve().parents[3] / "recipes"
TINY = str(RECIPES / "tiny" / "xgram.yaml")
SMALL = [TINY, "train.micro_batch=1", "--ranks", "8", "--ranks-per-node", "4"]


def test_figures_as_text_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *SMALL]) == 0
    text = capsys.readouterr().out
    assert main(["simulate", *SMALL, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert f"{1000 * figures['seconds']:,.1f} ms" in text
    assert (figures["ranks"], figures["nodes"], figures["micro_batches"]) == (8, 2, 2)
    phases = sum(phase["mean"] for phase in figures["phases"].values())
    assert phases == pytest.approx(figures["seconds"], rel=1e-3)
    assert phases == pytest.approx(sum(figures["parts"].values()))
    assert figures["trace"] == "Zipf's law"


def test_layouts_on_several_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", TINY, "--layouts", "--ranks", "2,8", "--ranks-per-node", "2", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {(row["layout"], row["ranks"]) for row in rows} >= {("replicated", 2), ("HSDP, overlap", 8)}
    assert all(row["efficiency"] == 1.0 for row in rows if row["ranks"] == 2)
    assert main(["simulate", str(RECIPES / "tiny" / "vanilla.yaml"), "--layouts", "--ranks", "2,4"]) == 0
    assert "by node" not in capsys.readouterr().out


def test_the_page_stands_alone_and_holds_the_events(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "step.html"
    words = ["--straggler", "5:2", "--jitter", "0.1", "--timeline", str(page), "--timeline-ranks", "4"]
    assert main(["simulate", *SMALL, *words, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"(src|href)=\"(?!#)", text)
    assert "http" not in re.sub(r"http-equiv", "", text)
    data = json.loads(html.unescape(re.search(r'data-timeline="([^"]*)"', text).group(1)))  # type: ignore[union-attr]
    assert len(data["rows"]) == 4
    assert data["rows"][0].startswith("rank 5, work x 2")
    assert data["end"] >= 1e6 * figures["seconds"] * 0.99
    device = sorted(event for event in data["events"] if event[:2] == [0, 0])
    by_time = sorted(device, key=lambda event: event[3])
    assert all(before[4] <= after[3] + 0.2 for before, after in itertools.pairwise(by_time))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--ranks", "0"], "--ranks 0 is not from 1 to"),
        (["--ranks", "8,x"], "--ranks 8,x is not a number, or several such as 16,64"),
        (["--ranks", "8,16"], "--ranks takes several numbers with --layouts only"),
        (["--ranks", "12"], "--ranks 12 are not whole nodes of 8; change it or --ranks-per-node"),
        (["--ranks", "2", "--ranks-per-node", "0"], "--ranks-per-node 0 is not at least 1"),
        (["--straggler", "3"], "--straggler 3 is not RANK:FACTOR, such as 17:1.3"),
        (["--straggler", "99:2"], "--straggler 99:2: ranks are 0 to"),
        (["--straggler", "1:nan"], "the factor must be a number above 0"),
        (["--jitter", "2"], "--jitter 2 is not from 0 to 1"),
        (["--latency", "-1"], "--latency -1 is not a number of microseconds, 0 or more"),
        (["--uplink", "0"], "--uplink 0 is not a number of GB/s above 0"),
        (["--bandwidth", "inf"], "--bandwidth inf is not a number of GB/s above 0"),
        (["--trace", "gone.npz"], "gone.npz"),
        (["--layouts", "--timeline", "x.html"], "--timeline is for one layout; leave out --layouts"),
        (["--timeline-ranks", "65"], "--timeline-ranks 65 is above 64"),
        (["parallel.pipeline=2"], "parallel.pipeline"),
    ],
)
def test_what_it_refuses(words: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", TINY, "train.micro_batch=1", *words]) == 2
    sentence = capsys.readouterr().err
    assert expected in sentence
    assert sentence.count("\n") == 1


def test_help_repeats_the_defaults() -> None:
    for field, text in LATENCIES.values():
        assert f"(default {getattr(Latency(), field):g})" in text
