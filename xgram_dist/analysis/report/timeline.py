"""A simulated step as a page: a row a rank, with what its device, its links and its host do, to be zoomed into.

The page stands alone. All events are in it as JSON; `timeline.js` draws those in view, and shows the phase under the
pointer.
"""

import json
from pathlib import Path

from xgram_dist.analysis.report.html import Markup, Section, note, page, table, tag
from xgram_dist.estimate.simulate import OTHERS, Recorder, SimulatedStep

HERE = Path(__file__).parent
LANES = ("device", "network", "node", "host")
COLOURS = {
    "forward": 0,
    "backward": 5,
    "head and loss": 3,
    "gathering vectors": 4,
    "adding up gradients": 4,
    "table vectors": 1,
    "table gradients": 9,
    "gradients of replicas": 6,
    "gathering parameters": 2,
    "reducing gradients": 8,
    "tensor axis": 6,
    "updating tables": 10,
    "updating the backbone": 10,
    OTHERS: 7,
}
OTHER_COLOUR = 11


def timeline_page(
    title: str, step: SimulatedStep, recorder: Recorder, slow: dict[int, float], facts: list[tuple[str, str]]
) -> str:
    """`slow`: factor of work by rank. `facts`: (what, value), shown below."""
    names = list(dict.fromkeys(event.name for event in recorder.events))
    begin = float(recorder.start.min())
    events = []
    for event in recorder.events:
        what = LANES.index(event.lane), names.index(event.name)
        for row, (start, end) in enumerate(zip(event.start - begin, event.end - begin, strict=True)):
            if end > start:
                events.append([row, *what, round(1e6 * start, 1), round(1e6 * end, 1)])
    data = {
        "rows": [_label(rank, step, slow) for rank in recorder.ranks],
        "lanes": LANES,
        "names": names,
        "colours": [COLOURS.get(name, OTHER_COLOUR) for name in names],
        "events": events,
        "end": max((event[4] for event in events), default=1.0),
    }
    buttons = [tag("button", text, type="button", data_zoom=zoom) for text, zoom in BUTTONS]
    figure = tag(
        "figure",
        tag("div", buttons, class_="buttons"),
        tag("div", tag("canvas", tabindex="0"), tag("div", class_="tip", hidden=True), class_="plot"),
        tag("ul", [_legend(name, COLOURS.get(name, OTHER_COLOUR)) for name in names], class_="legend"),
        data_timeline=json.dumps(data, separators=(",", ":")),
        class_="timeline",
    )
    rows = [[name, f"{1000 * s.mean():,.2f}", f"{1000 * s.max():,.2f}"] for name, s in step.spent.items()]
    how = note(
        "Each rank has four strips: its device (tall), its card to the network, its link within the node, and its "
        "host. Grey on the device is waiting for other ranks. Wheel or + and - zoom, dragging or the arrow keys move, "
        "a double click shows everything. The ranks that wait least hold up the others, and come first."
    )
    sections = [
        Section("timeline", "Timeline", [how, figure, tag("style", Markup(STYLE)), tag("script", _script())]),
        Section("phases", "Seconds of a device", table(["phase", "mean over ranks, ms", "largest, ms"], rows)),
        Section("facts", "Step", table(["", ""], [list(fact) for fact in facts], left=(0, 1))),
    ]
    return page(title, f"{len(recorder.ranks)} of {len(step.end):,} ranks", sections)


BUTTONS = (("+", "in"), ("\N{MINUS SIGN}", "out"), ("all", "all"))
STYLE = """
.timeline { margin: 8px 0; } .timeline canvas { width: 100%; display: block; cursor: crosshair; touch-action: none; }
.timeline .plot { position: relative; } .timeline .legend .key { height: 11px; border: 0; width: 14px; }
.timeline .tip { position: absolute; pointer-events: none; background: var(--paper); border: 1px solid var(--line);
  padding: 4px 8px; font-size: 13px; white-space: pre; z-index: 2; }
.timeline button { font: inherit; min-width: 34px; margin: 0 4px 6px 0; }
"""


def _script() -> Markup:
    return Markup((HERE / "timeline.js").read_text(encoding="utf-8"))


def _legend(name: str, colour: int) -> Markup:
    return tag("li", tag("span", class_="key", style=f"background:var(--c{colour})"), name)


def _label(rank: int, step: SimulatedStep, slow: dict[int, float]) -> str:
    waited = 1000 * float(step.waiting[rank])
    factor = f", work x {slow[rank]:g}" if rank in slow else ""
    return f"rank {rank}{factor}\nwaits {waited:,.1f} ms"
