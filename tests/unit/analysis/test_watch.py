"""The terminal screen of runs, and the page that is served."""

import http.client
import json
import os
import pty
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from rich.console import Console
from run_folders import Parsed, make_run, records

from xgram_dist.analysis.report import serve
from xgram_dist.analysis.report.serve import PageServer
from xgram_dist.analysis.watch.plot import plot
from xgram_dist.analysis.watch.run_view import RunView, views_of
from xgram_dist.analysis.watch.screen import screen
from xgram_dist.cli.main import main
from xgram_dist.errors import UserError

SLOW = {
    "kind": "stragglers",
    "step": 100,
    "straggler": {"rank": 3, "node": "n7", "seconds": 0.5, "median": 0.25},
    "phases": {"compute": {"rank": 3, "node": "n7", "seconds": 0.5, "median": 0.25}},
    "nodes": {},
}


def shown(*runs: Path, width: int = 120, height: int = 50) -> str:
    views = views_of(list(runs))
    for view in views:
        view.look()
    console = Console(width=width, height=height, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(screen(views, width, height))
    return console.export_text()


def add_start(run: Path, **facts: object) -> None:
    (run / "starts").mkdir()
    start = {"begun": 100.0, "seen": 150.0, "step": 100, "after_step": 0, "nodes": ["n1", "n2"], "ranks": 2}
    seconds = {"training": 40.0, "starting": 10.0, "saving": 0.0, "evaluating": 0.0, "parts": {}, "ended": None}
    (run / "starts" / "0001.json").write_text(json.dumps({**start, **seconds, **facts}))


def test_a_finished_run_is_shown_with_all_its_parts(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "xgram", [*records("xgram"), SLOW])
    add_start(run, ended="complete")
    text = shown(run)
    for part in ("hand-xgram", "step 100 of 100, 100 %", "complete", "4.0000", "10,100", "compute", "300.0"):
        assert part in text, part
    for part in ("n7", "500.0", "250.0", "401.0 MiB", "120.6 KiB", "30.0 MiB", "80.0 %", "2 rank(s) on n1,n2"):
        assert part in text, part


@pytest.mark.parametrize("height", [24, 40])
def test_a_small_terminal_holds_every_part_and_cuts_no_figure(tmp_path: Path, height: int) -> None:
    run = make_run(tmp_path / "run", "xgram", [*records("xgram"), SLOW])
    add_start(run, ended="complete")
    text = shown(run, width=80, height=height)
    assert len(text.splitlines()) <= height
    assert max(map(len, text.splitlines())) <= 80
    # loss, tokens a second, phases, stragglers, memory, exchange, checkpoints, jobs
    for figure in ("4.0000", "10,100", "300.0", "500.0", "401.0 MiB", "120.6 KiB", "30.0 MiB", "80.0 %", "job"):
        assert figure in text, text


def test_a_run_that_gives_no_sign_is_told_from_one_that_trains(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "vanilla", records("vanilla")[:7])
    add_start(run, seen=time.time() - 1)
    assert "running" in shown(run)
    (run / "starts" / "0001.json").unlink()
    (run / "starts").rmdir()
    add_start(run, seen=time.time() - 3600)
    assert "no sign for 1 h 00 m" in shown(run)


def test_several_runs_stand_beside_each_other(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / name, "vanilla", records("vanilla", shift=shift)) for name, shift in (("a", 0), ("b", 1))
    ]
    text = shown(*runs, width=160)
    lines = text.splitlines()
    for run, loss in zip(runs, ("4.0000", "5.0000"), strict=True):
        assert any(line.startswith(f"{run.name} ") and loss in line for line in lines)
    assert text.count("phases: ") == 2


def test_records_are_followed_as_they_come_and_read_anew_after_a_resume(tmp_path: Path) -> None:
    lines = records("vanilla")
    run = make_run(tmp_path / "run", "vanilla", lines[:3])
    view = RunView(run)
    view.look()
    assert view.step == 20
    text = json.dumps(next(one for one in lines if one["step"] == 30)) + "\n"
    with (run / "metrics.jsonl").open("a") as file:
        file.write(text[:40])  # a line half written
        file.flush()
        view.look()
        assert view.step == 20
        file.write(text[40:])
    view.look()
    assert view.step == 30
    assert [step for step, _ in view.loss] == [10, 20, 30]
    (run / "other").write_text("".join(json.dumps(one) + "\n" for one in lines[:1]))
    (run / "other").replace(run / "metrics.jsonl")  # as a resume does
    view.look()
    assert [step for step, _ in view.loss] == [10]


def test_nothing_of_a_runs_files_reaches_the_terminal_as_a_command(tmp_path: Path) -> None:
    evil = "\x1b]0;owned\x07\x1b[2J[red]"
    slow = {**SLOW, "straggler": {**SLOW["straggler"], "node": evil}}  # type: ignore[dict-item]
    run = make_run(tmp_path / "run", "vanilla", [*records("vanilla"), slow])
    add_start(run, ended=evil, nodes=[evil])
    for text in (shown(run), shown(run, run)):
        assert "\x1b" not in text
        assert "\x07" not in text
    assert "[red]" in shown(run, width=300)  # as it stands


def test_a_curve_has_its_first_point_at_the_top_left_and_its_last_at_the_bottom_right() -> None:
    text = str(plot([("", [(n, 10.0 - n) for n in range(11)], "")], 30, 5))
    rows = text.splitlines()
    assert rows[0].startswith("10 ")
    assert rows[4].strip().startswith("0 ")
    dots = [[place for place, sign in enumerate(row) if 0x2800 < ord(sign) < 0x2900] for row in rows[:5]]
    assert min(dots[0]) == 3
    assert max(dots[4]) == 29
    assert [min(row) for row in dots] == sorted(min(row) for row in dots)
    for flat in ([(1.0, 2.0)], [(1.0, 2.0), (2.0, 2.0)], [(5.0, float("nan"))], []):
        plot([("", flat, "")], 30, 5)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(tmp_path)]) == 2
    assert "is not a run folder" in capsys.readouterr().err


def test_a_terminal_is_kept_up_to_date_until_ctrl_c(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "vanilla", records("vanilla")[:2])
    ours, theirs = pty.openpty()
    words = [sys.executable, "-m", "xgram_dist", "watch", str(run), "--every", "0.1"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "50"}
    with subprocess.Popen(
        words, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
    ) as it:
        os.close(theirs)
        seen = ""

        def read_until(words: str) -> None:
            nonlocal seen
            while words not in seen:
                seen += os.read(ours, 65536).decode(errors="replace")

        read_until("step 20 of 100")
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(next(one for one in records("vanilla") if one["step"] == 30)) + "\n")
        read_until("step 30 of 100")
        it.send_signal(2)
        with suppress(OSError):  # its end closes the terminal
            while os.read(ours, 65536):
                pass
        assert it.wait() == 0
    os.close(ours)


# ---- the page


@pytest.fixture
def server(tmp_path: Path):
    folder = tmp_path / "run"
    make_run(folder, "vanilla", records("vanilla"))
    pages: list[str] = []

    def page() -> str:
        from xgram_dist.analysis.report.run_page import run_page
        from xgram_dist.analysis.report.runs import read_run

        pages.append(run_page([read_run(folder)]))
        return pages[-1]

    made = PageServer(page, 0)
    thread = threading.Thread(target=made.serve, daemon=True)
    thread.start()
    yield made, pages, folder
    made.http.shutdown()
    thread.join()


def get(server: PageServer, path: str, **headers: str) -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    return answer.status, dict(answer.getheaders()), answer.read().decode()


def test_the_page_is_served_with_the_token_alone_and_shows_itself_again(server) -> None:
    made, pages, _ = server
    status, headers, text = get(made, f"/?token={made.token}")
    assert status == 200
    assert headers["Refresh"] == str(serve.REFRESH_SECONDS)
    assert headers["Cache-Control"] == "no-store"
    assert "hand-vanilla" in Parsed(text).text
    for path in (
        "/",
        "/?token=",
        f"/?token={made.token[:-1]}",
        f"/?token={made.token}x",
        "/?token=%00",
        "/?token=%c3%a9%ff",
    ):
        status, headers, text = get(made, path)
        assert status == 403, path
        assert made.token not in text + str(headers)
    assert get(made, f"/../run/metrics.jsonl?token={made.token}")[0] == 404
    assert get(made, f"/?token={made.token}", Host="evil.example")[0] == 404
    assert get(made, f"/?token={made.token}", Host=f"localhost:{made.port}")[0] == 200
    assert len(pages) == 1  # not made anew at every request


def test_only_this_machine_is_listened_to(server) -> None:
    assert server[0].http.server_address[0] == "127.0.0.1"


def test_the_page_follows_the_run_and_says_what_it_cannot_read(server, monkeypatch: pytest.MonkeyPatch) -> None:
    made, _, folder = server
    monkeypatch.setattr(serve, "REFRESH_SECONDS", 0)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "skipped", "step": 77}) + "\n")
    assert "step 77" in get(made, f"/?token={made.token}")[2]
    (folder / "metrics.jsonl").unlink()
    status, headers, text = get(made, f"/?token={made.token}")
    assert (status, headers["Content-Type"]) == (503, "text/plain; charset=utf-8")
    assert "is not a run folder" in text


def test_a_port_that_is_taken_is_refused_in_a_sentence(server, capsys: pytest.CaptureFixture[str]) -> None:
    made, _, folder = server
    assert main(["report", str(folder), "--html", "--serve", str(made.port)]) == 2
    assert f"cannot listen on 127.0.0.1:{made.port}" in capsys.readouterr().err
    with pytest.raises(UserError, match="choose another port"):
        PageServer(str, 70_000)
    assert main(["report", str(folder), "--html"]) == 2
    assert "--html needs a file, or --serve" in capsys.readouterr().err
    assert main(["report", str(folder), "--html", str(folder / "x.html"), "--serve"]) == 2
