"""The working set: what the network sees of the tables during one window of tokens.

Which rows are needed depends on the token ids alone, so they are fetched before the forward pass, once per distinct
token, and their gradient goes back once. Between the two, the network reads plain local leaf tensors:

    working = lookup.fetch(tokens)               distinct tokens -> one vector a token and table
    model(tokens_i, working.slots[i], working.values)   any number of forward and backward passes
    lookup.give_back(working)                    the leaves' gradients -> the owners of the rows

A `Lookup` is a local table, or tables spread over ranks; the network cannot tell. Gradients add up in the leaves in
fp32 over all micro-batches, whatever the compute type.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from xgram_dist.memory.layout import Slab


@dataclass
class WorkingSet:
    keys: Tensor
    """Distinct tokens, ascending [U]."""
    slots: Tensor
    """For each token of the window, its row in the values; shaped as the tokens."""
    values: dict[str, Tensor]
    """For each table, by name, the retrieved vectors [U, width]: leaves of the autograd graph."""
    context: dict[str, Any] = field(default_factory=dict)
    """What the lookup needs to take the gradients back."""

    def gradients(self, slab: Slab) -> list[Tensor]:
        """The gradient of each of the slab's tables; zero where no loss depended on it."""
        leaves = [self.values[table.name] for table in slab.tables]
        return [leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in leaves]


class Lookup(Protocol):
    def fetch(self, tokens: Tensor, *, training: bool = True) -> WorkingSet:
        """The working set of all `tokens` (any shape)."""
        ...

    def give_back(self, working: WorkingSet) -> None:
        """Hand the gradients of `working.values` to the owners of the rows, where they add up."""
        ...


class NoTables:
    """The lookup of a model without tables."""

    def fetch(self, tokens: Tensor, *, training: bool = True) -> WorkingSet:
        return WorkingSet(tokens.new_empty(0), torch.zeros_like(tokens), {})

    def give_back(self, working: WorkingSet) -> None:
        pass
