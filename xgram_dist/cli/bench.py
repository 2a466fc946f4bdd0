"""`xgram-dist bench`."""

import argparse
import json

from xgram_dist.errors import UserError

EXAMPLES = """
  xgram-dist bench step               X-gram's training step against vanilla's
  xgram-dist bench data --json        prepare against bare tokenisation; loader against what training consumes
  xgram-dist bench data --corpus FOLDER --tokenizer tokenizer.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=["data", "step"], help="which benchmark")
    parser.add_argument("--json", action="store_true", help="print as JSON")
    parser.add_argument("--rounds", type=int, default=12, help="step: rounds of two steps each that count (default 12)")
    parser.add_argument("--vocabulary", type=int, default=32768, help="step: vocabulary (default 32768)")
    parser.add_argument("--no-compile", action="store_true", help="step: without torch.compile")
    parser.add_argument("--corpus", help="data: documents to tokenise (default: the embedded corpus)")
    parser.add_argument("--tokenizer", help="data: tokenizer file (default: one trained on the corpus)")
    parser.add_argument(
        "--consumption", type=float, default=25_000, help="data: tokens/s that training consumes (default 25000)"
    )


def run(args: argparse.Namespace) -> int:
    if args.what == "step":
        if args.rounds < 2:
            raise UserError(f"--rounds {args.rounds} is too few; quartiles need at least 2")
        from xgram_dist.bench.step import run_step_benchmark

        figures = run_step_benchmark(args.rounds, args.vocabulary, not args.no_compile)
    else:
        from xgram_dist.bench.data import run_data_benchmark

        figures = run_data_benchmark(args.corpus, args.consumption, tokenizer=args.tokenizer)
    if args.json:
        print(json.dumps(figures, indent=2))
        return 0
    from xgram_dist.progress import table

    table([f"bench {args.what}", "value"], [[key.replace("_", " "), _shown(v)] for key, v in figures.items()])
    return 0


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
