"""The tables as a library: row-sharded tables for any training loop, without a recipe or a trainer of ours.

    tables = TokenTables({"block0": 64, "block1": 64}, num_keys=vocabulary)      one shard on every rank of the group
    plan = tables.plan(tokens)                                                   may be called a step ahead
    rows = tables.fetch(plan)
    loss = model(tokens, rows.slots[0], rows.values)                             leaf tensors, and positions in them
    loss.backward()
    tables.give_back(rows)
    tables.clip(model.parameters(), 1.0)
    if tables.step(learning_rate):
        optimizer.step()

What this package exports is stable within a minor version; everything else in xgram_dist may change.
"""

from xgram_dist.library.modules import ShortConv, XgramInjection, gather
from xgram_dist.library.sites import TableSites
from xgram_dist.library.token_tables import Routing, TokenTables

__all__ = ["Routing", "ShortConv", "TableSites", "TokenTables", "XgramInjection", "gather"]
