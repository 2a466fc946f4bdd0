"""Rows that a run touches, and what they take: memory and checkpoints of shards that keep touched rows grow to this.

Expectations over the tokens of the whole run, which count as independent draws from the token frequencies. For n-grams
that is an upper bound: real text repeats them more often.
"""

from dataclasses import asdict, dataclass
from typing import Any

from xgram_dist.config.schema import Config
from xgram_dist.estimate.comm import FP32, Axes
from xgram_dist.estimate.memory import INT64
from xgram_dist.estimate.traffic import Traffic
from xgram_dist.model.methods.base import method_of
from xgram_dist.tables.optimizers.build import TableOptimizerSettings, keeps_touched_rows
from xgram_dist.tables.optimizers.rounding import KEY
from xgram_dist.tables.records import record_width

SLOT_BYTES = 24
"""Host memory of a record's slot: the row's number, and entries of the hash table that is at most half full."""


@dataclass(frozen=True)
class TouchedEstimate:
    kept: bool
    """Whether the recipe keeps touched rows only; otherwise memory and checkpoints hold all rows."""
    tokens: int
    """Of the run."""
    rows: int
    """Of each table."""
    touched: float
    """Of them, at the end of the run; mean over views."""
    record_bytes: int
    """Of a row, over all tables: values, gates, optimizer state, bookkeeping."""
    rank_bytes: float
    """Records of a rank at the end of the run."""
    slot_bytes: float
    """Of a rank, in host memory."""
    checkpoint_bytes: float
    """Touched rows in a checkpoint at the end of the run, of all ranks."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def plan_touched_rows(config: Config, axes: Axes, optimizer: str, traffic: Traffic) -> TouchedEstimate:
    """`optimizer`: the kind."""
    train, layout = config.train, axes.layout(config)
    tokens = train.steps * train.global_batch * config.model.sequence_length
    share = traffic.run_share(tokens)
    record_bytes = saved_bytes = 0
    if optimizer != "dense":
        settings = TableOptimizerSettings.of(config, None, layout.num_rows, optimizer)
        gated, counted = axes.row_gates(config) > 0, config.memory.count_updates
        for slab in layout.slabs:
            fields = settings.record_fields(slab.width, len(slab.tables), gated=gated, counted=counted)
            record_bytes += FP32 * record_width(fields)
        for slab in method_of(config).layout(axes.tensor).slabs:  # of all stages
            fields = settings.record_fields(slab.width, len(slab.tables), gated=gated, counted=counted)
            saved_bytes += sum(field.nbytes for field in fields if not field.name.endswith(KEY)) + INT64  # the row's id
    touched_of_rank = share * traffic.rows_held
    return TouchedEstimate(
        kept=keeps_touched_rows(config, layout.num_rows, optimizer),
        tokens=tokens,
        rows=layout.num_rows,
        touched=share * layout.num_rows,
        record_bytes=record_bytes,
        rank_bytes=touched_of_rank * record_bytes,
        slot_bytes=touched_of_rank * SLOT_BYTES * len(layout.slabs),
        checkpoint_bytes=share * layout.num_rows * saved_bytes * axes.tensor,
    )
