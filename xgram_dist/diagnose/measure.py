"""All figures of a checkpoint, in one pass over its rows and one over some text.

In: a checkpoint, prepared data, ranks. Out: plain numbers, the same on every rank and for every number of ranks. A
figure that does not apply to the memory method says so: {"not_applicable": reason}.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xgram_dist.data.dataset import PreparedData
from xgram_dist.data.loader import validation_batches
from xgram_dist.diagnose.activation import Activation, by_frequency, magnitudes
from xgram_dist.diagnose.cosines import LayerCosines, layer_cosines
from xgram_dist.diagnose.movement import Movement
from xgram_dist.diagnose.open import Opened
from xgram_dist.diagnose.rows import hit_concentration, update_shares
from xgram_dist.diagnose.sums import Sums, Totals
from xgram_dist.diagnose.views import ViewCosines, view_cosines
from xgram_dist.diagnose.watch import injecting_sites, watching
from xgram_dist.memory.routing.frequencies import load_frequencies
from xgram_dist.progress import Progress

NGRAM_METHODS = ("engram", "scone")
"""Their rows are read by n-grams, so that token frequencies say nothing of them."""

Figures = dict[str, Any]


def measure(opened: Opened, data: PreparedData, sequences: int, batch: int, thresholds: list[int]) -> Figures:
    """`sequences` of the data, `batch` at a time; `thresholds` for the share of rows with more updates."""
    config = opened.config
    movement = _rows(opened)
    totals, views = _text(opened, data, sequences, batch)
    frequencies, source = _frequencies(opened, data, totals)
    found: Figures = {
        "activation": _activation(opened, totals, frequencies, source),
        "layers": layer_cosines(totals, config.model.layers),
        "views": _views(opened, totals, views),
        "row_hits": _row_hits(opened, frequencies, source),
        "updates": _updates(opened, frequencies, source, thresholds),
        "movement": movement,
    }
    return {
        "run": config.name,
        "method": config.memory.method,
        "step": opened.step,
        "split": data.split,
        "positions": int(totals["occurrences"].sum()),
        "figures": found,
    }


def not_applicable(reason: str) -> Figures:
    return {"not_applicable": reason}


def _rows(opened: Opened) -> Figures:
    """Reads the rows into their place, and what that says of their movement."""
    reachable = _reachable(opened)
    movement = Movement(list(reachable))

    def moved(table: str, rows: Tensor, initial: Tensor, now: Tensor) -> None:
        if reachable[table] is not None:
            read = torch.from_numpy(reachable[table][rows.numpy()])
            initial, now = initial[read], now[read]
        movement.add(table, initial, now)

    with _progress(opened, opened.row_bytes() / 1e6, "MB", "table rows") as advance:
        opened.read_rows(moved, lambda size: advance(size / 1e6))
    if opened.store is None:
        return not_applicable(f"{opened.config.memory.method} trains no tables")
    source = opened.saved.facts["started_from"]
    if source is not None:
        return not_applicable(
            f"the run started from another's checkpoint ({source['name']}, step {source['step']}), not from rows of "
            "its own seed"
        )
    found = movement.figures(opened.mesh.world)
    if not found["tables"]:
        return not_applicable(f"the rows of {opened.config.memory.method} start at zero")
    return found


def _reachable(opened: Opened) -> dict[str, Any]:
    """For each table, which rows some token reads; None: all."""
    found: dict[str, Any] = {}
    routing = opened.saved.routing
    for state in opened.store.states if opened.store is not None else ():
        mask = None
        if routing is not None and state.slab.rows == routing.num_rows:
            mask = np.zeros(routing.num_rows, dtype=bool)
            mask[routing.views[state.slab.view].rows] = True
        found |= dict.fromkeys(state.slab.columns(), mask)
    return found


def _text(opened: Opened, data: PreparedData, sequences: int, batch: int) -> tuple[Totals, ViewCosines]:
    """Forward passes over some text, batches dealt to the ranks in turn."""
    sums = Sums()
    names = [name for state in (opened.store.states if opened.store else ()) for name in state.slab.columns()]
    cosines = LayerCosines(sums)
    activation = Activation(sums, opened.config.model.vocabulary)
    views = ViewCosines(sums, names)

    def see(what: str, layer: int, name: str, value: Tensor) -> None:
        for one in (cosines, activation, views):
            one.see(what, layer, name, value)

    batches = validation_batches(data, opened.config.model.sequence_length, batch, sequences)
    ranks = opened.mesh.data
    with (
        _progress(opened, sum(len(one) for one in batches), "sequences", "figures") as advance,
        watching(opened.model, see),
    ):
        for first in range(0, len(batches), ranks.size):
            mine = first + ranks.rank
            # A rank without a batch in the last round goes along with another: collectives need all.
            tokens_BT = batches[mine] if mine < len(batches) else batches[0]
            sums.counts = mine < len(batches)
            activation.begin(tokens_BT.to(opened.device))
            working = opened.forward(tokens_BT)
            views.retrieved(working.values, working.slots)
            advance(sum(len(one) for one in batches[first : first + ranks.size]))
    return sums.over(opened.mesh.world), views


def _frequencies(opened: Opened, data: PreparedData, totals: Totals) -> tuple[NDArray[np.float64], str]:
    """Of the training text where its counts are there, else of what was read just now; and which of the two."""
    config = opened.config
    places = [
        (config.memory.routing.frequencies, "the run's frequency file"),
        (str(data.folder / "counts.npz"), "the data set's token counts"),
        (None if config.data.path is None else f"{config.data.path}/counts.npz", "the data set's token counts"),
    ]
    for place, name in places:
        if place is not None and Path(place).is_file():
            return np.asarray(load_frequencies(place, vocabulary=config.model.vocabulary)), name
    counts = totals["occurrences"].numpy()
    return counts / counts.sum(), SAMPLE


SAMPLE = "the text that was read"


def _activation(opened: Opened, totals: Totals, frequencies: NDArray[np.float64], source: str) -> Figures:
    sites = injecting_sites(opened.model)
    sites = {site: layers for site, layers in sites.items() if f"norms.{site}" in totals}
    if not sites:
        return not_applicable(f"{opened.config.memory.method} adds no vector at a site")
    occurrences = totals["occurrences"].numpy()
    found = magnitudes(totals, sites)
    return {
        "frequencies": source,
        **by_frequency(found.pop("all"), frequencies, occurrences),
        "sites": {site: by_frequency(one, frequencies, occurrences) for site, one in found.items()},
    }


def _views(opened: Opened, totals: Totals, views: ViewCosines) -> Figures:
    found = view_cosines(totals, views.groups)
    return found or not_applicable(f"{opened.config.memory.method} has no two views at a site")


def _row_hits(opened: Opened, frequencies: NDArray[np.float64], source: str) -> Figures:
    refused = _not_by_token(opened)
    if refused is not None:
        return refused
    return {"frequencies": source, **hit_concentration(frequencies, opened.saved.routing)}


def _updates(opened: Opened, frequencies: NDArray[np.float64], source: str, thresholds: list[int]) -> Figures:
    refused = _not_by_token(opened)
    if refused is not None:
        return refused
    if source == SAMPLE:
        return not_applicable("the data set has no token counts (counts.npz)")
    tokens = opened.saved.facts["loader"]["position"] * opened.config.model.sequence_length
    assert opened.store is not None
    rows = opened.store.states[0].slab.rows
    return {"frequencies": source, **update_shares(frequencies, opened.saved.routing, rows, tokens, thresholds)}


def _not_by_token(opened: Opened) -> Figures | None:
    """Why token frequencies do not tell how rows are read; None: they do."""
    method = opened.config.memory.method
    if opened.store is None:
        return not_applicable(f"{method} trains no tables")
    routing = opened.saved.routing
    expected = opened.config.model.vocabulary if routing is None else routing.num_rows
    if method in NGRAM_METHODS or any(state.slab.rows != expected for state in opened.store.states):
        return not_applicable(f"rows of {method} are not read by token")
    return None


@contextmanager
def _progress(opened: Opened, total: float, unit: str, title: str) -> Iterator[Callable[[float], None]]:
    """The first rank's, on screen."""
    if not opened.mesh.world.first or not total:
        yield lambda amount: None
        return
    with Progress(total, unit, title) as progress:
        yield progress.update
