"""`xgram-dist data`: what a data set holds, what a batch of a run contains, and whether all of it is undamaged."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xgram_dist.cli.command import Command
from xgram_dist.console import Progress, print_table
from xgram_dist.errors import UserError

if TYPE_CHECKING:
    from xgram_dist.config import Config
    from xgram_dist.data.dataset import PreparedData
    from xgram_dist.data.loader import Loader
    from xgram_dist.data.tokenizer import Tokenizer

EXAMPLES = """
  xgram-dist data data/mix                          sources, tokens, documents, lengths
  xgram-dist data data/mix --samples 3              and decoded samples
  xgram-dist data data/mix --verify                 every shard against its hash
  xgram-dist data s3://bucket/mix --cache /scratch/cache
  xgram-dist data runs/tiny-xgram --step 120        the documents that step 120 trained on
  xgram-dist data recipes/tiny/xgram.yaml --position 7680
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="DATA|RUN|RECIPE", help="a data set (folder or address), a run, or a recipe")
    parser.add_argument("--split", choices=["train", "validation"], default="train", help="(default train)")
    parser.add_argument("--samples", type=int, default=0, metavar="N", help="decode N samples of every source")
    parser.add_argument("--step", type=int, metavar="K", help="of a run or recipe: what the batch of step K contains")
    parser.add_argument("--position", type=int, metavar="P", help="the same for the batch that starts at position P")
    parser.add_argument("--verify", action="store_true", help="read every shard of both splits against its hash")
    parser.add_argument("--workers", type=int, metavar="N", help="threads of --verify (default: one per core)")
    parser.add_argument("--cache", metavar="DIR", help="folder for what is fetched from an address")
    parser.add_argument("--json", action="store_true", help="print as JSON")


def run(args: argparse.Namespace) -> int:
    if args.step is not None or args.position is not None:
        return _show_batch(args)
    if args.verify:
        return _verify(args)
    from xgram_dist.data.describe import decoded_samples, describe

    data = _open(args, args.split)
    figures = describe(data)
    figures["samples"] = list(decoded_samples(data, _tokenizer(data), args.samples)) if args.samples else []
    if args.json:
        print(json.dumps(figures, indent=1, ensure_ascii=False))
    else:
        _print_data(figures)
    return 0


def _open(args: argparse.Namespace, split: str) -> "PreparedData":
    """The data set that is named, or that of the run or recipe that is named."""
    from xgram_dist.data.dataset import PreparedData

    if "://" in args.path:
        return PreparedData.open(None, split, remote=args.path, cache=args.cache)
    config = _config(args.path)
    if config is not None:
        from xgram_dist.data.from_config import open_data

        return open_data(config, split, config.data.path, config.data.remote)
    return PreparedData.open(args.path, split, cache=args.cache)


def _config(path: str) -> "Config | None":
    """Of a run's folder or a recipe; None where the path is neither."""
    file = Path(path) / "config.yaml" if Path(path).is_dir() else Path(path)
    if not file.is_file() or file.suffix not in (".yaml", ".yml"):
        return None
    from xgram_dist.config import load_config

    return load_config(file)


def _tokenizer(data: "PreparedData") -> "Tokenizer":
    from xgram_dist.data.tokenizer import load_tokenizer

    files = data.tokenizer_files()
    if not files:
        raise UserError(f"the tokenizer of '{data.folder}' could not be fetched; text cannot be decoded")
    return load_tokenizer(files[0], data.manifest.end_of_text_name)


def _show_batch(args: argparse.Namespace) -> int:
    from xgram_dist.data.describe import batch_contents
    from xgram_dist.data.from_config import build_loader, open_training_data

    if args.step is not None and args.position is not None:
        raise UserError("give --step or --position, not both")
    config = _config(args.path)
    if config is None:
        raise UserError(f"--step and --position need a run or a recipe; '{args.path}' is neither")
    data = open_training_data(config)
    with build_loader(config, data) as loader:
        _restore_changes(loader, Path(args.path))
        if args.step is not None and args.step < 1:
            raise UserError(f"--step {args.step} is not at least 1")
        position = args.position if args.step is None else loader.position_of_step(args.step)
        contents = batch_contents(loader, position, _tokenizer(data))
    if args.json:
        print(json.dumps(contents, indent=1, ensure_ascii=False))
        return 0
    print(f"position {position:,}, {len(contents['sequences']):,} sequences of {contents['sequence_length']:,} tokens")
    for number, sequence in enumerate(contents["sequences"]):
        place = f"chunk {sequence['chunk']:,}, sequence {sequence['sequence']}, {sequence['shard']}"
        print(f"\n{number}: {sequence['source']}, {place}")
        for document in sequence["documents"]:
            print(f"  {document['first_token']:>6} +{document['tokens']:<6} {_line(document['text'])}")
    return 0


def _restore_changes(loader: "Loader", run: Path) -> None:
    """The stages of a run whose data was changed on the way are in its checkpoints."""
    from xgram_dist.checkpoint.folder import FOLDER, checkpoints_at
    from xgram_dist.checkpoint.manifest import Manifest

    if (run / FOLDER).is_dir():
        folders = checkpoints_at(run)
        if folders:
            loader.load_state_dict(Manifest.read(folders[-1]).run["loader"])


def _verify(args: argparse.Namespace) -> int:
    from xgram_dist.data.describe import find_damage
    from xgram_dist.data.workers import available_cores

    if args.workers is not None and args.workers < 1:
        raise UserError(f"--workers {args.workers} is not at least 1")
    splits = [_open(args, split) for split in ("train", "validation")]
    total = sum(data.packed_bytes for data in splits)
    damage: list[str] = []
    with Progress(total / 1e6, "MB", "verifying") as progress:
        for data in splits:
            damage += find_damage(data, args.workers or available_cores(), lambda size: progress.update(size / 1e6))
    shards = sum(len(chunks) for data in splits for chunks in data.shard_chunks)
    if args.json:
        print(json.dumps({"shards": shards, "bytes": total, "damaged": sorted(damage)}, indent=1))
    else:
        print(f"{shards:,} shards, {total / 1e6:,.1f} MB: {len(damage) or 'none'} damaged")
    for sentence in sorted(damage):
        print(f"xgram-dist data: {sentence}", file=sys.stderr)
    return 1 if damage else 0


def _print_data(figures: dict[str, Any]) -> None:
    rows = []
    for source in figures["sources"]:
        quantiles = source["length_quantiles"]
        rows.append(
            [
                source["name"],
                "by size" if source["weight"] is None else f"{source['weight']:g}",
                f"{source['documents']:,}",
                f"{source['tokens']:,}",
                f"{source['shards']:,}",
                "" if source["tokens_per_document"] is None else f"{source['tokens_per_document']:,}",
                " / ".join(f"{value:,}" for value in quantiles.values()),
                f"{sum(source['rejected'].values()):,}",
            ]
        )
    heads = ["source", "weight", "documents", "tokens", "shards", "tokens/document", "10/50/90/99 %", "rejected lines"]
    print_table(heads, rows)
    packing = ""
    if figures["sequence_length"] is not None:
        padding, tokens = (sum(source[key] for source in figures["sources"]) for key in ("padding", "tokens"))
        share = 100 * padding / max(1, tokens)
        packing = f", whole documents in {figures['sequence_length']:,} ({share:.2f} % padding)"
    print(
        f"{figures['split']} split of {figures['data']}: vocabulary {figures['vocabulary']:,}, chunks of "
        f"{figures['chunk_tokens']:,} tokens{packing}, fingerprint {figures['fingerprint'][:12]}"
    )
    for sample in figures["samples"]:
        print(f"{sample['source']}, chunk {sample['chunk']:,}: {_line(sample['text'])}")


def _line(text: str) -> str:
    """One line of a terminal's width."""
    line = text.encode("unicode_escape").decode("ascii") if not text.isprintable() else text
    return line if len(line) <= 150 else line[:149] + "…"


COMMANDS = {"data": Command(EXAMPLES, add_arguments, run)}
