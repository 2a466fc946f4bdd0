"""`xgram-dist compare`."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from xgram_dist.compare.plan import Plan
    from xgram_dist.compare.state import State

EXAMPLES = """
  xgram-dist compare recipes/tiny/vanilla.yaml recipes/tiny/xgram.yaml --seeds 0,1,2 --steps 180 --ranks 2
  xgram-dist compare recipes/tiny/vanilla.yaml recipes/tiny/xgram.yaml --out runs/wide model.width=256
  xgram-dist compare recipes/0.73b/vanilla.yaml recipes/0.73b/xgram-1x-50.yaml --seeds 0,1 --slurm --nodes 2
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "words", nargs="+", metavar="RECIPE|KEY=VALUE", help="recipes, and keys to change in all of them"
    )
    parser.add_argument(
        "--seeds", default="0", metavar="S,...", help="train each recipe with each of these (default 0)"
    )
    parser.add_argument("--steps", type=int, metavar="N", help="of every run (default: each recipe's own)")
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="start N ranks on this machine (default 1)")
    parser.add_argument("--out", default="runs/compare", metavar="DIR", help="runs and results (default runs/compare)")
    parser.add_argument(
        "--baseline", metavar="NAME", help="recipe to hold the others against (default: one without tables)"
    )
    parser.add_argument("--sequences", type=int, default=64, help="of the diagnostics (default 64)")
    parser.add_argument("--no-diagnose", action="store_true", help="without the diagnostics")
    parser.add_argument("--no-train", action="store_true", help="train nothing: the page of what is there")
    parser.add_argument("--slurm", action="store_true", help="submit the runs as a job array instead")
    parser.add_argument("--nodes", default="1", metavar="N|MIN-MAX", help="of --slurm: nodes of a run (1)")
    parser.add_argument("--site", metavar="FILE", help="of --slurm: the cluster's file (slurm/sites/default.yaml)")
    parser.add_argument("--no-preflight", action="store_true", help="of --slurm: do not check ranks and links before")
    parser.add_argument("--force", action="store_true", help="of --slurm: also what the plan speaks against")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.set_defaults(overrides=[])


def run(args: argparse.Namespace) -> int:
    from xgram_dist.compare.plan import parse_seeds, plan_runs
    from xgram_dist.compare.state import State
    from xgram_dist.errors import UserError

    for option in ("ranks", "sequences"):
        if getattr(args, option) < 1:
            raise UserError(f"--{option} {getattr(args, option)} is not at least 1")
    words = [*args.words, *args.overrides]
    recipes, overrides = [w for w in words if "=" not in w], [w for w in words if "=" in w]
    plan = plan_runs(recipes, overrides, parse_seeds(args.seeds), args.steps, args.baseline)
    state = State(Path(args.out))
    state.check(plan)
    code = _work(args, plan, state)
    _write(args, plan, state)
    return code


def _work(args: argparse.Namespace, plan: "Plan", state: "State") -> int:
    """What is left to be trained and measured."""
    from xgram_dist.compare.local import diagnose_all, train_all

    if args.no_train:
        return 0
    if args.slurm:
        from xgram_dist.compare.cluster import submit_all
        from xgram_dist.slurm.site import load_site

        options = {"preflight": not args.no_preflight, "force": args.force}
        for one in submit_all(plan, state, load_site(args.site), args.nodes, **options):
            _say(f"{one['run']}: job {one['job']}, {one['state']}: {one['folder']}")
        return 0
    from xgram_dist.config.check import accumulation, check_files
    from xgram_dist.parallel.degrees import check_degrees

    for planned in plan.runs:  # refused before the first is trained
        check_files(planned.config)
        check_degrees(planned.config, args.ranks)
        accumulation(planned.config, args.ranks // planned.config.parallel.tensor)
    code = train_all(plan, state, args.ranks, _say, lambda: _write(args, plan, state, quiet=True))
    if code == 130 or args.no_diagnose:
        return code
    return diagnose_all(plan, state, args.ranks, args.sequences, _say) or code


def _write(args: argparse.Namespace, plan: "Plan", state: "State", *, quiet: bool = False) -> None:
    import json

    from xgram_dist.compare.page import compare_page, title_of
    from xgram_dist.compare.results import as_json, read_results
    from xgram_dist.compare.table import HEADER, markdown, rows_of
    from xgram_dist.progress import table
    from xgram_dist.whole_file import write_whole

    results = read_results(plan, state)
    tree = json.dumps(as_json(results), indent=1)
    write_whole(state.out / "compare.html", compare_page(plan, results, state.out))
    write_whole(state.out / "compare.md", markdown(results, title_of(results)))
    write_whole(state.out / "results.json", tree + "\n")
    if quiet:
        return
    if args.json:
        print(tree)
        return
    rows = [list(pair) for pair in zip(HEADER, *rows_of(results), strict=True)]
    table(rows[0], rows[1:])
    print(f"page: {state.out / 'compare.html'}\ntable: {state.out / 'compare.md'}")


def _say(text: str) -> None:
    import sys

    print(text, file=sys.stderr, flush=True)
