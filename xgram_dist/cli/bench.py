"""`xgram-dist bench`: the benchmarks of `xgram_dist.bench`, one at a time."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from xgram_dist.cli.command import Command
from xgram_dist.errors import UserError

EXAMPLES = """
  xgram-dist bench step               a training step of X-gram against vanilla's
  xgram-dist bench generate           time per generated token, tables mapped from files, against vanilla's
  xgram-dist bench data --json        prepare against bare tokenization; the loader against what training consumes
  xgram-dist bench data --corpus FOLDER --tokenizer tokenizer.json
  xgram-dist bench streaming          a run at 10 times the consumption that reads from S3, at 20 ms and 50 MB/s
  xgram-dist bench checkpoint --json --folder /scratch       saves and loads against plain files of the same size
  xgram-dist bench exchange --ranks 2 --rounds 3 --peers tools/peers --frequencies frequencies.npz
  xgram-dist bench engine --frequencies frequencies.npz      engines against bare loops; sharded tables against FSDP
  xgram-dist bench planning recipes/1.15b/engram-4x.yaml --ranks 32      planning a step against the predicted step
  xgram-dist bench tiers --json --folder /scratch            table rows in memory, on the host and on disk (as root)
  xgram-dist bench serve --json       time per token in vLLM, against the backbone without tables (after `make serving`)
  xgram-dist bench restart recipes/tiny/xgram.yaml           kill to first new step: the command again, and --restarts
  xgram-dist bench overlap            exchange with and without overlap, over an emulated link of 1 Gb/s (as root)
  xgram-dist bench simulate --ranks 2 4 8     simulated steps against measured ones, over an emulated link (as root)
"""

Figures = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=list(BENCHMARKS), help="which benchmark")
    parser.add_argument("recipe", nargs="?", help="planning, restart: YAML file")
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="planning, restart: change keys of the recipe"
    )
    parser.add_argument("--json", action="store_true", help="print as JSON")
    parser.add_argument(
        "--rounds",
        type=int,
        help="rounds, in each of which all sides run (default: step 12, generate 15, overlap 4, serve 6, tiers 8, "
        "others 3)",
    )
    parser.add_argument("--vocabulary", type=int, default=32768, help="step, generate, serve, engine (default 32768)")
    parser.add_argument("--no-compile", action="store_true", help="step, serve: without torch.compile")
    parser.add_argument("--corpus", help="data: documents to tokenize (default: the embedded corpus)")
    parser.add_argument("--tokenizer", help="data: tokenizer file (default: one trained on the corpus)")
    parser.add_argument(
        "--consumption",
        type=float,
        default=25_000,
        help="data, streaming: tokens/s that training consumes (default 25000, about the tiny recipe's)",
    )
    parser.add_argument(
        "--ranks",
        type=int,
        nargs="+",
        default=[2],
        help="exchange, simulate: one or more numbers of ranks; checkpoint, engine, planning: one number (default 2)",
    )
    parser.add_argument(
        "--steps",
        type=int,
        help="measured steps in a round (default: exchange 30, engine 8, overlap 4, simulate 7, tiers 12)",
    )
    parser.add_argument("--scale", type=int, choices=[1, 4], default=1, help="engine: tables of 1x or 4x (default 1)")
    parser.add_argument(
        "--python",
        default="tools/serving/.venv/bin/python",
        help="serve: interpreter of an environment with vLLM (default: that of `make serving`)",
    )
    parser.add_argument(
        "--folder", help="checkpoint, serve, tiers: folder on the disk to measure (default: the current one)"
    )
    parser.add_argument("--peers", help="exchange: folder of the peer systems, tools/peers (default: no peers)")
    parser.add_argument("--frequencies", help="exchange, engine, planning: token frequencies (default: Zipf)")
    parser.add_argument("--data", help="planning: a prepared data set to take tokens from (default: draw them)")


def run(args: argparse.Namespace) -> int:
    if args.recipe is not None and args.what not in ("planning", "restart"):
        raise UserError(f"bench {args.what} takes no recipe or keys: leave out {args.recipe}")
    benchmark, show = BENCHMARKS[args.what]
    figures = benchmark(args)
    if args.json:
        print(json.dumps(figures, indent=2))
    else:
        show(args, figures)
    return 0


def _step(args: argparse.Namespace) -> Figures:
    rounds = _rounds_with_quartiles(args, 12)
    from xgram_dist.bench.step import run_step_benchmark

    return run_step_benchmark(rounds, args.vocabulary, not args.no_compile)


def _generate(args: argparse.Namespace) -> Figures:
    rounds = _rounds_with_quartiles(args, 15)
    from xgram_dist.bench.generate import run_generate_benchmark

    return run_generate_benchmark(rounds, 32, args.vocabulary)


def _rounds_with_quartiles(args: argparse.Namespace, default: int) -> int:
    rounds: int = default if args.rounds is None else args.rounds
    if rounds < 2:
        raise UserError(f"--rounds {rounds} is too few; quartiles need at least 2")
    return rounds


def _data(args: argparse.Namespace) -> Figures:
    from xgram_dist.bench.data import run_data_benchmark

    return run_data_benchmark(args.corpus, args.consumption, tokenizer=args.tokenizer)


def _streaming(args: argparse.Namespace) -> Figures:
    if args.consumption <= 0:
        raise UserError(f"--consumption {args.consumption:g} is not above 0")
    from xgram_dist.bench.streaming import run_streaming_benchmark

    return run_streaming_benchmark(10 * args.consumption)


def _checkpoint(args: argparse.Namespace) -> Figures:
    rounds = 3 if args.rounds is None else args.rounds
    if rounds < 1 or len(args.ranks) != 1:
        raise UserError("bench checkpoint needs --rounds of at least 1 and one number of --ranks")
    from xgram_dist.bench.checkpoint import run_checkpoint_benchmark

    return run_checkpoint_benchmark(args.ranks[0], rounds, _path(args.folder))


def _exchange(args: argparse.Namespace) -> Figures:
    rounds = 3 if args.rounds is None else args.rounds
    steps = 30 if args.steps is None else args.steps
    if rounds < 1 or steps < 2 or min(args.ranks) < 2:
        raise UserError("bench exchange needs --rounds of at least 1, --steps of at least 2 and --ranks of at least 2")
    from xgram_dist.bench.exchange import run_exchange_benchmark

    return run_exchange_benchmark(args.ranks, rounds, steps, _path(args.peers), _path(args.frequencies))


def _engine(args: argparse.Namespace) -> Figures:
    rounds = 3 if args.rounds is None else args.rounds
    steps = 8 if args.steps is None else args.steps
    if rounds < 1 or steps < 1 or len(args.ranks) != 1 or args.ranks[0] < 2:
        raise UserError("bench engine needs --rounds and --steps of at least 1, and one number of --ranks, at least 2")
    from xgram_dist.bench.engine import run_engine_benchmark

    return run_engine_benchmark(args.ranks[0], rounds, steps, args.vocabulary, args.scale, _path(args.frequencies))


def _planning(args: argparse.Namespace) -> Figures:
    rounds = 3 if args.rounds is None else args.rounds
    if args.recipe is None or rounds < 1 or len(args.ranks) != 1 or args.ranks[0] < 1:
        raise UserError("bench planning needs a recipe, --rounds of at least 1 and one number of --ranks, at least 1")
    from xgram_dist.bench.planning import run_planning_benchmark

    paths = _path(args.frequencies), _path(args.data)
    return run_planning_benchmark(args.recipe, args.overrides, args.ranks[0], rounds, *paths)


def _overlap(args: argparse.Namespace) -> Figures:
    rounds = 4 if args.rounds is None else args.rounds
    steps = 4 if args.steps is None else args.steps
    if rounds < 1 or steps < 1:
        raise UserError("bench overlap needs --rounds and --steps of at least 1")
    from xgram_dist.bench.slow_link import why_not

    reason = why_not()
    if reason:
        return {"skipped": reason}
    from xgram_dist.bench.overlap import run_overlap_benchmark

    return run_overlap_benchmark(rounds, steps)


def _simulate(args: argparse.Namespace) -> Figures:
    steps = 7 if args.steps is None else args.steps
    if steps < 1 or any(ranks < 2 or ranks % 2 for ranks in args.ranks):
        raise UserError("bench simulate needs --steps of at least 1 and even numbers of --ranks: two nodes")
    from xgram_dist.bench.slow_link import why_not

    reason = why_not()
    if reason:
        return {"skipped": reason}
    from xgram_dist.bench.simulate import run_simulate_benchmark

    return run_simulate_benchmark(args.ranks, steps)


def _tiers(args: argparse.Namespace) -> Figures:
    rounds = 8 if args.rounds is None else args.rounds
    steps = 12 if args.steps is None else args.steps
    if rounds < 1 or steps < 1:
        raise UserError("bench tiers needs --rounds and --steps of at least 1")
    from xgram_dist.bench.tiers import run_tiers_benchmark

    return run_tiers_benchmark(rounds, steps, Path(args.folder or "."))


def _serve(args: argparse.Namespace) -> Figures:
    rounds = _rounds_with_quartiles(args, 6)
    from xgram_dist.bench.serve import run_serve_benchmark

    folder = Path(args.folder or ".")
    return run_serve_benchmark(Path(args.python), rounds, args.vocabulary, folder, not args.no_compile)


def _restart(args: argparse.Namespace) -> Figures:
    rounds = 3 if args.rounds is None else args.rounds
    if args.recipe is None or rounds < 1 or len(args.ranks) != 1 or args.ranks[0] < 2:
        raise UserError("bench restart needs a recipe, --rounds of at least 1 and one number of --ranks, at least 2")
    from xgram_dist.bench.restart import run_restart_benchmark

    return run_restart_benchmark(args.recipe, args.overrides, args.ranks[0], rounds)


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)


def _show_figures(args: argparse.Namespace, figures: Figures) -> None:
    from xgram_dist.console import print_table

    print_table([f"bench {args.what}", "value"], _rows(figures))


def _show_exchange(args: argparse.Namespace, figures: Figures) -> None:
    from xgram_dist.console import print_table

    for ranks, result in figures["w1"].items():
        rows = [[name, f"{ms:,.1f}", str(result["ours_over"].get(name, ""))] for name, ms in result["ms"].items()]
        print_table([f"W1 on {ranks} ranks", "ms", "ours / this"], rows)
        phases = ", ".join(f"{name} {ms:.1f}" for name, ms in result["phases_ms"].items())
        print(f"ours by phase, ms: {phases}; bytes over the lower bound: {result['bytes_over_bound']}\n")
    for name in ("w2", "growth", "optimizers"):
        print_table([name, "value"], _rows(figures[name]))


def _show_engine(args: argparse.Namespace, figures: Figures) -> None:
    from xgram_dist.console import print_table

    overhead = figures["overhead"]
    rows = [[name, *(_format(value) for value in result.values())] for name, result in overhead.items()]
    columns = [key.replace("_", " ") for key in next(iter(overhead.values()))]
    print_table([f"overhead on {args.ranks[0]} ranks", *columns], rows)
    print()
    layout = figures["paper_layout"]
    rows = []
    for side, prefix in {"ours": None, "paper": "", "paper_kept": "kept_"}.items():
        row = [_format(layout[f"{side}_{key}"]) for key in ("ms", "bytes", "tables_bytes")]
        ratios = ["", ""] if prefix is None else [_format(layout[f"{prefix}{key}_ratio"]) for key in ("time", "bytes")]
        rows.append([side.replace("_", ", "), *row, *ratios])
    print_table([f"{args.scale}x at 50 %", "ms", "bytes", "of them tables", "time / ours", "bytes / ours"], rows)
    others = ("vocabulary", "frequencies", "touched_share", "optimizer", "table_bytes", "loss_difference")
    print("; ".join(f"{key.replace('_', ' ')} {_format(layout[key])}" for key in others))


def _show_planning(args: argparse.Namespace, figures: Figures) -> None:
    from xgram_dist.console import print_table

    step = figures["predicted_step_seconds"]
    parts = {**figures.pop("parts"), "planning": {"wall": figures["wall_seconds"], "cpu": figures["cpu_seconds"]}}
    rows = []
    for name, part in parts.items():
        shares = (f"{100 * part[kind] / step:.1f} %" for kind in ("wall", "cpu"))
        rows.append([name, f"{part['wall']:.3f}", f"{part['cpu']:.3f}", *shares])
    rows.append(["predicted step", f"{step:.3f}", "", "", ""])
    header = [f"{figures['recipe']}, a rank of {figures['ranks']}", "wall, s", "CPU, s", "wall / step", "CPU / step"]
    print_table(header, rows)
    print()
    print_table(["planning", "value"], _rows(figures))


def _show_simulate(args: argparse.Namespace, figures: Figures) -> None:
    from xgram_dist.console import print_table

    layouts = figures.pop("layouts", {})
    if layouts:
        columns = [key.replace("_", " ") for key in next(iter(layouts.values()))]
        print_table(["layout", *columns], [[name, *map(_format, one.values())] for name, one in layouts.items()])
        print()
    print_table([f"bench {args.what}", "value"], _rows(figures))


def _show_tiers(args: argparse.Namespace, figures: Figures) -> None:
    from xgram_dist.console import print_table

    parts = {name: part for name, part in figures.items() if isinstance(part, dict)}
    print_table([f"bench {args.what}", "value"], _rows({n: figure for n, figure in figures.items() if n not in parts}))
    for name, part in parts.items():
        print()
        print_table([name.replace("_", " "), "value"], _rows(part))


def _rows(figures: Figures) -> list[list[str]]:
    return [[key.replace("_", " "), _format(value)] for key, value in figures.items()]


def _format(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


Benchmark = Callable[[argparse.Namespace], Figures]
Show = Callable[[argparse.Namespace, Figures], None]
BENCHMARKS: dict[str, tuple[Benchmark, Show]] = {
    "checkpoint": (_checkpoint, _show_figures),
    "data": (_data, _show_figures),
    "engine": (_engine, _show_engine),
    "exchange": (_exchange, _show_exchange),
    "generate": (_generate, _show_figures),
    "planning": (_planning, _show_planning),
    "overlap": (_overlap, _show_figures),
    "restart": (_restart, _show_tiers),
    "serve": (_serve, _show_tiers),
    "simulate": (_simulate, _show_simulate),
    "step": (_step, _show_figures),
    "streaming": (_streaming, _show_figures),
    "tiers": (_tiers, _show_tiers),
}
COMMANDS = {"bench": Command(EXAMPLES, add_arguments, run)}
