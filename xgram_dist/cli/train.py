"""`xgram-dist train`."""

import argparse
import os
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from xgram_dist.train.start import Source

EXAMPLES = """
  xgram-dist train recipes/tiny/xgram.yaml
  xgram-dist train recipes/tiny/xgram.yaml --ranks 2
  xgram-dist train recipes/tiny/xgram.yaml train.steps=100 memory.compression=1 --folder runs/no-hash
  xgram-dist train recipes/tiny/xgram.yaml --from runs/tiny-vanilla --weights-only --folder runs/warm
  torchrun --nproc-per-node 2 -m xgram_dist train recipes/tiny/xgram.yaml
  srun --nodes 2 --ntasks-per-node 8 xgram-dist train recipes/0.73b/xgram-2x-50.yaml --preflight 50
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help="YAML file; docs/configuration.md lists its keys")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="change keys of the recipe")
    parser.add_argument("--folder", metavar="DIR", help="run folder (default: runs/NAME)")
    parser.add_argument("--fresh", action="store_true", help="start over in a folder that already holds a run")
    parser.add_argument("--from", dest="source", metavar="PATH", help="start from a checkpoint, or a run's newest one")
    parser.add_argument("--weights-only", action="store_true", help="of --from: the weights that fit; all else anew")
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="start N ranks on this machine (default 1)")
    parser.add_argument(
        "--preflight",
        type=float,
        metavar="GB/S",
        help="first see that all ranks are there and agree, and hold the links against so many GB/s a rank",
    )


def run(args: argparse.Namespace) -> int:
    from xgram_dist.config import load_config
    from xgram_dist.config.check import accumulation, check_files
    from xgram_dist.errors import UserError
    from xgram_dist.slurm.environment import adopt

    adopt()
    config = load_config(args.recipe, args.overrides)
    folder = Path(args.folder) if args.folder else Path("runs") / config.name
    if args.weights_only and args.source is None:
        raise UserError("--weights-only says what to take of --from PATH; name the checkpoint or run with --from")
    if args.ranks < 1:
        raise UserError(f"--ranks {args.ranks} is not at least 1")
    check_files(config)
    if args.ranks > 1 and "RANK" not in os.environ:
        from xgram_dist.checkpoint.lease import check_free
        from xgram_dist.parallel.degrees import check_degrees
        from xgram_dist.parallel.launch import launch
        from xgram_dist.train.folder import check_run_folder

        # What a single look can refuse is refused once, before any rank starts.
        check_degrees(config, args.ranks)
        accumulation(config, args.ranks // config.parallel.tensor)
        check_free(folder)
        check_run_folder(folder, config, args.fresh)
        _source(args, folder)
        options = ["--folder", str(folder), *(["--fresh"] if args.fresh else [])]
        options += ["--preflight", str(args.preflight)] if args.preflight is not None else []
        options += [] if args.source is None else ["--from", args.source]
        options += ["--weights-only"] if args.weights_only else []
        return launch(["train", args.recipe, *args.overrides, *options], args.ranks)
    from xgram_dist.checkpoint.lease import hold
    from xgram_dist.parallel.device import choose_device
    from xgram_dist.parallel.ranks import join_ranks
    from xgram_dist.train.loop import Trainer

    device = choose_device()
    if args.preflight is None:
        ranks = join_ranks(device, config.train.collective_timeout)
    else:
        from xgram_dist.preflight.preflight import join_checked

        ranks = join_checked(config, device, args.preflight)
    try:
        with hold(folder) if ranks.first else nullcontext() as lease:
            return Trainer(config, folder, args.fresh, ranks, lease, _source(args, folder)).run()
    except (RuntimeError, MemoryError) as error:
        from xgram_dist.train.out_of_memory import explained, is_out_of_memory

        if not is_out_of_memory(error):
            raise
        raise explained(config, ranks.size, error) from error
    finally:
        ranks.close()


def _source(args: argparse.Namespace, folder: Path) -> "Source | None":
    from xgram_dist.train.start import Source

    if args.source is None:
        return None
    return Source.find(Path(args.source), folder, weights_only=args.weights_only, fresh=args.fresh)
