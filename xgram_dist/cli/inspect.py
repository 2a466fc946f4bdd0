"""`xgram-dist inspect`, `checkpoint pack`: what a checkpoint holds, whether it is undamaged, and a copy of it.

Imports no torch.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from xgram_dist.cli.command import Command

EXAMPLES = """
  xgram-dist inspect runs/tiny-xgram
  xgram-dist inspect runs/tiny-xgram/checkpoints/step-00000180 --verify
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="a checkpoint, or a run: then all of its checkpoints, newest last")
    parser.add_argument("--verify", action="store_true", help="read everything against its checksums")
    parser.add_argument("--json", action="store_true", help="print as JSON")


def run(args: argparse.Namespace) -> int:
    from xgram_dist.checkpoint.folder import checkpoints_at
    from xgram_dist.checkpoint.inspect import describe
    from xgram_dist.checkpoint.manifest import Manifest
    from xgram_dist.checkpoint.safetensors_io import DamagedFileError

    manifests: dict[Path, Manifest] = {}
    descriptions: dict[Path, dict[str, Any]] = {}
    damage: dict[Path, list[str]] = {}
    for folder in checkpoints_at(Path(args.path)):
        try:
            manifest = Manifest.read(folder)
            descriptions[folder] = describe(folder, manifest)
            manifests[folder] = manifest
        except DamagedFileError as error:
            damage[folder] = [str(error)]
    if args.verify:
        damage |= _verify(manifests)
    folders = sorted([*manifests, *(folder for folder in damage if folder not in manifests)])
    if args.json:
        trees = [
            {**descriptions.get(folder, {"checkpoint": str(folder)}), "damaged": damage.get(folder, [])}
            for folder in folders
        ]
        print(json.dumps(trees[0] if folders == [Path(args.path)] else trees, indent=2))
    else:
        _print(folders, descriptions, damage, args.verify)
    for sentences in damage.values():
        for sentence in sentences:
            print(f"xgram-dist inspect: {sentence}", file=sys.stderr)
    return 1 if damage else 0


def _verify(manifests: dict[Path, Any]) -> dict[Path, list[str]]:
    """A sentence for every damage, by checkpoint; undamaged ones are left out."""
    from xgram_dist.checkpoint.inspect import find_damage
    from xgram_dist.console import Progress

    total = sum(manifest.nbytes(name) for manifest in manifests.values() for name in manifest.tensors)
    damage = {}
    with Progress(total / 1e6, "MB", "verifying") as progress:
        for folder, manifest in manifests.items():
            sentences = list(find_damage(folder, manifest, lambda nbytes: progress.update(nbytes / 1e6)))
            if sentences:
                damage[folder] = sentences
    return damage


def _print(folders: list[Path], descriptions: dict[Path, Any], damage: dict[Path, list[str]], verified: bool) -> None:
    """A line for each checkpoint, then the newest one in full."""
    from xgram_dist.console import print_table

    if len(folders) > 1:
        rows = []
        for folder in folders:
            state = "damaged" if folder in damage else "whole" if verified else "complete"
            one = descriptions.get(folder)
            cells = ["-"] * 4 if one is None else [_loss(one), one["saved"], str(one["ranks"]), _size(one["bytes"])]
            rows.append([folder.name, *cells, state])
        print_table(["checkpoint", "loss", "saved", "ranks", "size", ""], rows, left=(0, 5))
        print()
    if not descriptions:
        return
    newest = max(descriptions)
    for name, text in _lines(descriptions[newest]):
        print(f"{name:<12} {text}".rstrip())
    print()
    rows = [
        [
            group["name"],
            f"{group['tensors']:,}",
            "-" if group["shape"] is None else " x ".join(f"{size:,}" for size in group["shape"]) or "1",
            f"{group['numbers']:,}",
            " ".join(group["dtypes"]),
            _size(group["bytes"]),
            str(group["files"]),
        ]
        for group in descriptions[newest]["parts"]
    ]
    print_table(["part", "tensors", "shape of each", "numbers", "type", "size", "files"], rows)
    if verified and newest not in damage:
        print("\nevery checksum matches")


def _lines(one: dict[str, Any]) -> list[tuple[str, str]]:
    """(heading, text) of a checkpoint's description."""
    by = ", ".join(f"{name} {version}" for name, version in one["written_by"].items())
    source = one["started_from"]
    lines = [
        ("checkpoint", one["checkpoint"]),
        ("run", f"{one['name']}, step {one['step']:,} of {one['steps']:,}, loss {_loss(one)}"),
        ("saved", f"{one['saved']} by {by}"),
        ("layout", f"{one['ranks']} rank(s), tensor degree {one['tensor']}, engine {one['engine']}{_stages(one)}"),
    ]
    if one["method"] != "vanilla" and one["table_optimizer"] is None:
        lines.append(("method", f"{one['method']}, whose tables are computed at export"))
    elif one["method"] != "vanilla":
        text = f"{one['method']}, compression {one['compression']}, optimizer {one['table_optimizer']}"
        lines.append(("tables", text + (f", routing {one['routing'][:12]}" if one["routing"] else "")))
    lines.append(
        ("data", f"{one['position']:,} sequences of {one['data'][:12]}, tokenizer {(one['tokenizer'] or MISSING)[:12]}")
    )
    if source is not None:
        what = "the weights" if source["weights_only"] else "the state"
        lines.append(("started from", f"{what} of {source['checkpoint']} ({source['name']}, step {source['step']:,})"))
    tensors = [name for name in one["files"] if name.endswith(".safetensors")]
    others = [name for name in one["files"] if name not in tensors]
    beside = f", {', '.join(others)}" if others else ""
    lines.append(("size", f"{_size(one['bytes'])} in {len(tensors)} tensor file(s){beside}"))
    return lines


MISSING = "unknown"


def _loss(one: dict[str, Any]) -> str:
    return "-" if one["loss"] is None else f"{one['loss']:.4f}"


def _size(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count:,} bytes"


PACK_EXAMPLES = """
  xgram-dist checkpoint pack runs/tiny-xgram --out tiny-xgram-180
"""


def add_pack_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=["pack"], help="pack: copy it, and read the copy against its checksums")
    parser.add_argument("path", metavar="PATH", help="a checkpoint, or a run: then its newest checkpoint")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder to write; must not exist")


def run_pack(args: argparse.Namespace) -> int:
    from xgram_dist.checkpoint.chain import pack
    from xgram_dist.checkpoint.folder import checkpoints_at
    from xgram_dist.checkpoint.manifest import Manifest
    from xgram_dist.console import Progress

    checkpoint = checkpoints_at(Path(args.path))[-1]
    size = sum(Manifest.read(checkpoint).files.values())
    with Progress(2 * size / 1e6, "MB", "copying and verifying") as progress:
        manifest = pack(checkpoint, Path(args.out), lambda count: progress.update(count / 1e6))
    print(f"step {manifest.run['step']:,} in '{args.out}': {len(manifest.files)} files, {_size(size)}")
    return 0


COMMANDS = {
    "inspect": Command(EXAMPLES, add_arguments, run),
    "checkpoint": Command(PACK_EXAMPLES, add_pack_arguments, run_pack),
}


def _stages(one: dict[str, Any]) -> str:
    """Of a pipeline."""
    return f", {len(one['stages'])} stages" if one["stages"] else ""
