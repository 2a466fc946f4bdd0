"""Token-indexed tables, row-sharded over ranks: routing, exchange, shards, optimizers."""
