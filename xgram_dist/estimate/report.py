"""The output of `xgram-dist plan`: the estimates of a recipe as text tables or JSON."""

from dataclasses import dataclass
from typing import Any

from xgram_dist.config.schema import Config
from xgram_dist.console import print_table
from xgram_dist.estimate.advice import Advice, Recommendation
from xgram_dist.estimate.flops import Budget
from xgram_dist.estimate.layout import LayoutEstimate
from xgram_dist.estimate.memory import Phase
from xgram_dist.estimate.replicas import ShardChoice
from xgram_dist.estimate.step_time import PUBLIC_MFU, Machine
from xgram_dist.estimate.touched_rows import TouchedEstimate
from xgram_dist.parallel.device import MAX_PLANNING_THREADS

BUDGET_LABELS = {
    "backbone_parameters": "backbone parameters",
    "table_parameters": "table parameters",
    "gate_parameters": "row gates",
    "extractor_parameters": "other parameters of the method",
    "tables": "tables",
    "rows_per_table": "rows a table",
    "activation_width": "retrieved width a token",
    "backbone_flops_per_token": "backbone FLOPs a token, forward",
    "extra_flops_per_token": "added FLOPs a token, forward",
    "tokens_per_step": "tokens a step",
    "training_tokens": "tokens in all",
}
ALLOCATION_LABELS = {
    "backbone_parameters": "backbone: weights",
    "backbone_gradients": "backbone: gradients",
    "backbone_optimizer": "backbone: AdamW moments",
    "backbone_compute": "backbone: gathered or cast for compute",
    "backbone_buffers": "backbone: communication buffers",
    "tables": "tables: rows",
    "row_slots": "tables: slots of touched rows",
    "row_gates": "tables: row gates",
    "table_optimizer": "tables: optimizer state",
    "row_gate_optimizer": "tables: optimizer state of the gates",
    "staging": "tables: records of a step, on their way",
    "hit_rows": "tables: copies of the rows a step hits",
    "working_set": "working set: vectors, gradients",
    "activations": "activations",
    "keys_and_values": "keys and values of other context ranks",
    "stage_buffers": "pipeline: gradients between stages",
    "loss": "loss: logits of a chunk, gradient of the head",
    "exchange_buffers": "exchange: communication buffers",
    "hit_gradients": "exchange: gradients of the rows a step hits",
}
PHASE_LABELS: dict[Phase, str] = {
    "step": "always",
    "compute": "forward, backward",
    "reduce": "after backward",
    "exchange": "fetch, return",
}
MAX_ADVICE = 6
MAX_RECOMMENDATIONS = 3


@dataclass(frozen=True)
class Report:
    config: Config
    budget: Budget
    machine: Machine
    memory_limit: int | None
    """Device bytes of a rank; None: not given."""
    layout: LayoutEstimate
    """As the recipe says."""
    alternatives: list[LayoutEstimate]
    advice: list[Advice]
    recommendations: list[Recommendation]
    """Faster, and within the memory."""
    exchange: dict[str, Any] | None
    """The figures of the exchange, with the files they come from; None: not known."""
    notes: list[str]
    update_places: dict[str, LayoutEstimate] | None = None
    """Touched rows in host memory or on disk, updated on the `device` and on the `host`; None: there is no choice."""

    @property
    def fits(self) -> bool | None:
        return None if self.memory_limit is None else self.layout.device_bytes <= self.memory_limit

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.config.name,
            "method": self.config.memory.method,
            **self.budget.as_dict(),
            "exchange": self.exchange,
            "machine": self.machine.as_dict(),
            "layout": self.layout.as_dict(),
            "table_update": self._update_places(),
            "memory_per_rank": self.memory_limit,
            "fits": self.fits,
            "advice": [one.as_dict() for one in self.advice],
            "recommendations": [one.as_dict() for one in self.recommendations],
            "layouts": [layout.as_dict() for layout in self.alternatives],
        }

    def _update_places(self) -> dict[str, Any] | None:
        if self.update_places is None or self.layout.tables is None:
            return None
        return {
            "on": "host" if self.layout.tables.updated_on_host else "device",
            "seconds": {place: layout.time.overlapped for place, layout in self.update_places.items()},
            "device_bytes": {place: layout.device_bytes for place, layout in self.update_places.items()},
        }

    def print(self) -> None:
        _print_budget(self.config.name, self.budget)
        if self.exchange is not None:
            print()
            _print_exchange(self.exchange)
        if self.layout.tables is not None:
            print()
            _print_touched_rows(self.layout.tables.run)
        print()
        _print_memory(self.layout, self.memory_limit, self.advice)
        print()
        _print_messages(self.layout, self.machine)
        print()
        _print_time(self.layout, self.machine)
        places = self._update_places()
        if places is not None:
            _print_update_places(places)
        print()
        _print_recommendations(self.recommendations)
        _print_alternatives(self.alternatives)
        for note in self.notes:
            print(f"\n{note}")


def _print_budget(name: str, budget: Budget) -> None:
    figures = budget.as_dict()
    rows = [[label, f"{figures[key]:,}"] for key, label in BUDGET_LABELS.items()]
    rows.append(["relative FLOPs", f"{budget.relative_flops:.4f}x"])
    print_table([name, "count"], rows)


def _print_exchange(e: dict[str, Any]) -> None:
    """Counts, then bytes on the wire, then the row-sharding policies."""
    counts = [
        ["tokens a rank's step", f"{e['tokens_per_rank_step']:,}"],
        ["tokens a micro-batch", f"{e['tokens_per_micro_batch']:,}"],
        ["micro-batches", f"{e['accumulation']:,}"],
        ["windows (memory.window), of micro-batches each", f"{len(e['windows']):,} of {max(e['windows']):,}"],
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
    print_table([f"exchange of a step on {e['ranks']} rank{'s' if e['ranks'] > 1 else ''}", "count"], counts)
    print()
    ratio = "-" if e["wire_over_lower_bound"] is None else f"{e['wire_over_lower_bound']:.3f}"
    wire = [
        ["token ids to the owners", *[format_bytes(e["id_bytes"])] * 2],
        ["vectors, each way", *map(format_bytes, e["wire_bytes"].values())],
        ["lower bound, a vector for each remote token", *map(format_bytes, e["lower_bound_bytes"].values())],
        ["vectors / lower bound", ratio, ratio],
        ["rows from host memory", *map(format_bytes, e["prefetch_bytes"].values())],
        [
            f"rows from host memory, at {e['host_bandwidth_gb_per_second']:g} GB/s",
            *(f"{1000 * seconds:,.1f} ms" for seconds in e["prefetch_seconds"].values()),
        ],
    ]
    print_table(["moved in a rank's step", *e["wire_bytes"]], wire)
    if "policies" in e:
        print()
        _print_policies(e["policies"], e["tokens_per_rank_step"])
    print(f"\ntokens as independent draws from {e['frequencies']}", end="")
    print("" if e["routing"] in (None, e["frequencies"]) else f", routing of {e['routing']}")


def _print_touched_rows(run: TouchedEstimate) -> None:
    rows = [
        ["rows of a table", f"{run.rows:,}"],
        ["rows touched at the end, expected", f"{run.touched:,.0f} ({100 * run.touched / run.rows:.3g} %)"],
    ]
    if run.record_bytes:
        rows += [
            ["record of a row, over all tables", format_bytes(run.record_bytes)],
            ["records of a rank at the end", format_bytes(run.rank_bytes)],
            ["their part of a checkpoint, all ranks", format_bytes(run.checkpoint_bytes)],
        ]
    rows.append(["rows kept (memory.rows)", "touched" if run.kept else "all"])
    print_table([f"rows touched by {run.tokens:,} tokens", "count"], rows)


def _print_policies(policies: list[dict[str, Any]], tokens: int) -> None:
    print_table(
        ["row sharding", "ranks", "vectors a token", "most loaded / mean", "sampled"],
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
    print(f"for a rank's step of {tokens:,} tokens; training shards rows by bucket")


def _print_memory(layout: LayoutEstimate, limit: int | None, advice: list[Advice]) -> None:
    rows = []
    for allocation in layout.allocations:
        size = format_bytes(allocation.bytes)
        device, host = ("", size) if allocation.host else (size, "")
        rows.append([ALLOCATION_LABELS[allocation.key], device, host, PHASE_LABELS[allocation.phase]])
    rows.append(["peak", format_bytes(layout.device_bytes), format_bytes(layout.host_bytes), ""])
    of_stages = ""
    if layout.axes.pipeline > 1:
        layers = "; ".join(f"{stage.layers[0]} to {stage.layers[-1]}" for stage in layout.stages)
        of_stages = f", layers {layers} (of {layout.axes.pipeline} pipeline ranks the one with most)"
    print_table([f"memory of a rank, {layout.name}{of_stages}", "device", "host", "when"], rows)
    if limit is None:
        return
    if layout.device_bytes <= limit:
        print(f"fits {format_bytes(limit)}, with {format_bytes(limit - layout.device_bytes)} to spare")
        return
    print(f"does not fit {format_bytes(limit)}: {format_bytes(layout.device_bytes - limit)} too much")
    if advice:
        print()
        print_table(
            ["changes that help, each alone", "device", "fits"],
            [[one.change, format_bytes(one.device_bytes), "yes" if one.fits else "no"] for one in advice[:MAX_ADVICE]],
        )


def _print_messages(layout: LayoutEstimate, machine: Machine) -> None:
    rows = [
        [
            message.name,
            message.collective,
            message.axis,
            str(message.ranks),
            format_bytes(message.bytes),
            format_seconds(machine.seconds_on_wire(message, layout.axes)),
        ]
        for message in layout.messages
    ]
    rows.append(["total", "", "", "", format_bytes(layout.wire_bytes), format_seconds(layout.time.wire)])
    print_table(["sent by a rank in a step", "collective", "axis", "ranks", "bytes", "time"], rows)


def _print_time(layout: LayoutEstimate, machine: Machine) -> None:
    time = layout.time
    rows = [
        [
            part.name,
            *(format_seconds(value) if value else "" for value in (part.matmul, part.memory, part.wire, part.host)),
            format_seconds(part.seconds),
            f"{100 * part.seconds / time.one_by_one:.0f} %",
            part.bound,
        ]
        for part in time.parts
    ]
    whole = ["", "", "", ""]
    rows.append(["total, without overlap", *whole, format_seconds(time.one_by_one), f"MFU {100 * time.mfu:.1f} %", ""])
    overlapped = [format_seconds(time.overlapped), f"MFU {100 * time.mfu_overlapped:.1f} %", ""]
    rows.append(["total, communication hidden behind compute", *whole, *overlapped])
    print_table(
        ["predicted time of a step", "products", "memory", "network", "host", "total", "share", "bound by"],
        rows,
        left=(0, 7),
    )
    worst = time.bottleneck
    print(
        f"bottleneck: {worst.name}, bound by {worst.bound}: {100 * worst.seconds / time.one_by_one:.0f} % of the step"
    )
    if layout.tables is not None:
        planning = layout.tables.planning_cpu_seconds
        share = planning / MAX_PLANNING_THREADS / time.overlapped
        print(
            f"planning, on the host while the step before trains: {format_seconds(planning)} of CPU time; "
            f"{100 * share:.1f} % of the step, divided among {MAX_PLANNING_THREADS} threads"
        )
    public = ", ".join(f"{100 * share:.1f} % at {size}" for size, share in PUBLIC_MFU.items())
    print(
        f"MFU with all attention scores counted: {100 * time.mfu_full_attention:.1f} %; so counted, others measured "
        f"{public} (MPT, 8,192 tokens, 8 x H100, llm-foundry)"
    )
    print(
        f"at {machine.flops:g} TFLOP/s x {machine.utilisation:g}; network {machine.bandwidth:g} GB/s a rank, "
        f"{machine.node_bandwidth:g} GB/s within a node of {machine.node_ranks}; memory {machine.memory_bandwidth:g} "
        f"GB/s, host {machine.host_bandwidth:g} GB/s; no latency"
    )


def _print_update_places(places: dict[str, Any]) -> None:
    ways = {"device": "on the device, to which their records are copied and back", "host": "by the CPU, where they lie"}
    faster = min(ways, key=lambda place: places["seconds"][place])
    print(f"touched rows (memory.update) are updated {ways[places['on']]}")
    for place in ways:
        seconds, size = format_seconds(places["seconds"][place]), format_bytes(places["device_bytes"][place])
        print(f"  {place}: {seconds} a step, {size} of device memory{', the faster one' if place == faster else ''}")


def _print_recommendations(recommendations: list[Recommendation]) -> None:
    if not recommendations:
        return
    print_table(
        ["recommended: faster, and fits", "a step", "MFU", "memory a rank"],
        [
            [one.change, format_seconds(one.seconds), f"{100 * one.mfu:.1f} %", format_bytes(one.device_bytes)]
            for one in recommendations[:MAX_RECOMMENDATIONS]
        ],
    )
    print()


def _print_alternatives(layouts: list[LayoutEstimate]) -> None:
    print_table(
        ["layouts", "memory a rank", "wire a step", "of it tables", "no overlap", "overlapped"],
        [
            [
                layout.name,
                format_bytes(layout.device_bytes),
                format_bytes(layout.wire_bytes),
                format_bytes(sum(message.bytes for message in layout.messages if message.of_tables)),
                format_seconds(layout.time.one_by_one),
                format_seconds(layout.time.overlapped),
            ]
            for layout in layouts
        ],
    )


def print_shard_choices(choices: list[ShardChoice], limited: bool) -> None:
    header = ["ranks", "memory.shard", "replicas", "within nodes", "between nodes", "wire", "memory a rank", ""]
    rows = [
        [
            f"{one.ranks:,}",
            "world" if one.replicas == 1 else f"{one.shard:,}",
            f"{one.replicas:,}",
            format_bytes(one.within_bytes),
            format_bytes(one.between_bytes),
            format_seconds(one.seconds),
            format_bytes(one.device_bytes),
            "does not fit" if not one.fits else "<- fastest" + (" that fits" if limited else "") if one.picked else "",
        ]
        for one in choices
    ]
    print_table(header, rows)
    print("\nBytes of the tables that a rank sends in a step, and their time on the wire, without overlap.")


def print_recipe_table(recipes: list[dict[str, Any]]) -> None:
    """A line for each recipe: its `Budget` with `name`, and `twin`, the cross-check of its FLOPs."""
    print_table(
        ["recipe", "table parameters", "other", "retrieved", "added FLOPs", "relative", "counted"],
        [
            [
                recipe["name"],
                _format_parameters(recipe["table_parameters"]),
                f"{recipe['extractor_parameters'] / 1e6:,.2f} M",
                f"{recipe['activation_width']:,}",
                f"{recipe['extra_flops_per_token'] / 1e6:,.2f} M",
                f"{recipe['relative_flops']:.4f}x",
                f"{100 * recipe['twin']['difference']:+.1f} %" if recipe["twin"]["formula"] else "-",
            ]
            for recipe in recipes
        ],
    )
    print(
        "\nother: parameters that the method adds beside its tables; retrieved: numbers a token; FLOPs a token, forward"
    )
    print("counted: by torch's counter in a small model of the same method, against the formula for the added FLOPs")


def format_seconds(seconds: float) -> str:
    """`12.3 ms`, `1.24 s`."""
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{1000 * seconds:,.1f} ms"


def format_bytes(size: float) -> str:
    """`3.21 GB`, in powers of 1000."""
    for unit in ("B", "kB", "MB"):
        if size < 999.5:
            return f"{size:,.0f} B" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.2f} GB"


def _format_parameters(count: int) -> str:
    return f"{count / 1e9:.3f} B" if count >= 1e8 else f"{count / 1e6:.3f} M"
