"""The page of a run: all sections, every number from the run's files, nothing of them as code."""

import json
from pathlib import Path

import pytest
from run_folders import EVIL, FIGURES, Parsed, add_figures, make_run, records

from xgram_dist.analysis.report import runs as figures
from xgram_dist.analysis.report.chart import MAX_POINTS, Axis, Series, chart, round_step, thin_points
from xgram_dist.analysis.report.diagnostics import diagnostics
from xgram_dist.analysis.report.html import Markup, parameters, short, size, standard_error, tag, text, with_error
from xgram_dist.analysis.report.runs import read_run
from xgram_dist.cli.main import main

SECTIONS = [
    "summary",
    "curves",
    "throughput",
    "phases",
    "stragglers",
    "memory",
    "exchange",
    "checkpoints",
    "goodput",
    "restarts",
    "evaluation",
    "diagnostics",
    "recipe",
]


def page_of(*runs: Path) -> str:
    file = runs[0].parent / "page.html"
    assert main(["report", *map(str, runs), "--html", str(file)]) == 0
    return file.read_text(encoding="utf-8")


def test_a_complete_run_has_all_sections_and_its_numbers(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "xgram", records("xgram"))
    add_figures(run)
    (run / "eval").mkdir()
    scores = {"xgram_dist": {"scores": {"boolq": 62.5}}}
    (run / "eval" / "step-00000100.json").write_text(json.dumps(scores))
    found = Parsed(page_of(run))
    assert found.ids == SECTIONS
    assert found.stands_alone()
    for part in ("hand-xgram", "16.000", "10,050", "401.0 MiB", "5 of 10", "300.00", "120.6 KiB", "1.23", "30.0 MiB"):
        assert part in found.text, part
    for part in ("61.5", "62.5", "0.159", "1.140", "43.00 %", "One start.", "No step was skipped."):
        assert part in found.text, part


def test_spikes_and_modules_that_were_not_finite_are_listed(tmp_path: Path) -> None:
    place = {"micro_batch": 2, "rank": 13, "host": "n7", "device": "cuda:5", "cause": "device", "direction": "forward"}
    found = [
        {"kind": "spike", "step": 40, "loss": 9.5, "gradient_norm": 3.25, "documents": "spikes/step-00000040.json"},
        {"kind": "skipped", "step": 50, "loss": None, "documents": "spikes/step-00000050.json"},
        {"kind": "not_finite", "step": 50, "module": "blocks.3.ffn.down", **place},
    ]
    text = Parsed(page_of(make_run(tmp_path / "run", "vanilla", [*records("vanilla"), *found]))).text
    for part in ("9.500", "spikes/step-00000040.json", "spikes/step-00000050.json", "blocks.3.ffn.down", "n7 cuda:5"):
        assert part in text, part


def test_what_the_files_do_not_hold_is_missing(tmp_path: Path) -> None:
    bare = [{"kind": "train", "step": 1, "cross_entropy": None, "tokens_per_second": 5.0}]
    found = Parsed(page_of(make_run(tmp_path / "bare", "vanilla", bare)))
    assert found.ids == SECTIONS
    assert found.text.count("missing") >= 5
    for part in ("No values in the run's files.", "No memory records", "No checkpoints", "No evaluation", "No figures"):
        assert part in found.text, part
    assert "nan" not in found.text.lower().split()


def test_nothing_of_a_runs_files_becomes_code(tmp_path: Path) -> None:
    lines = records("xgram")
    lines[-2]["</td><script>x()</script>"] = 3.0
    run = make_run(tmp_path / EVIL, "xgram", lines, data={"path": "</pre></details><script>y()</script>"})
    (run / "eval").mkdir()
    scores = {"xgram_dist": {"scores": {"<script>z()</script>": 1.0}}}
    (run / "eval" / "<b onload=z()>.json").write_text(json.dumps(scores))
    (run / "slurm").mkdir()
    attempt = {"job": "1", "restart": 0, "nodes": ["<i>n</i>"], "step": 0, "started": 1.0, "ended": 2.0}
    attempt |= {"outcome": "crashed", "reason": "<script>w()</script>"}
    (run / "slurm" / "attempts.json").write_text(json.dumps([attempt]))
    made = page_of(run)
    found = Parsed(made)
    assert found.stands_alone()
    assert "<script>x()" not in made
    for part in ("<script>z()</script>", "<script>w()</script>", "<i>n</i>", EVIL):
        assert part in found.text  # shown, as text


def test_several_runs_on_one_page(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, name, records(name)) for name in ("vanilla", "xgram")]
    found = Parsed(page_of(*runs))
    assert found.ids == ["summary", "curves", "run-0", "run-1"]
    assert "2 runs" in found.text


def test_a_method_without_tables_beside_one_with(tmp_path: Path) -> None:
    """Thresholds of updates are rows of their own only where they apply."""
    refused = {"not_applicable": "vanilla trains no tables"}
    bare = {**FIGURES["figures"], "updates": refused, "movement": refused, "row_hits": refused}
    page = text(diagnostics({"vanilla": [{**FIGURES, "figures": bare}], "xgram": [FIGURES, FIGURES]}))
    found = Parsed(page)
    assert "more than N" not in found.text
    assert found.text.count("n/a") == 2 + 2 + 3 + 2  # updates, movement, hits; extracted views of both
    assert "missing" not in found.text


def test_restarts_are_where_the_clock_begins_anew(tmp_path: Path) -> None:
    lines = records("vanilla")
    for record in lines:
        if record["step"] > 50 and "seconds" in record:
            record["seconds"] -= 5
    run = read_run(make_run(tmp_path / "run", "vanilla", lines))
    assert figures.restarts(run) == [50]
    assert "Resumed after step 50." in Parsed(page_of(run.folder)).text


def test_means_weigh_every_step_alike_without_the_first_record(tmp_path: Path) -> None:
    steps = [(1, 99.0), (11, 2.0), (16, 5.0)]
    lines = [{"kind": "train", "step": s, "cross_entropy": 1.0, "tokens_per_second": 1.0, "x": v} for s, v in steps]
    run = read_run(make_run(tmp_path / "run", "vanilla", lines))
    assert figures.average(run, "x") == pytest.approx((10 * 2 + 5 * 5) / 15)
    assert figures.average(run, "y") is None


def test_a_page_that_cannot_be_written_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", "vanilla", records("vanilla"))
    (tmp_path / "file").write_text("")
    assert main(["report", str(run), "--html", str(tmp_path / "file" / "p.html")]) == 2
    assert "cannot write" in capsys.readouterr().err


def test_text_is_escaped_unless_it_is_markup() -> None:
    assert tag("p", "a < b", Markup("<b>"), ["&", None], class_="x", title='"') == (
        '<p class="x" title="&quot;">a &lt; b<b>&amp;</p>'
    )
    assert tag("meta", charset="utf-8", hidden=True, id=None) == '<meta charset="utf-8" hidden>'


def test_ticks_are_round_numbers_within_the_axis() -> None:
    assert [round_step(step) for step in (0.07, 1.0, 1.1, 23, 700)] == pytest.approx([0.1, 1, 2, 50, 1000])
    assert Axis(0.0, 1.0, 0, 100).ticks() == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert Axis(1e-5, 1e-1, 0, 100, log=True).ticks() == pytest.approx([1e-5, 1e-4, 1e-3, 1e-2, 1e-1])
    assert Axis(1e-5, 1e-1, 0, 100, log=True).position(1e-3) == pytest.approx(50)


def test_long_curves_keep_their_peaks_and_their_end() -> None:
    points = [(float(x), 0.0) for x in range(10_000)]
    points[4321] = (4321.0, 9.0)
    found = thin_points(points)
    assert len(found) <= MAX_POINTS + 1
    assert (4321.0, 9.0) in found
    assert found[-1] == points[-1]


@pytest.mark.parametrize("points", [[], [(1.0, 2.0)], [(1.0, 2.0), (2.0, 2.0)], [(0.0, float("nan"))]])
def test_charts_of_few_points(points: list[tuple[float, float]]) -> None:
    Parsed(chart("t", "x", "y", [Series("s", points)]))
    Parsed(chart("t", "x", "y", [Series("s", points)], log_x=True, from_zero=True))


def test_numbers() -> None:
    assert parameters(726_300_000) == "726.30 M"
    assert parameters(2_334_000_000) == "2.334 B"
    assert [size(n) for n in (12, 2048, 3 << 30)] == ["12 B", "2.0 KiB", "3.0 GiB"]
    assert [short(n) for n in (0, 0.25, 20_000, 1e-5)] == ["0", "0.25", "20k", "1e-5"]
    assert standard_error([1.0, 2.0, 3.0]) == pytest.approx(1 / 3**0.5)
    assert with_error([2.0], lambda v: f"{v:.1f}") == "2.0"
    assert with_error([1.0, 3.0], lambda v: f"{v:.1f}") == "2.0 ± 1.0"
    assert with_error([2.0, 2.0], lambda v: f"{v:+.1f}") == "+2.0"
    assert with_error([], str) is None
