"""The exchange of a step: vectors and bytes between ranks, balance over owners, rows read from host memory.

In: a recipe, token frequencies, the routing (None: row = token id) and the number of ranks of the data axis. Out: the
figures of `xgram-dist plan`, for the recipe's windows. All are expectations, the same every time; the imbalance is also
given for one sampled step, because the largest of many loads is larger in a step than on average.

Slabs travel together, so their loads add up. Wire figures are for one direction (vectors come, gradients go back) and
the mean over ranks; local rows do not travel.
"""

from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xgram_dist.config.schema import Config
from xgram_dist.config.validate import accumulation
from xgram_dist.estimate.comm import FP32, read_tokens
from xgram_dist.estimate.flops import num_row_gates
from xgram_dist.estimate.traffic import TokenDraw, TokenOwners, plan_window_sizes
from xgram_dist.model.methods.base import table_layout
from xgram_dist.parallel.device import DTYPES
from xgram_dist.tables.exchange_plan import ID_BYTES
from xgram_dist.tables.frequencies import chance_seen, expected_touched_share, row_probabilities
from xgram_dist.tables.layout import Slab
from xgram_dist.tables.routing import Routing
from xgram_dist.tables.row_sharding import RowSharding, plan_row_sharding

WIRE_BYTES = {name: dtype.itemsize for name, dtype in DTYPES.items()}
"""Of a number, by `memory.wire`."""
NUMBERS_PER_ELEMENT = {"sparse": 3, "dense": 4}
"""Held for each element of a table: itself and two moments; the dense optimizer keeps a gradient too."""
MAX_DEFAULT_RANKS = 16


@dataclass(frozen=True)
class ExchangeEstimate:
    ranks: int
    tokens_per_rank_step: int
    tokens_per_micro_batch: int
    accumulation: int
    windows: list[int]
    """Micro-batches of each window of a step."""
    distinct_tokens: float
    """Of a step."""
    distinct_tokens_per_micro_batch: float
    vectors: float
    """Asked for by a rank in a step, over all slabs."""
    vectors_per_token: float
    """For each distinct token and slab: the owners of its rows."""
    distinct_tokens_step_over_micro_batches: float
    """Of a step, divided by the sum of its micro-batches: what deduplicating over the whole step saves."""
    vectors_step_over_micro_batches: float
    """The same in vectors: a step has more rare tokens, and these have more owners."""
    imbalance_expected: float
    """Most vectors asked of an owner, divided by the mean."""
    imbalance_sampled: float
    touched_share: float
    """Share of the rows that a step of all ranks hits."""
    wire_bytes: dict[str, float]
    lower_bound_bytes: dict[str, float]
    """One vector for each distinct token with a remote row; no exchange moves less."""
    wire_over_lower_bound: float | None
    id_bytes: float
    """Token ids to the owners, ahead of the vectors."""
    table_bytes: dict[str, dict[str, float]]
    """With optimizer state: mean and largest over ranks."""
    distinct_rows: float
    """Rows read in a rank's step, mean over slabs."""
    prefetch_bytes: dict[str, float]
    """The distinct rows of each window of a rank's step, read from host memory."""
    host_bandwidth_gb_per_second: float
    prefetch_seconds: dict[str, float]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class LoadBalance:
    """Load of the owners under a row sharding."""

    policy: str
    ranks: int
    vectors_per_token: float
    imbalance_expected: float
    imbalance_sampled: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def default_ranks(config: Config) -> int:
    """The most ranks, up to 16, over which the batch divides."""
    micro_batches = config.train.global_batch // config.train.micro_batch
    return max(ranks for ranks in range(1, MAX_DEFAULT_RANKS + 1) if micro_batches % ranks == 0)


def plan_exchange(
    config: Config,
    frequencies: NDArray[Any],
    routing: Routing | None,
    ranks: int,
    host_bandwidth: float,
    replicas: int = 1,
) -> ExchangeEstimate:
    """`ranks`: of the data axis. `host_bandwidth`: from host to device, in GB/s. `replicas`: of the tables. The recipe
    must have tables."""
    micro_batches = accumulation(config, ranks)
    per_micro_batch = read_tokens(config)
    slabs = table_layout(config, config.parallel.tensor).slabs
    num_rows, slab_widths = slabs[0].rows, np.array([slab.width for slab in slabs])
    sharding = plan_row_sharding(routing, num_rows, ranks // replicas)
    owners = _owners_by_slab(config, routing, sharding)
    draw_of = lru_cache(lambda count: TokenDraw(frequencies, count * per_micro_batch))
    step, micro = draw_of(micro_batches), draw_of(1)
    window_sizes = plan_window_sizes(config, micro_batches, lambda count: draw_of(count).distinct)
    windows = [draw_of(count) for count in window_sizes]
    vectors = np.array([sum(o.vectors(window.seen) for window in windows) for o in owners])
    step_vectors = sum(o.vectors(step.seen) for o in owners)
    balance = _balance(sharding.policy, owners, step)
    remote_vectors = (1 - replicas / ranks) * vectors
    remote_tokens = np.array([sum(o.remote_tokens(window.seen) for window in windows) for o in owners])
    distinct_rows = np.array([_distinct_rows(step, routing, slab) for slab in slabs])
    fetched_rows = np.array([sum(_distinct_rows(window, routing, slab) for window in windows) for slab in slabs])
    rows_held = np.bincount(sharding.owner, minlength=sharding.ranks)
    row_bytes = (sum(slab.width for slab in slabs) + num_row_gates(config)) * FP32
    prefetch = _bytes_by_type(fetched_rows @ slab_widths)
    return ExchangeEstimate(
        ranks=ranks,
        tokens_per_rank_step=step.tokens,
        tokens_per_micro_batch=per_micro_batch,
        accumulation=micro_batches,
        windows=window_sizes,
        distinct_tokens=step.distinct,
        distinct_tokens_per_micro_batch=micro.distinct,
        vectors=float(vectors.sum()),
        vectors_per_token=balance.vectors_per_token,
        distinct_tokens_step_over_micro_batches=step.distinct / (micro_batches * micro.distinct),
        vectors_step_over_micro_batches=step_vectors / (micro_batches * sum(o.vectors(micro.seen) for o in owners)),
        imbalance_expected=balance.imbalance_expected,
        imbalance_sampled=balance.imbalance_sampled,
        touched_share=expected_touched_share(frequencies, routing, num_rows, step.tokens * ranks),
        wire_bytes=_bytes_by_type(remote_vectors @ slab_widths),
        lower_bound_bytes=_bytes_by_type(remote_tokens @ slab_widths),
        wire_over_lower_bound=(
            float(remote_vectors @ slab_widths) / float(remote_tokens @ slab_widths) if sharding.ranks > 1 else None
        ),
        id_bytes=float(remote_vectors.sum()) * ID_BYTES,
        table_bytes={
            name: {
                "mean": float(rows_held.mean() * row_bytes * numbers),
                "largest": float(rows_held.max() * row_bytes * numbers),
            }
            for name, numbers in NUMBERS_PER_ELEMENT.items()
        },
        distinct_rows=float(distinct_rows.mean()),
        prefetch_bytes=prefetch,
        host_bandwidth_gb_per_second=host_bandwidth,
        prefetch_seconds={name: size / (host_bandwidth * 1e9) for name, size in prefetch.items()},
    )


def plan_balance(config: Config, draw: TokenDraw, routing: Routing | None, ranks: int, policy: str) -> LoadBalance:
    """How even the row sharding `policy` is on so many ranks, whether or not the recipe's batch divides over them."""
    sharding = plan_row_sharding(routing, table_layout(config).slabs[0].rows, ranks, policy)
    return _balance(policy, _owners_by_slab(config, routing, sharding), draw)


def _owners_by_slab(config: Config, routing: Routing | None, sharding: RowSharding) -> list[TokenOwners]:
    return [TokenOwners(routing, slab, sharding, config.model.vocabulary) for slab in table_layout(config).slabs]


def _balance(policy: str, owners: list[TokenOwners], draw: TokenDraw) -> LoadBalance:
    loads = np.sum([o.loads(draw.seen) for o in owners], axis=0)
    sampled = np.sum([o.loads(draw.sample) for o in owners], axis=0)
    return LoadBalance(
        policy=policy,
        ranks=len(loads),
        vectors_per_token=float(loads.sum()) / (len(owners) * draw.distinct),
        imbalance_expected=float(loads.max() / loads.mean()),
        imbalance_sampled=float(sampled.max() / sampled.mean()),
    )


def _distinct_rows(draw: TokenDraw, routing: Routing | None, slab: Slab) -> float:
    """Rows of the slab that the draw reads."""
    rows = row_probabilities(draw.probabilities, routing, slab.view, slab.rows)
    return float(chance_seen(rows, draw.tokens).sum())


def _bytes_by_type(elements: float) -> dict[str, float]:
    return {name: float(elements) * size for name, size in WIRE_BYTES.items()}
