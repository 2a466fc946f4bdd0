"""What a checkpoint says of its run, for states that no run has made."""

from typing import Any

from xgram_dist.config import Config, dump_config
from xgram_dist.optim.tables import TableOptimizer


def made_facts(config: Config, step: int, ranks: int, tables: TableOptimizer | None, **known: Any) -> dict[str, Any]:
    """`known`: facts that are not as those of a state that was just built."""
    return {
        "step": step,
        "updates": 0,
        "skipped": 0,
        "loss": None,
        "saved": "",
        "started_from": None,
        "loader": {},
        "tokenizer": {},
        "ranks": ranks,
        "data_ranks": ranks,
        "tensor": 1,
        "engine": config.parallel.engine,
        "placement": "token" if tables is None else tables.store.placement.policy,
        "table_optimizer": None if tables is None else tables.kind,
        "routing": None,
        "config": dump_config(config),
    } | known
