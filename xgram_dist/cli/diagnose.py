"""`xgram-dist diagnose`."""

import argparse
import os
from pathlib import Path
from typing import Any

EXAMPLES = """
  xgram-dist diagnose runs/tiny-xgram
  xgram-dist diagnose runs/tiny-xgram --data data/demo --ranks 2 --json
  xgram-dist diagnose runs/tiny-xgram --beside runs/tiny-vanilla --out figures
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", help="checkpoint folder, or a run folder (its newest)")
    parser.add_argument("--data", metavar="DIR", help="folder of `xgram-dist prepare` (default: the run's)")
    parser.add_argument("--split", choices=["train", "validation"], default="validation", help="(default validation)")
    parser.add_argument("--sequences", type=int, default=64, help="how many to look at (default 64)")
    parser.add_argument("--batch", type=int, default=8, help="sequences of a forward pass (default 8)")
    parser.add_argument(
        "--updates", default="1,10,100,1000", metavar="N,...", help="rows with more than N updates (1,10,100,1000)"
    )
    parser.add_argument("--dtype", choices=["fp32", "bf16"], help="of the computation (default: the run's)")
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="start N ranks on this machine (default 1)")
    parser.add_argument(
        "--beside", nargs="+", default=[], metavar="RUN", help="draw the figures of other runs, once diagnosed, too"
    )
    parser.add_argument("--out", metavar="DIR", help="figures and pictures (default: RUN/diagnose/STEP)")
    parser.add_argument("--no-pictures", action="store_true", help="figures alone")
    parser.add_argument("--json", action="store_true", help="print as JSON")


def run(args: argparse.Namespace) -> int:
    from xgram_dist.errors import UserError

    for option in ("sequences", "batch", "ranks"):
        if getattr(args, option) < 1:
            raise UserError(f"--{option} {getattr(args, option)} is not at least 1")
    thresholds = _thresholds(args.updates)
    from xgram_dist.diagnose.files import read_figures

    beside = [read_figures(Path(path)) for path in args.beside]
    data = _data(args)  # refused before anything is started
    if args.ranks > 1 and "RANK" not in os.environ:
        from xgram_dist.parallel.launch import launch

        return launch(_again(args), args.ranks)
    from xgram_dist.parallel.device import choose_device
    from xgram_dist.parallel.ranks import join_ranks

    device = choose_device()
    ranks = join_ranks(device)
    try:
        from xgram_dist.diagnose.measure import measure
        from xgram_dist.diagnose.open import open_checkpoint

        opened = open_checkpoint(Path(args.checkpoint), ranks, device, data.manifest.end_of_text, args.dtype)
        try:
            tree = measure(opened, data, args.sequences, args.batch, thresholds)
        finally:
            opened.lookup.close()
        return _show(args, tree, opened.saved.folder, beside) if ranks.first else 0
    finally:
        ranks.close()


def _data(args: argparse.Namespace) -> Any:
    """The prepared data, made with the checkpoint's tokenizer."""
    from xgram_dist.checkpoint.folder import checkpoints_at
    from xgram_dist.checkpoint.manifest import Manifest
    from xgram_dist.config import parse_config
    from xgram_dist.data.dataset import PreparedData
    from xgram_dist.errors import UserError

    facts = Manifest.read(checkpoints_at(Path(args.checkpoint))[-1]).run
    settings = parse_config(facts["config"]).data
    remote = settings.remote if args.data is None else None
    folder = args.data if args.data is not None else settings.path
    if folder is not None and not Path(folder).exists():
        raise UserError(f"the data '{folder}' does not exist; give the folder of `xgram-dist prepare` with --data DIR")
    data = PreparedData.open(folder, args.split, remote=remote, cache=settings.cache)
    theirs, ours = data.manifest.tokenizer_sha256, (facts["tokenizer"] or {}).get("sha256")
    if ours is not None and theirs != ours:
        raise UserError(
            f"'{folder}' was made with another tokenizer (sha256 {theirs[:12]}) than the checkpoint was trained with "
            f"({ours[:12]}); prepare the documents with the checkpoint's"
        )
    return data


def _thresholds(text: str) -> list[int]:
    from xgram_dist.errors import UserError

    found = [word.strip() for word in text.split(",")]
    if not all(word.isdigit() for word in found):
        raise UserError(f"--updates {text} is not a list of whole numbers such as 1,10,100")
    return sorted({int(word) for word in found})


def _show(args: argparse.Namespace, tree: dict[str, Any], checkpoint: Path, beside: list[dict[str, Any]]) -> int:
    import json
    import sys

    from xgram_dist.diagnose.files import default_folder, write_figures
    from xgram_dist.diagnose.text import lines_of
    from xgram_dist.progress import table

    folder = Path(args.out) if args.out else default_folder(checkpoint)
    file = write_figures(tree, folder)
    pictures = []
    if not args.no_pictures:
        from xgram_dist.diagnose.pictures import draw

        pictures = draw([tree, *beside], folder)
    where = f"figures: {file}" + (f"; pictures: {', '.join(one.name for one in pictures)}" if pictures else "")
    if args.json:
        print(json.dumps(tree, indent=1))
        print(where, file=sys.stderr)
        return 0
    rows = [[line.name, str(line)] for line in lines_of(tree)]
    table([f"{tree['run']} at step {tree['step']:,}, {tree['positions']:,} positions", ""], rows, left=(0, 1))
    print(where)
    return 0


def _again(args: argparse.Namespace) -> list[str]:
    """The same command, for the ranks."""
    words = ["diagnose", args.checkpoint, "--split", args.split, "--updates", args.updates]
    words += ["--sequences", str(args.sequences), "--batch", str(args.batch)]
    for option in ("data", "dtype", "out"):
        value = getattr(args, option)
        words += [f"--{option}", value] if value is not None else []
    words += ["--no-pictures"] if args.no_pictures else []
    words += ["--json"] if args.json else []
    return words + (["--beside", *args.beside] if args.beside else [])
