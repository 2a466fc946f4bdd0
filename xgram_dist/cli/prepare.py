"""`xgram-dist prepare`: documents to a prepared data set, and its summary."""

import argparse
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xgram_dist.cli.command import Command
from xgram_dist.console import format_duration, print_table
from xgram_dist.errors import UserError

if TYPE_CHECKING:
    from xgram_dist.data.prepare import Outcome, Source

EXAMPLES = """
  xgram-dist prepare --train-bpe 4096 --out data/embedded
  xgram-dist prepare --source web=raw/web@0.7 --source code=raw/code@0.3 --tokenizer tokenizer.json --out data/mix
  xgram-dist prepare --mix olmo-mix-1124/data --tokenizer qwen3/tokenizer.json --workers 64 --out data/olmo-mix
  xgram-dist prepare --source web=raw/web --tokenizer qwen3/tokenizer.json --whole-documents 8192 --out data/web
  xgram-dist prepare --source web=raw/web --tokenizer qwen3/tokenizer.json --out s3://bucket/web
"""
CHUNK, VALIDATION = 40_960, 0.005
EMBEDDED_CHUNK, EMBEDDED_VALIDATION = 4_096, 0.05  # the embedded corpus is small


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--source",
        action="append",
        default=[],
        metavar="NAME=PATH[@WEIGHT]",
        help="a file or folder (recursive) and its weight in the mix; repeatable (default: the embedded corpus)",
    )
    parser.add_argument("--mix", metavar="DIR", help="each folder inside DIR is a source")
    parser.add_argument("--tokenizer", metavar="FILE", help="a tokenizers JSON or a sentencepiece .model")
    parser.add_argument(
        "--train-bpe", type=int, metavar="N", help="train a byte-level BPE of N tokens on the documents"
    )
    parser.add_argument(
        "--end-of-text", metavar="NAME", help="the end-of-text token (default: looked up by common names)"
    )
    parser.add_argument(
        "--tokenizer-engine",
        choices=["auto", "gigatoken", "huggingface"],
        default="auto",
        help="what runs a tokenizers JSON; auto: gigatoken where its ids equal Hugging Face's on a check at the start",
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="folder of the data set, or an address (s3://...)")
    parser.add_argument(
        "--work",
        metavar="DIR",
        help="with an address: folder to prepare in before the upload (default: a temporary one)",
    )
    parser.add_argument("--workers", type=int, metavar="N", help="worker processes (default: one per core)")
    parser.add_argument(
        "--chunk-tokens",
        type=int,
        metavar="N",
        help=f"tokens in a chunk (default {CHUNK}; {EMBEDDED_CHUNK} for the embedded corpus)",
    )
    parser.add_argument(
        "--whole-documents",
        type=int,
        metavar="T",
        help="pack whole documents into sequences of T tokens and pad them; T is the recipe's model.sequence_length "
        "(default: documents are joined and cut anywhere)",
    )
    parser.add_argument(
        "--validation",
        type=float,
        metavar="SHARE",
        help=f"share of documents held out (default {VALIDATION}; {EMBEDDED_VALIDATION} for the embedded corpus)",
    )
    parser.add_argument(
        "--max-rejected",
        type=float,
        default=0.01,
        metavar="SHARE",
        help="fail above this share of rejected lines (default 0.01)",
    )
    parser.add_argument("--corpus-bytes", type=int, metavar="N", help="size of the embedded corpus (default 12 MB)")
    parser.add_argument(
        "--part",
        metavar="K/N",
        help="do part K (from 0) of N only, for a job array; the same command without --part then merges",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace another data set in DIR")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")


def parse_source(text: str) -> "Source":
    """`NAME=PATH[@WEIGHT]`. A path that exists as it stands may contain an `@`."""
    from xgram_dist.data.prepare import Source

    name, equals, rest = text.partition("=")
    if not equals or not name or not rest:
        raise UserError(f"--source '{text}' is not of the form NAME=PATH or NAME=PATH@WEIGHT")
    path, at, weight = rest.rpartition("@")
    if at and not Path(rest).exists():
        try:
            value = float(weight)
        except ValueError:
            raise UserError(f"weight '{weight}' in --source '{text}' is not a number") from None
        if not math.isfinite(value) or value < 0:
            raise UserError(f"weight '{weight}' in --source '{text}' is not a number of at least 0")
        return Source(name, Path(path), value)
    return Source(name, Path(rest))


def parse_part(text: str) -> tuple[int, int]:
    part, slash, parts = text.partition("/")
    if not slash or not part.isdecimal() or not parts.isdecimal():
        raise UserError(f"--part '{text}' is not of the form K/N")
    return int(part), int(parts)


def find_sources(sources: list[str], mix: str | None) -> list["Source"]:
    from xgram_dist.data.prepare import Source

    if mix is None:
        return [parse_source(text) for text in sources]
    if sources:
        raise UserError("give --source or --mix, not both")
    if not Path(mix).is_dir():
        raise UserError(f"--mix '{mix}' is not a folder")
    folders = sorted(item for item in Path(mix).iterdir() if item.is_dir() and not item.name.startswith("."))
    if not folders:
        raise UserError(f"--mix '{mix}' holds no folder; each folder inside it is a source")
    return [Source(folder.name, folder) for folder in folders]


def run(args: argparse.Namespace) -> int:
    from xgram_dist.data.corpus import DEFAULT_BYTES
    from xgram_dist.data.prepare import Request, prepare, prepare_part
    from xgram_dist.data.storage import is_address
    from xgram_dist.data.workers import available_cores

    sources = find_sources(args.source, args.mix)
    chunk, validation = (CHUNK, VALIDATION) if sources else (EMBEDDED_CHUNK, EMBEDDED_VALIDATION)
    request = Request(
        out=Path(args.out),
        workers=available_cores() if args.workers is None else args.workers,
        sources=tuple(sources),
        tokenizer=None if args.tokenizer is None else Path(args.tokenizer),
        train_bpe=args.train_bpe,
        end_of_text=args.end_of_text,
        chunk_tokens=chunk if args.chunk_tokens is None else args.chunk_tokens,
        sequence_length=args.whole_documents,
        validation=validation if args.validation is None else args.validation,
        max_rejected=args.max_rejected,
        corpus_bytes=DEFAULT_BYTES if args.corpus_bytes is None else args.corpus_bytes,
        overwrite=args.overwrite,
        engine=args.tokenizer_engine,
    )
    if args.work is not None and not is_address(args.out):
        raise UserError(
            f"--work {args.work} is the folder to prepare in before an upload; --out {args.out} is no address"
        )
    if args.part is not None and is_address(args.out):
        raise UserError("--part needs a folder that all parts share as --out; upload the merged data set afterwards")
    if args.part is not None:
        part = prepare_part(request, *parse_part(args.part))
        print(
            json.dumps(asdict(part))
            if args.json
            else f"part {args.part}: {part.units:,} units done, {part.units_kept:,} of them by an earlier run; "
            f"{part.new_tokens:,} tokens in {format_duration(part.seconds)}"
        )
        return 0
    if is_address(args.out):
        from xgram_dist.data.upload import prepare_at

        outcome = prepare_at(request, args.out, None if args.work is None else Path(args.work))
    else:
        outcome = prepare(request)
    if args.json:
        print(json.dumps(summary(outcome, args.out), indent=1))
    else:
        print_summary(outcome, args.out)
    return 0


def summary(outcome: "Outcome", out: str) -> dict[str, Any]:
    from xgram_dist.data.manifest import SPLITS

    manifest = outcome.manifest
    rejected: dict[str, int] = {}
    for source in manifest.sources:
        for reason, count in source.rejected.items():
            rejected[reason] = rejected.get(reason, 0) + count
    return {
        "out": out,
        "already_there": outcome.already_there,
        "fingerprint": manifest.fingerprint,
        "vocabulary": manifest.vocabulary,
        "chunk_tokens": manifest.chunk_tokens,
        "documents": sum(source.documents for source in manifest.sources),
        "bytes": sum(source.bytes for source in manifest.sources),
        "train_tokens": sum(source.train.tokens for source in manifest.sources),
        "validation_tokens": sum(source.validation.tokens for source in manifest.sources),
        "padding": sum(source.split(split).padding for source in manifest.sources for split in SPLITS),
        "dropped_tokens": outcome.dropped_tokens,
        "rejected": rejected,
        "first_rejections": outcome.first_rejections,
        "engine": None if outcome.engine is None else asdict(outcome.engine),
        "worker_bytes": outcome.worker_bytes,
        "cpu_seconds": round(outcome.cpu_seconds, 3),
        "units": outcome.units,
        "units_kept": outcome.units_kept,
        "seconds": round(outcome.seconds, 3),
        "sources": [asdict(source) for source in manifest.sources],
    }


def print_summary(outcome: "Outcome", out: str) -> None:
    manifest = outcome.manifest
    rows = []
    for source in manifest.sources:
        rows.append(
            [
                source.name,
                "by size" if source.weight is None else f"{source.weight:g}",
                f"{source.documents:,}",
                f"{source.bytes / 1e6:,.1f}",
                f"{source.train.tokens:,}",
                f"{source.validation.tokens:,}",
                f"{sum(source.rejected.values()):,}",
            ]
        )
    totals = summary(outcome, out)
    if len(rows) > 1:
        rows.append(
            [
                "total",
                "",
                f"{totals['documents']:,}",
                f"{totals['bytes'] / 1e6:,.1f}",
                f"{totals['train_tokens']:,}",
                f"{totals['validation_tokens']:,}",
                f"{sum(totals['rejected'].values()):,}",
            ]
        )
    print_table(
        ["source", "weight", "documents", "MB of text", "train tokens", "validation tokens", "rejected lines"], rows
    )
    for reason, count in sorted(totals["rejected"].items(), key=lambda item: -item[1]):
        print(f"rejected, {reason}: {count:,}")
    for line in outcome.first_rejections:
        print(f"  {line}")
    for source in manifest.sources:
        for split in ("train", "validation"):
            info = source.split(split)
            if info.documents and not info.chunks:
                print(f"note: source '{source.name}' has less than one {split} chunk; lower --chunk-tokens to use it")
    if outcome.already_there:
        print(f"'{out}' already holds this data set; nothing was done")
        return
    kept = f", {outcome.units_kept:,} of {outcome.units:,} units kept from an earlier run" if outcome.units_kept else ""
    rate = outcome.new_tokens / max(outcome.seconds, 1e-9)
    print(
        f"vocabulary {manifest.vocabulary:,}, chunks of {manifest.chunk_tokens:,} tokens, "
        f"{outcome.dropped_tokens:,} tokens dropped; {format_duration(outcome.seconds)}, {rate:,.0f} tokens/s{kept}"
    )
    if manifest.sequence_length is not None:
        share = totals["padding"] / (totals["train_tokens"] + totals["validation_tokens"])
        print(
            f"whole documents in sequences of {manifest.sequence_length:,} tokens: {totals['padding']:,} tokens "
            f"({100 * share:.2f} %) are padding; train with model.label_masking=true"
        )
    print(f"written to {out}")


COMMANDS = {"prepare": Command(EXAMPLES, add_arguments, run)}
