"""`xgram-dist train`."""

import argparse
from pathlib import Path

EXAMPLES = """
  xgram-dist train recipes/tiny/xgram.yaml
  xgram-dist train recipes/tiny/xgram.yaml train.steps=100 memory.compression=1 --run runs/no-hash
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help="YAML file; docs/configuration.md lists its keys")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="change keys of the recipe")
    parser.add_argument("--run", metavar="DIR", help="run folder (default: runs/NAME)")
    parser.add_argument("--fresh", action="store_true", help="start over in a folder that already holds a run")


def run(args: argparse.Namespace) -> int:
    from xgram_dist.config import load_config

    config = load_config(args.recipe, args.overrides)
    from xgram_dist.train.loop import Trainer

    folder = Path(args.run) if args.run else Path("runs") / config.name
    return Trainer(config, folder, args.fresh).run()
