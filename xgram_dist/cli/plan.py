"""`xgram-dist plan`: predicted parameters, memory, wire bytes and step time of a recipe, on any number of ranks."""

import argparse
import json
import math
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xgram_dist.cli.command import Command
from xgram_dist.console import Progress
from xgram_dist.errors import UserError, one_line

if TYPE_CHECKING:
    from xgram_dist.config import Config
    from xgram_dist.estimate.comm import Axes
    from xgram_dist.estimate.exchange import LoadBalance
    from xgram_dist.estimate.step_time import Machine
    from xgram_dist.estimate.traffic import Traffic
    from xgram_dist.tables.routing import Routing

EXAMPLES = """
  xgram-dist plan recipes/0.73b/xgram-1x-50.yaml
  xgram-dist plan recipes/0.73b/xgram-1x-50.yaml memory.compression=0.25 --json
  xgram-dist plan recipes/0.73b/xgram-4x-50.yaml --ranks 64 --frequencies frequencies.npz --memory-per-rank 80GB
  xgram-dist plan recipes/1.15b/xgram-4x-100.yaml --ranks 256 --tensor 2 train.micro_batch=4 --bandwidth 100
  xgram-dist plan recipes/0.73b/xgram-1x-50.yaml --frequencies frequencies.npz --host-bandwidth 50 --policies
  xgram-dist plan recipes/0.73b/xgram-4x-50.yaml --frequencies frequencies.npz --shards --memory-per-rank 80GB
  xgram-dist plan --table recipes/0.73b/*.yaml
"""

POLICY_RANKS = (4, 16, 64)
MAX_RANKS = 1 << 14
MACHINE = {
    "bandwidth": "network bandwidth of a rank, in GB/s (default 50)",
    "node_bandwidth": "bandwidth between the 8 ranks of a node, in GB/s (default 450)",
    "host_bandwidth": "bandwidth between host and device, in GB/s (default 25)",
    "memory_bandwidth": "bandwidth of the device's memory, in GB/s (default 2600)",
    "flops": "peak of a rank's device, in TFLOP/s (default 989)",
    "utilisation": "share of the peak that matrix products reach (default 0.65)",
}
"""Options by field of `Machine`. The defaults are repeated here because `--help` must not import torch."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help="YAML file")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="change keys of the recipe")
    parser.add_argument("--table", action="store_true", help="several recipes (those with a name), one line each")
    parser.add_argument("--ranks", type=int, metavar="N", help="ranks (default: up to 16, as the batch divides)")
    parser.add_argument("--tensor", type=int, metavar="T", help="ranks that share each layer; as parallel.tensor=T")
    parser.add_argument("--context", type=int, metavar="C", help="ranks that share a sequence; as parallel.context=C")
    parser.add_argument("--memory-per-rank", metavar="SIZE", help="80GB or 80GiB: does it fit, and which changes help")
    parser.add_argument(
        "--frequencies",
        metavar="FILE.npz",
        help="token frequencies, also for the routing unless memory.routing.file is set (default: "
        "memory.routing.frequencies, or the counts of the prepared data; else Zipf's law)",
    )
    add_machine_arguments(parser)
    parser.add_argument(
        "--policies", action="store_true", help="compare the row-sharding policies, at 4, 16 and 64 ranks"
    )
    parser.add_argument(
        "--shards", action="store_true", help="compare replicas of the tables (memory.shard) on 16 to 1,024 ranks"
    )
    parser.add_argument("--json", action="store_true", help="print JSON: bytes, seconds, shares between 0 and 1")


def add_machine_arguments(parser: argparse.ArgumentParser) -> None:
    for key, text in MACHINE.items():
        parser.add_argument(f"--{key.replace('_', '-')}", type=float, metavar="X", help=text)


def run(args: argparse.Namespace) -> int:
    from xgram_dist.estimate.advice import advise, recommend
    from xgram_dist.estimate.flops import plan_budget
    from xgram_dist.estimate.layout import compare_layouts, compare_update_places, plan_layout
    from xgram_dist.estimate.report import Report
    from xgram_dist.estimate.traffic import build_traffic
    from xgram_dist.model.methods.base import load_recipe

    if args.table:
        return _run_table(args)
    degrees = {"tensor": args.tensor, "context": args.context}
    overrides = [*args.overrides, *(f"parallel.{axis}={n}" for axis, n in degrees.items() if n is not None)]
    config = load_recipe(args.recipe, overrides)
    axes, machine, limit = _axes(args, config), read_machine(args), _memory_limit(args)
    budget = plan_budget(config)
    source, missing = find_frequencies(args, config)
    frequencies, routing = load_tables_source(config, source)
    exchange, missing = _exchange(args, config, axes, machine, source, missing, frequencies, routing)

    @cache
    def traffic_of(data_ranks: int) -> "Traffic | None":
        return None if frequencies is None else build_traffic(config, frequencies, routing, data_ranks)

    if args.shards:
        return _run_shards(args, config, machine, limit, traffic_of)
    traffic = traffic_of(axes.rows)
    layout = plan_layout(config, axes, machine, traffic, _layout_name(config, axes))
    fits = limit is None or layout.device_bytes <= limit
    notes = ["no frequencies given: tokens by Zipf's law"] if source is None and frequencies is not None else []
    report = Report(
        config=config,
        budget=budget,
        machine=machine,
        memory_limit=limit,
        layout=layout,
        alternatives=compare_layouts(config, axes, machine, traffic),
        advice=[] if limit is None or fits else advise(config, axes.world, limit, traffic_of),
        recommendations=recommend(config, axes, machine, limit, traffic_of),
        exchange=exchange,
        notes=[*notes, missing] if missing else notes,
        update_places=compare_update_places(config, axes, machine, traffic),
    )
    if args.json:
        print(json.dumps(report.as_dict(), indent=2))
    else:
        report.print()
    return 0


def _run_shards(
    args: argparse.Namespace,
    config: "Config",
    machine: "Machine",
    limit: int | None,
    traffic_of: "Callable[[int], Traffic | None]",
) -> int:
    """How many ranks should hold the tables once."""
    from xgram_dist.estimate.replicas import RANKS, compare_shards
    from xgram_dist.estimate.report import print_shard_choices

    if traffic_of(1) is None:
        raise UserError(
            f"--shards compares replicas of the tables, but memory.method = {config.memory.method} has none"
        )
    with Progress(len(RANKS), "numbers of ranks", "comparing replicas of the tables") as progress:
        choices = compare_shards(config, machine, traffic_of, limit, progress=progress.update)
    if not choices:
        raise UserError(
            f"train.global_batch = {config.train.global_batch} divides over none of {RANKS[0]} to {RANKS[-1]} ranks; "
            f"change it or train.micro_batch"
        )
    if args.json:
        print(json.dumps([one.as_dict() for one in choices], indent=2))
    else:
        print_shard_choices(choices, limit is not None)
    return 0


def _run_table(args: argparse.Namespace) -> int:
    """The paper's accounting: a line a recipe."""
    from xgram_dist.config.load import read_tree
    from xgram_dist.estimate.flop_counter import check_flops
    from xgram_dist.estimate.flops import plan_budget
    from xgram_dist.estimate.report import print_recipe_table
    from xgram_dist.model.methods.base import load_recipe

    files = [args.recipe, *(word for word in args.overrides if "=" not in word)]
    overrides = [word for word in args.overrides if "=" in word]
    recipes = []
    with Progress(len(files), "recipes", "counting") as progress:
        for file in files:
            if "name" in read_tree(Path(file), "recipe"):
                config = load_recipe(file, overrides)
                budget, check = plan_budget(config).as_dict(), check_flops(config).as_dict()
                recipes.append({"name": config.name, "method": config.memory.method, **budget, "twin": check})
            progress.update()
    if args.json:
        print(json.dumps(recipes, indent=2))
    else:
        print_recipe_table(recipes)
    return 0


# Arguments


def _axes(args: argparse.Namespace, config: "Config") -> "Axes":
    from xgram_dist.config.validate import accumulation
    from xgram_dist.estimate.comm import Axes
    from xgram_dist.estimate.exchange import default_ranks

    parallel = config.parallel
    sharers = parallel.tensor * parallel.context * parallel.pipeline
    ranks = default_ranks(config) * sharers if args.ranks is None else args.ranks
    if not 1 <= ranks <= MAX_RANKS:
        raise UserError(f"--ranks {one_line(str(ranks), 40)} is not from 1 to {MAX_RANKS}")
    axes = Axes.of(config, ranks)
    accumulation(config, axes.data)
    return axes


def read_machine(args: argparse.Namespace) -> "Machine":
    from xgram_dist.estimate.step_time import Machine

    given = {key: getattr(args, key) for key in MACHINE if getattr(args, key) is not None}
    for key, value in given.items():
        flag = f"--{key.replace('_', '-')}"
        if key == "utilisation" and not 0 < value <= 1:
            raise UserError(f"{flag} {value:g} is not above 0 and at most 1")
        if not (math.isfinite(value) and value > 0):
            unit = "TFLOP/s" if key == "flops" else "GB/s"
            raise UserError(f"{flag} {value:g} is not a number of {unit} above 0")
    return Machine(**given)


def _memory_limit(args: argparse.Namespace) -> int | None:
    from xgram_dist.config.schema import BYTES, parse_bytes

    if args.memory_per_rank is None:
        return None
    if not re.fullmatch(BYTES, args.memory_per_rank):
        raise UserError(f"--memory-per-rank {one_line(args.memory_per_rank, 40)} is not a size such as 80GB or 80GiB")
    return parse_bytes(args.memory_per_rank)


def _layout_name(config: "Config", axes: "Axes") -> str:
    parallel = config.parallel
    engine = f"deepspeed stage {parallel.zero_stage}" if parallel.engine == "deepspeed" else parallel.engine
    ranks = f"{axes.world} rank{'s' if axes.world > 1 else ''}"
    if axes.tensor > 1:
        ranks += f" = {axes.data} data x {axes.tensor} tensor"
    if axes.context > 1:
        ranks += f", data = {axes.data // axes.context} batch x {axes.context} context"
    if axes.replicate > 1:
        ranks += f", data = {axes.replicate} replicate x {axes.shard} shard"
    if axes.replicas > 1:
        ranks += f", {axes.replicas} replicas of the tables"
    return f"{engine}, {ranks}"


# Frequencies, routing and the exchange


def find_frequencies(args: argparse.Namespace, config: "Config") -> tuple[Path | None, str]:
    """The file with the token frequencies; or None and how to get one. Files that a recipe names may be on another
    machine: that they are missing is no error, unless --frequencies asks for the exchange."""
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


def load_tables_source(config: "Config", source: Path | None) -> "tuple[Any, Routing | None]":
    """As a run would have them; without a file, by Zipf's law. (None, None) without tables."""
    from xgram_dist.estimate.traffic import zipf
    from xgram_dist.model.methods.base import table_layout
    from xgram_dist.tables.frequencies import load_frequencies
    from xgram_dist.tables.layout import routing_settings
    from xgram_dist.tables.routing_build import build_routing
    from xgram_dist.tables.routing_io import load_routing

    vocabulary, file, layout = config.model.vocabulary, config.memory.routing.file, table_layout(config)
    if not layout.tables:
        return None, None
    frequencies = zipf(vocabulary) if source is None else load_frequencies(source, vocabulary)
    if not layout.hashed:
        return frequencies, None
    if file is None or source is None:
        return frequencies, build_routing(frequencies, routing_settings(config), layout.num_views)
    routing = load_routing(file)
    wanted = (vocabulary, layout.num_rows, layout.num_views)
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
    """The figures of the exchange; or None and why there are none."""
    from xgram_dist.estimate.exchange import plan_exchange
    from xgram_dist.model.methods.base import method_of

    method = method_of(config)
    if not method.trains_tables:
        return None, "no tables, so nothing is exchanged"
    if method.looks_up_ngrams:
        return None, "the frequencies of n-grams are not known: each counts as new"
    if source is None:
        return None, f"for the exchange of a step: {missing}"
    exchange = plan_exchange(config, frequencies, routing, axes.data, machine.host_bandwidth, axes.replicas).as_dict()
    exchange["frequencies"] = str(source)
    exchange["routing"] = None if routing is None else config.memory.routing.file or str(source)
    if args.policies:
        balances = _compare_policies(config, frequencies, routing, exchange["tokens_per_rank_step"])
        exchange["policies"] = [balance.as_dict() for balance in balances]
    return exchange, ""


def _compare_policies(
    config: "Config", frequencies: Any, routing: "Routing | None", tokens: int
) -> "list[LoadBalance]":
    from xgram_dist.estimate.exchange import plan_balance
    from xgram_dist.estimate.traffic import TokenDraw
    from xgram_dist.tables.row_sharding import POLICIES

    draw = TokenDraw(frequencies, tokens)
    pairs = [(policy, ranks) for policy in POLICIES for ranks in POLICY_RANKS]
    balances = []
    with Progress(len(pairs), "policies", "comparing row shardings") as progress:
        for policy, ranks in pairs:
            balances.append(plan_balance(config, draw, routing, ranks, policy))
            progress.update()
    return balances


COMMANDS = {"plan": Command(EXAMPLES, add_arguments, run)}
