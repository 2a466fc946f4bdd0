"""Tables whose rows are spread over ranks: one exchange each way around a window of tokens.

    plan    distinct tokens of this rank; who owns their rows; ids to the owners          2 small all-to-alls
    fetch   each owner combines its rows into one vector a token and sends it             1 all-to-all a slab
    return  gradients of those vectors to the owners, which add them in rank order        1 all-to-all a slab

A token whose rows lie with several owners gets a partial sum from each, and the reader adds them up. Owners do the
arithmetic of a single process (local_tables.py) over the rows they hold, so results do not depend on the number of
ranks, up to the order of additions; for a given number of ranks they repeat bitwise.

Shapes: U distinct tokens here, P (token, owner) pairs of a slab, Q tokens asked of this owner, W slab width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from xgram_dist.config import Config
from xgram_dist.memory.layout import plan_slabs
from xgram_dist.memory.local_tables import LocalTables
from xgram_dist.memory.placement import owners_of_tokens, plan_placement
from xgram_dist.memory.retrieval import Accesses, retrieve
from xgram_dist.memory.routing.routing import Routing
from xgram_dist.memory.working_set import Lookup, WorkingSet
from xgram_dist.parallel.ranks import Ranks


@dataclass
class SlabPlan:
    """Who sends how many vectors of a slab to whom."""

    pairs_P: Tensor
    """Index into the keys of each vector this rank asks for, by owner."""
    asked: list[int]
    """Vectors this rank asks of each owner."""
    accesses: Accesses
    """Rows read here for the tokens others ask for, by asking rank."""
    answered: list[int]
    """Vectors this owner sends to each rank."""


class ShardedTables:
    """Implements `Lookup` (working_set.py)."""

    def __init__(self, config: Config, routing: Routing | None, device: torch.device, ranks: Ranks):
        self.ranks = ranks
        placement = plan_placement(routing, plan_slabs(config)[0].rows, ranks.size)
        self.owned = LocalTables(config, routing, device, placement, ranks.rank)
        self._owners = []
        for state in self.owned.states:
            offsets, owners = owners_of_tokens(routing, state.slab.view, placement, config.model.vocabulary)
            self._owners.append((torch.tensor(offsets, device=device), torch.tensor(owners, device=device)))

    @torch.no_grad()
    def fetch(self, tokens: Tensor, *, training: bool = True) -> WorkingSet:
        keys, slots = torch.unique(tokens, return_inverse=True)
        plans = self._plan(keys)
        flights = []
        for state, plan in zip(self.owned.states, plans, strict=True):
            vectors = torch.cat(retrieve(state.rows, state.gates, plan.accesses, state.widths), dim=1)
            flights.append(self.ranks.exchange(vectors, plan.answered, plan.asked))
        values: dict[str, Tensor] = {}
        for state, plan, (received_PW, handle) in zip(self.owned.states, plans, flights, strict=True):
            handle.wait()
            # Owners come in rank order, and partial sums of a token are added in that order.
            whole_UW = received_PW.new_zeros(keys.numel(), received_PW.shape[1])
            whole_UW.index_add_(0, plan.pairs_P, received_PW)
            for table, piece in zip(state.slab.tables, whole_UW.split(state.widths, dim=1), strict=True):
                values[table.name] = piece.contiguous().requires_grad_(training)
        return WorkingSet(keys, slots, values, {"plans": plans})

    @torch.no_grad()
    def give_back(self, working: WorkingSet) -> None:
        plans: list[SlabPlan] = working.context["plans"]
        flights = []
        for state, plan in zip(self.owned.states, plans, strict=True):
            # The loss of the run is the mean over ranks.
            sent_PW = torch.cat(working.gradients(state.slab), dim=1).index_select(0, plan.pairs_P) / self.ranks.size
            flights.append(self.ranks.exchange(sent_PW, plan.asked, plan.answered))
        for state, plan, (received_QW, handle) in zip(self.owned.states, plans, flights, strict=True):
            handle.wait()
            state.add_gradients(list(received_QW.split(state.widths, dim=1)), plan.accesses)

    def _plan(self, keys_U: Tensor) -> list[SlabPlan]:
        size, slabs = self.ranks.size, len(self.owned.states)
        pairs, counts = [], []
        for offsets, owners in self._owners:
            start = offsets[keys_U]
            per_key = offsets[keys_U + 1] - start
            key_P = torch.repeat_interleave(per_key)
            entry = start[key_P] + torch.arange(key_P.numel(), device=key_P.device)
            owner_P = owners[entry - (torch.cumsum(per_key, 0) - per_key)[key_P]]
            order = torch.argsort(owner_P, stable=True)
            pairs.append(key_P[order])
            counts.append(torch.bincount(owner_P, minlength=size))
        asked = torch.stack(counts, dim=1)  # [owner, slab]
        answered, handle = self.ranks.exchange(asked, [1] * size, [1] * size)
        # Ids go owner by owner, and within an owner slab by slab.
        parts = [pair.split(count.tolist()) for pair, count in zip(pairs, counts, strict=True)]
        ids = torch.cat([keys_U[parts[slab][owner]] for owner in range(size) for slab in range(slabs)])
        handle.wait()
        asked_list, answered_list = asked.tolist(), answered.tolist()
        received, handle = self.ranks.exchange(ids, [sum(c) for c in asked_list], [sum(c) for c in answered_list])
        handle.wait()
        pieces = received.split([count for row in answered_list for count in row])
        plans = []
        for slab, state in enumerate(self.owned.states):
            wanted = torch.cat([pieces[rank * slabs + slab] for rank in range(size)])
            plans.append(
                SlabPlan(
                    pairs_P=pairs[slab],
                    asked=[row[slab] for row in asked_list],
                    accesses=state.accesses(wanted),
                    answered=[row[slab] for row in answered_list],
                )
            )
        return plans


def owned_tables(lookup: Lookup) -> LocalTables | None:
    """The rows this process holds and updates, whatever the layout; None for a model without tables."""
    if isinstance(lookup, ShardedTables):
        return lookup.owned
    return lookup if isinstance(lookup, LocalTables) else None
