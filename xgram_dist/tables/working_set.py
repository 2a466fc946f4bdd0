"""The working set: what the network sees of the tables during one window of tokens.

Which rows a step needs depends on its token ids alone. So rows are planned ahead, fetched once per distinct token
before the forward pass, and their gradient is returned once. In between, the network reads plain local leaf tensors:

    windows = lookup.plan(tokens).result()       distinct tokens and the owners of their rows: ids only, ahead of time
    working = lookup.fetch(window)               distinct tokens -> one vector a token and table, on their way
    model(tokens_i, working.slots[i], working.values)   any number of forward and backward passes
    working.begin_return()                       optional: the next backward pass is the last one
    lookup.give_back(working)                    gradients of the leaves -> the owners of the rows

A window is the whole optimizer step or some of its micro-batches. Gradients accumulate in the leaves in fp32 over all
micro-batches of a window, whatever the compute type.
Shapes: U vectors of the working set, W slab width.
"""

import warnings
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
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

    def __init__(self, rows: int, width: int, like: Tensor):
        """`like`: a tensor of the same type and device."""
        self._shape, self._like = (rows, width), like
        self._buffer: Tensor | None = None  # allocated on first use: activations may need the memory before

    def take(self, leaf: Tensor, columns: slice) -> None:
        """Move the leaf's gradient to these columns, where autograd goes on."""
        self.put(columns, leaf.grad)
        leaf.grad = self.columns(columns)

    @torch.no_grad()
    def put(self, columns: slice, gradient: Tensor | None) -> None:
        """The final gradient of these columns. None: nothing depended on them."""
        target = self.columns(columns)
        if gradient is None:
            target.zero_()
        elif gradient.data_ptr() != target.data_ptr() or gradient.stride() != target.stride():
            target.copy_(gradient)

    def columns(self, columns: slice) -> Tensor:
        if self._buffer is None:
            self._buffer = self._like.new_empty(self._shape)
        return self._buffer[:, columns]


@dataclass
class WorkingSet:
    window: Window
    values: Mapping[str, Tensor]
    """For each table, by name, the retrieved vectors [U, width]: leaves of the autograd graph. Reading a table waits
    until its vectors have arrived."""

    @property
    def slots(self) -> Tensor:
        """For each token of the window, its row in the values; shaped like the tokens."""
        return self.window.slots

    def wait(self) -> None:
        """Until all vectors have arrived."""

    def begin_return(self) -> None:
        """The next backward pass is the last one of the window: gradients may leave while it runs."""


class Lookup(Protocol):
    """Tables as the training loop sees them."""

    overlap: bool
    """Whether fetching the next step's vectors early pays: they travel while the backbone is updated."""

    def plan(self, tokens: Tensor, *, whole: bool = False) -> "Future[list[Window]]":
        """The windows of a step's tokens [micro-batches, ...] in host memory. Every rank must plan the same steps in
        the same order; planning may run steps ahead of fetching. `whole`: one window, whatever the recipe says."""
        ...

    def fetch(self, window: Window, *, training: bool = True) -> WorkingSet:
        """The working set of a window. For training, the tables must not be updated between the fetch of a step's first
        window and its own update."""
        ...

    def give_back(self, working: WorkingSet) -> None:
        """Return the gradients of `working.values` to the owners of the rows, where they add up."""
        ...

    def close(self) -> None:
        """Stop threads."""
        ...


class NoTables:
    """The lookup of a model without tables."""

    overlap = False

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
