"""`xgram-dist bench`."""

import argparse
import json
from pathlib import Path

from xgram_dist.errors import UserError

EXAMPLES = """
  xgram-dist bench step               X-gram's training step against vanilla's
  xgram-dist bench generate           X-gram's time a generated token, tables mapped from files, against vanilla's
  xgram-dist bench data --json        prepare against bare tokenisation; loader against what training consumes
  xgram-dist bench data --corpus FOLDER --tokenizer tokenizer.json
  xgram-dist bench checkpoint --json --folder /scratch       saves and loads against plain files of the same size
  xgram-dist bench exchange --ranks 2 --rounds 3 --peers tools/peers --frequencies frequencies.npz
  xgram-dist bench engine --frequencies frequencies.npz      engines against bare loops; FSDP around tables against ours
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = ["checkpoint", "data", "engine", "exchange", "generate", "step"]
    parser.add_argument("what", choices=names, help="which benchmark")
    parser.add_argument("--json", action="store_true", help="print as JSON")
    parser.add_argument(
        "--rounds", type=int, help="how often the sides take turns (default: step 12, generate 15, others 3)"
    )
    parser.add_argument(
        "--vocabulary", type=int, default=32768, help="step, generate, engine: vocabulary (default 32768)"
    )
    parser.add_argument("--no-compile", action="store_true", help="step: without torch.compile")
    parser.add_argument("--corpus", help="data: documents to tokenise (default: the embedded corpus)")
    parser.add_argument("--tokenizer", help="data: tokenizer file (default: one trained on the corpus)")
    parser.add_argument(
        "--ranks",
        type=int,
        nargs="+",
        default=[2],
        help="exchange: numbers of ranks; checkpoint, engine: one (default 2)",
    )
    parser.add_argument("--steps", type=int, help="steps of a round that count (default: exchange 30, engine 8)")
    parser.add_argument(
        "--scale", type=int, choices=[1, 4], default=1, help="engine: tables of 1x or of 4x (default 1)"
    )
    parser.add_argument("--folder", help="checkpoint: on the disk to be measured (default: the current folder)")
    parser.add_argument("--peers", help="exchange: folder of the peers, tools/peers (default: ours alone)")
    parser.add_argument("--frequencies", help="exchange, engine: token frequencies (default: Zipf)")
    parser.add_argument(
        "--consumption", type=float, default=25_000, help="data: tokens/s that training consumes (default 25000)"
    )


def run(args: argparse.Namespace) -> int:
    if args.what == "step":
        rounds = 12 if args.rounds is None else args.rounds
        if rounds < 2:
            raise UserError(f"--rounds {rounds} is too few; quartiles need at least 2")
        from xgram_dist.bench.step import run_step_benchmark

        figures = run_step_benchmark(rounds, args.vocabulary, not args.no_compile)
    elif args.what == "checkpoint":
        rounds = 3 if args.rounds is None else args.rounds
        if rounds < 1 or len(args.ranks) != 1:
            raise UserError("bench checkpoint needs --rounds of at least 1 and one number of --ranks")
        from xgram_dist.bench.checkpoint import run_checkpoint_benchmark

        figures = run_checkpoint_benchmark(args.ranks[0], rounds, None if args.folder is None else Path(args.folder))
    elif args.what == "generate":
        rounds = 15 if args.rounds is None else args.rounds
        if rounds < 2:
            raise UserError(f"--rounds {rounds} is too few; quartiles need at least 2")
        from xgram_dist.bench.generate import run_generate_benchmark

        figures = run_generate_benchmark(rounds, 32, args.vocabulary)
    elif args.what == "exchange":
        return _exchange(args)
    elif args.what == "engine":
        return _engine(args)
    else:
        from xgram_dist.bench.data import run_data_benchmark

        figures = run_data_benchmark(args.corpus, args.consumption, tokenizer=args.tokenizer)
    if args.json:
        print(json.dumps(figures, indent=2))
        return 0
    from xgram_dist.progress import table

    table([f"bench {args.what}", "value"], [[key.replace("_", " "), _shown(v)] for key, v in figures.items()])
    return 0


def _exchange(args: argparse.Namespace) -> int:
    rounds = 3 if args.rounds is None else args.rounds
    steps = 30 if args.steps is None else args.steps
    if rounds < 1 or steps < 2 or min(args.ranks) < 2:
        raise UserError("bench exchange needs --rounds of at least 1, --steps of at least 2 and --ranks of at least 2")
    from xgram_dist.bench.exchange import run_exchange_benchmark

    peers, frequencies = (None if text is None else Path(text) for text in (args.peers, args.frequencies))
    figures = run_exchange_benchmark(args.ranks, rounds, steps, peers, frequencies)
    if args.json:
        print(json.dumps(figures, indent=2))
        return 0
    from xgram_dist.progress import table

    for size, found in figures["w1"].items():
        rows = [[name, f"{ms:,.1f}", str(found["ours_over"].get(name, ""))] for name, ms in found["ms"].items()]
        table([f"W1 on {size} ranks", "ms", "ours / this"], rows)
        phases = ", ".join(f"{name} {ms:.1f}" for name, ms in found["phases_ms"].items())
        print(f"ours by phase, ms: {phases}; bytes over the lower bound: {found['bytes_over_bound']}\n")
    for name in ("w2", "growth", "optimizers"):
        table([name, "value"], [[key.replace("_", " "), _shown(v)] for key, v in figures[name].items()])
    return 0


def _engine(args: argparse.Namespace) -> int:
    rounds = 3 if args.rounds is None else args.rounds
    steps = 8 if args.steps is None else args.steps
    if rounds < 1 or steps < 1 or len(args.ranks) != 1 or args.ranks[0] < 2:
        raise UserError("bench engine needs --rounds and --steps of at least 1, and one number of --ranks, at least 2")
    from xgram_dist.bench.engine import run_engine_benchmark

    frequencies = None if args.frequencies is None else Path(args.frequencies)
    figures = run_engine_benchmark(args.ranks[0], rounds, steps, args.vocabulary, args.scale, frequencies)
    if args.json:
        print(json.dumps(figures, indent=2))
        return 0
    from xgram_dist.progress import table

    rows = [[name, *(_shown(value) for value in found.values())] for name, found in figures["overhead"].items()]
    names = [key.replace("_", " ") for key in next(iter(figures["overhead"].values()))]
    table([f"overhead on {args.ranks[0]} ranks", *names], rows)
    print()
    found = figures["paper_layout"]
    sides = {"ours": None, "paper": "", "paper_kept": "kept_"}
    rows = []
    for side, prefix in sides.items():
        row = [_shown(found[f"{side}_{key}"]) for key in ("ms", "bytes", "tables_bytes")]
        ratios = ["", ""] if prefix is None else [_shown(found[f"{prefix}{key}_ratio"]) for key in ("time", "bytes")]
        rows.append([side.replace("_", ", "), *row, *ratios])
    table([f"{args.scale}x at 50 %", "ms", "bytes", "of them tables", "time / ours", "bytes / ours"], rows)
    rest = ("vocabulary", "frequencies", "touched_share", "optimizer", "table_bytes", "loss_difference")
    print("; ".join(f"{key.replace('_', ' ')} {_shown(found[key])}" for key in rest))
    return 0


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
