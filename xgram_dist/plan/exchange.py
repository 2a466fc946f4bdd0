"""The exchange of an optimizer step, computed from token frequencies; nothing is allocated.

In: a recipe, token frequencies, the routing (None: row = token id) and the number of ranks. Out: what a rank asks of
the others, what crosses the wire, how even it is, and what a rank holds, for the recipe's windows. Tokens count as
independent draws, so all figures but one are expectations, exact and the same every time; the imbalance is also that
of one sampled step, because the largest of many loads is larger in a step than on average.

A slab has its own token -> row map, so a token is asked for once a slab and owner of its rows there; slabs travel at
one time, so their loads add up. Wire figures are for one direction (vectors come, gradients go back) and the mean over
ranks; what a rank owns itself does not travel.
"""

from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xgram_dist.config.check import accumulation
from xgram_dist.config.schema import Config
from xgram_dist.memory.layout import Slab, plan_slabs
from xgram_dist.memory.placement import Placement, owners_of_tokens, plan_placement
from xgram_dist.memory.routing.routing import Routing
from xgram_dist.memory.touched import chance_seen, expected_touched_share, row_probabilities
from xgram_dist.plan.windows import plan_windows

BYTES = {"fp32": 4, "bf16": 2}
ID_BYTES = 4
# Numbers held for one of a table: itself and two moments; the dense optimizer keeps a gradient besides.
STATES = {"sparse": 3, "dense": 4}
DEFAULT_RANKS = 16
SEED = 0


@dataclass(frozen=True)
class Exchange:
    ranks: int
    tokens_per_rank_step: int
    tokens_per_micro_batch: int
    accumulation: int
    windows: list[int]
    """Micro-batches of each working set of a step."""
    distinct_tokens: float
    """Of a step."""
    distinct_tokens_per_micro_batch: float
    vectors: float
    """Asked for by a rank in a step, over all slabs."""
    vectors_per_token: float
    """For each distinct token and slab: the owners of its rows."""
    distinct_tokens_step_over_micro_batches: float
    """Of a step, over the sum of its micro-batches: what deduplicating over the whole step saves."""
    vectors_step_over_micro_batches: float
    """The same, in vectors: rare tokens, of which a step has more, have more owners."""
    imbalance_expected: float
    """Most vectors asked of an owner, over the mean."""
    imbalance_sampled: float
    touched_share: float
    """Of the rows, in a step of all ranks."""
    wire_bytes: dict[str, float]
    lower_bound_bytes: dict[str, float]
    """One vector for each distinct token with a row elsewhere; no exchange moves less."""
    wire_over_lower_bound: float | None
    id_bytes: float
    """Token ids to the owners, before the vectors come."""
    table_bytes: dict[str, dict[str, float]]
    """With the optimizer's state: mean and largest over ranks."""
    distinct_rows: float
    """Read in a rank's step, mean over slabs."""
    prefetch_bytes: dict[str, float]
    """The distinct rows of each working set of a rank's step, from host memory."""
    host_bandwidth_gb_per_second: float
    prefetch_seconds: dict[str, float]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Balance:
    """A placement under a rank's step."""

    policy: str
    ranks: int
    vectors_per_token: float
    imbalance_expected: float
    imbalance_sampled: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Draw:
    """So many tokens of the text: the chance that each occurs, and one sample."""

    def __init__(self, frequencies: NDArray[Any], tokens: int):
        self.tokens = tokens
        self.probabilities = frequencies / np.sum(frequencies, dtype=np.float64)
        self.seen = chance_seen(self.probabilities, tokens)

    @property
    def distinct(self) -> float:
        return float(self.seen.sum())

    @cached_property
    def sample(self) -> NDArray[np.float64]:
        """1 for each token that occurs in one seeded draw, else 0."""
        # Ascending, because what rounding leaves over falls to the last: the most frequent token can take it.
        order = np.argsort(self.probabilities, kind="stable")
        counts = np.zeros(len(order), dtype=np.int64)
        counts[order] = np.random.default_rng(SEED).multinomial(self.tokens, self.probabilities[order])
        return (counts > 0).astype(np.float64)


class Owners:
    """Who owns the rows of each token in a slab."""

    def __init__(self, routing: Routing | None, slab: Slab, placement: Placement, vocabulary: int):
        offsets, self.owners = owners_of_tokens(routing, slab.view, placement, vocabulary)
        self.ranks = placement.ranks
        self.per_token = np.diff(offsets)

    def vectors(self, seen: NDArray[np.float64]) -> float:
        return float(seen @ self.per_token)

    def loads(self, seen: NDArray[np.float64]) -> NDArray[np.float64]:
        """Vectors asked of each owner."""
        weights = np.repeat(seen, self.per_token)
        return np.bincount(self.owners, weights=weights, minlength=self.ranks).astype(np.float64)

    def elsewhere(self, seen: NDArray[np.float64]) -> float:
        """Distinct tokens with a row on another rank than the one that asks, mean over the ranks."""
        return float(seen @ (1 - (self.per_token == 1) / self.ranks))


def default_ranks(config: Config) -> int:
    """The most ranks, up to 16, over which the batch divides."""
    parts = config.train.global_batch // config.train.micro_batch
    return max(ranks for ranks in range(1, DEFAULT_RANKS + 1) if parts % ranks == 0)


def plan_exchange(
    config: Config, frequencies: NDArray[Any], routing: Routing | None, ranks: int, host_bandwidth: float
) -> Exchange:
    """`ranks`: of the data axis. `host_bandwidth` from host to device, in GB/s. The recipe must have tables."""
    steps = accumulation(config, ranks)
    per_micro_batch = config.train.micro_batch * config.model.sequence_length
    slabs = plan_slabs(config, config.parallel.tensor)
    num_rows, widths = slabs[0].rows, np.array([slab.width for slab in slabs])
    placement = plan_placement(routing, num_rows, ranks)
    owners = _owners(config, routing, placement)
    draw_of = lru_cache(lambda count: Draw(frequencies, count * per_micro_batch))
    step, micro = draw_of(steps), draw_of(1)
    windows = plan_windows(config, steps, lambda count: draw_of(count).distinct)
    of_windows = [draw_of(count) for count in windows]
    vectors = np.array([sum(o.vectors(draw.seen) for draw in of_windows) for o in owners])
    of_step = sum(o.vectors(step.seen) for o in owners)
    balance = _balance(placement.policy, owners, step)
    off_rank = (1 - 1 / ranks) * vectors
    elsewhere = np.array([sum(o.elsewhere(draw.seen) for draw in of_windows) for o in owners])
    distinct_rows = np.array([_distinct_rows(step, routing, slab) for slab in slabs])
    fetched_rows = np.array([sum(_distinct_rows(draw, routing, slab) for draw in of_windows) for slab in slabs])
    rows_held = np.bincount(placement.owner, minlength=ranks)
    row_bytes = _numbers_per_row(config, slabs) * BYTES["fp32"]
    prefetch = _bytes(fetched_rows @ widths)
    return Exchange(
        ranks=ranks,
        tokens_per_rank_step=step.tokens,
        tokens_per_micro_batch=per_micro_batch,
        accumulation=steps,
        windows=windows,
        distinct_tokens=step.distinct,
        distinct_tokens_per_micro_batch=micro.distinct,
        vectors=float(vectors.sum()),
        vectors_per_token=balance.vectors_per_token,
        distinct_tokens_step_over_micro_batches=step.distinct / (steps * micro.distinct),
        vectors_step_over_micro_batches=of_step / (steps * sum(o.vectors(micro.seen) for o in owners)),
        imbalance_expected=balance.imbalance_expected,
        imbalance_sampled=balance.imbalance_sampled,
        touched_share=expected_touched_share(frequencies, routing, num_rows, step.tokens * ranks),
        wire_bytes=_bytes(off_rank @ widths),
        lower_bound_bytes=_bytes(elsewhere @ widths),
        wire_over_lower_bound=float(off_rank @ widths) / float(elsewhere @ widths) if ranks > 1 else None,
        id_bytes=float(off_rank.sum()) * ID_BYTES,
        table_bytes={
            name: {
                "mean": float(rows_held.mean() * row_bytes * states),
                "largest": float(rows_held.max() * row_bytes * states),
            }
            for name, states in STATES.items()
        },
        distinct_rows=float(distinct_rows.mean()),
        prefetch_bytes=prefetch,
        host_bandwidth_gb_per_second=host_bandwidth,
        prefetch_seconds={name: size / (host_bandwidth * 1e9) for name, size in prefetch.items()},
    )


def plan_balance(config: Config, draw: Draw, routing: Routing | None, ranks: int, policy: str) -> Balance:
    """How even `policy` is on so many ranks, whether or not the recipe's batch divides over them."""
    placement = plan_placement(routing, plan_slabs(config)[0].rows, ranks, policy)
    return _balance(policy, _owners(config, routing, placement), draw)


def _owners(config: Config, routing: Routing | None, placement: Placement) -> list[Owners]:
    return [Owners(routing, slab, placement, config.model.vocabulary) for slab in plan_slabs(config)]


def _balance(policy: str, owners: list[Owners], draw: Draw) -> Balance:
    loads = np.sum([o.loads(draw.seen) for o in owners], axis=0)
    sampled = np.sum([o.loads(draw.sample) for o in owners], axis=0)
    return Balance(
        policy=policy,
        ranks=len(loads),
        vectors_per_token=float(loads.sum()) / (len(owners) * draw.distinct),
        imbalance_expected=float(loads.max() / loads.mean()),
        imbalance_sampled=float(sampled.max() / sampled.mean()),
    )


def _distinct_rows(draw: Draw, routing: Routing | None, slab: Slab) -> float:
    """Rows of the slab that the draw reads."""
    rows = row_probabilities(draw.probabilities, routing, slab.view, slab.rows)
    return float(chance_seen(rows, draw.tokens).sum())


def _numbers_per_row(config: Config, slabs: tuple[Slab, ...]) -> int:
    """Columns of all tables, and their row gates."""
    gated = config.memory.row_gates and config.memory.compression < 1
    return sum(slab.width + (len(slab.tables) if gated else 0) for slab in slabs)


def _bytes(numbers: float) -> dict[str, float]:
    return {name: float(numbers) * size for name, size in BYTES.items()}
