"""The working set: what the network sees of the tables during one window of tokens.

Which rows are needed depends on the token ids alone, so they are planned ahead, fetched before the forward pass, once
per distinct token, and their gradient goes back once. In between, the network reads plain local leaf tensors:

    windows = lookup.plan(tokens).result()       distinct tokens, the owners of their rows: ids only, ahead of time
    working = lookup.fetch(window)               distinct tokens -> one vector a token and table
    model(tokens_i, working.slots[i], working.values)   any number of forward and backward passes
    lookup.give_back(working)                    the leaves' gradients -> the owners of the rows

A window is the whole optimizer step or some of its micro-batches. Gradients add up in the leaves in fp32 over all
micro-batches of a window, whatever the compute type.
"""

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from xgram_dist.memory.gradients import SlabGradients
from xgram_dist.memory.plan import Window


@dataclass
class WorkingSet:
    window: Window
    values: dict[str, Tensor]
    """For each table, by name, the retrieved vectors [U, width]: leaves of the autograd graph."""
    slabs: list[Tensor] = field(default_factory=list)
    """The same memory, tables that travel together side by side [U, slab width], for who reads all at
    once, and may make it a leaf then."""
    gradients: list[SlabGradients] = field(default_factory=list)
    """Of the values, side by side in the same way."""

    @property
    def slots(self) -> Tensor:
        """For each token of the window, its row in the values; shaped as the tokens."""
        return self.window.slots


class Lookup(Protocol):
    def plan(self, tokens: Tensor, *, whole: bool = False) -> "Future[list[Window]]":
        """The windows of a step's tokens [micro-batches, ...], in host memory. Every rank must plan the same steps in
        the same order; it may be steps ahead of what is fetched. `whole`: one window, whatever the recipe says."""
        ...

    def fetch(self, window: Window, *, training: bool = True) -> WorkingSet:
        """The working set of a window."""
        ...

    def give_back(self, working: WorkingSet) -> None:
        """Hand the gradients of `working.values` to the owners of the rows, where they add up."""
        ...

    def close(self) -> None:
        """Let go of threads."""
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
