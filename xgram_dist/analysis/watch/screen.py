"""The screen of `xgram-dist watch`: one run in full, or several beside each other, running or finished."""

import os
import time
from pathlib import Path

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from xgram_dist.analysis.report.chart import Point
from xgram_dist.analysis.watch.plot import plot
from xgram_dist.analysis.watch.run_view import RunView, plain, views_of
from xgram_dist.checkpoint.folder import list_steps
from xgram_dist.console import format_duration
from xgram_dist.train.metrics_file import Record, number
from xgram_dist.train.starts import KINDS, goodput
from xgram_dist.train.stragglers import straggler_rows

TALL = 40
"""Lines of a terminal that hold everything of a run; a lower one gets the chart and a line for each of the rest."""
COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red")


def screen(views: list[RunView], width: int, height: int) -> RenderableType:
    """One run: everything, or in a low terminal the rest in short. Several: a line each, their losses in one chart, and
    the rest of each in short."""
    if len(views) == 1:
        return _whole(views[0], width, height) if height >= TALL else _low(views[0], width, height)
    chart_height = max(6, min(16, height - 2 * len(views) - 12))
    curves = [(view.name, view.loss or view.validation, COLOURS[n % len(COLOURS)]) for n, view in enumerate(views)]
    parts: list[RenderableType] = [_overview(views), _panel("loss", plot(curves, width - 4, chart_height))]
    parts += [_panel(view.name, _in_short(view), COLOURS[n % len(COLOURS)]) for n, view in enumerate(views)]
    return Group(*parts)


def _overview(views: list[RunView]) -> Table:
    table = _table("run", "state", "step", "loss", "validation", "tokens/s", "left", "goodput", "newest checkpoint")
    for n, view in enumerate(views):
        word, colour = view.state()
        train = view.last.get("train", {})
        table.add_row(
            Text(view.name, COLOURS[n % len(COLOURS)]),
            Text(word, colour),
            _of(view.step, view.steps),
            _number(number(train, "cross_entropy"), ".4f"),
            _number(number(view.last.get("validation", {}), "loss"), ".4f"),
            _number(number(train, "tokens_per_second"), ",.0f"),
            _left(view),
            _goodput_share(view),
            _number(max(list_steps(view.folder), default=None), ",d"),
        )
    return table


def _in_short(view: RunView) -> Text:
    lines = [
        f"phases: {', '.join(f'{name} {1000 * value:,.1f} ms' for name, value in _phases(view)[:6]) or '-'}",
        f"stragglers: {_straggler_sentence(view)}",
        f"memory: {_memory_sentence(view)}; exchange: {_exchange_sentence(view)}",
        f"checkpoints: {_saves_sentence(view)}; jobs: {_job_sentence(view)}",
    ]
    return Text("\n".join(lines))


def _title(view: RunView) -> Text:
    word, colour = view.state()
    share = f", {100 * view.step / view.steps:.0f} %" if view.steps else ""
    return Text.assemble((view.name, "bold"), f"  step {_of(view.step, view.steps)}{share}  ", (word, f"bold {colour}"))


def _curves(view: RunView) -> list[tuple[str, list[Point], str]]:
    return [("training", view.loss, COLOURS[0]), ("validation", view.validation, COLOURS[1])]


def _low(view: RunView, width: int, height: int) -> RenderableType:
    train, validation = view.last.get("train", {}), view.last.get("validation", {})
    figures = (
        f"loss {_number(number(train, 'cross_entropy'), '.4f')}, "
        f"validation {_number(number(validation, 'loss'), '.4f')}, "
        f"{_number(number(train, 'tokens_per_second'), ',.0f')} tokens/s, left {_left(view)}, "
        f"goodput {_goodput_share(view)}"
    )
    rest = Group(Text(figures), _in_short(view))
    chart = plot(_curves(view), width - 4, max(4, height - 18))
    return Group(_title(view), _panel("loss", chart), _panel("now", rest))


def _whole(view: RunView, width: int, height: int) -> RenderableType:
    third = max(24, (width - 6) // 3)
    chart_height = max(6, min(16, height - 33))
    charts = Columns(
        [
            _panel("loss", plot(_curves(view), 2 * third - 4, chart_height), width=2 * third),
            _panel("progress", _progress(view), width=width - 2 * third - 1),
        ],
        padding=(0, 0),
    )
    middle = Columns(
        [
            _panel("phases of a step", _phase_table(view, third), width=third),
            _panel("stragglers", _straggler_table(view), width=third),
            _panel("tokens a second", plot([("", view.rates, COLOURS[3])], third - 4, 6), width=width - 2 * third - 1),
        ],
        padding=(0, 0),
    )
    low = Columns(
        [
            _panel("memory of a rank", _memory_table(view), width=third),
            _panel("exchange of a step", _exchange_table(view), width=third),
            _panel("checkpoints", _checkpoint_table(view), width=width - 2 * third - 1),
        ],
        padding=(0, 0),
    )
    return Group(_title(view), charts, middle, low, _panel("starts and jobs", _jobs(view)))


def _progress(view: RunView) -> Table:
    train, validation = view.last.get("train", {}), view.last.get("validation", {})
    rows = [
        ("loss", _number(number(train, "cross_entropy"), ".4f")),
        ("perplexity", _number(number(train, "perplexity"), ",.3f")),
        ("validation loss", _number(number(validation, "loss"), ".4f")),
        ("tokens/s", _number(number(train, "tokens_per_second"), ",.0f")),
        ("seconds a step", _number(number(train, "step_seconds"), ".3f")),
        ("utilisation", _number(number(train, "utilisation"), ".1%")),
        ("learning rate", _number(number(train, "learning_rate"), ".2e")),
        ("gradient norm", _number(number(train, "gradient_norm"), ".3f")),
        ("time left", _left(view)),
        ("skipped, spikes", f"{len(view.skipped)}, {len(view.spikes)}"),
        ("goodput", _goodput_share(view)),
    ]
    table = _table("", "")
    for name, value in rows:
        table.add_row(_name(name), value)
    return table


def _phases(view: RunView) -> list[tuple[str, float]]:
    """Seconds a step in the last interval, longest first."""
    found = [
        (plain(key.removeprefix("seconds_"), 20), float(value))
        for key in view.last.get("train", {})
        if key.startswith("seconds_") and (value := number(view.last["train"], key)) is not None
    ]
    return sorted(found, key=lambda one: -one[1])


def _phase_table(view: RunView, width: int) -> RenderableType:
    phases = _phases(view)
    if not phases:
        return Text("none yet", "dim")
    table = _table("", "ms", "")
    table.columns[2].justify = "left"
    room = max(4, width - 28)
    for name, value in phases[:7]:
        bar = "█" * max(1, round(room * value / phases[0][1])) if phases[0][1] else ""
        table.add_row(_name(name), f"{1000 * value:,.1f}", Text(bar, COLOURS[0]))
    return table


def _straggler_table(view: RunView) -> RenderableType:
    record = view.last.get("stragglers")
    if record is None:
        return Text("one rank, or no report yet", "dim")
    table = _table("phase", "rank", "node", "ms", "median")
    for phase, rank, node, seconds, median, _ in _straggler_rows(record)[:7]:
        table.add_row(*(Text(plain(cell, 16)) for cell in (phase, rank, node, seconds, median)))
    return table


def _straggler_rows(record: Record) -> list[list[str]]:
    try:
        return straggler_rows(record)
    except (KeyError, TypeError, ValueError, AttributeError):  # of a file that no run wrote
        return []


def _straggler_sentence(view: RunView) -> str:
    rows = _straggler_rows(view.last["stragglers"]) if "stragglers" in view.last else []
    if not rows:
        return "-"
    return f"rank {rows[0][1]} on {plain(rows[0][2], 30)}: {rows[0][3]} ms of own work, median {rows[0][4]}"


def _memory_table(view: RunView) -> RenderableType:
    if not view.memory:
        return Text("none yet", "dim")
    shown = max(view.memory.values(), key=lambda one: number(one, "bytes_peak") or 0)
    table = _table(f"rank {int(number(shown, 'rank') or 0)} of {len(view.memory)}", "")
    for key, value in shown.items():
        if key.startswith("bytes_") and (count := number(shown, key)) is not None and (value or key == "bytes_peak"):
            table.add_row(_name(plain(key.removeprefix("bytes_").replace("_", " "), 24)), _bytes(count))
    return table


def _memory_sentence(view: RunView) -> str:
    peaks = [peak for one in view.memory.values() if (peak := number(one, "bytes_peak"))]
    return f"at most {_bytes(max(peaks))} on a rank" if peaks else "-"


EXCHANGE = ("distinct_tokens", "vectors_sent", "vectors_received", "bytes_sent", "bytes_received", "imbalance")


def _exchange(view: RunView) -> list[tuple[str, str]]:
    found = []
    for key in EXCHANGE:
        value = number(view.last.get("train", {}), key)
        if value is not None:
            form = (
                _bytes(value) if key.startswith("bytes") else f"{value:,.2f}" if key == "imbalance" else f"{value:,.0f}"
            )
            found.append((key.replace("_", " "), form))
    return found


def _exchange_table(view: RunView) -> RenderableType:
    table = _table("first rank", "")
    for name, value in _exchange(view):
        table.add_row(_name(name), value)
    return table if table.row_count else Text("no tables, or no step yet", "dim")


def _exchange_sentence(view: RunView) -> str:
    return ", ".join(f"{name} {value}" for name, value in _exchange(view) if name.startswith("bytes")) or "-"


def _checkpoint_table(view: RunView) -> RenderableType:
    if not view.saves:
        return Text("none yet", "dim")
    table = _table("step", "size", "s", "waited")
    for one in view.saves:
        failed = not one.get("written")
        table.add_row(
            Text(f"{one['step']:,}", "red" if failed else ""),
            "failed" if failed else _bytes(number(one, "bytes")),
            _number(number(one, "seconds_saving"), ".1f"),
            _number(number(one, "seconds_blocked"), ".2f"),
        )
    upload = view.last.get("upload")
    if upload is not None:
        table.add_row(f"{upload['step']:,}", "uploaded" if upload.get("uploaded") else "NOT uploaded", "", "")
    return table


def _saves_sentence(view: RunView) -> str:
    if not view.saves:
        return "-"
    last = view.saves[-1]
    return f"step {last['step']:,} {'of ' + _bytes(number(last, 'bytes')) if last.get('written') else 'NOT written'}"


def _jobs(view: RunView) -> Text:
    spent = goodput(view.folder)
    lines = [f"job: {_job_sentence(view)}"]
    if spent is not None:
        times = ", ".join(f"{kind} {format_duration(spent[kind])}" for kind in KINDS if spent[kind] >= 0.5)
        lines.append(f"time: {times}")
        for n, one in list(enumerate(spent["starts"], start=1))[-3:]:
            nodes = plain(",".join(map(str, one["nodes"])), 40)
            ended = plain(str(one["ended"] or "running, or was killed"), 30)
            lines.append(
                f"start {n}: {one['ranks']} rank(s) on {nodes}, after step {one['after_step']:,} to {one['step']:,}, "
                f"{one['to_first_step']:.1f} s to the first step: {ended}"
            )
    return Text("\n".join(lines))


def _job_sentence(view: RunView) -> str:
    job = view.job()
    if job is None:
        return "none" if not (view.folder / "slurm").exists() else "not known to Slurm"
    words = [f"{job.get(key, '')}" for key in ("JobId", "JobState", "NodeList", "RunTime")]
    return plain(" ".join(word for word in words if word and word != "(null)"))


def _goodput_share(view: RunView) -> str:
    spent = goodput(view.folder)
    return "-" if spent is None or spent["goodput"] is None else f"{100 * spent['goodput']:.1f} %"


def _left(view: RunView) -> str:
    left = view.seconds_left()
    return "-" if left is None or view.state()[0] == "complete" else format_duration(left)


def _of(step: int, steps: int | None) -> str:
    return f"{step:,}" if steps is None else f"{step:,} of {steps:,}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _bytes(count: float | None) -> str:
    if count is None:
        return "-"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} TiB"


def _table(*header: str) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), show_header=any(header), header_style="dim", expand=False)
    for n, name in enumerate(header):
        table.add_column(name, justify="left" if n == 0 else "right", no_wrap=n > 0)
    return table


def _name(text: str) -> Text:
    """Of a row: where the terminal is narrow it is cut, and the figures behind it are not."""
    return Text(text, no_wrap=True, overflow="ellipsis")


def _panel(title: str, body: RenderableType, colour: str = "", width: int | None = None) -> Panel:
    return Panel(body, title=Text(title, colour or "bold"), title_align="left", width=width, border_style="dim")


def watch(folders: list[Path], every: float, once: bool) -> None:
    """Show the runs until Ctrl-C; `once`, or where the output is no terminal: print them and return."""
    views = views_of(folders)
    console = Console(width=None if os.isatty(1) else 120, height=None if os.isatty(1) else 50)

    def look() -> RenderableType:
        for view in views:
            view.look()
        return screen(views, console.width, console.height)

    if once or not console.is_terminal:
        console.print(look())
        return
    with Live(look(), console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            time.sleep(every)
            live.update(look(), refresh=True)
