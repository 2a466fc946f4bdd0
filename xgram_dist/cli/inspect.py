"""`xgram-dist inspect`."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

EXAMPLES = """
  xgram-dist inspect runs/tiny-xgram
  xgram-dist inspect runs/tiny-xgram/checkpoints/step-00000180 --verify
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="a checkpoint, or a run: then all of its checkpoints, newest last")
    parser.add_argument("--verify", action="store_true", help="read everything against its checksums")
    parser.add_argument("--json", action="store_true", help="print as JSON")


def run(args: argparse.Namespace) -> int:
    from xgram_dist.checkpoint.contents import describe
    from xgram_dist.checkpoint.folder import checkpoints_at
    from xgram_dist.checkpoint.manifest import Manifest
    from xgram_dist.checkpoint.raw import DamagedFileError

    whole: dict[Path, Manifest] = {}
    faults: dict[Path, list[str]] = {}
    for folder in checkpoints_at(Path(args.path)):
        try:
            whole[folder] = Manifest.read(folder)
        except DamagedFileError as error:
            faults[folder] = [str(error)]
    if args.verify:
        faults |= _verify(whole)
    found = sorted([*whole, *(folder for folder in faults if folder not in whole)])
    about = {folder: describe(folder, manifest) for folder, manifest in whole.items()}
    if args.json:
        tree = [
            {**about.get(folder, {"checkpoint": str(folder)}), "damaged": faults.get(folder, [])} for folder in found
        ]
        print(json.dumps(tree[0] if found == [Path(args.path)] else tree, indent=2))
    else:
        _print(found, about, faults, args.verify)
    for sentences in faults.values():
        for sentence in sentences:
            print(f"xgram-dist inspect: {sentence}", file=sys.stderr)
    return 1 if faults else 0


def _verify(whole: dict[Path, Any]) -> dict[Path, list[str]]:
    from xgram_dist.checkpoint.contents import damages
    from xgram_dist.progress import Progress

    total = sum(manifest.bytes_of(name) for manifest in whole.values() for name in manifest.tensors)
    faults = {}
    with Progress(total / 1e6, "MB", "verifying") as progress:
        for folder, manifest in whole.items():
            sentences = list(damages(folder, manifest, lambda count: progress.update(count / 1e6)))
            if sentences:
                faults[folder] = sentences
    return faults


def _print(found: list[Path], about: dict[Path, Any], faults: dict[Path, list[str]], verified: bool) -> None:
    from xgram_dist.progress import table

    if len(found) > 1:
        rows = []
        for folder in found:
            state = "damaged" if folder in faults else "whole" if verified else "complete"
            one = about.get(folder)
            known = [] if one is None else [_loss(one), one["saved"], str(one["ranks"]), _size(one["bytes"])]
            rows.append([folder.name, *(known or ["-"] * 4), state])
        table(["checkpoint", "loss", "saved", "ranks", "size", ""], rows, left=(0, 5))
        print()
    if not about:
        return
    one = about[max(about)]
    for name, text in _lines(one):
        print(f"{name:<12} {text}".rstrip())
    print()
    rows = [
        [
            part["name"],
            f"{part['tensors']:,}",
            "-" if part["shape"] is None else " x ".join(f"{size:,}" for size in part["shape"]) or "1",
            f"{part['numbers']:,}",
            " ".join(part["dtypes"]),
            _size(part["bytes"]),
            str(part["files"]),
        ]
        for part in one["parts"]
    ]
    table(["part", "tensors", "shape of each", "numbers", "type", "size", "files"], rows)
    if verified and max(about) not in faults:
        print("\nevery checksum matches")


def _lines(one: dict[str, Any]) -> list[tuple[str, str]]:
    by = ", ".join(f"{name} {version}" for name, version in one["written_by"].items())
    source = one["started_from"]
    lines = [
        ("checkpoint", one["checkpoint"]),
        ("run", f"{one['name']}, step {one['step']:,} of {one['steps']:,}, loss {_loss(one)}"),
        ("saved", f"{one['saved']} by {by}"),
        ("layout", f"{one['ranks']} rank(s), tensor degree {one['tensor']}, engine {one['engine']}"),
    ]
    if one["method"] != "vanilla" and one["table_optimizer"] is None:
        lines.append(("method", f"{one['method']}, whose tables are made at export"))
    elif one["method"] != "vanilla":
        text = f"{one['method']}, compression {one['compression']}, optimizer {one['table_optimizer']}"
        lines.append(("tables", text + (f", routing {one['routing'][:12]}" if one["routing"] else "")))
    lines.append(("data", f"{one['position']:,} sequences of {one['data'][:12]}, tokenizer {one['tokenizer'][:12]}"))
    if source is not None:
        what = "the weights" if source["weights_only"] else "the state"
        lines.append(("started from", f"{what} of {source['checkpoint']} ({source['name']}, step {source['step']:,})"))
    tensors = [name for name in one["files"] if name.endswith(".safetensors")]
    others = [name for name in one["files"] if name not in tensors]
    beside = f", {', '.join(others)}" if others else ""
    lines.append(("size", f"{_size(one['bytes'])} in {len(tensors)} tensor file(s){beside}"))
    return lines


def _loss(one: dict[str, Any]) -> str:
    return "-" if one["loss"] is None else f"{one['loss']:.4f}"


def _size(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count:,} bytes"
