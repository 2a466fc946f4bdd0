"""`xgram-dist doctor`: check a new machine or cluster before the first run on it."""

import argparse
from pathlib import Path

from xgram_dist.cli.command import Command, close_ranks, launch_ranks, require_at_least, starts_ranks
from xgram_dist.errors import UserError

EXAMPLES = """
  xgram-dist doctor
  xgram-dist doctor --quick --ranks 2 --folder runs
  torchrun --nproc-per-node 8 -m xgram_dist doctor --out doctor-node.json
  srun --nodes 2 --ntasks-per-node 8 --gpus-per-node 8 xgram-dist doctor --folder /shared/runs
  xgram-dist doctor --recipe recipes/0.73b/xgram-1x-50.yaml train.micro_batch=2
"""

QUICK_SECONDS = 2.0
COLLECTIVE_SECONDS = 120.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="with --recipe: change its keys")
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="start N ranks on this machine (default 1)")
    parser.add_argument("--folder", metavar="DIR", default="runs", help="where runs are to be written (default runs)")
    parser.add_argument("--out", metavar="FILE", default="doctor.json", help="results as JSON (default doctor.json)")
    parser.add_argument("--seconds", type=float, metavar="S", help="length of the timed run (default 120; --quick: 2)")
    parser.add_argument("--quick", action="store_true", help="one parity case, small files, a short timed run")
    parser.add_argument("--recipe", metavar="FILE", help="model of the timed run (default: by the device's memory)")


def run(args: argparse.Namespace) -> int:
    require_at_least(args, 1, "ranks")
    if args.seconds is not None and not 0 < args.seconds < 86400:
        raise UserError(f"--seconds {args.seconds:g} is not above 0 and below 86400")
    if args.overrides and args.recipe is None:
        raise UserError(f"'{args.overrides[0]}' changes a recipe, and none is given; name it with --recipe")
    if args.recipe is not None:
        from xgram_dist.model.methods.base import load_recipe

        load_recipe(args.recipe, args.overrides)  # a mistake in it is refused before anything is measured
    if starts_ranks(args):
        return launch_ranks(args)
    from xgram_dist.cluster.doctor.report import Context
    from xgram_dist.cluster.doctor.run import run_doctor
    from xgram_dist.cluster.preflight import check_in_from_environment, rank_facts
    from xgram_dist.parallel.device import choose_device, make_deterministic
    from xgram_dist.parallel.mesh import init_world

    make_deterministic(True)  # before the first use of cuBLAS, which reads its variable once
    make_deterministic(False)
    device = choose_device()
    nodes = check_in_from_environment(rank_facts(None))
    ranks = init_world(device, COLLECTIVE_SECONDS)
    seconds = args.seconds if args.seconds is not None else QUICK_SECONDS if args.quick else 120.0
    context = Context(
        ranks=ranks,
        nodes=nodes,
        device=device,
        folder=Path(args.folder),
        quick=args.quick,
        seconds=seconds,
        recipe=None if args.recipe is None else Path(args.recipe),
        overrides=args.overrides,
    )
    with close_ranks(args.command, ranks):
        healthy = run_doctor(context, Path(args.out))
    return 0 if healthy or not ranks.first else 1


COMMANDS = {"doctor": Command(EXAMPLES, add_arguments, run)}
