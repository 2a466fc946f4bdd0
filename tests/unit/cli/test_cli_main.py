"""The commands' outside: help, exit codes, and mistakes as one line."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from xgram_dist import __version__
from xgram_dist.cli import main as cli
from xgram_dist.cli.main import COMMANDS, main

RECIPES = Path(__file__).resolve().parents[3] / "recipes"
HEAVY = {"torch", "pydantic", "yaml", "streaming", "matplotlib", "tensorboard", "wandb", "mlflow"}
TINY = str(RECIPES / "tiny" / "xgram.yaml")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert f"usage: xgram-dist {command}" in text
    assert f"\n  xgram-dist {command} " in text.partition("example:")[2]


def test_the_help_lists_every_command_with_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for command, entry in COMMANDS.items():
        assert f"{command} {entry.help}" in text


def test_no_command_prints_the_help_and_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "usage: xgram-dist" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"xgram-dist {__version__}\n"


@pytest.mark.parametrize(("typed", "meant"), [("trian", "train"), ("plna", "plan"), ("rout", "route")])
def test_an_unknown_command_comes_with_the_nearest(typed: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([typed, "x"]) == 2
    captured = capsys.readouterr()
    assert captured.err == f"xgram-dist: unknown command '{typed}'; did you mean '{meant}'?\n"
    assert captured.out == ""


def test_a_command_like_no_other_comes_with_all_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["xyzzy"]) == 2
    assert f"valid: {', '.join(COMMANDS)}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["plan", "gone.yaml"], ["gone.yaml"]),
        (["plan", TINY, "train.stesp=3"], ["train.stesp", "did you mean 'train.steps'?"]),
        (["plan", TINY, "--json", "model.width=130"], ["model.width = 130", "model.heads = 4"]),
        (["train", TINY, "data.path=gone"], ["data.path = 'gone'", "xgram-dist prepare"]),
        (["report", "gone"], ["'gone' is not a run folder"]),
        (["bench", "step", "--rounds", "1"], ["--rounds 1", "at least 2"]),
        (["bench", "step", "train.steps=3"], ["bench step takes no recipe", "train.steps=3"]),
        (["bench", "planning"], ["needs a recipe"]),
        (["bench", "planning", TINY, "memory.window=1MB"], ["memory.window = 1MB", "memory.window=step"]),
        (["frequencies", "gone", "--out", "f.npz"], ["gone"]),
        (["prepare", "--source", "nothing", "--out", "o"], ["NAME=PATH"]),
        (["route"], ["--frequencies"]),
    ],
)
def test_a_mistake_is_one_line_on_stderr_and_exit_code_two(
    words: list[str],
    parts: list[str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"xgram-dist {words[0]}: ")
    assert captured.err.count("\n") == 1
    for part in parts:
        assert part in captured.err
    assert list(tmp_path.iterdir()) == []  # a mistake leaves nothing behind


@pytest.mark.parametrize("words", [["plan"], ["plan", TINY, "--jsno"], ["bench", "nothing"], ["--wrong"]])
def test_options_that_do_not_exist_are_exit_code_two(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2
    assert "usage: xgram-dist" in capsys.readouterr().err


def test_overrides_may_stand_after_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["train.global_batch=8", "train.micro_batch=4", "model.sequence_length=16"]
    assert main(["plan", TINY, "train.steps=3", "--json", *sizes]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["tokens_per_step"], figures["training_tokens"]) == (8 * 16, 3 * 8 * 16)


def test_a_word_too_many_is_refused_where_there_are_no_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["inspect", "gone", "train.steps=3"])
    assert end.value.code == 2
    assert "unrecognized arguments: train.steps=3" in capsys.readouterr().err


def test_a_bug_is_not_hidden_behind_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    import xgram_dist.estimate.flops

    def broken(config: object) -> None:
        raise AssertionError("a bug")

    monkeypatch.setattr(xgram_dist.estimate.flops, "plan_budget", broken)
    with pytest.raises(AssertionError, match="a bug"):
        main(["plan", TINY])


def test_ctrl_c_is_exit_code_130_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import xgram_dist.estimate.flops

    def interrupted(config: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(xgram_dist.estimate.flops, "plan_budget", interrupted)
    assert main(["plan", TINY]) == 130
    assert capsys.readouterr().err == "xgram-dist plan: stopped by Ctrl-C\n"


def test_a_reader_that_goes_away_leaves_no_traceback() -> None:
    """`xgram-dist plan ... | head -0`"""
    command = [sys.executable, "-u", "-m", "xgram_dist", "plan", TINY]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=RECIPES.parent)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert (process.wait(timeout=60), errors) == (141, b"")


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys\nfrom xgram_dist.cli.main import COMMANDS, main\n"
        "for command in COMMANDS:\n    try:\n        main([command, '--help'])\n    except SystemExit:\n        pass\n"
        f"print(sorted({HEAVY} & set(sys.modules)), len(COMMANDS))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=RECIPES.parent
    )
    assert done.stdout.splitlines()[-1] == f"[] {len(cli.COMMANDS)}"


def test_every_module_lists_exactly_its_commands() -> None:
    for module in {entry.module for entry in COMMANDS.values()}:
        listed = importlib.import_module(f"xgram_dist.cli.{module}").COMMANDS
        assert set(listed) == {name for name, entry in COMMANDS.items() if entry.module == module}


def test_plan_prints_a_table_and_the_same_figures_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(RECIPES / "0.73b" / "xgram-1x-50.yaml")]) == 0
    text = capsys.readouterr().out
    assert main(["plan", str(RECIPES / "0.73b" / "xgram-1x-50.yaml"), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["name"] == "0.73b-xgram-1x-50"
    assert figures["method"] == "xgram"
    assert figures["backbone_parameters"] == 726_325_248
    assert figures["table_parameters"] == 1_166_868_480
    assert "0.73b-xgram-1x-50" in text
    for value in figures.values():
        if isinstance(value, int):
            assert f"{value:,}" in text
    assert f"{figures['relative_flops']:.4f}x" in text


def test_plan_follows_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", TINY, "model.vocabulary=5000", "memory.compression=1", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["rows_per_table"] == 5000
    assert figures["gate_parameters"] == 0
