"""`xgram-dist report` on run folders made by hand."""

import json
from pathlib import Path
from typing import Any

import pytest
from run_folders import MEMORY, MODEL

from xgram_dist.cli.main import main
from xgram_dist.config import build_config, dump_config


def train(step: int, loss: float | None, rate: float = 1000.0) -> dict[str, Any]:
    return {"kind": "train", "step": step, "loss": loss, "cross_entropy": loss, "tokens_per_second": rate}


def validation(step: int, loss: float | None, perplexity: float | None) -> dict[str, Any]:
    return {"kind": "validation", "step": step, "loss": loss, "perplexity": perplexity}


def make_run(folder: Path, method: str, records: list[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True)
    config = build_config({"name": f"tiny-{method}", "model": MODEL, "memory": MEMORY[method], "train": {"steps": 300}})
    (folder / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


@pytest.fixture
def complete(tmp_path: Path) -> Path:
    end = {
        "kind": "end",
        "step": 300,
        "complete": True,
        "tokens_per_second": 23456.7,
        "rows_hit": 12_345,
        "rows": 16_384,
    }
    records = [train(1, 8.0), validation(100, 5.0, 148.4), train(300, 4.0), validation(300, 4.5, 90.017), end]
    return make_run(tmp_path / "runs" / "full", "xgram", records)


@pytest.fixture
def unfinished(tmp_path: Path) -> Path:
    records = [train(1, 8.0, 900.0), {"kind": "skipped", "step": 2, "loss": None}, train(40, None, 1234.0)]
    return make_run(tmp_path / "runs" / "half", "vanilla", records)


def test_the_table_has_a_row_a_run_with_its_figures(
    complete: Path, unfinished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(complete), str(unfinished)]) == 0
    header, _, full, half = capsys.readouterr().out.splitlines()
    assert header.split()[0] == "run"
    for part in ("tiny-xgram ", "90.017", "23,457", "12,345 of 16,384"):
        assert part in full
    assert "tiny-vanilla (step 40 of 300)" in half
    assert "1,234" in half
    assert half.split()[-1] == "-"  # no tables, no rows


def test_json_has_the_same_figures(complete: Path, unfinished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(complete), str(unfinished), "--json"]) == 0
    full, half = json.loads(capsys.readouterr().out)
    # 4 layers of 2 tables of 2048 rows of width 64.
    assert full["table_parameters"] == 4 * 2 * 2048 * 64
    assert (full["complete"], full["step"], full["validation_perplexity"]) == (True, 300, 90.017)
    assert (full["rows_hit"], full["rows"], full["tokens_per_second"]) == (12_345, 16_384, 23456.7)
    assert (half["complete"], half["step"], half["steps"]) == (False, 40, 300)
    assert (half["validation_perplexity"], half["rows_hit"], half["table_parameters"]) == (None, None, 0)
    assert half["tokens_per_second"] == 1234.0
    assert full["backbone_parameters"] == half["backbone_parameters"]


@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG\r\n\x1a\n"), (".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_the_picture_is_of_the_kind_its_name_says(
    complete: Path, unfinished: Path, suffix: str, magic: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = complete.parent / "new" / f"losses{suffix}"
    assert main(["report", str(complete), str(unfinished), "--picture", str(picture)]) == 0
    assert picture.read_bytes().startswith(magic)
    assert f"loss curves: {picture}" in capsys.readouterr().out


def test_the_picture_names_each_run_and_its_perplexity(complete: Path, unfinished: Path) -> None:
    from matplotlib import rcParams

    picture = complete.parent / "losses.svg"
    rcParams["svg.fonttype"] = "none"  # text as text
    assert main(["report", str(complete), str(unfinished), "--picture", str(picture)]) == 0
    drawn = picture.read_text()
    assert "tiny-xgram: validation perplexity 90.02" in drawn
    assert ">tiny-vanilla<" in drawn


@pytest.mark.parametrize("name", ["losses.txt", "losses"])
def test_a_picture_of_another_kind_is_refused(complete: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(complete.parent.iterdir())
    assert main(["report", str(complete), "--picture", str(complete.parent / name)]) == 2
    assert f"{name}' must end in .png, .svg, .pdf" in capsys.readouterr().err
    assert sorted(complete.parent.iterdir()) == before


def test_a_picture_that_cannot_be_written_is_one_sentence(complete: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (complete.parent / "file").write_text("")
    assert main(["report", str(complete), "--picture", str(complete.parent / "file" / "p.png")]) == 2
    error = capsys.readouterr().err
    assert "cannot write the picture" in error
    assert error.count("\n") == 1


def test_a_loss_beyond_all_bounds_is_drawn_without_a_perplexity(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "astray", "vanilla", [train(1, 900.0), validation(1, 900.0, None)])
    assert main(["report", str(run), "--picture", str(tmp_path / "p.png")]) == 0
    assert (tmp_path / "p.png").exists()


def test_a_run_that_has_said_nothing_yet_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(make_run(tmp_path / "young", "xgram", []))]) == 0
    assert "tiny-xgram (step 0 of 300)" in capsys.readouterr().out


@pytest.mark.parametrize("what", ["empty folder", "no folder"])
def test_a_folder_without_a_run_is_refused(tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "x"
    if what == "empty folder":
        folder.mkdir()
    assert main(["report", str(folder)]) == 2
    assert f"'{folder}' is not a run folder: it has no metrics.jsonl" in capsys.readouterr().err


def test_a_last_line_cut_off_by_a_kill_does_not_hide_the_run(
    unfinished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (unfinished / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    assert main(["report", str(unfinished), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["step"] == 40


def test_a_run_without_its_config_is_one_sentence(complete: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (complete / "config.yaml").unlink()
    assert main(["report", str(complete)]) == 2
    assert f"cannot read recipe '{complete / 'config.yaml'}'" in capsys.readouterr().err
