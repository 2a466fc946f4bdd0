"""`xgram-dist report`."""

import argparse
import json
from pathlib import Path

EXAMPLES = """
  xgram-dist report runs/tiny-vanilla runs/tiny-xgram --picture runs/losses.png
  xgram-dist report runs/tiny-xgram --html runs/tiny-xgram/report.html
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders")
    parser.add_argument("--picture", metavar="FILE", help="draw the loss curves (.png, .svg or .pdf)")
    parser.add_argument(
        "--html", metavar="FILE", help="write a page: curves, phases, memory, exchange, restarts and more"
    )
    parser.add_argument("--json", action="store_true", help="print as JSON")


def run(args: argparse.Namespace) -> int:
    from xgram_dist.progress import table
    from xgram_dist.report.picture import draw_losses
    from xgram_dist.report.runs import read_run, summary

    runs = [read_run(Path(folder)) for folder in args.runs]
    figures = [summary(run) for run in runs]
    if args.picture:
        draw_losses(runs, Path(args.picture))
    if args.html:
        from xgram_dist.report.run_page import run_page
        from xgram_dist.whole_file import write_whole

        write_whole(Path(args.html), run_page(runs))
    if args.json:
        print(json.dumps(figures, indent=2))
        return 0
    rows = []
    for f in figures:
        perplexity, rate = f["validation_perplexity"], f["tokens_per_second"]
        rows.append(
            [
                f["run"] + ("" if f["complete"] else f" (step {f['step']} of {f['steps']})"),
                "-" if perplexity is None else f"{perplexity:.3f}",
                "-" if rate is None else f"{rate:,.0f}",
                f"{f['backbone_parameters'] / 1e6:,.2f} M",
                f"{f['table_parameters'] / 1e6:,.2f} M" if f["table_parameters"] else "-",
                f"{f['rows_hit']:,} of {f['rows']:,}" if f["rows"] else "-",
            ]
        )
    table(["run", "validation perplexity", "tokens/s", "backbone", "tables", "table rows hit"], rows)
    if args.picture:
        print(f"loss curves: {args.picture}")
    if args.html:
        print(f"page: {args.html}")
    return 0
