"""The HTML page of one run, or of several."""

import time
from typing import Any

from xgram_dist.analysis.diagnose.figures import newest_figures, read_figures
from xgram_dist.analysis.report import runs as figures
from xgram_dist.analysis.report.chart import Series, chart
from xgram_dist.analysis.report.diagnostics import diagnostics
from xgram_dist.analysis.report.html import (
    MISSING,
    Child,
    Markup,
    Section,
    bar,
    format_or_missing,
    no_decimals,
    note,
    page,
    parameters,
    percent,
    seconds,
    size,
    table,
    tag,
    thousands,
    three_decimals,
)
from xgram_dist.analysis.report.runs import Run, summary
from xgram_dist.checkpoint.folder import list_steps
from xgram_dist.cluster.slurm.attempts import read_attempts
from xgram_dist.config import dump_config
from xgram_dist.errors import UserError
from xgram_dist.train.metrics_file import number
from xgram_dist.train.starts import KINDS, PARTS, goodput
from xgram_dist.train.stragglers import STRAGGLER_HEADER, straggler_rows


def run_page(runs: list[Run]) -> str:
    """One run: all its sections. Several: a summary and their curves together, then all sections of each."""
    if len(runs) == 1:
        return page(runs[0].config.name, _state(runs[0]), sections(runs[0]))
    names = unique_names(runs)
    first = [
        Section("summary", "Summary", _summary(runs, names)),
        Section("curves", "Loss", tag("div", _losses(runs, names), class_="charts")),
    ]
    each = [
        Section(f"run-{number}", name, [_subsection(one) for one in sections(run)])
        for number, (name, run) in enumerate(zip(names, runs, strict=True))
    ]
    return page(f"{len(runs)} runs", ", ".join(names), [*first, *each])


def sections(run: Run) -> list[Section]:
    return [
        Section("summary", "Summary", _summary([run], [run.config.name])),
        Section("curves", "Curves", tag("div", [*_losses([run], [run.config.name]), *_others(run)], class_="charts")),
        Section("throughput", "Throughput", _throughput(run)),
        Section("phases", "Phases of a step", _phases(run)),
        Section("stragglers", "Stragglers", _stragglers(run)),
        Section("memory", "Memory", _memory(run)),
        Section("exchange", "Exchange of table vectors", _exchange(run)),
        Section("checkpoints", "Checkpoints", _checkpoints(run)),
        Section("goodput", "Goodput", _goodput(run)),
        Section("restarts", "Restarts and skipped steps", _restarts(run)),
        Section("evaluation", "Evaluation", _evaluation(run)),
        Section(
            "diagnostics", "Diagnostics", [*diagnostics({run.config.name: newest_figures_of(run)}), *_in_training(run)]
        ),
        Section("recipe", "Recipe", tag("details", tag("summary", "config.yaml"), tag("pre", dump_config(run.config)))),
    ]


def unique_names(runs: list[Run]) -> list[str]:
    names = [run.config.name for run in runs]
    return [f"{name} ({run.folder})" if names.count(name) > 1 else name for name, run in zip(names, runs, strict=True)]


def newest_figures_of(run: Run) -> list[dict[str, Any]]:
    """The newest of `diagnose`; an empty list if there are none that can be read."""
    file = newest_figures(run.folder)
    try:
        return [] if file is None else [read_figures(file)]
    except UserError:
        return []


def _subsection(one: Section) -> list[Child]:
    return [tag("h3", one.title), one.body]


def _state(run: Run) -> str:
    totals = summary(run)
    state = "complete" if totals["complete"] else f"step {totals['step']:,} of {totals['steps']:,}"
    return f"{run.folder} · {state} · written {time.strftime('%Y-%m-%d %H:%M')}"


def _summary(runs: list[Run], names: list[str]) -> Markup:
    rows: list[list[Child]] = []
    for run, name in zip(runs, names, strict=True):
        one = summary(run)
        rows.append(
            [
                name,
                run.config.memory.method,
                f"{one['step']:,} of {one['steps']:,}",
                format_or_missing(one["step"] * run.tokens_per_step or None, thousands),
                format_or_missing(one["validation_perplexity"], three_decimals),
                format_or_missing(one["tokens_per_second"], no_decimals),
                parameters(one["backbone_parameters"]),
                parameters(one["table_parameters"]) if one["table_parameters"] else "none",
                format_or_missing(figures.peak_memory(run), size),
                f"{one['rows_hit']:,} of {one['rows']:,}" if one["rows"] else _no_rows(run),
            ]
        )
    header: list[Child] = ["run", "memory method", "steps", "tokens", "validation perplexity", "tokens/s", "backbone"]
    return table([*header, "tables", "peak memory of a rank", "table rows hit"], rows, left=(0, 1))


def _no_rows(run: Run) -> Child:
    return "none" if run.end is not None and not run.end.get("rows", 1) else MISSING


def _losses(runs: list[Run], names: list[str]) -> list[Markup]:
    series = []
    for colour, (run, name) in enumerate(zip(runs, names, strict=True)):
        series.append(Series(f"{name}, training", figures.curve(run, "train", "cross_entropy"), colour, "thin"))
        series.append(Series(f"{name}, validation", figures.curve(run, "validation", "loss"), colour, "dots"))
    return [chart("Loss", "million tokens", "cross-entropy (nats a token)", series)]


def _others(run: Run) -> list[Markup]:
    rate = Series("learning rate", figures.curve(run, "train", "learning_rate"))
    norm = Series("gradient norm", figures.curve(run, "train", "gradient_norm"), 1)
    return [
        chart("Learning rate of the backbone", "million tokens", "learning rate", [rate], from_zero=True),
        chart("Gradient norm before clipping", "million tokens", "norm", [norm], from_zero=True),
    ]


def _throughput(run: Run) -> list[Child]:
    rate = Series("tokens/s", figures.curve(run, "train", "tokens_per_second", by_tokens=False))
    rows: list[list[Child]] = [
        ["tokens a second, whole run", format_or_missing(figures.tokens_per_second(run), no_decimals)],
        ["tokens a second and rank", format_or_missing(figures.average(run, "tokens_per_second_rank"), no_decimals)],
        ["seconds a step", format_or_missing(figures.average(run, "step_seconds"), seconds)],
        ["model TFLOP/s a rank", format_or_missing(figures.average(run, "model_tflops"), three_decimals)],
        ["utilisation of the device", format_or_missing(figures.average(run, "utilisation"), percent)],
    ]
    drawn = chart("Tokens a second", "step", "tokens/s", [rate], from_zero=True)
    return [tag("div", table(["", "mean over steps"], rows), drawn, class_="charts")]


def _phases(run: Run) -> list[Child]:
    phases = figures.phases(run)
    if not phases:
        return [note("No phases in the run's files.")]
    step_seconds = figures.average(run, "step_seconds")
    longest = max(phases.values())
    rows: list[list[Child]] = [
        [
            name,
            bar(value / (step_seconds or longest)),
            f"{1000 * value:,.2f}",
            percent(value / step_seconds) if step_seconds else MISSING,
        ]
        for name, value in phases.items()
    ]
    sentence = "Mean over steps, of the first rank. Planning overlaps the others, so the sum may exceed a step."
    return [note(sentence), table(["phase", "", "ms a step", "of a step"], rows, left=(0, 1))]


def _memory(run: Run) -> list[Child]:
    records = figures.memory(run)
    if not records:
        return [note("No memory records in the run's files.")]
    parts = [part for part in figures.MEMORY_PARTS if any(f"bytes_{part}" in record for record in records)]
    rows: list[list[Child]] = [
        [
            number(record, "rank") or 0,
            *(format_or_missing(number(record, f"bytes_{part}"), size) for part in parts),
            format_or_missing(number(record, "bytes_peak"), size),
        ]
        for record in records
    ]
    header = ["rank", *(part.replace("_", " ") for part in parts), "peak"]
    return [
        note("After the first step. The peak also includes activations and temporary buffers."),
        table([*header], rows),
    ]


def _exchange(run: Run) -> list[Child]:
    means = figures.exchange(run)
    if not means:
        return [note("No exchange in the run's files: it has no tables.")]
    forms = {"imbalance": three_decimals}
    rows: list[list[Child]] = []
    for key, name in figures.EXCHANGE.items():
        form = size if key.startswith("bytes") else forms.get(key, no_decimals)
        rows.append([name, format_or_missing(means.get(key), form)])
    sent, bound = means.get("bytes_sent"), means.get("bytes_bound")
    if sent and bound:
        rows.append(["bytes sent relative to the bound", f"{sent / bound:.2f}"])
    return [note("Of the first rank, to and from the others."), table(["", "mean a step"], rows)]


def _checkpoints(run: Run) -> list[Child]:
    records = run.records_of("checkpoint")
    present = set(list_steps(run.folder))
    if not records and not present:
        return [note("No checkpoints in the run's files.")]
    rows: list[list[Child]] = [
        [
            f"{record['step']:,}",
            "yes" if record.get("written") else "failed",
            format_or_missing(number(record, "bytes"), size),
            format_or_missing(number(record, "seconds_saving"), seconds),
            format_or_missing(number(record, "seconds_blocked"), seconds),
            "yes" if record["step"] in present else "no longer",
        ]
        for record in records
    ]
    recorded = {record["step"] for record in records}
    rows += [[f"{step:,}", "yes", *[MISSING] * 3, "yes"] for step in sorted(present - recorded)]
    return [
        table(["step", "written", "bytes of a rank", "writing", "training waited", "in the folder"], rows, left=(1,))
    ]


def _stragglers(run: Run) -> list[Child]:
    """The last report, and the straggler of each over the run."""
    records = run.records_of("stragglers")
    if not records:
        return [note("No straggler report: the run has one rank, or was made before there was one.")]
    rows: list[list[Child]] = [[*row] for row in straggler_rows(records[-1])]
    series = [
        Series(f"slowest rank {kind}", [(one["step"], 1000 * one["straggler"][key]) for one in records], colour)
        for colour, (kind, key) in enumerate((("", "seconds"), ("(median of the ranks)", "median")))
    ]
    return [
        note(
            f"At step {records[-1]['step']:,}. Own work is reading data and computing; the slowest rank keeps the rest."
        ),
        table([*STRAGGLER_HEADER], rows, left=(0, 2, 5)),
        tag("div", chart("Own work of a rank", "step", "ms a step", series, from_zero=True), class_="charts"),
    ]


def _goodput(run: Run) -> list[Child]:
    spent = goodput(run.folder)
    if spent is None:
        return [note("No record of the run's starts.")]
    rows: list[list[Child]] = [
        [kind, bar(spent[kind] / (spent["total"] or 1)), seconds(spent[kind]), percent(spent[kind] / spent["total"])]
        for kind in KINDS
        if spent["total"]
    ]
    starts: list[list[Child]] = [
        [
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one["begun"])),
            f"{one['after_step']:,}",
            f"{one['step']:,}",
            ", ".join(one["nodes"]),
            one["ended"] or "",
            *(format_or_missing(one["parts"].get(part), seconds) for part in ("queue", *PARTS)),
        ]
        for one in spent["starts"]
    ]
    header: list[Child] = ["started", "after step", "to step", "nodes", "end", "queue", *PARTS.values()]
    return [
        note(f"Goodput {percent(spent['goodput'] or 0.0)}: time of training that was kept, of the time of all starts."),
        table(["", "", "time", "share"], rows, left=(0, 1)),
        table(header, starts, left=(0, 3, 4), caption="Time to the first step of each start, by part."),
    ]


def _restarts(run: Run) -> list[Child]:
    attempts = read_attempts(run.folder)
    parts: list[Child] = []
    if attempts:
        rows: list[list[Child]] = [
            [
                time.strftime("%Y-%m-%d %H:%M", time.localtime(one.started)),
                f"{one.step:,}",
                ", ".join(one.nodes),
                one.outcome or ("running or cut off" if one is attempts[-1] else "cut off"),
                one.explain() if one.outcome or one is not attempts[-1] else "",
                format_or_missing(None if one.ended is None else one.ended - one.started, seconds),
            ]
            for one in attempts
        ]
        parts.append(table(["started", "after step", "nodes", "end", "reason", "lasted"], rows, left=(0, 2, 3, 4)))
    resumed = figures.restarts(run)
    if resumed:
        parts.append(note(f"Resumed after step {', '.join(f'{step:,}' for step in resumed)}."))
    elif not attempts:
        parts.append(note("One start."))
    skipped = run.records_of("skipped")
    if skipped:
        steps = ", ".join(f"{record['step']:,}" for record in skipped[:20])
        more = f" and {len(skipped) - 20} more" if len(skipped) > 20 else ""
        parts.append(note(f"Skipped because the loss or gradient was not finite: step {steps}{more}."))
    else:
        parts.append(note("No step was skipped."))
    return [*parts, *_not_finite(run), *_spikes(run)]


def _not_finite(run: Run) -> list[Child]:
    """Findings of train.check_finite = layers."""
    rows: list[list[Child]] = [
        [
            f"{one['step']:,}",
            one.get("module"),
            one.get("direction"),
            one.get("micro_batch"),
            one.get("rank"),
            f"{one.get('host')} {one.get('device')}",
            one.get("cause"),
        ]
        for one in run.records_of("not_finite")
    ]
    header: list[Child] = ["step", "first module not finite", "pass", "micro-batch", "rank", "device", "cause"]
    return [table(header, rows, left=(1, 2, 5, 6))] if rows else []


def _spikes(run: Run) -> list[Child]:
    """Steps whose documents were recorded; the newest 20."""
    records = [one for one in (*run.records_of("skipped"), *run.records_of("spike")) if one.get("documents")]
    rows: list[list[Child]] = [
        [
            f"{one['step']:,}",
            "skipped" if one["kind"] == "skipped" else "spike",
            format_or_missing(number(one, "loss"), three_decimals),
            format_or_missing(number(one, "gradient_norm"), three_decimals),
            one["documents"],
        ]
        for one in sorted(records, key=lambda one: one["step"])[-20:]
    ]
    return [table(["step", "", "loss", "gradient norm", "documents of the batch"], rows, left=(1, 4))] if rows else []


def _evaluation(run: Run) -> list[Child]:
    columns = [(f"in training, step {r['step']:,}", _scores(r)) for r in run.records_of("eval")]
    columns += [(one["file"], one["scores"] or {}) for one in figures.evaluations(run.folder)]
    if not columns:
        return [note("No evaluation in the run's files; `xgram-dist eval RUN` makes one.")]
    tasks = list(dict.fromkeys(task for _, scores in columns for task in scores))
    rows: list[list[Child]] = [
        [name, *(format_or_missing(scores.get(t), lambda v: f"{v:.1f}") for t in tasks)] for name, scores in columns
    ]
    return [table(["evaluation", *tasks], rows, caption="Scores, in per cent for accuracies.")]


def _in_training(run: Run) -> list[Child]:
    """Records of train.diagnose_every: the last layer's cosines, view cosines, injected norms."""
    records = run.records_of("diagnose")
    if not records:
        return []
    last = run.config.model.layers - 1
    names = [name for name in records[-1] if name not in ("kind", "step", "seconds")]
    cosines = [name for name in names if name.endswith(f"_{last}") or name.startswith("views_")]
    norms = [name for name in names if name.startswith("injected_")]
    charts = []
    for title, unit, chosen in (
        ("In training: cosines of the last layer, and of views", "cosine", cosines),
        ("In training: injected vectors, by site", "mean L2 norm", norms),
    ):
        series = [Series(name, figures.curve(run, "diagnose", name), n, "dots") for n, name in enumerate(chosen)]
        charts += [chart(title, "million tokens", unit, series)] if series else []
    return [tag("div", charts, class_="charts")]


def _scores(record: dict[str, Any]) -> dict[str, float]:
    return {k: v for k, v in record.items() if k not in ("kind", "step", "seconds") and isinstance(v, int | float)}
