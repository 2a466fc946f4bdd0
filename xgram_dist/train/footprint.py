"""Bytes this rank holds, by part, and the most it ever held."""

from collections.abc import Iterable

from torch import Tensor

from xgram_dist.engine.protocol import Engine
from xgram_dist.memory.plan import Window
from xgram_dist.memory.tables import Tables
from xgram_dist.memory.working_set import Lookup
from xgram_dist.optim.update import Optimizer
from xgram_dist.parallel.device import peak_memory

FP32 = 4


def footprint(engine: Engine, lookup: Lookup, optimizer: Optimizer, windows: list[Window]) -> dict[str, int]:
    """`bytes_PART`. Activations are what is left of the peak."""
    pieces = engine.pieces()
    parts = {
        "backbone": _bytes(t for p in pieces if p.kind == "weight" for _, t in p.boxes),
        "backbone_optimizer": _bytes(t for p in pieces if p.kind != "weight" for _, t in p.boxes),
    }
    if isinstance(lookup, Tables) and optimizer.table_optimizer is not None:
        states, tables = lookup.store.states, optimizer.table_optimizer
        width = sum(sum(state.widths) for state in states)
        parts["tables"] = _bytes(t for state in states for t in (state.rows, state.gates) if t is not None)
        parts["tables_optimizer"] = sum(one.nbytes() for one in (*tables.rows, *tables.gates) if one is not None)
        parts["working_set"] = 2 * FP32 * width * max(len(window.keys) for window in windows)
    return {f"bytes_{name}": value for name, value in parts.items()} | {"bytes_peak": peak_memory(engine.device)}


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
