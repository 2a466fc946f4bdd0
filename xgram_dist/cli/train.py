"""`xgram-dist train`."""

import argparse
import gc
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from xgram_dist.cli.command import Command, close_ranks, launch_ranks, report_error, require_at_least, starts_ranks
from xgram_dist.errors import GO_BACK, UserError, is_out_of_memory

if TYPE_CHECKING:
    from xgram_dist.config import Config
    from xgram_dist.train.checkpointing import StartCheckpoint, StartFromHf
    from xgram_dist.train.starts import StartClock

EXAMPLES = """
  xgram-dist train recipes/tiny/xgram.yaml
  xgram-dist train recipes/tiny/xgram.yaml --ranks 2 --restarts 3
  xgram-dist train recipes/tiny/xgram.yaml train.steps=100 memory.compression=1 --folder runs/no-hash
  xgram-dist train recipes/tiny/xgram.yaml --from runs/tiny-vanilla --weights-only --folder runs/warm
  xgram-dist train recipes/adapt/xgram.yaml --from-hf Qwen3-0.6B train.freeze_backbone=true --ranks 2
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
        "--from-hf",
        metavar="DIR",
        help="start the backbone from a Hugging Face folder (Llama, Qwen3, OLMo-2), which sets the keys of model",
    )
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
        "--restarts",
        type=int,
        default=0,
        metavar="N",
        help="with --ranks: start the ranks again when one is lost, at most N times (default 0)",
    )
    parser.add_argument(
        "--preflight",
        type=float,
        metavar="GB/S",
        help="first check that all ranks are present and agree, and that each link reaches this bandwidth",
    )


def run(args: argparse.Namespace) -> int:
    from xgram_dist.model.methods.base import check_files, load_recipe
    from xgram_dist.train.loggers import check_installed
    from xgram_dist.train.starts import StartClock

    clock = StartClock()
    clock.mark("python")
    config = load_recipe(args.recipe, [*_overrides_of_hf(args), *args.overrides])
    folder = Path(args.folder) if args.folder else Path("runs") / config.name
    if args.weights_only and args.source is None:
        raise UserError("--weights-only says what to take from --from PATH; name the checkpoint or run with --from")
    require_at_least(args, 1, "ranks")
    require_at_least(args, 0, "restarts")
    if args.restarts and args.ranks == 1:
        raise UserError(f"--restarts {args.restarts} is for ranks that this command starts; add --ranks N")
    check_files(config)
    check_installed(config)
    if starts_ranks(args):
        _check_once(args, config, folder)
        return _launch_with_restarts(args) if args.restarts else launch_ranks(args)
    return _run_rank(args, config, folder, clock)


def _run_rank(args: argparse.Namespace, config: "Config", folder: Path, clock: "StartClock") -> int:
    """A run in this process alone goes back to its last checkpoint when it lost state; ranks are started again by those
    who started them."""
    from xgram_dist.parallel.launch import MOST_RETURNS
    from xgram_dist.train.starts import StartClock

    for returned in range(MOST_RETURNS):
        try:
            return _train(args, config, folder, clock)
        except UserError as error:
            if error.exit_code != GO_BACK:
                raise
            report_error(args.command, error)
        print(f"going back to the last checkpoint, {returned + 1} of {MOST_RETURNS} times", file=sys.stderr, flush=True)
        gc.collect()  # of the run that has ended
        args.fresh, clock = False, StartClock(time.time())
    return _train(args, config, folder, clock)


def _train(args: argparse.Namespace, config: "Config", folder: Path, clock: "StartClock") -> int:
    _start_faster(config, folder, fresh=args.fresh)
    from xgram_dist.checkpoint.lease import hold
    from xgram_dist.parallel.device import choose_device
    from xgram_dist.parallel.mesh import init_world
    from xgram_dist.train.trainer import train_run

    device = choose_device()
    clock.mark("import")
    if args.preflight is None:
        ranks = init_world(device, config.train.collective_timeout)
    else:
        from xgram_dist.cluster.preflight import join_with_preflight

        ranks = join_with_preflight(config, device, args.preflight, folder)
    clock.mark("rendezvous")
    with close_ranks(args.command, ranks) as held:
        lease = held.enter_context(hold(folder)) if ranks.first else None
        try:
            start = _start_checkpoint(args, folder)
            options = {"start_from": start, "accept_data_change": args.accept_data_change, "clock": clock}
            return train_run(config, folder, args.fresh, ranks=ranks, lease=lease, **options)
        except (RuntimeError, MemoryError) as error:
            from xgram_dist.train.memory import explain_out_of_memory

            if not is_out_of_memory(error):
                raise
            raise explain_out_of_memory(config, ranks.size, error) from error


def _start_faster(config: "Config", folder: Path, *, fresh: bool) -> None:
    from xgram_dist.checkpoint.folder import read_ahead
    from xgram_dist.environment import read_place
    from xgram_dist.train.compile_cache import keep_compiled

    if not fresh:
        read_ahead(folder, read_place().rank)
    if config.train.compile:
        keep_compiled(folder)


def _launch_with_restarts(args: argparse.Namespace) -> int:
    """Everything is imported once, here, and ranks are forks: they start again without importing anything."""
    import torch._inductor.compile_fx  # noqa: F401

    import xgram_dist.train.trainer  # noqa: F401
    from xgram_dist.parallel.launch import launch

    def run_rank(starts_before: int) -> int:
        args.fresh = args.fresh and not starts_before  # a second start resumes
        try:
            return run(args)
        except BaseException as error:
            return report_error(args.command, error)

    return launch(args.command_line, args.ranks, run_rank, args.restarts)


def _check_once(args: argparse.Namespace, config: "Config", folder: Path) -> None:
    """Refuse before any rank starts what one process can see, so that it is reported once."""
    from xgram_dist.checkpoint.lease import check_free
    from xgram_dist.config.validate import accumulation, check_degrees, data_ranks
    from xgram_dist.train.run_dir import check_run_folder

    check_degrees(config, args.ranks)
    accumulation(config, data_ranks(config, args.ranks))
    check_free(folder)
    check_run_folder(folder, config, args.fresh)
    _start_checkpoint(args, folder)


def _overrides_of_hf(args: argparse.Namespace) -> list[str]:
    """Keys of `model`, as the folder's configuration says. The command line comes after them."""
    if args.from_hf is None:
        return []
    if args.source is not None:
        raise UserError("--from and --from-hf both say what the run starts from; give one of them")
    from xgram_dist.checkpoint.from_hf import model_keys

    return [f"model.{key}={json.dumps(value)}" for key, value in model_keys(Path(args.from_hf)).items()]


def _start_checkpoint(args: argparse.Namespace, folder: Path) -> "StartCheckpoint | StartFromHf | None":
    from xgram_dist.train.checkpointing import StartCheckpoint, StartFromHf

    if args.from_hf is not None:
        return StartFromHf(Path(args.from_hf))
    if args.source is None:
        return None
    return StartCheckpoint.find(Path(args.source), folder, weights_only=args.weights_only, fresh=args.fresh)


COMMANDS = {"train": Command(EXAMPLES, add_arguments, run)}
