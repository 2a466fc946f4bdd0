"""Run folders with content that no run wrote: a resume goes on, and the commands that read them still answer."""

import argparse
import json
import os
import re
import time
from pathlib import Path

import pytest
import torch
from train_helpers import read_metrics, small_config

from xgram_dist.checkpoint import lease
from xgram_dist.cli.main import main
from xgram_dist.cluster.slurm.attempts import read_attempts
from xgram_dist.cluster.slurm.bad_nodes import excluded_nodes, note_node
from xgram_dist.cluster.slurm.ranks import Ranks
from xgram_dist.cluster.slurm.status import _last_records
from xgram_dist.cluster.slurm.successor import read_jobs, write_jobs
from xgram_dist.config import load_config
from xgram_dist.errors import UserError
from xgram_dist.train.run_dir import open_run_folder
from xgram_dist.train.trainer import Trainer

BAD_LINES = {
    "not UTF-8": b'\xff\xfe{"kind": "train"}',
    "zeros of a power cut": b"\0" * 4096,
    "text": b"not json",
    "half a line": b'{"kind": "train", "st',
    "empty": b"",
    "a list": b"[1, 2]",
    "a number": b"3",
    "null": b"null",
    "no kind": b'{"step": 3}',
    "kind is a list": b'{"kind": ["train"], "step": 3}',
    "no step": b'{"kind": "end"}',
    "step is text": b'{"kind": "end", "step": "three"}',
    "step is a float": b'{"kind": "end", "step": 1.5}',
    "step is true": b'{"kind": "end", "step": true}',
    "step below zero": b'{"kind": "end", "step": -1}',
    "step of 400 digits": b'{"kind": "end", "step": ' + b"9" * 400 + b"}",
    "step of 5,000 digits": b'{"kind": "end", "step": ' + b"9" * 5000 + b"}",
    "number of 400 digits": b'{"kind": "x", "step": 1, "loss": ' + b"9" * 400 + b"}",
    "number out of range": b'{"kind": "x", "step": 1, "loss": 1e999}',
    "NaN": b'{"kind": "x", "step": 1, "loss": NaN}',
    "loss is text": b'{"kind": "validation", "step": 2, "loss": "low", "perplexity": 1.0}',
    "rate is a list": b'{"kind": "train", "step": 2, "cross_entropy": 1.0, "tokens_per_second": [1]}',
    "no rate": b'{"kind": "train", "step": 2, "cross_entropy": 1.0}',
    "nested": b'{"kind": "x", "step": 1, "a": ' + b"[" * 100 + b"]" * 100 + b"}",
    "nested beyond the parser": b"[" * 200_000,
    "half a character": b'{"kind": "\\ud800", "step": 1}',
    "a line of 2 MB": b'{"kind": "' + b"x" * 2_000_000 + b'", "step": 1}',
}


@pytest.mark.parametrize("line", BAD_LINES.values(), ids=BAD_LINES)
def test_a_line_that_is_no_record_is_set_aside_by_a_resume_and_left_out_by_report(
    run: Path, line: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = run / "metrics.jsonl"
    before = metrics.read_bytes().splitlines(keepends=True)
    metrics.write_bytes(b"".join([*before[:2], line + b"\n", *before[2:]]))
    capsys.readouterr()
    assert main(["report", str(run), "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)[0]["step"] == 4
    assert err == f"'{metrics}': 1 line(s) are no metrics records and are left out\n"
    assert main(["report", str(run), "--html", str(run / "page.html")]) == 0
    (sentence,) = open_run_folder(run, load_config(run / "config.yaml"), 1, resumed=2)
    (aside,) = run.glob("metrics.jsonl.unreadable-*")
    assert sentence == (
        f"{len(line) + 1:,} bytes of '{metrics}' are no metrics records; they are now in '{aside.name}'"
    )
    assert aside.read_bytes() == line + b"\n"
    kept = [one for one in before if json.loads(one)["step"] <= 2 and json.loads(one)["kind"] != "end"]
    assert metrics.read_bytes() == b"".join(kept)


ODD_VALUES = {
    "text for figures": {"kind": "memory", "step": 1, "rank": "zero", "bytes_peak": "much", "bytes_backbone": [1]},
    "bytes is an object": {"kind": "checkpoint", "step": 2, "bytes": {}, "seconds_saving": "x", "seconds_blocked": []},
    "seconds is text": {"kind": "skipped", "step": 2, "seconds": "x"},
    "rate of the end is text": {"kind": "end", "step": 4, "tokens_per_second": "fast", "rows": "x", "rows_hit": [1]},
    "figures are text": {"kind": "diagnose", "step": 2, "cosine_attention_1": "x", "views_raw": {}, "injected_v": []},
    "scores are text": {"kind": "eval", "step": 2, "sciq": "good", "piqa": {"a": 1}},
    "a huge step": {"kind": "train", "step": 10**12, "cross_entropy": 1e299, "tokens_per_second": 1e299},
}


@pytest.mark.parametrize("record", ODD_VALUES.values(), ids=ODD_VALUES)
def test_odd_values_in_a_record_leave_the_report_and_the_picture_whole(
    run: Path, record: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")
    assert main(["report", str(run), "--html", str(run / "page.html")]) == 0
    assert main(["report", str(run), "--picture", str(run / "x.png")]) == 0
    assert (run / "page.html").stat().st_size > 1000


def test_a_resume_with_every_bad_line_trains_on_to_the_same_weights(
    run: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "metrics.jsonl").write_bytes(b"\n".join(BAD_LINES.values()) + (run / "metrics.jsonl").read_bytes() + b"{")
    (run / "tensorboard" / "events.out.tfevents.1").write_bytes(b"\xff" * 100)
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    config = small_config(data, train={"steps": 5}, checkpoint={"every": 2}, memory={"optimizer": "catch_up"})
    assert Trainer(config, run, fresh=False).run() == 0
    torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
    assert [record["step"] for record in read_metrics(run, "train")][-1] == 5
    out, err = capsys.readouterr()
    assert "resuming after step 4" in out
    assert "are no metrics records; they are now in 'metrics.jsonl.unreadable-" in err


def test_what_is_no_file_is_set_aside_unread_and_untouched(run: Path) -> None:
    config = load_config(run / "config.yaml")
    outside = run.parent / "outside"
    outside.write_text("mine")
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").symlink_to(outside)
    (run / "config.yaml").unlink()
    (run / "config.yaml").symlink_to(outside)
    (run / "tensorboard").rename(run / "old")
    (run / "tensorboard").write_text("no folder")
    sentences = open_run_folder(run, config, 1, resumed=2)
    assert sentences == [
        f"'{run / 'metrics.jsonl'}' is a link, not a regular file; put the file itself in its place; it is now "
        f"'{run / 'metrics.jsonl.unreadable-1'}', and the run begins a new one",
        f"'{run / 'tensorboard'}' is not a folder; it is now 'tensorboard.unreadable-1'",
        f"'{run / 'config.yaml'}' is not a regular file; it is now 'config.yaml.unreadable-1'",
    ]
    assert outside.read_text() == "mine"


@pytest.mark.parametrize("kind", ["fifo", "folder"])
def test_metrics_that_are_no_file_are_one_sentence(run: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "metrics.jsonl").unlink()
    (os.mkfifo if kind == "fifo" else os.mkdir)(run / "metrics.jsonl")
    assert main(["report", str(run)]) == 2
    what = "a named pipe" if kind == "fifo" else "a folder"
    assert f"'{run / 'metrics.jsonl'}' is {what}, not a regular file" in capsys.readouterr().err
    assert _last_records(run / "metrics.jsonl") == {}


@pytest.mark.parametrize("line", BAD_LINES.values(), ids=BAD_LINES)
def test_status_reads_past_bad_lines(tmp_path: Path, line: bytes) -> None:
    good = b'{"kind": "train", "step": 7, "cross_entropy": 1.0, "tokens_per_second": 2.0}\n'
    (tmp_path / "m").write_bytes(line + b"\n" + good + line[:1000])
    last = _last_records(tmp_path / "m")
    train, end = last.get("train"), last.get("end")
    assert (train or {})["step"] == 7
    assert end is None


def test_status_and_watch_answer_where_figures_are_missing(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        for kind in ("train", "validation", "checkpoint", "memory", "upload", "eval", "skipped", "spike", "end"):
            figures = {"cross_entropy": None, "tokens_per_second": None, "loss": None, "perplexity": None}
            file.write(json.dumps({"kind": kind, "step": 4, **figures}) + "\n")
    assert main(["status", str(run)]) == 0
    assert re.search(r"tokens/s +-\n", capsys.readouterr().out)
    assert main(["watch", str(run), "--once"]) == 0


@pytest.mark.parametrize("kind", ["fifo", "link"])
def test_watch_does_not_wait_for_metrics_that_are_no_file(
    run: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = run / "metrics.jsonl"
    metrics.unlink()
    os.mkfifo(metrics) if kind == "fifo" else metrics.symlink_to("/dev/zero")
    assert main(["watch", str(run), "--once"]) == 2
    assert f"'{metrics}' is a {'named pipe' if kind == 'fifo' else 'link'}, not a regular" in capsys.readouterr().err


def test_what_slurms_files_of_a_run_say_reaches_no_terminal_as_a_command(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "slurm").mkdir()
    attempt = {"job": "7", "restart": 0, "nodes": ["n\x1b[2J"], "step": 0, "started": 1.0, "ended": 2.0}
    attempt |= {"outcome": "crashed", "reason": "\x1b]0;title\x07\nstart 2"}
    (run / "slurm" / "attempts.json").write_text(json.dumps([attempt]))
    event = {"node": "n1", "time": time.time(), "kind": "slow", "why": "\x1b[2J\nlog: x"}
    (run / "slurm" / "nodes.jsonl").write_text(json.dumps(event) + "\n")
    assert main(["status", str(run)]) == 0
    out = capsys.readouterr().out
    assert all(line.isprintable() for line in out.splitlines())
    assert r"n1, slow: \x1b[2J\nlog: x" in out
    assert r"start 1 on n\x1b[2J from the beginning: \x1b]0;title\x07\nstart 2" in out


@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_a_jobs_files_are_not_written_through_what_stands_in_their_place(tmp_path: Path, kind: str) -> None:
    outside = tmp_path / "outside"
    outside.write_text("mine")
    (tmp_path / "slurm").mkdir()
    for name in ("nodes.jsonl", "stop", "jobs.json"):
        path = tmp_path / "slurm" / name
        os.mkfifo(path) if kind == "fifo" else path.symlink_to(outside)
    note_node(tmp_path, "n1", "lost", "why")
    Ranks(argparse.Namespace(folder=str(tmp_path)), ["n1"], 7, "7:0.0.0").ask_to_stop()
    write_jobs(tmp_path, {"train": "7"})
    assert outside.read_text() == "mine"
    assert excluded_nodes(tmp_path, time.time()) == {}
    assert read_jobs(tmp_path) == {"train": "7"}


LEASES = {
    "a folder": lambda path: path.mkdir(),
    "not JSON": lambda path: path.write_bytes(b"\xff"),
    "a list": lambda path: path.write_text("[]"),
    "nested": lambda path: path.write_text("[" * 100_000),
    "text for the process": lambda path: path.write_text('{"pid": "../../self"}'),
    "a fifo": lambda path: os.mkfifo(path),
    "a link": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("make", LEASES.values(), ids=LEASES)
def test_a_lease_that_nobody_wrote_is_refused_while_new_and_taken_over_when_old(tmp_path: Path, make) -> None:
    (tmp_path / "lease").mkdir()
    path = tmp_path / "lease" / "00000007.json"
    make(path)
    if not path.is_symlink():
        with pytest.raises(UserError, match="is held by a run that is just starting"):
            lease.check_free(tmp_path)
    os.utime(path, (time.time() - 1000,) * 2, follow_symlinks=False)
    with lease.hold(tmp_path) as held:
        assert held.number == 8
    assert not path.exists()


@pytest.mark.parametrize("name", ["²²²²²²²².json", "٠٠٠٠٠٠٠٧.json", "7.json", "9" * 240 + ".json", "00000007.json\n"])
def test_a_file_beside_the_lease_with_an_odd_number_is_no_lease(tmp_path: Path, name: str) -> None:
    (tmp_path / "lease").mkdir()
    (tmp_path / "lease" / name).write_text("{}")
    lease.check_free(tmp_path)
    with lease.hold(tmp_path) as held:
        assert held.number == 1


ATTEMPTS = [
    b"\xff",
    b"[" * 100_000,
    b'[{"job": 1}]',
    b"[[]]",
    b"3",
    b'[{"job": "7", "restart": 0, "nodes": 3, "step": 0, "started": 1}]',
    b'[{"job": "7", "restart": 0, "nodes": [], "step": "x", "started": 1}]',
    b'[{"job": "7", "restart": 0, "nodes": [], "step": 0, "started": 1e300}]',
]


@pytest.mark.parametrize("content", ATTEMPTS, ids=range(len(ATTEMPTS)))
def test_damaged_attempts_count_as_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm" / "attempts.json").write_bytes(content)
    assert read_attempts(tmp_path) == []
