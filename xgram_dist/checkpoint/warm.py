"""A new run from the weights of another one: what both have is taken, the rest keeps its initial values.

Backbone weights are taken by name and shape. A table is taken where both runs have its layer, site and view:

    the same token -> row map     rows and gates as they are
    another map (compression,     a token that shares no row with another starts with rows that give exactly the vector
    routing)                      it had; rows that several tokens share are nobody's in particular, and stay initial

Optimizer, step and data position start anew. Every rank reads what it needs for the rows it owns.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xgram_dist.checkpoint.boxes import Spread
from xgram_dist.checkpoint.fits import check_model, check_tokenizer
from xgram_dist.checkpoint.load import load_boxes
from xgram_dist.checkpoint.state import backbone_state
from xgram_dist.checkpoint.weights import SavedWeights
from xgram_dist.engine.protocol import Engine
from xgram_dist.memory.retrieval import segment_sums
from xgram_dist.memory.routing.routing import Routing
from xgram_dist.memory.routing.views import View
from xgram_dist.memory.store import SlabState, Store
from xgram_dist.parallel.mesh import Mesh

TOKENS_AT_ONCE = 4096
INITIAL = "initial values"


@dataclass
class Account:
    """Of one part: how many of its tensors were taken, and what became of the others."""

    part: str
    taken: int = 0
    total: int = 0
    notes: list[str] = field(default_factory=list)

    def add(self, taken: bool, note: str | None = None) -> None:
        self.total += 1
        self.taken += taken
        if note is not None and note not in self.notes:
            self.notes.append(note)


@torch.no_grad()
def take_weights(
    folder: Path, engine: Engine, store: Store | None, routing: Routing | None, mesh: Mesh, tokenizer: str
) -> tuple[dict[str, Any], list[Account]]:
    """Overwrite what can be; (facts of the checkpoint, account)."""
    saved = SavedWeights(folder)
    check_model(folder, saved.facts, engine.config)
    check_tokenizer(folder, saved.facts, tokenizer)
    shapes = saved.shapes()
    wanted = {name: one for name, one in backbone_state(engine, mesh).items() if not name.endswith("_moment")}
    whole = {name: one for name, one in wanted.items() if shapes.get(name) == list(one.shape)}
    gains = {name for name in wanted if name.endswith(".gain") and name in shapes and name not in whole}
    tables = [] if store is None else [name for state in store.states for name in state.names]
    found = [name for name in tables if f"tables.{name}.rows" in shapes]
    weights = [*whole, *gains, *(f"tables.{name}.{what}" for name in found for what in ("rows", "gates"))]
    saved.reader.verify(mesh.world, {one for name in weights if name in shapes for one in saved.needed(name)})

    accounts: dict[str, Account] = {}
    load_boxes(saved.reader, whole, mesh)
    for name, spread in wanted.items():
        account = accounts.setdefault(_part(name), Account(_part(name)))
        if name in whole:
            account.add(True)
        elif name in gains:
            account.add(True, _take_gains(saved.whole(name), spread))
        elif name in shapes:
            account.add(False, f"another shape ({shapes[name]}, here {list(spread.shape)}): {INITIAL}")
        else:
            account.add(False, f"not in the checkpoint: {INITIAL}")
    engine.loaded()
    for state in store.states if store is not None else ():
        taker = _SlabTaker(saved, state, routing, mesh)
        for number, name in enumerate(state.names):
            part = _part(f"tables.{name}.rows")
            account = accounts.setdefault(part, Account(part))
            if name in found:
                account.add(True, taker.take(number, name))
            else:
                account.add(False, f"not in the checkpoint: {INITIAL}")
    for name in (name for name in shapes if not name.endswith(".gates")):
        if name not in wanted and name.removeprefix("tables.").removesuffix(".rows") not in tables:
            account = accounts.setdefault(_part(name), Account(_part(name)))
            account.add(False, "not in this model")
    return saved.facts, list(accounts.values())


def _part(name: str) -> str:
    words = name.split(".")
    if words[0] == "tables":
        return f"tables {words[3]}.{words[4]}"
    return f"extraction and gains at {words[4]}" if words[3:4] == ["sites"] else "backbone"


def _take_gains(values: Tensor, spread: Spread) -> str:
    """One number a view: those of the views in both."""
    for box in spread.boxes:
        (start,) = box.offsets
        part = values[start : start + len(box.tensor)]
        box.tensor[: len(part)] = part.to(box.tensor)
    return f"{len(values)} views there, {spread.shape[0]} here: gains of those in both"


class _SlabTaker:
    """Fills the tables of one slab: all have the same map here."""

    def __init__(self, saved: SavedWeights, state: SlabState, routing: Routing | None, mesh: Mesh):
        self.saved, self.state, self.mesh = saved, state, mesh
        self.config = saved.config
        self.view = None if routing is None else routing.views[state.slab.view]
        self.owned_S = state.owned.cpu().numpy()
        self.tokens_S: NDArray[Any] | None = None
        """Of each row held here: the token that it serves alone, or -1; made when asked for."""

    def take(self, number: int, name: str) -> str | None:
        table = self.state.slab.tables[number]
        columns = slice(self.mesh.tensor.rank * table.width, (self.mesh.tensor.rank + 1) * table.width)
        values_SW = self.state.rows[:, self.state.slab.columns()[name]]
        gates_S = None if self.state.gates is None else self.state.gates[:, number]
        if _same(self.saved.view_of(name), self.view):
            return self._copy(name, columns, values_SW, gates_S)
        return self._translate(name, columns, values_SW, gates_S)

    def _copy(self, name: str, columns: slice, values_SW: Tensor, gates_S: Tensor | None) -> str | None:
        """Row by row. Where only one of the two has gates, rows change by what the gates come to."""
        gated = f"tables.{name}.gates" in self.saved.manifest.tensors
        for part in _parts(len(self.owned_S)):
            rows_B = self.owned_S[part]
            new_BW = self.saved.rows(f"tables.{name}.rows", rows_B, columns)
            if gated:
                gates_B = self.saved.rows(f"tables.{name}.gates", rows_B)
                if gates_S is None:
                    new_BW *= torch.sigmoid(gates_B)[:, None]
                else:
                    gates_S[part] = gates_B.to(gates_S)
            elif gates_S is not None:
                new_BW /= torch.sigmoid(gates_S[part].cpu())[:, None]
            values_SW[part] = new_BW.to(values_SW)
        if gated == (gates_S is not None):
            return None
        return "row gates folded into the rows" if gated else "rows divided by the initial row gates"

    def _translate(self, name: str, columns: slice, values_SW: Tensor, gates_S: Tensor | None) -> str:
        tokens_S, vocabulary = self._lone_tokens(), self.config.model.vocabulary
        coefficients_V = np.ones(vocabulary) if self.view is None else _sums(self.view)
        places = np.flatnonzero(tokens_S >= 0)
        for part in _parts(len(places)):
            here_B, tokens_B = places[part], tokens_S[places[part]]
            vectors_BW = self._read(name, tokens_B, columns)
            factor_B = torch.from_numpy(coefficients_V[tokens_B])
            if gates_S is not None:
                factor_B = factor_B * torch.sigmoid(gates_S[torch.from_numpy(here_B)].cpu().double())
            values_SW[torch.from_numpy(here_B)] = (vectors_BW.double() / factor_B[:, None]).to(values_SW)
        count = vocabulary if self.view is None else int(_lone(self.view).sum())
        if count == vocabulary:
            return "another map: every token starts with its vector"
        return f"another map: {count:,} of {vocabulary:,} tokens start with their vectors, shared rows with {INITIAL}"

    def _lone_tokens(self) -> NDArray[Any]:
        if self.tokens_S is None:
            of_rows = None if self.view is None else _tokens_of_rows(self.view, self.state.slab.rows)
            self.tokens_S = self.owned_S if of_rows is None else of_rows[self.owned_S]
        return self.tokens_S

    def _read(self, name: str, tokens_B: NDArray[Any], columns: slice) -> Tensor:
        """What these tokens read in the saved run [B, W]."""
        view = self.saved.view_of(name)
        if view is None:
            return self.saved.rows(f"tables.{name}.rows", tokens_B, columns)
        counts_B = view.offsets[tokens_B + 1] - view.offsets[tokens_B]
        ends_B = np.cumsum(counts_B)
        first_B = ends_B - counts_B
        accesses_N = np.repeat(view.offsets[tokens_B] - first_B, counts_B) + np.arange(counts_B.sum())
        rows_R, place_N = np.unique(view.rows[accesses_N], return_inverse=True)
        values_RW = self.saved.rows(f"tables.{name}.rows", rows_R, columns)
        if f"tables.{name}.gates" in self.saved.manifest.tensors:
            values_RW *= torch.sigmoid(self.saved.rows(f"tables.{name}.gates", rows_R))[:, None]
        coefficients_N = torch.from_numpy(view.coefficients[accesses_N])
        return segment_sums(values_RW, torch.from_numpy(place_N), torch.from_numpy(first_B), coefficients_N)


def _parts(count: int) -> list[slice]:
    return [slice(start, min(start + TOKENS_AT_ONCE, count)) for start in range(0, count, TOKENS_AT_ONCE)]


def _same(one: View | None, other: View | None) -> bool:
    if one is None or other is None:
        return one is other
    pairs = ((one.offsets, other.offsets), (one.rows, other.rows), (one.coefficients, other.coefficients))
    return all(np.array_equal(a, b) for a, b in pairs)


def _sums(view: View) -> NDArray[Any]:
    """The coefficients of each token, added up."""
    return np.bincount(view.tokens(), weights=view.coefficients, minlength=view.vocabulary)


def _lone(view: View) -> NDArray[Any]:
    """Whether a token has rows, and all of them for itself. Equal rows of a token are one access."""
    shared_N = np.bincount(view.rows)[view.rows] > 1
    with_shared = np.bincount(view.tokens(), weights=shared_N, minlength=view.vocabulary) > 0
    return (np.diff(view.offsets) > 0) & ~with_shared


def _tokens_of_rows(view: View, num_rows: int) -> NDArray[Any]:
    """For each row the token that it serves alone, where that has no shared row; else -1."""
    tokens_N = view.tokens()
    found = np.full(num_rows, -1, dtype=np.int64)
    lone_N = _lone(view)[tokens_N]
    found[view.rows[lone_N]] = tokens_N[lone_N]
    return found


def account_rows(accounts: list[Account]) -> list[list[str]]:
    """For a table: part, taken, of, remarks."""
    return [[one.part, f"{one.taken:,}", f"{one.total:,}", "; ".join(one.notes)] for one in accounts]
