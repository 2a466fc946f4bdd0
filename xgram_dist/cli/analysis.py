"""`xgram-dist report`, `compare`, `diagnose`: runs beside each other, and what their tables learned."""

import argparse
import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xgram_dist.cli.command import Command, close_ranks, launch_ranks, require_at_least, starts_ranks
from xgram_dist.errors import UserError

if TYPE_CHECKING:
    from xgram_dist.analysis.compare.runs import Comparison, ComparisonState
    from xgram_dist.data.dataset import PreparedData

REPORT_EXAMPLES = """
  xgram-dist report runs/tiny-vanilla runs/tiny-xgram --picture runs/losses.png
  xgram-dist report runs/tiny-xgram --html runs/tiny-xgram/report.html
  xgram-dist report runs/tiny-xgram --html --serve 8090
"""
WATCH_EXAMPLES = """
  xgram-dist watch runs/tiny-xgram
  xgram-dist watch runs/tiny-vanilla runs/tiny-xgram --every 5
  xgram-dist watch runs/tiny-xgram --once
"""
COMPARE_EXAMPLES = """
  xgram-dist compare recipes/tiny/vanilla.yaml recipes/tiny/xgram.yaml --seeds 0,1,2 --steps 180 --ranks 2
  xgram-dist compare recipes/tiny/vanilla.yaml recipes/tiny/xgram.yaml --out runs/wide model.width=256
  xgram-dist compare recipes/ablations/overall/*.yaml --scale recipes/text/scale.yaml --seeds 0,1,2 --at-once 2
  xgram-dist compare recipes/text/vanilla.yaml recipes/text/ple.yaml --tune memory.learning_rate.multiplier=1,3,10,30
  xgram-dist compare recipes/0.73b/vanilla.yaml recipes/0.73b/xgram-1x-50.yaml --seeds 0,1 --slurm --nodes 2
"""
DIAGNOSE_EXAMPLES = """
  xgram-dist diagnose runs/tiny-xgram
  xgram-dist diagnose runs/tiny-xgram --data data/demo --ranks 2 --json
  xgram-dist diagnose runs/tiny-xgram --beside runs/tiny-vanilla --out figures
"""


# report


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders")
    parser.add_argument("--picture", metavar="FILE", help="draw the loss curves (.png, .svg or .pdf)")
    parser.add_argument(
        "--html",
        metavar="FILE",
        nargs="?",
        const="",
        help="write a page: curves, phases, memory, exchange, restarts and more; no file with --serve",
    )
    parser.add_argument(
        "--serve",
        metavar="PORT",
        type=int,
        nargs="?",
        const=0,
        help="with --html: serve the page on 127.0.0.1 and renew it, until Ctrl-C; the address has a token (default: "
        "any free port)",
    )
    parser.add_argument("--json", action="store_true", help="print as JSON")


def run_report(args: argparse.Namespace) -> int:
    from xgram_dist.analysis.report.runs import draw_losses, read_run, summary
    from xgram_dist.console import print_table

    if args.serve is not None:
        return _serve(args)
    if args.html == "":
        raise UserError("--html needs a file, or --serve; for example --html report.html")
    runs = [read_run(Path(folder)) for folder in args.runs]
    summaries = [summary(run) for run in runs]
    if args.picture:
        draw_losses(runs, Path(args.picture))
    if args.html:
        from xgram_dist.analysis.report.run_page import run_page
        from xgram_dist.files import write_atomically

        write_atomically(Path(args.html), run_page(runs))
    if args.json:
        print(json.dumps(summaries, indent=2))
        return 0
    rows = []
    for run in summaries:
        perplexity, rate = run["validation_perplexity"], run["tokens_per_second"]
        rows.append(
            [
                run["run"] + ("" if run["complete"] else f" (step {run['step']} of {run['steps']})"),
                "-" if perplexity is None else f"{perplexity:.3f}",
                "-" if rate is None else f"{rate:,.0f}",
                f"{run['backbone_parameters'] / 1e6:,.2f} M",
                f"{run['table_parameters'] / 1e6:,.2f} M" if run["table_parameters"] else "-",
                f"{run['rows_hit']:,} of {run['rows']:,}" if run["rows"] else "-",
            ]
        )
    print_table(["run", "validation perplexity", "tokens/s", "backbone", "tables", "table rows hit"], rows)
    if args.picture:
        print(f"loss curves: {args.picture}")
    if args.html:
        print(f"page: {args.html}")
    return 0


def _serve(args: argparse.Namespace) -> int:
    from xgram_dist.analysis.report.run_page import run_page
    from xgram_dist.analysis.report.runs import read_run
    from xgram_dist.analysis.report.serve import PageServer

    if args.html != "" or args.picture or args.json:
        raise UserError("--serve goes with --html without a file, and without --picture and --json")
    server = PageServer(lambda: run_page([read_run(Path(folder)) for folder in args.runs]), args.serve)
    server.page()  # a mistake in the folders is reported here
    print(f"page: {server.address}\n(Ctrl-C ends it)", flush=True)
    try:
        server.serve()
    except KeyboardInterrupt:
        print()
    return 0


# watch


def add_watch_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders, of running or finished runs")
    parser.add_argument("--every", type=float, default=2.0, metavar="S", help="seconds between looks (default 2)")
    parser.add_argument("--once", action="store_true", help="print the screen once, also into a file or a pipe")


def run_watch(args: argparse.Namespace) -> int:
    from xgram_dist.analysis.watch.screen import watch

    if not 0.1 <= args.every <= 3600:
        raise UserError(f"--every {args.every:g} is not between 0.1 and 3600 seconds")
    with suppress(KeyboardInterrupt):
        watch([Path(folder) for folder in args.runs], args.every, args.once)
    return 0


# compare


def add_compare_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "words", nargs="+", metavar="RECIPE|KEY=VALUE", help="recipes, and keys to change in all of them"
    )
    parser.add_argument("--seeds", default="0", metavar="S,...", help="train every recipe with each seed (default 0)")
    parser.add_argument("--steps", type=int, metavar="N", help="steps of every run (default: each recipe's own)")
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="start N ranks on this machine (default 1)")
    parser.add_argument(
        "--at-once", type=int, default=1, metavar="N", help="train N runs at once, each on its part of the cores"
    )
    parser.add_argument(
        "--scale",
        metavar="RECIPE",
        help="take all but name and memory from this recipe (recipes/text/scale.yaml)",
    )
    parser.add_argument(
        "--tune",
        metavar="KEY=V,V,...",
        help="first train every recipe that has the key with each value, on the first seed; go on with the best",
    )
    parser.add_argument("--tune-steps", type=int, metavar="N", help="steps of these runs (default: --steps)")
    parser.add_argument("--out", default="runs/compare", metavar="DIR", help="runs and results (default runs/compare)")
    parser.add_argument(
        "--baseline", metavar="NAME", help="recipe the others are compared with (default: one without tables)"
    )
    parser.add_argument("--sequences", type=int, default=64, help="sequences of the diagnostics (default 64)")
    parser.add_argument("--no-diagnose", action="store_true", help="skip the diagnostics")
    parser.add_argument("--no-train", action="store_true", help="train nothing; write the page from finished runs")
    parser.add_argument("--slurm", action="store_true", help="submit the runs as a job array")
    parser.add_argument("--nodes", default="1", metavar="N|MIN-MAX", help="with --slurm: nodes of a run (default 1)")
    parser.add_argument(
        "--site", metavar="FILE", help="with --slurm: the cluster's settings (default: slurm/sites/default.yaml)"
    )
    parser.add_argument("--no-preflight", action="store_true", help="with --slurm: do not check ranks and links")
    parser.add_argument("--force", action="store_true", help="with --slurm: submit although the estimate fails")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.set_defaults(overrides=[])


def run_compare(args: argparse.Namespace) -> int:
    from xgram_dist.analysis.compare.runs import ComparisonState, parse_seeds, plan_runs

    require_at_least(args, 1, "ranks", "sequences", "at_once")
    words = [*args.words, *args.overrides]
    recipes, overrides = [word for word in words if "=" not in word], [word for word in words if "=" in word]
    seeds = parse_seeds(args.seeds)
    comparison = plan_runs(recipes, overrides, seeds, args.steps, args.baseline, args.scale)
    state = ComparisonState(Path(args.out))
    if args.tune:
        tuned = _tune(args, recipes, overrides, seeds[0])
        if tuned is None:
            return 130
        comparison = plan_runs(recipes, overrides, seeds, args.steps, args.baseline, args.scale, tuned)
    state.check(comparison)
    code = _train_and_diagnose(args, comparison, state)
    _write_results(args, comparison, state)
    return code


def _tune(args: argparse.Namespace, recipes: list[str], overrides: list[str], seed: int) -> dict[str, str] | None:
    """The override that suits each recipe best, by name; None if stopped."""
    from xgram_dist.analysis.compare import tune
    from xgram_dist.analysis.compare.execute import train_all
    from xgram_dist.analysis.compare.runs import ComparisonState
    from xgram_dist.console import print_table

    if args.slurm:
        raise UserError("--tune trains on this machine; leave out --slurm, or submit a --sweep")
    tuning = tune.parse_tuning(args.tune)
    plan = tune.plan_tuning(recipes, overrides, tuning, seed, args.tune_steps or args.steps, args.scale)
    state = ComparisonState(Path(args.out) / tune.FOLDER)
    state.check(plan)
    if not args.no_train:
        _check_runs(plan, args.ranks)
        if train_all(plan, state, args.ranks, _log, lambda: None, at_once=args.at_once) == 130:
            return None
    tuned = tune.read_tuned(recipes, overrides, tuning, plan, state, args.scale)
    if not args.json:
        print_table(*tune.table(tuning, tuned))
    return {name: tuning.override(one.best) for name, one in tuned.items()}


def _train_and_diagnose(args: argparse.Namespace, comparison: "Comparison", state: "ComparisonState") -> int:
    """Train and diagnose the runs that are not finished."""
    from xgram_dist.analysis.compare.execute import diagnose_all, train_all

    if args.no_train:
        return 0
    if args.slurm:
        from xgram_dist.analysis.compare.execute import submit_all
        from xgram_dist.cluster.slurm.site import load_site

        options = {"preflight": not args.no_preflight, "force": args.force}
        for run in submit_all(comparison, state, load_site(args.site), args.nodes, **options):
            _log(f"{run['run']}: job {run['job']}, {run['state']}: {run['folder']}")
        return 0
    _check_runs(comparison, args.ranks)

    def write() -> None:
        _write_results(args, comparison, state, quiet=True)

    code = train_all(comparison, state, args.ranks, _log, write, at_once=args.at_once)
    if code == 130 or args.no_diagnose:
        return code
    return diagnose_all(comparison, state, args.ranks, args.sequences, _log, at_once=args.at_once) or code


def _check_runs(comparison: "Comparison", ranks: int) -> None:
    """All are checked before the first is trained."""
    from xgram_dist.config.validate import accumulation, check_degrees, data_ranks
    from xgram_dist.model.methods.base import check_files

    for planned in comparison.runs:
        check_files(planned.config)
        check_degrees(planned.config, ranks)
        accumulation(planned.config, data_ranks(planned.config, ranks))


def _write_results(
    args: argparse.Namespace, comparison: "Comparison", state: "ComparisonState", *, quiet: bool = False
) -> None:
    from xgram_dist.analysis.compare.page import compare_page, title_of
    from xgram_dist.analysis.compare.results import HEADER, as_json, markdown, read_results, table_rows
    from xgram_dist.console import print_table
    from xgram_dist.files import write_atomically

    results = read_results(comparison, state)
    text = json.dumps(as_json(results), indent=1)
    write_atomically(state.out / "compare.html", compare_page(comparison, results, state.out))
    write_atomically(state.out / "compare.md", markdown(results, title_of(results)))
    write_atomically(state.out / "results.json", text + "\n")
    if quiet:
        return
    if args.json:
        print(text)
        return
    rows = [list(cells) for cells in zip(HEADER, *table_rows(results), strict=True)]
    print_table(rows[0], rows[1:])
    print(f"page: {state.out / 'compare.html'}\ntable: {state.out / 'compare.md'}")


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# diagnose


def add_diagnose_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", help="checkpoint folder, or a run folder (its newest checkpoint)")
    parser.add_argument("--data", metavar="DIR", help="folder of `xgram-dist prepare` (default: the run's)")
    parser.add_argument("--split", choices=["train", "validation"], default="validation", help="(default validation)")
    parser.add_argument("--sequences", type=int, default=64, help="sequences to measure on (default 64)")
    parser.add_argument("--batch", type=int, default=8, help="sequences in a forward pass (default 8)")
    parser.add_argument(
        "--updates",
        default="1,10,100,1000",
        metavar="N,...",
        help="count rows with more than N updates (default 1,10,100,1000)",
    )
    parser.add_argument("--dtype", choices=["fp32", "bf16"], help="dtype of the computation (default: the run's)")
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="start N ranks on this machine (default 1)")
    parser.add_argument(
        "--beside", nargs="+", default=[], metavar="RUN", help="also draw runs that were diagnosed before"
    )
    parser.add_argument("--out", metavar="DIR", help="figures and pictures (default: RUN/diagnose/STEP)")
    parser.add_argument("--no-pictures", action="store_true", help="write the figures only")
    parser.add_argument("--json", action="store_true", help="print as JSON")


def run_diagnose(args: argparse.Namespace) -> int:
    require_at_least(args, 1, "sequences", "batch", "ranks")
    thresholds = _parse_thresholds(args.updates)
    from xgram_dist.analysis.diagnose.figures import read_figures

    beside = [read_figures(Path(path)) for path in args.beside]
    data = _open_data(args)  # before any rank starts, so that a mistake is reported once
    if starts_ranks(args):
        return launch_ranks(args)
    from xgram_dist.parallel.device import choose_device
    from xgram_dist.parallel.mesh import init_world

    device = choose_device()
    ranks = init_world(device)
    with close_ranks(args.command, ranks):
        from xgram_dist.analysis.diagnose.measure import measure, open_checkpoint

        checkpoint = open_checkpoint(Path(args.checkpoint), ranks, device, data.manifest.end_of_text, args.dtype)
        figures = measure(checkpoint, data, args.sequences, args.batch, thresholds)
        checkpoint.lookup.close()
        return _show_figures(args, figures, checkpoint.saved.folder, beside) if ranks.first else 0


def _open_data(args: argparse.Namespace) -> "PreparedData":
    """The prepared data; refused if it was made with another tokenizer than the checkpoint's."""
    from xgram_dist.checkpoint.folder import checkpoints_at
    from xgram_dist.checkpoint.manifest import Manifest
    from xgram_dist.config import parse_config
    from xgram_dist.data.dataset import PreparedData

    facts = Manifest.read(checkpoints_at(Path(args.checkpoint))[-1]).run
    settings = parse_config(facts["config"]).data
    remote = settings.remote if args.data is None else None
    folder = args.data if args.data is not None else settings.path
    if folder is not None and not Path(folder).exists():
        raise UserError(f"the data '{folder}' does not exist; give the folder of `xgram-dist prepare` with --data DIR")
    data = PreparedData.open(folder, args.split, remote=remote, cache=settings.cache)
    of_data, of_checkpoint = data.manifest.tokenizer_sha256, (facts["tokenizer"] or {}).get("sha256")
    if of_checkpoint is not None and of_data != of_checkpoint:
        raise UserError(
            f"'{folder}' was made with another tokenizer (sha256 {of_data[:12]}) than the checkpoint was trained with "
            f"({of_checkpoint[:12]}); prepare the documents with the checkpoint's"
        )
    return data


def _parse_thresholds(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdigit() for word in words):
        raise UserError(f"--updates {text} is not a list of whole numbers such as 1,10,100")
    return sorted({int(word) for word in words})


def _show_figures(
    args: argparse.Namespace, figures: dict[str, Any], checkpoint: Path, beside: list[dict[str, Any]]
) -> int:
    from xgram_dist.analysis.diagnose.figures import default_folder, draw_figures, summary_lines, write_figures
    from xgram_dist.console import print_table

    folder = Path(args.out) if args.out else default_folder(checkpoint)
    file = write_figures(figures, folder)
    pictures = [] if args.no_pictures else draw_figures([figures, *beside], folder)
    written = f"figures: {file}" + (f"; pictures: {', '.join(path.name for path in pictures)}" if pictures else "")
    if args.json:
        print(json.dumps(figures, indent=1))
        print(written, file=sys.stderr)
        return 0
    rows = [[line.name, str(line)] for line in summary_lines(figures)]
    title = f"{figures['run']} at step {figures['step']:,}, {figures['positions']:,} positions"
    print_table([title, ""], rows, left=(0, 1))
    print(written)
    return 0


COMMANDS = {
    "report": Command(REPORT_EXAMPLES, add_report_arguments, run_report),
    "watch": Command(WATCH_EXAMPLES, add_watch_arguments, run_watch),
    "compare": Command(COMPARE_EXAMPLES, add_compare_arguments, run_compare),
    "diagnose": Command(DIAGNOSE_EXAMPLES, add_diagnose_arguments, run_diagnose),
}
