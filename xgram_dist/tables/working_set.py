"""The working set: what the network sees of the tables during one window of tokens.

Which rows a step needs depends on its token ids alone. So rows are planned ahead, fetched once per distinct token
before the forward pass, and their gradient is returned once. In between, the network reads plain local leaf tensors:

    windows = lookup.plan(tokens).result()       distinct tokens and the owners of their rows: ids only, ahead of time
    working = lookup.fetch(window)               distinct tokens -> one vector a token and table
    model(tokens_i, working.slots[i], working.values)   any number of forward and backward passes
    lookup.give_back(working)                    gradients of the leaves -> the owners of the rows

A window is the whole optimizer step or some of its micro-batches. Gradients accumulate in the leaves in fp32 over all
micro-batches of a window, whatever the compute type.
Shapes: U vectors of the working set, W slab width.
"""

import warnings
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from xgram_dist.tables.exchange_plan import Window

# Columns of a wider tensor are not contiguous. That is intended here.
warnings.filterwarnings("ignore", message="grad and param do not obey the gradient layout contract")


class SlabGradient:
    """The gradients of a slab's tables side by side [U, W], in the layout in which they are sent.

    Autograd gives each table's leaf a gradient of its own; concatenating them before the exchange would hold all of
    them twice. So a leaf's first gradient moves to its columns of one tensor, and autograd accumulates there from then
    on.
    """

    def __init__(self, vectors_UW: Tensor):
        self._like = vectors_UW
        self._buffer: Tensor | None = None  # allocated on first use: activations may need the memory before

    def accumulate_from(self, leaf: Tensor, columns: slice) -> None:
        """Accumulate the gradients of this leaf in these columns."""

        def move(leaf: Tensor) -> None:
            self.put(columns, leaf.grad)
            leaf.grad = self._columns(columns)

        leaf.register_post_accumulate_grad_hook(move)

    @torch.no_grad()
    def put(self, columns: slice, gradient: Tensor | None) -> None:
        """The final gradient of these columns. None: nothing depended on them."""
        target = self._columns(columns)
        if gradient is None:
            target.zero_()
        elif gradient.data_ptr() != target.data_ptr() or gradient.stride() != target.stride():
            target.copy_(gradient)

    def whole(self) -> Tensor:
        """[U, W], after all columns were put."""
        assert self._buffer is not None
        return self._buffer

    def _columns(self, columns: slice) -> Tensor:
        if self._buffer is None:
            self._buffer = torch.empty_like(self._like)
        return self._buffer[:, columns]


@dataclass
class WorkingSet:
    window: Window
    values: dict[str, Tensor]
    """For each table, by name, the retrieved vectors [U, width]: leaves of the autograd graph."""
    slabs: list[Tensor] = field(default_factory=list)
    """The same memory, one tensor a slab [U, W]. A reader of all tables may use the whole slab as one leaf instead."""
    gradients: list[SlabGradient] = field(default_factory=list)
    """Gradients of the values, one tensor a slab."""

    @property
    def slots(self) -> Tensor:
        """For each token of the window, its row in the values; shaped like the tokens."""
        return self.window.slots


class Lookup(Protocol):
    """Tables as the training loop sees them."""

    def plan(self, tokens: Tensor, *, whole: bool = False) -> "Future[list[Window]]":
        """The windows of a step's tokens [micro-batches, ...] in host memory. Every rank must plan the same steps in
        the same order; planning may run steps ahead of fetching. `whole`: one window, whatever the recipe says."""
        ...

    def fetch(self, window: Window, *, training: bool = True) -> WorkingSet:
        """The working set of a window."""
        ...

    def give_back(self, working: WorkingSet) -> None:
        """Return the gradients of `working.values` to the owners of the rows, where they add up."""
        ...

    def close(self) -> None:
        """Stop threads."""
        ...


class NoTables:
    """The lookup of a model without tables."""

    def __init__(self, device: torch.device):
        self.device = device

    def plan(self, tokens: Tensor, *, whole: bool = False) -> "Future[list[Window]]":
        done: Future[list[Window]] = Future()
        slots = torch.zeros(tokens.shape, dtype=torch.int64, device=self.device)
        done.set_result([Window(slice(0, len(tokens)), slots, 0, [])])
        return done

    def fetch(self, window: Window, *, training: bool = True) -> WorkingSet:
        return WorkingSet(window, {})

    def give_back(self, working: WorkingSet) -> None:
        pass

    def close(self) -> None:
        pass
