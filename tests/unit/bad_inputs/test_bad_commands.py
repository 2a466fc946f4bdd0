"""Options and files of commands that cannot be meant: one sentence, exit code not 0, nothing written."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from refusals import LONGEST

from xgram_dist.cli.main import main

RECIPE = str(Path(__file__).resolve().parents[3] / "recipes/tiny/xgram.yaml")
BATCH = "train.global_batch=8000000000"


def refused(capfd: pytest.CaptureFixture[str], words: list[str]) -> str:
    code = main(words)
    output, errors = capfd.readouterr()
    assert code == 2
    assert output == ""
    assert errors.count("\n") == 1, errors
    assert len(errors) <= LONGEST
    return errors


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["plan", RECIPE, BATCH, "--ranks", "1000000000"], "plan: --ranks 1000000000 is not from 1 to 16384"),
        (["plan", RECIPE, "--ranks", "0"], "plan: --ranks 0 is not from 1 to 16384"),
        (["plan", RECIPE, "--ranks", "9" * 400], "is not from 1 to 16384"),
        (["plan", RECIPE, "--bandwidth", "nan"], "--bandwidth nan is not a number of GB/s above 0"),
        (["plan", RECIPE, "--memory-per-rank", "9" * 400 + "GB"], "is not a size such as 80GB"),
        (["plan", RECIPE, "--memory-per-rank", "80GB\n"], "is not a size such as 80GB"),
        (["train", RECIPE, "--ranks", "1000000000"], "--ranks 1000000000: at most 1024 ranks start on one machine"),
        (["train", RECIPE, "--ranks", "-1"], "--ranks -1 is not at least 1"),
        (["generate", "x", "--prompt", "a", "--temperature", "nan"], "--temperature nan from 0 to 1000"),
        (["generate", "x", "--prompt", "a", "--temperature", "inf"], "--temperature inf from 0 to 1000"),
        (["generate", "x", "--prompt", "a", "--top-p", "nan"], "--top-p nan above 0 and at most 1"),
        (["generate", "x", "--prompt", "a", "--seed", "-1"], "--seed -1 is not from 0 to 2^63 - 1"),
        (["generate", "x", "--prompt", "a", "--seed", "9" * 400], "is not from 0 to 2^63 - 1"),
        (["generate", "x", "--prompt", "ab\udcff"], "--prompt: character 3 is not UTF-8"),
        (["generate", "x", "--prompt", "a", "--max-tokens", "0"], "--max-tokens 0 must be at least 1"),
        (["eval", "x", "--tasks", ""], "--tasks '' names no task"),
        (["eval", "x", "--tasks", ","], "--tasks ',' names no task"),
        (["eval", "x", "--tasks", "sciq,"], "--tasks 'sciq,' names no task"),
        (["eval"], "give a checkpoint to evaluate"),
        (["plan\x1b[2J\n"], r"unknown command 'plan\x1b[2J\n'; valid: recipes"),
    ],
    ids=lambda value: "-".join(value)[-40:] if isinstance(value, list) else "",
)
def test_of_options(words: list[str], sentence: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert sentence in refused(capfd, words)


def evaluation(folder: Path, results: object) -> Path:
    file = folder / "eval" / "step-1.json"
    file.parent.mkdir(parents=True)
    ours = {"name": "run", "backbone_parameters": 1, "table_parameters": 0}
    file.write_text(json.dumps({"results": results, "xgram_dist": ours}))
    return file


def test_comparing_with_a_run_that_was_not_evaluated(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    evaluation(tmp_path / "good", {"sciq": {"acc,none": 0.5}})
    assert main(["eval", "--compare", str(tmp_path / "good")]) == 0
    capfd.readouterr()
    (tmp_path / "bare").mkdir()
    evaluation(tmp_path / "empty", {})
    evaluation(tmp_path / "odd", ["sciq"])
    for name, sentence in (("bare", "has no evaluation"), ("empty", "holds no score"), ("odd", "is not a file of")):
        code = main(["eval", "--compare", str(tmp_path / "good"), str(tmp_path / name)])
        output, errors = capfd.readouterr()
        assert (code, output) == (2, "")
        assert sentence in errors


@pytest.mark.parametrize(
    "jobs",
    [
        {"train": "-uroot"},
        {"train": "12 --user=root"},
        {"train": "12\n"},
        {"train": "12", "eval": "--state=RUNNING"},
        {"train": ""},
        {"train": "1_2_3"},
        {"train": "\u0661\u0662"},
        {"train": 12},
        {"eval": "12"},
        ["12"],
    ],
    ids=repr,
)
def test_job_ids_that_are_none_never_reach_slurm(
    jobs: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    called = tmp_path / "called"
    for name in ("scancel", "scontrol", "squeue"):
        command = tmp_path / "bin" / name
        command.parent.mkdir(exist_ok=True)
        command.write_text(f"#!/bin/sh\necho {name} >> {called}\n")
        command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm" / "jobs.json").write_text(json.dumps(jobs))
    assert "jobs.json' is damaged" in refused(capfd, ["cancel", str(tmp_path)])
    assert not called.exists()


def command(*words: str, **options: object) -> "subprocess.CompletedProcess[str]":
    start = [sys.executable, "-m", "xgram_dist", *words]
    return subprocess.run(start, stderr=subprocess.PIPE, text=True, timeout=120, **options)  # type: ignore[call-overload, no-any-return]


def test_output_to_a_full_device() -> None:
    with open("/dev/full", "w") as full:
        planned = command("plan", "--table", RECIPE, stdout=full)
    assert (planned.returncode, planned.stderr) == (1, "xgram-dist plan: No space left on device\n")


def test_errors_of_the_machine_are_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    import errno

    from xgram_dist.cli import main as entry
    from xgram_dist.cli.command import Command

    for error, code, sentence in (
        (MemoryError(), 1, "xgram-dist plan: out of memory (no more to be had)\n"),
        (RuntimeError("DefaultCPUAllocator: not enough memory\nframe #0"), 1, "out of memory (DefaultCPUAllocator"),
        (OSError(errno.ENOSPC, "No space left on device", "/x"), 1, "xgram-dist plan: '/x': No space left on device\n"),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), 1, "'/x': Permission denied"),
        (KeyboardInterrupt(), 130, "xgram-dist plan: stopped by Ctrl-C\n"),
        (RuntimeError("a bug"), 1, "Traceback"),
    ):

        def fail(_: object, error: BaseException = error) -> int:
            raise error

        monkeypatch.setattr(entry, "load_command", lambda _, run=fail: Command("", lambda parser: None, run))
        assert main(["plan"]) == code
        errors = capfd.readouterr().err
        assert sentence in errors
        assert ("Traceback" in errors) == (sentence == "Traceback")
