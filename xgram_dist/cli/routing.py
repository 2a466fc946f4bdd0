"""`xgram-dist frequencies`, `route`: token counts, and the routing of tokens to table rows built from them."""

import argparse
import json
import time
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xgram_dist.cli.command import Command
from xgram_dist.console import print_table
from xgram_dist.errors import UserError

if TYPE_CHECKING:
    from xgram_dist.tables.routing import Routing
    from xgram_dist.tables.routing_statistics import RegionStatistics, RoutingStatistics

FREQUENCIES_EXAMPLES = """
  xgram-dist frequencies data/embedded --out frequencies.npz
  xgram-dist frequencies data/olmo-mix --vocabulary 151936 --out qwen3-olmo-mix.npz --json
"""
ROUTE_EXAMPLES = """
  xgram-dist route --frequencies frequencies.npz --vocabulary 151936 --compression 0.5 --views 2 --out routing.npz
  xgram-dist route --frequencies frequencies.npz --compression 1 --json
  xgram-dist route --import xgram_token_map.npz --views 2 --out routing.npz
"""

TOP = 20
"""Most frequent tokens that `frequencies` prints."""
DEFAULT_VIEWS = 2

# Settings that a token map contains; they cannot be given together with --import.
FIXED_BY_MAP = ("vip", "buckets", "compression", "alpha", "copies", "decay")

SETTING_HELP = {
    "vip": "most frequent tokens, each with a row of its own",
    "buckets": "frequency buckets of the other tokens",
    "compression": "rows / vocabulary, above 0 and at most 1; at 1 row = token id",
    "paths": "hash paths of a token in a dense bucket",
    "alpha": "buckets are balanced by frequency^alpha",
    "copies": "most additional rows of a VIP or sparse token",
    "decay": "weight of the c-th additional row is decay^c",
}


def add_frequencies_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("data", metavar="DATA", help="a folder written by `xgram-dist prepare`")
    parser.add_argument("--out", required=True, metavar="FILE.npz", help="frequency file to write")
    parser.add_argument(
        "--vocabulary", type=int, metavar="V", help="pad with zeros to V tokens, the model's vocabulary"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def run_frequencies(args: argparse.Namespace) -> int:
    import numpy as np

    from xgram_dist.data.manifest import read_manifest
    from xgram_dist.data.tokenizer import load_tokenizer
    from xgram_dist.files import read_npz, write_npz
    from xgram_dist.tables.frequencies import MAX_VOCABULARY
    from xgram_dist.untrusted import shown

    folder = Path(args.data)
    manifest = read_manifest(folder)
    path = folder / "counts.npz"
    counts = read_npz(path, "the counts of a data set (`xgram-dist prepare` makes them)").get("counts", np.zeros(0))
    expected = sum(source.train.tokens for source in manifest.sources)
    if counts.shape != (manifest.vocabulary,) or counts.dtype != np.int64 or int(counts.sum()) != expected:
        raise UserError(
            f"'{path}' does not hold the counts of this data set; run `xgram-dist prepare --overwrite` again"
        )
    size = manifest.vocabulary if args.vocabulary is None else args.vocabulary
    if size < manifest.vocabulary:
        raise UserError(f"--vocabulary {size:,} is smaller than that of the data set ({manifest.vocabulary:,})")
    if size > MAX_VOCABULARY:
        raise UserError(f"--vocabulary {shown(size)} is above the limit of {MAX_VOCABULARY:,}")
    padded = np.zeros(size, dtype=np.int64)
    padded[: len(counts)] = counts
    write_npz(args.out, {"counts": padded}, compressed=True)
    tokenizer = load_tokenizer(folder / manifest.tokenizer_file, manifest.end_of_text_name)
    order = np.argsort(-counts, kind="stable")[:TOP]
    top = [(int(token), tokenizer.decode([token]) or "", int(counts[token])) for token in order if counts[token]]
    total, distinct = int(counts.sum()), int((counts > 0).sum())
    if args.json:
        figures = {
            "out": args.out,
            "vocabulary": size,
            "total": total,
            "distinct": distinct,
            "top": [{"token": token, "text": text, "count": count} for token, text, count in top],
        }
        print(json.dumps(figures, indent=1, ensure_ascii=False))
        return 0
    print_table(
        ["token", "text", "count", "share"],
        [[str(token), repr(text), f"{count:,}", f"{100 * count / total:.2f} %"] for token, text, count in top],
    )
    print(f"{total:,} tokens, {distinct:,} of {size:,} ids seen; written to {args.out}")
    return 0


def add_route_arguments(parser: argparse.ArgumentParser) -> None:
    from xgram_dist.tables.routing import RoutingSettings

    parser.add_argument("--frequencies", metavar="FILE", help="frequency file (.npz with counts or p)")
    parser.add_argument("--import", dest="token_map", metavar="FILE", help="the authors' token map (.npz)")
    parser.add_argument("--vocabulary", type=int, metavar="N", help="size of the vocabulary (default: the file's)")
    parser.add_argument(
        "--views", type=int, default=DEFAULT_VIEWS, metavar="N", help=f"views (default {DEFAULT_VIEWS})"
    )
    for field in fields(RoutingSettings):
        kind = int if field.type is int else float
        text = f"{SETTING_HELP[field.name]} (default {field.default})"
        parser.add_argument(f"--{field.name}", type=kind, metavar="N" if kind is int else "X", help=text)
    parser.add_argument("--out", metavar="FILE", help="routing file to write; without it nothing is written")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON; shares are fractions of 1")


def run_route(args: argparse.Namespace) -> int:
    from xgram_dist.tables.routing_io import save_routing
    from xgram_dist.tables.routing_statistics import routing_statistics

    start = time.perf_counter()
    routing, frequencies = _build(args)
    seconds = time.perf_counter() - start
    statistics = routing_statistics(routing, frequencies)
    if args.out:
        save_routing(routing, args.out)
    if args.json:
        print(json.dumps(_figures(routing, statistics, seconds, args.out), indent=2))
    else:
        _print_layout(routing, statistics, seconds)
        print(f"\nwritten: {args.out}" if args.out else "\nnothing written; --out FILE writes the routing file")
    return 0


def _build(args: argparse.Namespace) -> "tuple[Routing, Any]":
    """The routing, and the frequencies if any were given."""
    from xgram_dist.tables.frequencies import load_frequencies
    from xgram_dist.tables.routing import RoutingSettings
    from xgram_dist.tables.routing_build import build_routing
    from xgram_dist.tables.routing_import import import_token_map

    given = {field.name: getattr(args, field.name) for field in fields(RoutingSettings)}
    given = {name: value for name, value in given.items() if value is not None}
    settings = RoutingSettings(**given)
    if args.token_map is None:
        if args.frequencies is None:
            raise UserError("nothing to route; give --frequencies FILE or --import FILE")
        frequencies = load_frequencies(args.frequencies, args.vocabulary)
        return build_routing(frequencies, settings, args.views), frequencies
    for name in FIXED_BY_MAP:
        if name in given:
            raise UserError(f"--{name} is {given[name]}, but a token map sets it; leave it out with --import")
    routing = import_token_map(args.token_map, args.views, settings.paths)
    if args.vocabulary not in (None, routing.vocabulary):
        raise UserError(
            f"--vocabulary is {args.vocabulary:,}, but {args.token_map} is of {routing.vocabulary:,} tokens"
        )
    return routing, load_frequencies(args.frequencies, routing.vocabulary) if args.frequencies else None


def _regions(routing: "Routing", statistics: "RoutingStatistics") -> "list[RegionStatistics]":
    """Three regions: VIP, sparse buckets, dense buckets; or one, where row = token id."""
    from xgram_dist.tables.routing_statistics import RegionStatistics, merged

    if not routing.gated:
        share = None if statistics.row_hits is None else 1.0
        return [RegionStatistics("row = token", routing.vocabulary, routing.num_rows, share)]
    regions = [statistics.vip]
    for name, is_sparse in (("sparse", True), ("dense", False)):
        buckets = [b for b, sparse in enumerate(routing.bucket_sparse.tolist()) if sparse == is_sparse]
        if buckets:
            regions.append(merged(f"{name} buckets {_ranges(buckets)}", [statistics.buckets[b] for b in buckets]))
    return regions


def _ranges(numbers: list[int]) -> str:
    """`0-3, 5, 7-8` for [0, 1, 2, 3, 5, 7, 8]."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def _print_layout(routing: "Routing", statistics: "RoutingStatistics", seconds: float) -> None:
    views = f"{routing.num_views} view{'s' if routing.num_views > 1 else ''}"
    print(
        f"{routing.vocabulary:,} tokens -> {routing.num_rows:,} rows, {views}, from {routing.source}, {seconds:.2f} s"
    )
    print(f"sha256 {routing.sha256()}\n")
    with_hits = statistics.row_hits is not None
    rows = []
    for region in _regions(routing, statistics):
        cells = [region.name, f"{region.tokens:,}", f"{region.rows:,}", f"{region.tokens_per_row:.2f}"]
        rows.append([*cells, f"{100 * region.share_of_hits:.2f} %"] if region.share_of_hits is not None else cells)
    print_table(["region", "tokens", "rows", "tokens/row", *(["hits"] if with_hits else [])], rows)
    if routing.gated:
        size = int(routing.bucket_rows[0])
        print(f"\neach bucket has {size:,} rows; {statistics.unused_rows:,} rows are read by no token")
        print(f"rows read per token: {statistics.reads_per_token:.2f} on average", end="")
        print(f", {statistics.reads_per_position:.2f} over the text" if with_hits else "")
        print(f"tokens with the same rows as another in every view: {statistics.indistinguishable_tokens:,}")
    if statistics.row_hits is not None:
        print()
        hits = [[f"{100 * float(top):g} %", f"{100 * share:.2f} %"] for top, share in statistics.row_hits.items()]
        print_table(["hottest rows", "share of hits"], hits)


def _figures(routing: "Routing", statistics: "RoutingStatistics", seconds: float, out: str | None) -> dict[str, Any]:
    sparse = routing.bucket_sparse.tolist()

    def region(r: "RegionStatistics") -> dict[str, Any]:
        return {
            "tokens": r.tokens,
            "rows": r.rows,
            "tokens_per_row": r.tokens_per_row,
            "share_of_hits": r.share_of_hits,
        }

    return {
        "vocabulary": routing.vocabulary,
        "num_rows": routing.num_rows,
        "views": routing.num_views,
        "gated": routing.gated,
        "source": routing.source,
        "sha256": routing.sha256(),
        "settings": asdict(routing.settings),
        "row_hits": statistics.row_hits,
        "row_hits_by_view": statistics.row_hits_by_view,
        "regions": [{"name": r.name, **region(r)} for r in _regions(routing, statistics)],
        "vip_rows": routing.vip_rows,
        "region_rows": int(routing.bucket_rows[0]) if sparse else None,
        "bucket_sizes": [bucket.tokens for bucket in statistics.buckets],
        "sparse_buckets": [b for b, is_sparse in enumerate(sparse) if is_sparse],
        "dense_buckets": [b for b, is_sparse in enumerate(sparse) if not is_sparse],
        "buckets": [
            {"bucket": b, "sparse": is_sparse, "start": int(routing.bucket_start[b]), **region(statistics.buckets[b])}
            for b, is_sparse in enumerate(sparse)
        ],
        "unused_rows": statistics.unused_rows,
        "reads_per_token": statistics.reads_per_token,
        "reads_per_position": statistics.reads_per_position,
        "most_tokens_in_a_row": statistics.most_tokens_in_a_row,
        "indistinguishable_tokens": statistics.indistinguishable_tokens,
        "seconds": seconds,
        "out": out,
    }


COMMANDS = {
    "frequencies": Command(FREQUENCIES_EXAMPLES, add_frequencies_arguments, run_frequencies),
    "route": Command(ROUTE_EXAMPLES, add_route_arguments, run_route),
}
