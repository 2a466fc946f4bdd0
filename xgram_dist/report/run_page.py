"""The page of a run, and of several."""

import time
from typing import Any

from xgram_dist.checkpoint.folder import found_steps
from xgram_dist.config import dump_config
from xgram_dist.diagnose.files import newest_figures, read_figures
from xgram_dist.errors import UserError
from xgram_dist.report import figures
from xgram_dist.report.chart import Series, chart
from xgram_dist.report.diagnosed import diagnosed
from xgram_dist.report.markup import Child, Markup, tag
from xgram_dist.report.numbers import MISSING, parameters, percent, seconds, shown, size, thousands, three, whole
from xgram_dist.report.page import Section, bar, note, page, table
from xgram_dist.report.runs import Run, summary
from xgram_dist.slurm.attempts import read_attempts


def run_page(runs: list[Run]) -> str:
    """Of one run all there is; of several a table and their curves together, then all of each."""
    if len(runs) == 1:
        return page(runs[0].config.name, _state(runs[0]), sections(runs[0]))
    names = unique_names(runs)
    first = [
        Section("summary", "Summary", _summary(runs, names)),
        Section("curves", "Loss", tag("div", _losses(runs, names), class_="charts")),
    ]
    each = [
        Section(f"run-{number}", name, [_part(one) for one in sections(run)])
        for number, (name, run) in enumerate(zip(names, runs, strict=True))
    ]
    return page(f"{len(runs)} runs", ", ".join(names), [*first, *each])


def sections(run: Run) -> list[Section]:
    return [
        Section("summary", "Summary", _summary([run], [run.config.name])),
        Section("curves", "Curves", tag("div", [*_losses([run], [run.config.name]), *_others(run)], class_="charts")),
        Section("throughput", "Throughput", _throughput(run)),
        Section("phases", "Phases of a step", _phases(run)),
        Section("memory", "Memory", _memory(run)),
        Section("exchange", "Exchange of table vectors", _exchange(run)),
        Section("checkpoints", "Checkpoints", _checkpoints(run)),
        Section("restarts", "Restarts and skipped steps", _restarts(run)),
        Section("evaluation", "Evaluation", _evaluation(run)),
        Section("diagnostics", "Diagnostics", [*diagnosed({run.config.name: figures_of(run)}), *_in_training(run)]),
        Section("recipe", "Recipe", tag("details", tag("summary", "config.yaml"), tag("pre", dump_config(run.config)))),
    ]


def unique_names(runs: list[Run]) -> list[str]:
    names = [run.config.name for run in runs]
    return [f"{name} ({run.folder})" if names.count(name) > 1 else name for name, run in zip(names, runs, strict=True)]


def figures_of(run: Run) -> list[dict[str, Any]]:
    """Of `diagnose`, the newest; none where there are none that can be read."""
    file = newest_figures(run.folder)
    try:
        return [] if file is None else [read_figures(file)]
    except UserError:
        return []


def _part(one: Section) -> list[Child]:
    return [tag("h3", one.title), one.body]


def _state(run: Run) -> str:
    found = summary(run)
    state = "complete" if found["complete"] else f"step {found['step']:,} of {found['steps']:,}"
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
                shown(one["step"] * run.tokens_per_step or None, thousands),
                shown(one["validation_perplexity"], three),
                shown(one["tokens_per_second"], whole),
                parameters(one["backbone_parameters"]),
                parameters(one["table_parameters"]) if one["table_parameters"] else "none",
                shown(figures.peak_memory(run), size),
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
        ["tokens a second, whole run", shown(figures.tokens_per_second(run), whole)],
        ["tokens a second and rank", shown(figures.average(run, "tokens_per_second_rank"), whole)],
        ["seconds a step", shown(figures.average(run, "step_seconds"), seconds)],
        ["model TFLOP/s a rank", shown(figures.average(run, "model_tflops"), three)],
        ["utilisation of the device", shown(figures.average(run, "utilisation"), percent)],
    ]
    drawn = chart("Tokens a second", "step", "tokens/s", [rate], from_zero=True)
    return [tag("div", table(["", "mean over steps"], rows), drawn, class_="charts")]


def _phases(run: Run) -> list[Child]:
    found = figures.phases(run)
    if not found:
        return [note("No phases in the run's files.")]
    whole_step = figures.average(run, "step_seconds")
    longest = max(found.values())
    rows: list[list[Child]] = [
        [
            name,
            bar(value / (whole_step or longest)),
            f"{1000 * value:,.2f}",
            percent(value / whole_step) if whole_step else MISSING,
        ]
        for name, value in found.items()
    ]
    words = "Mean over steps, of the first rank. Planning runs in a thread beside the others: parts may exceed a step."
    return [note(words), table(["phase", "", "ms a step", "of a step"], rows, left=(0, 1))]


def _memory(run: Run) -> list[Child]:
    found = figures.memory(run)
    if not found:
        return [note("No memory records in the run's files.")]
    parts = [part for part in figures.MEMORY_PARTS if any(f"bytes_{part}" in record for record in found)]
    rows: list[list[Child]] = [
        [
            record.get("rank", 0),
            *(shown(record.get(f"bytes_{part}"), size) for part in parts),
            shown(record.get("bytes_peak"), size),
        ]
        for record in found
    ]
    header = ["rank", *(part.replace("_", " ") for part in parts), "peak"]
    return [note("After the first step; the peak holds activations and all else too."), table([*header], rows)]


def _exchange(run: Run) -> list[Child]:
    found = figures.exchange(run)
    if not found:
        return [note("No exchange in the run's files: it has no tables.")]
    forms = {"imbalance": three}
    rows: list[list[Child]] = []
    for key, name in figures.EXCHANGE.items():
        form = size if key.startswith("bytes") else forms.get(key, whole)
        rows.append([name, shown(found.get(key), form)])
    sent, bound = found.get("bytes_sent"), found.get("bytes_bound")
    if sent and bound:
        rows.append(["bytes sent against that bound", f"{sent / bound:.2f}"])
    return [note("Of the first rank, to and from the others."), table(["", "mean a step"], rows)]


def _checkpoints(run: Run) -> list[Child]:
    records = run.of("checkpoint")
    there = set(found_steps(run.folder))
    if not records and not there:
        return [note("No checkpoints in the run's files.")]
    rows: list[list[Child]] = [
        [
            f"{record['step']:,}",
            "yes" if record.get("written") else "failed",
            shown(record.get("bytes"), size),
            shown(record.get("seconds_saving"), seconds),
            shown(record.get("seconds_blocked"), seconds),
            "yes" if record["step"] in there else "no longer",
        ]
        for record in records
    ]
    noted = {record["step"] for record in records}
    rows += [[f"{step:,}", "yes", *[MISSING] * 3, "yes"] for step in sorted(there - noted)]
    return [
        table(["step", "written", "bytes of a rank", "writing", "training waited", "in the folder"], rows, left=(1,))
    ]


def _restarts(run: Run) -> list[Child]:
    attempts = read_attempts(run.folder)
    made: list[Child] = []
    if attempts:
        rows: list[list[Child]] = [
            [
                time.strftime("%Y-%m-%d %H:%M", time.localtime(one.started)),
                f"{one.step:,}",
                ", ".join(one.nodes),
                one.outcome or ("under way or cut off" if one is attempts[-1] else "cut off"),
                one.why() if one.outcome or one is not attempts[-1] else "",
                shown(None if one.ended is None else one.ended - one.started, seconds),
            ]
            for one in attempts
        ]
        made.append(table(["started", "after step", "nodes", "end", "reason", "lasted"], rows, left=(0, 2, 3, 4)))
    again = figures.starts(run)
    if again:
        made.append(note(f"Went on after step {', '.join(f'{step:,}' for step in again)}."))
    elif not attempts:
        made.append(note("One start."))
    skipped = run.of("skipped")
    if skipped:
        steps = ", ".join(f"{record['step']:,}" for record in skipped[:20])
        more = f" and {len(skipped) - 20} more" if len(skipped) > 20 else ""
        made.append(note(f"Skipped, for a loss or gradient that was not finite: step {steps}{more}."))
    else:
        made.append(note("No step was skipped."))
    return made


def _evaluation(run: Run) -> list[Child]:
    columns = [(f"in training, step {r['step']:,}", _scores(r)) for r in run.of("eval")]
    columns += [(one["file"], one["scores"] or {}) for one in figures.evaluations(run.folder)]
    if not columns:
        return [note("No evaluation in the run's files; `xgram-dist eval RUN` makes one.")]
    tasks = list(dict.fromkeys(task for _, scores in columns for task in scores))
    rows: list[list[Child]] = [
        [name, *(shown(scores.get(t), lambda v: f"{v:.1f}") for t in tasks)] for name, scores in columns
    ]
    return [table(["evaluation", *tasks], rows, caption="Scores, in per cent for accuracies.")]


def _in_training(run: Run) -> list[Child]:
    """What train.diagnose_every has left: the last layer's cosines, views, norms."""
    records = run.of("diagnose")
    if not records:
        return []
    last = run.config.model.layers - 1
    names = [name for name in records[-1] if name not in ("kind", "step", "seconds")]
    cosines = [name for name in names if name.endswith(f"_{last}") or name.startswith("views_")]
    norms = [name for name in names if name.startswith("injected_")]
    made = []
    for title, unit, chosen in (
        ("In training: cosines of the last layer, and of views", "cosine", cosines),
        ("In training: what is injected, by site", "mean L2 norm", norms),
    ):
        series = [Series(name, figures.curve(run, "diagnose", name), n, "dots") for n, name in enumerate(chosen)]
        made += [chart(title, "million tokens", unit, series)] if series else []
    return [tag("div", made, class_="charts")]


def _scores(record: dict[str, Any]) -> dict[str, float]:
    return {k: v for k, v in record.items() if k not in ("kind", "step", "seconds") and isinstance(v, int | float)}
