"""Saving and loading the state of a row optimizer, as a checkpoint does."""

from torch import Tensor

from xgram_dist.tables.optimizers.base import RowOptimizer


def saved_state(optimizer: RowOptimizer, *, caught_up: bool = False) -> dict[str, dict[str, Tensor]]:
    """Copies of everything beside the values, by kind and name."""
    if caught_up:
        optimizer.catch_up_all()
    state = optimizer.state()
    return {kind: {name: tensor.clone() for name, tensor in getattr(state, kind).items()} for kind in KINDS}


def load_state(optimizer: RowOptimizer, saved: dict[str, dict[str, Tensor]]) -> None:
    """Overwrite what both have; then the replicated tensors, as loading a checkpoint does."""
    state = optimizer.state()
    for kind in ("columns", "tables", "rows"):
        for name, tensor in saved[kind].items():
            if name in getattr(state, kind):
                getattr(state, kind)[name].copy_(tensor)
    for name, number in optimizer.load_replicated(saved["replicated"]).items():
        optimizer.state().rows[name].fill_(number)


def tensors(optimizer: RowOptimizer) -> list[Tensor]:
    return [tensor for of_kind in saved_state(optimizer).values() for tensor in of_kind.values()]


KINDS = ("columns", "tables", "rows", "replicated")
