"""`xgram-dist simulate`: a step of a recipe, event by event, on any number of ranks and links."""

import argparse
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xgram_dist.cli.command import Command, require_at_least
from xgram_dist.cli.plan import (
    MAX_RANKS,
    add_machine_arguments,
    find_frequencies,
    load_tables_source,
    read_machine,
)
from xgram_dist.console import Progress, print_table
from xgram_dist.errors import UserError, one_line

if TYPE_CHECKING:
    from xgram_dist.config import Config
    from xgram_dist.estimate.scaling import Network, ScalingRow, Simulation, Trace

EXAMPLES = """
  xgram-dist simulate recipes/0.73b/xgram-4x-50.yaml --ranks 64 --trace frequencies.npz
  xgram-dist simulate recipes/0.73b/xgram-4x-50.yaml --ranks 1024 --trace frequencies.npz --timeline step.html \\
      train.micro_batch=1 parallel.engine=hsdp parallel.replicate=128 memory.overlap=true
  xgram-dist simulate recipes/1.15b/xgram-4x-50.yaml --ranks 64 --straggler 17:1.3 --jitter 0.05 --seed 3 --json
  xgram-dist simulate recipes/0.73b/vanilla.yaml --ranks 32 --ranks-per-node 4 --bandwidth 12.5 --uplink 25
  xgram-dist simulate recipes/0.73b/xgram-4x-50.yaml --layouts --ranks 16,64,256,1024 --trace frequencies.npz
  xgram-dist simulate recipes/0.73b/engram-4x.yaml --layouts --ranks 16,4096 train.global_batch=4096
"""

LATENCIES = {
    "latency": ("network", "from a rank to one of another node, in microseconds (default 10)"),
    "node_latency": ("node", "within a node, in microseconds (default 2)"),
    "message_overhead": ("message", "of a rank, for each message of an all-to-all, in microseconds (default 1)"),
}
"""Options by field of `Latency`."""
MAX_TIMELINE_RANKS = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help="YAML file")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="change keys of the recipe")
    parser.add_argument("--ranks", default="16", metavar="N[,N]", help="ranks; several with --layouts (default 16)")
    parser.add_argument("--ranks-per-node", type=int, default=8, metavar="N", help="ranks of a node (default 8)")
    parser.add_argument(
        "--trace",
        dest="frequencies",
        metavar="FILE.npz",
        help="token frequencies from which the tokens of the step are drawn ('xgram-dist frequencies' writes them; "
        "default: memory.routing.frequencies, or the counts of the prepared data; else Zipf's law)",
    )
    add_machine_arguments(parser)
    parser.add_argument(
        "--uplink", type=float, metavar="X", help="bandwidth of a node, in GB/s (default: --bandwidth for each rank)"
    )
    for key, (_, text) in LATENCIES.items():
        parser.add_argument(f"--{key.replace('_', '-')}", type=float, metavar="X", help=text)
    parser.add_argument(
        "--straggler",
        action="append",
        default=[],
        metavar="RANK:FACTOR",
        help="a rank whose work takes FACTOR times as long; may be given several times",
    )
    parser.add_argument(
        "--jitter", type=float, default=0.0, metavar="S", help="random spread of work, such as 0.05 (default 0)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of tokens and jitter (default 0)")
    parser.add_argument("--layouts", action="store_true", help="compare layouts, on each number of --ranks")
    parser.add_argument("--timeline", metavar="FILE.html", help="write a timeline of some ranks as a page")
    parser.add_argument(
        "--timeline-ranks", type=int, default=12, metavar="N", help="ranks on the timeline (default 12)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON: bytes, seconds, shares between 0 and 1")


def run(args: argparse.Namespace) -> int:
    from xgram_dist.estimate.step_program import check_simulated
    from xgram_dist.model.methods.base import load_recipe

    config = load_recipe(args.recipe, args.overrides)
    check_simulated(config)
    ranks, network = _ranks(args), _network(args)
    slow = _stragglers(args, ranks)
    trace = _trace(args, config)
    if args.layouts:
        return _run_layouts(args, config, ranks, network, trace)
    simulation = _simulate(args, config, ranks[0], network, trace, slow)
    if args.timeline is not None:
        _write_timeline(args, config, simulation, slow)
    if args.json:
        print(json.dumps({**simulation.as_dict(), "seed": args.seed, "trace": _source(args, config)}, indent=2))
    else:
        _print(simulation, _source(args, config))
    return 0


def _simulate(
    args: argparse.Namespace,
    config: "Config",
    ranks: int,
    network: "Network",
    trace: "Trace",
    slow: dict[int, float],
) -> "Simulation":
    from xgram_dist.estimate.scaling import simulate_recipe

    rows = 0 if args.timeline is None else min(args.timeline_ranks, ranks)
    with Progress(ranks // config.parallel.tensor, "ranks", "drawing tokens") as progress:
        return simulate_recipe(config, ranks, network, trace, slow, args.jitter, rows, progress.update)


def _run_layouts(
    args: argparse.Namespace, config: "Config", ranks: list[int], network: "Network", trace: "Trace"
) -> int:
    from xgram_dist.estimate.scaling import LAYOUTS, sweep

    for option, given in (("--straggler", args.straggler), ("--timeline", args.timeline), ("--jitter", args.jitter)):
        if given:
            raise UserError(f"{option} is for one layout; leave out --layouts")
    names = list(LAYOUTS) if trace.frequencies is not None else [name for name in LAYOUTS if "," not in name]
    with Progress(len(names) * len(ranks), "simulations", "simulating layouts") as progress:
        rows = sweep(config, ranks, names, network, trace, progress.update)
    if args.json:
        print(json.dumps([row.as_dict() for row in rows], indent=2))
    else:
        _print_layouts(config, rows)
    return 0


# Arguments


def _ranks(args: argparse.Namespace) -> list[int]:
    try:
        ranks = [int(word) for word in args.ranks.split(",")]
    except ValueError:
        raise UserError(f"--ranks {one_line(args.ranks, 40)} is not a number, or several such as 16,64") from None
    for count in ranks:
        if not 1 <= count <= MAX_RANKS:
            raise UserError(f"--ranks {one_line(str(count), 40)} is not from 1 to {MAX_RANKS}")
    if len(ranks) > 1 and not args.layouts:
        raise UserError("--ranks takes several numbers with --layouts only; give one")
    require_at_least(args, 1, "ranks_per_node", "timeline_ranks")
    require_at_least(args, 0, "seed")
    if args.timeline_ranks > MAX_TIMELINE_RANKS:
        raise UserError(f"--timeline-ranks {args.timeline_ranks} is above {MAX_TIMELINE_RANKS}")
    for count in ranks:
        if count > args.ranks_per_node and count % args.ranks_per_node:
            raise UserError(
                f"--ranks {count} are not whole nodes of {args.ranks_per_node}; change it or --ranks-per-node"
            )
    return sorted(set(ranks))


def _network(args: argparse.Namespace) -> "Network":
    from dataclasses import replace

    from xgram_dist.estimate.links import Latency
    from xgram_dist.estimate.scaling import Network

    machine = replace(read_machine(args), node_ranks=args.ranks_per_node)
    if args.uplink is not None and not (math.isfinite(args.uplink) and args.uplink > 0):
        raise UserError(f"--uplink {args.uplink:g} is not a number of GB/s above 0")
    given = {field: getattr(args, key) for key, (field, _) in LATENCIES.items() if getattr(args, key) is not None}
    for key, (field, _) in LATENCIES.items():
        if field in given and not (math.isfinite(given[field]) and given[field] >= 0):
            raise UserError(f"--{key.replace('_', '-')} {given[field]:g} is not a number of microseconds, 0 or more")
    return Network(machine, Latency(**given), args.uplink)


def _stragglers(args: argparse.Namespace, ranks: list[int]) -> dict[int, float]:
    if not (math.isfinite(args.jitter) and 0 <= args.jitter <= 1):
        raise UserError(f"--jitter {args.jitter:g} is not from 0 to 1")
    slow = {}
    for text in args.straggler:
        rank, _, factor = text.partition(":")
        try:
            number, times = int(rank), float(factor)
        except ValueError:
            raise UserError(f"--straggler {one_line(text, 40)} is not RANK:FACTOR, such as 17:1.3") from None
        if not 0 <= number < ranks[0]:
            raise UserError(f"--straggler {one_line(text, 40)}: ranks are 0 to {ranks[0] - 1}")
        if not (math.isfinite(times) and times > 0):
            raise UserError(f"--straggler {one_line(text, 40)}: the factor must be a number above 0")
        slow[number] = times
    return slow


def _trace(args: argparse.Namespace, config: "Config") -> "Trace":
    from xgram_dist.estimate.scaling import Trace

    source, _ = find_frequencies(args, config)
    frequencies, routing = load_tables_source(config, source)
    return Trace(frequencies, routing, args.seed)


def _source(args: argparse.Namespace, config: "Config") -> str:
    source, _ = find_frequencies(args, config)
    return "Zipf's law" if source is None else str(source)


# Output


def _write_timeline(
    args: argparse.Namespace, config: "Config", simulation: "Simulation", slow: dict[int, float]
) -> None:
    from xgram_dist.analysis.report.timeline import timeline_page
    from xgram_dist.files import write_atomically

    title = f"{config.name}: a step of {simulation.layout.axes.world:,} ranks, simulated"
    write_atomically(
        Path(args.timeline), timeline_page(title, simulation.step, simulation.recorder, slow, _facts(simulation))
    )


def _print(simulation: "Simulation", source: str) -> None:
    step = simulation.step
    rows = []
    for name, seconds in sorted(step.spent.items(), key=lambda item: -float(item[1].mean())):
        mean, most = float(seconds.mean()), float(seconds.max())
        transfer = step.transferring.get(name)
        rows.append(
            [
                name,
                _ms(mean),
                _ms(most),
                f"{100 * mean / step.seconds:.1f} %",
                "" if transfer is None else _ms(transfer),
            ]
        )
    print_table(["a rank's device, in a step", "mean, ms", "largest, ms", "share", "transfer, hidden or not, ms"], rows)
    print()
    facts = _facts(simulation)
    if simulation.requests is not None:
        facts.append(("tokens", f"independent draws from {source}"))
    print_table(["simulated step", "value"], [list(fact) for fact in facts])
    hidden = [name for name in step.transferring if name not in step.spent]
    if hidden:
        print(f"entirely hidden: {', '.join(hidden)}")


def _facts(simulation: "Simulation") -> list[tuple[str, str]]:
    step, links, axes, time = simulation.step, simulation.links, simulation.layout.axes, simulation.layout.time
    facts = [
        ("step", f"{1000 * step.seconds:,.1f} ms"),
        ("estimate of plan: nothing hidden, all hidden", f"{_ms(time.one_by_one)} ms, {_ms(time.overlapped)} ms"),
        ("ranks", f"{axes.world:,} on {links.num_nodes:,} nodes; {axes.data:,} data x {axes.tensor} tensor"),
        ("sent to other nodes, mean and largest", _gigabytes(step.far)),
        ("sent within the node, mean and largest", _gigabytes(step.near)),
        ("compute, share of the step", f"{100 * simulation.part('compute') / step.seconds:.1f} %"),
        ("most of the rest", simulation.bound),
    ]
    if simulation.requests is not None:
        facts.append(("busiest owner of rows / mean", f"{simulation.requests.imbalance:.3f}"))
    return facts


def _print_layouts(config: "Config", rows: "list[ScalingRow]") -> None:
    from xgram_dist.estimate.scaling import PARTS

    print(f"{config.name}, {config.train.global_batch:,} sequences a step")
    header = ["layout", "ranks", "micro-batch", "memory, GB", "step, s", *PARTS, "efficiency", "most beside compute"]
    lines = []
    for row in rows:
        simulation = row.simulation
        seconds = simulation.step.seconds
        shares = [f"{100 * simulation.part(name) / seconds:.0f} %" for name in PARTS]
        lines.append(
            [
                row.layout,
                f"{simulation.layout.axes.world:,}",
                str(row.micro_batch),
                f"{simulation.layout.device_bytes / 1e9:.1f}",
                f"{seconds:.3f}",
                *shares,
                f"{100 * row.efficiency:.0f} %",
                simulation.bound,
            ]
        )
    print_table(header, lines)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.1f}"


def _gigabytes(sizes: Any) -> str:
    return f"{float(sizes.mean()) / 1e9:,.2f} GB, {float(sizes.max()) / 1e9:,.2f} GB"


COMMANDS = {"simulate": Command(EXAMPLES, add_arguments, run)}
