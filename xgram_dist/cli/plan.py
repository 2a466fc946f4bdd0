"""`xgram-dist plan`: what a recipe costs on so many ranks (memory, wire, time), and other layouts beside it."""

import argparse
import json
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xgram_dist.errors import UserError
from xgram_dist.progress import Progress, table

if TYPE_CHECKING:
    from xgram_dist.config import Config
    from xgram_dist.memory.routing.routing import Routing
    from xgram_dist.plan.axes import Axes
    from xgram_dist.plan.exchange import Balance
    from xgram_dist.plan.machine import Machine
    from xgram_dist.plan.traffic import Traffic

EXAMPLES = """
  xgram-dist plan recipes/0.73b/xgram-1x-50.yaml
  xgram-dist plan recipes/0.73b/xgram-1x-50.yaml memory.compression=0.25 --json
  xgram-dist plan recipes/0.73b/xgram-4x-50.yaml --ranks 64 --frequencies frequencies.npz --memory-per-rank 80GB
  xgram-dist plan recipes/1.15b/xgram-4x-100.yaml --ranks 256 --tensor 2 train.micro_batch=4 --bandwidth 100
  xgram-dist plan recipes/0.73b/xgram-1x-50.yaml --frequencies frequencies.npz --host-bandwidth 50 --policies
  xgram-dist plan --table recipes/0.73b/*.yaml
"""

MEANINGS = {
    "backbone_parameters": "backbone parameters",
    "table_parameters": "table parameters",
    "gate_parameters": "row gates",
    "extractor_parameters": "parameters beside tables",
    "tables": "tables",
    "rows_per_table": "rows a table",
    "activation_width": "retrieved width a token",
    "backbone_flops_per_token": "backbone FLOPs a token, forward",
    "extra_flops_per_token": "added FLOPs a token, forward",
    "tokens_per_step": "tokens a step",
    "training_tokens": "tokens in all",
}

POLICY_RANKS = (4, 16, 64)
MACHINE = {
    "bandwidth": "of the network, a rank, in GB/s (default 50)",
    "node_bandwidth": "between the 8 ranks of a node, in GB/s (default 450)",
    "host_bandwidth": "between host and device, in GB/s (default 25)",
    "memory_bandwidth": "of the device's memory, in GB/s (default 2000)",
    "flops": "peak of a rank's device, in TFLOP/s (default 989)",
    "utilisation": "share of the peak that compute reaches (default 0.4)",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help="YAML file")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="change keys of the recipe")
    parser.add_argument("--table", action="store_true", help="several recipes (those with a name), a line each")
    parser.add_argument("--ranks", type=int, metavar="N", help="ranks (default: up to 16, as the batch divides)")
    parser.add_argument("--tensor", type=int, metavar="T", help="ranks that share each layer; as parallel.tensor=T")
    parser.add_argument("--memory-per-rank", metavar="SIZE", help="80GB or 80GiB: whether it fits, and what would help")
    parser.add_argument(
        "--frequencies",
        metavar="FILE.npz",
        help="token frequencies, also for the routing unless memory.routing.file is set (default: "
        "memory.routing.frequencies, or the counts of the prepared data; else Zipf's law)",
    )
    for key, text in MACHINE.items():
        parser.add_argument(f"--{key.replace('_', '-')}", type=float, metavar="X", help=text)
    parser.add_argument(
        "--policies", action="store_true", help="compare the placements of rows on ranks, at 4, 16 and 64 ranks"
    )
    parser.add_argument("--json", action="store_true", help="print as JSON; bytes and seconds, shares are parts of 1")


def run(args: argparse.Namespace) -> int:
    from xgram_dist.config import load_config
    from xgram_dist.plan.budget import plan_budget

    if args.table:
        return _table(args)
    overrides = args.overrides if args.tensor is None else [*args.overrides, f"parallel.tensor={args.tensor}"]
    config = load_config(args.recipe, overrides)
    axes, machine, limit = _axes(args, config), _machine(args), _limit(args)
    figures = plan_budget(config).as_dict()
    source, missing = _frequency_file(args, config)
    frequencies, routing = _load(config, source)
    exchange, missing = _exchange(args, config, axes, machine, source, missing, frequencies, routing)
    found = _layouts(config, axes, machine, limit, frequencies, routing)
    if args.json:
        named = {"name": config.name, "method": config.memory.method}
        print(json.dumps({**named, **figures, "exchange": exchange, **_as_dict(found, machine, limit)}, indent=2))
        return 0
    rows = [[meaning, f"{figures[key]:,}"] for key, meaning in MEANINGS.items()]
    rows.append(["relative FLOPs", f"{figures['relative_flops']:.4f}x"])
    table([config.name, "count"], rows)
    if exchange is not None:
        _print_exchange(exchange)
    _print_layouts(found, machine, limit)
    if source is None and frequencies is not None:
        print("\ntokens by Zipf's law, for want of frequencies")
    if missing:
        print(f"\n{missing}")
    return 0


def _table(args: argparse.Namespace) -> int:
    """The paper's accounting: a line a recipe."""
    from xgram_dist.config import load_config
    from xgram_dist.config.load import read_tree
    from xgram_dist.plan.budget import plan_budget
    from xgram_dist.plan.counted import count_twin

    files = [args.recipe, *(word for word in args.overrides if "=" not in word)]
    overrides = [word for word in args.overrides if "=" in word]
    found = []
    with Progress(len(files), "recipes", "counting") as progress:
        for file in files:
            if "name" in read_tree(Path(file), "recipe"):
                config = load_config(file, overrides)
                budget, twin = plan_budget(config).as_dict(), count_twin(config)
                found.append({"name": config.name, "method": config.memory.method, **budget, "twin": twin.as_dict()})
            progress.update()
    if args.json:
        print(json.dumps(found, indent=2))
        return 0
    table(
        ["recipe", "table parameters", "beside", "retrieved", "added FLOPs", "relative", "counted"],
        [
            [
                one["name"],
                _parameters(one["table_parameters"]),
                f"{one['extractor_parameters'] / 1e6:,.2f} M",
                f"{one['activation_width']:,}",
                f"{one['extra_flops_per_token'] / 1e6:,.2f} M",
                f"{one['relative_flops']:.4f}x",
                f"{100 * one['twin']['difference']:+.1f} %" if one["twin"]["formula"] else "-",
            ]
            for one in found
        ],
    )
    print("\nbeside: parameters beside backbone and tables; retrieved: numbers a token; FLOPs a token, forward")
    print("counted: by torch's counter in a small model of the same kind, against the formula for the added FLOPs")
    return 0


def _parameters(count: int) -> str:
    return f"{count / 1e9:.3f} B" if count >= 1e8 else f"{count / 1e6:.3f} M"


def _axes(args: argparse.Namespace, config: "Config") -> "Axes":
    from xgram_dist.config.check import accumulation
    from xgram_dist.plan.axes import Axes
    from xgram_dist.plan.exchange import default_ranks

    ranks = default_ranks(config) * config.parallel.tensor if args.ranks is None else args.ranks
    if ranks < 1:
        raise UserError(f"--ranks {ranks} is not at least 1")
    axes = Axes.of(config, ranks)
    accumulation(config, axes.data)
    return axes


def _machine(args: argparse.Namespace) -> "Machine":
    from xgram_dist.plan.machine import Machine

    given = {key: getattr(args, key) for key in MACHINE if getattr(args, key) is not None}
    for key, value in given.items():
        flag = f"--{key.replace('_', '-')}"
        if key == "utilisation" and not 0 < value <= 1:
            raise UserError(f"{flag} {value:g} is not above 0 and at most 1")
        if not (math.isfinite(value) and value > 0):
            unit = "TFLOP/s" if key == "flops" else "GB/s"
            raise UserError(f"{flag} {value:g} is not a number of {unit} above 0")
    return Machine(**given)


def _limit(args: argparse.Namespace) -> int | None:
    from xgram_dist.config.units import BYTES, parse_bytes

    if args.memory_per_rank is None:
        return None
    if not re.match(BYTES, args.memory_per_rank):
        raise UserError(f"--memory-per-rank {args.memory_per_rank} is not a size such as 80GB or 80GiB")
    return parse_bytes(args.memory_per_rank)


def _layouts(
    config: "Config", axes: "Axes", machine: "Machine", limit: int | None, frequencies: Any, routing: "Routing | None"
) -> dict[str, Any]:
    """The recipe's own layout, others beside it, and what would make it fit."""
    from functools import lru_cache

    from xgram_dist.plan.advice import advise
    from xgram_dist.plan.compare import compare_layouts
    from xgram_dist.plan.layout import plan_layout
    from xgram_dist.plan.traffic import Traffic

    @lru_cache
    def traffic_of(data: int) -> "Traffic | None":
        return None if frequencies is None else Traffic(config, frequencies, routing, data)

    traffic = traffic_of(axes.data)
    own = plan_layout(config, axes, machine, traffic, _name(config, axes))
    fits = limit is None or own.device_bytes <= limit
    return {
        "own": own,
        "layouts": compare_layouts(config, axes, machine, traffic),
        "advice": [] if limit is None or fits else advise(config, axes.world, limit, traffic_of),
    }


def _name(config: "Config", axes: "Axes") -> str:
    parallel = config.parallel
    engine = f"deepspeed stage {parallel.zero_stage}" if parallel.engine == "deepspeed" else parallel.engine
    ranks = f"{axes.world} rank{'s' if axes.world > 1 else ''}"
    if axes.tensor > 1:
        ranks += f" = {axes.data} data x {axes.tensor} tensor"
    if axes.replicate > 1:
        ranks += f", data = {axes.replicate} replicate x {axes.shard} shard"
    return f"{engine}, {ranks}"


def _as_dict(found: dict[str, Any], machine: "Machine", limit: int | None) -> dict[str, Any]:
    own = found["own"]
    return {
        "machine": machine.as_dict(),
        "layout": own.as_dict(),
        "memory_per_rank": limit,
        "fits": None if limit is None else own.device_bytes <= limit,
        "advice": [one.as_dict() for one in found["advice"]],
        "layouts": [one.as_dict() for one in found["layouts"]],
    }


def _print_layouts(found: dict[str, Any], machine: "Machine", limit: int | None) -> None:
    from xgram_dist.plan.text import print_layouts, print_memory, print_time, print_wire

    print()
    print_memory(found["own"], limit, found["advice"])
    print()
    print_wire(found["own"], machine)
    print()
    print_time(found["own"], machine)
    print()
    print_layouts(found["layouts"])


def _exchange(
    args: argparse.Namespace,
    config: "Config",
    axes: "Axes",
    machine: "Machine",
    source: Path | None,
    missing: str,
    frequencies: Any,
    routing: "Routing | None",
) -> tuple[dict[str, Any] | None, str]:
    """The figures of the exchange; or None, and what is missing for them."""
    from xgram_dist.memory.layout import has_tables
    from xgram_dist.plan.exchange import plan_exchange

    if not has_tables(config):
        return None, "no tables, so nothing is exchanged for them"
    if config.memory.method == "engram":
        return None, "how often n-grams come again is not known: each counts as new"
    if source is None:
        return None, f"for the exchange of a step: {missing}"
    exchange = plan_exchange(config, frequencies, routing, axes.data, machine.host_bandwidth).as_dict()
    exchange["frequencies"] = str(source)
    exchange["routing"] = None if routing is None else config.memory.routing.file or str(source)
    if args.policies:
        balances = _compare_policies(config, frequencies, routing, exchange["tokens_per_rank_step"])
        exchange["policies"] = [balance.as_dict() for balance in balances]
    return exchange, ""


def _frequency_file(args: argparse.Namespace, config: "Config") -> tuple[Path | None, str]:
    """The file with the token frequencies; or None, and how to get one. Files that a recipe names may be elsewhere."""
    named, data = config.memory.routing.frequencies, config.data.path
    if args.frequencies is not None:
        source = Path(args.frequencies)
    elif named is not None:
        source = Path(named)
        if not source.exists():
            return None, f"memory.routing.frequencies = '{named}' does not exist; give --frequencies FILE.npz"
    else:
        source = Path(data or ".") / "counts.npz"
        if data is None or not source.exists():
            return None, "give --frequencies FILE.npz ('xgram-dist frequencies' makes one)"
    file = config.memory.routing.file
    if file is not None and config.memory.compression < 1 and not Path(file).exists():
        missing = f"memory.routing.file = '{file}' does not exist; make it with 'xgram-dist route' or leave it out"
        if args.frequencies is not None:
            raise UserError(missing)
        return None, missing
    return source, ""


def _load(config: "Config", source: Path | None) -> "tuple[Any, Routing | None]":
    """Frequencies and routing, as a run would have them; without a file, by Zipf's law. None without tables."""
    from xgram_dist.memory.layout import has_tables, num_rows, num_views, routing_settings
    from xgram_dist.memory.routing.build import build_routing
    from xgram_dist.memory.routing.frequencies import load_frequencies
    from xgram_dist.memory.routing.routing import Routing
    from xgram_dist.plan.traffic import zipf

    vocabulary, file = config.model.vocabulary, config.memory.routing.file
    if not has_tables(config):
        return None, None
    frequencies = zipf(vocabulary) if source is None else load_frequencies(source, vocabulary)
    if config.memory.compression == 1:
        return frequencies, None
    if file is None or source is None:
        return frequencies, build_routing(frequencies, routing_settings(config), num_views(config))
    routing = Routing.load(file)
    wanted = (vocabulary, num_rows(config), num_views(config))
    has = (routing.vocabulary, routing.num_rows, routing.num_views)
    if has[:2] != wanted[:2] or has[2] < wanted[2]:
        raise UserError(
            f"memory.routing.file = '{file}' is for {_tokens_rows_views(has)}, the recipe for "
            f"{_tokens_rows_views(wanted)}; make it again with 'xgram-dist route'"
        )
    return frequencies, routing


def _tokens_rows_views(numbers: tuple[int, int, int]) -> str:
    tokens, rows, views = numbers
    return f"{tokens:,} tokens, {rows:,} rows and {views} view{'s' if views > 1 else ''}"


def _compare_policies(config: "Config", frequencies: Any, routing: "Routing | None", tokens: int) -> "list[Balance]":
    from xgram_dist.memory.placement import POLICIES
    from xgram_dist.plan.exchange import Draw, plan_balance

    draw = Draw(frequencies, tokens)
    pairs = [(policy, ranks) for policy in POLICIES for ranks in POLICY_RANKS]
    found = []
    with Progress(len(pairs), "placements", "comparing placements") as progress:
        for policy, ranks in pairs:
            found.append(plan_balance(config, draw, routing, ranks, policy))
            progress.update()
    return found


def _print_exchange(e: dict[str, Any]) -> None:
    """Counts, then bytes on the wire, then the placements."""
    from xgram_dist.plan.text import size_text

    print()
    counts = [
        ["tokens a rank's step", f"{e['tokens_per_rank_step']:,}"],
        ["tokens a micro-batch", f"{e['tokens_per_micro_batch']:,}"],
        ["micro-batches", f"{e['accumulation']:,}"],
        ["working sets (memory.window), of micro-batches each", f"{len(e['windows']):,} of {max(e['windows']):,}"],
        ["distinct tokens a rank's step", f"{e['distinct_tokens']:,.0f}"],
        ["distinct tokens a micro-batch", f"{e['distinct_tokens_per_micro_batch']:,.0f}"],
        ["distinct tokens, step / sum of micro-batches", f"{e['distinct_tokens_step_over_micro_batches']:.3f}"],
        ["distinct rows a rank's step, a view", f"{e['distinct_rows']:,.0f}"],
        ["vectors a rank's step", f"{e['vectors']:,.0f}"],
        ["vectors, step / sum of micro-batches", f"{e['vectors_step_over_micro_batches']:.3f}"],
        ["vectors a distinct token, a view", f"{e['vectors_per_token']:.3f}"],
        ["most loaded owner / mean, expected", f"{e['imbalance_expected']:.3f}"],
        ["most loaded owner / mean, one sampled step", f"{e['imbalance_sampled']:.3f}"],
        ["rows hit in a step of all ranks", f"{100 * e['touched_share']:.1f} %"],
    ]
    table([f"exchange of a step on {e['ranks']} rank{'s' if e['ranks'] > 1 else ''}", "count"], counts)
    print()
    ratio = "-" if e["wire_over_lower_bound"] is None else f"{e['wire_over_lower_bound']:.3f}"
    wire = [
        ["ids to the owners", *[size_text(e["id_bytes"])] * 2],
        ["vectors, each way", *map(size_text, e["wire_bytes"].values())],
        ["lower bound, a vector a token elsewhere", *map(size_text, e["lower_bound_bytes"].values())],
        ["vectors / lower bound", ratio, ratio],
        ["rows from host memory", *map(size_text, e["prefetch_bytes"].values())],
        [
            f"rows from host memory, at {e['host_bandwidth_gb_per_second']:g} GB/s",
            *(f"{1000 * seconds:,.1f} ms" for seconds in e["prefetch_seconds"].values()),
        ],
    ]
    table(["moved in a rank's step", *e["wire_bytes"]], wire)
    if "policies" in e:
        print()
        _print_policies(e["policies"], e["tokens_per_rank_step"])
    print(f"\ntokens as independent draws from {e['frequencies']}", end="")
    print("" if e["routing"] in (None, e["frequencies"]) else f", routing of {e['routing']}")


def _print_policies(policies: list[dict[str, Any]], tokens: int) -> None:
    table(
        ["placement", "ranks", "vectors a token", "most loaded / mean", "sampled"],
        [
            [
                balance["policy"],
                str(balance["ranks"]),
                f"{balance['vectors_per_token']:.3f}",
                f"{balance['imbalance_expected']:.3f}",
                f"{balance['imbalance_sampled']:.3f}",
            ]
            for balance in policies
        ],
    )
    print(f"for a rank's step of {tokens:,} tokens; training places by bucket")
