"""`xgram-dist train`."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from xgram_dist.cli.command import Command, close_ranks, launch_ranks, require_at_least, starts_ranks
from xgram_dist.errors import UserError

if TYPE_CHECKING:
    from xgram_dist.config import Config
    from xgram_dist.train.checkpointing import StartCheckpoint

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
    parser.add_argument("--from", dest="source", metavar="PATH", help="start from a checkpoint, or from a run's newest")
    parser.add_argument(
        "--weights-only",
        action="store_true",
        help="with --from: take the weights that match; start steps, optimizer and data anew",
    )
    parser.add_argument(
        "--accept-data-change",
        action="store_true",
        help="when resuming: read other data, weights or stages from here on; recorded in metrics.jsonl",
    )
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="start N ranks on this machine (default 1)")
    parser.add_argument(
        "--preflight",
        type=float,
        metavar="GB/S",
        help="first check that all ranks are present and agree, and that each link reaches this bandwidth",
    )


def run(args: argparse.Namespace) -> int:
    from xgram_dist.cluster.slurm.commands import set_rank_environment
    from xgram_dist.model.methods.base import check_files, load_recipe

    set_rank_environment()
    config = load_recipe(args.recipe, args.overrides)
    folder = Path(args.folder) if args.folder else Path("runs") / config.name
    if args.weights_only and args.source is None:
        raise UserError("--weights-only says what to take from --from PATH; name the checkpoint or run with --from")
    require_at_least(args, 1, "ranks")
    check_files(config)
    if starts_ranks(args):
        _check_once(args, config, folder)
        return launch_ranks(args)
    from xgram_dist.checkpoint.lease import hold
    from xgram_dist.parallel.device import choose_device
    from xgram_dist.parallel.mesh import init_world
    from xgram_dist.train.trainer import Trainer

    device = choose_device()
    if args.preflight is None:
        ranks = init_world(device, config.train.collective_timeout)
    else:
        from xgram_dist.cluster.preflight import join_with_preflight

        ranks = join_with_preflight(config, device, args.preflight)
    with close_ranks(args.command, ranks) as held:
        lease = held.enter_context(hold(folder)) if ranks.first else None
        try:
            start = _start_checkpoint(args, folder)
            return Trainer(config, folder, args.fresh, ranks, lease, start, args.accept_data_change).run()
        except (RuntimeError, MemoryError) as error:
            from xgram_dist.train.memory import explain_out_of_memory, is_out_of_memory

            if not is_out_of_memory(error):
                raise
            raise explain_out_of_memory(config, ranks.size, error) from error


def _check_once(args: argparse.Namespace, config: "Config", folder: Path) -> None:
    """Refuse before any rank starts what one process can see, so that it is reported once."""
    from xgram_dist.checkpoint.lease import check_free
    from xgram_dist.config.validate import accumulation, check_degrees
    from xgram_dist.train.run_dir import check_run_folder

    check_degrees(config, args.ranks)
    accumulation(config, args.ranks // config.parallel.tensor)
    check_free(folder)
    check_run_folder(folder, config, args.fresh)
    _start_checkpoint(args, folder)


def _start_checkpoint(args: argparse.Namespace, folder: Path) -> "StartCheckpoint | None":
    from xgram_dist.train.checkpointing import StartCheckpoint

    if args.source is None:
        return None
    return StartCheckpoint.find(Path(args.source), folder, weights_only=args.weights_only, fresh=args.fresh)


COMMANDS = {"train": Command(EXAMPLES, add_arguments, run)}
