"""A plan as tables for people."""

from xgram_dist.plan.advice import Advice
from xgram_dist.plan.layout import Layout
from xgram_dist.plan.machine import Machine
from xgram_dist.plan.messages import Message
from xgram_dist.plan.parts import Moment
from xgram_dist.progress import table

LABELS = {
    "backbone_parameters": "backbone: weights",
    "backbone_gradients": "backbone: gradients",
    "backbone_optimizer": "backbone: AdamW's moments",
    "backbone_compute": "backbone: gathered or cast for compute",
    "backbone_buffers": "backbone: messages",
    "tables": "tables: rows",
    "row_gates": "tables: row gates",
    "table_optimizer": "tables: optimizer",
    "row_gate_optimizer": "tables: optimizer of the gates",
    "hit_rows": "tables: rows a step hits, as copies",
    "working_set": "working set: vectors, gradients",
    "activations": "activations",
    "loss": "loss: logits of a chunk, the head's gradient",
    "exchange_buffers": "exchange: vectors on their way",
    "hit_gradients": "exchange: gradients of rows a step hits",
}
MOMENTS: dict[Moment, str] = {
    "step": "always",
    "compute": "forward, backward",
    "reduce": "after backward",
    "exchange": "fetch, return",
}
MOST_ADVICE = 6


def print_memory(layout: Layout, limit: float | None, advice: list[Advice]) -> None:
    rows = [
        [LABELS[p.key], "" if p.host else size_text(p.bytes), size_text(p.bytes) if p.host else "", MOMENTS[p.moment]]
        for p in layout.parts
    ]
    rows.append(["most at one time", size_text(layout.device_bytes), size_text(layout.host_bytes), ""])
    table([f"memory of a rank, {layout.name}", "device", "host", "when"], rows)
    if limit is None:
        return
    if layout.device_bytes <= limit:
        print(f"fits {size_text(limit)}, with {size_text(limit - layout.device_bytes)} to spare")
        return
    print(f"does not fit {size_text(limit)}: {size_text(layout.device_bytes - limit)} too much")
    if advice:
        print()
        made = [[one.change, size_text(one.device_bytes), "yes" if one.fits else "no"] for one in advice[:MOST_ADVICE]]
        table(["what would help, each alone", "device", "fits"], made)


def print_wire(layout: Layout, machine: Machine) -> None:
    table(
        ["sent by a rank in a step", "collective", "axis", "ranks", "bytes", "time"],
        [
            [m.name, m.collective, m.axis, str(m.ranks), size_text(m.bytes), time_text(_seconds(m, layout, machine))]
            for m in layout.messages
        ]
        + [["together", "", "", "", size_text(layout.wire_bytes), time_text(layout.time.wire)]],
    )


def print_time(layout: Layout, machine: Machine) -> None:
    time = layout.time
    rows = [
        ["compute", time_text(time.compute)],
        ["wire", time_text(time.wire)],
        ["update of the backbone", time_text(time.update - time.tables_update)],
        ["update of the tables", time_text(time.tables_update)],
        ["between host and device", time_text(time.host)],
        ["one after the other", time_text(time.one_by_one)],
        ["communication hidden behind compute", time_text(time.overlapped)],
    ]
    table(["predicted time of a step", ""], rows)
    print(
        f"at {machine.flops:g} TFLOP/s x {machine.utilisation:g}; {machine.bandwidth:g} GB/s of network a rank, "
        f"{machine.node_bandwidth:g} GB/s within a node of {machine.node_ranks}; memory {machine.memory_bandwidth:g} "
        f"GB/s, host {machine.host_bandwidth:g} GB/s; no latency"
    )


def print_layouts(layouts: list[Layout]) -> None:
    table(
        ["layouts", "memory a rank", "wire a step", "of it tables", "one by one", "hidden"],
        [
            [
                one.name,
                size_text(one.device_bytes),
                size_text(one.wire_bytes),
                size_text(sum(m.bytes for m in one.messages if m.of_tables)),
                time_text(one.time.one_by_one),
                time_text(one.time.overlapped),
            ]
            for one in layouts
        ],
    )


def _seconds(message: Message, layout: Layout, machine: Machine) -> float:
    return machine.seconds_on_wire(message, layout.axes)


def time_text(seconds: float) -> str:
    """`12.3 ms`, `1.24 s`."""
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{1000 * seconds:,.1f} ms"


def size_text(size: float) -> str:
    """`3.21 GB`, in powers of 1000."""
    for unit in ("B", "kB", "MB"):
        if size < 999.5:
            return f"{size:,.0f} B" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.2f} GB"
