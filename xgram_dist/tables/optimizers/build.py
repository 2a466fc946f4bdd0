"""From a recipe to table optimizers: which kind, and at which learning rates."""

import math
from dataclasses import dataclass

from torch import Tensor

from xgram_dist.config import Config
from xgram_dist.config.schema import TableLearningRate
from xgram_dist.parallel.process_group import ProcessGroup
from xgram_dist.tables.optimizers.adagrad import RowAdagrad
from xgram_dist.tables.optimizers.adamw import AdamW, DenseAdamW, LazyAdamW
from xgram_dist.tables.optimizers.adamw_catchup import CatchUpAdamW
from xgram_dist.tables.optimizers.base import FrozenRows, RowOptimizer
from xgram_dist.tables.routing import Routing

FROZEN = "frozen"
"""The kind for tables that are only read."""
DENSE_FROM = 0.1
"""Share of rows touched in a step from which the dense sweep is the faster exact AdamW (docs/measurements.md)."""


def choose_optimizer(config: Config, touched_share: float | None) -> str:
    """The kind that `memory.optimizer` asks for. `auto` decides by the share of rows that a step is expected to touch;
    None: unknown."""
    if config.memory.optimizer != "auto":
        return config.memory.optimizer
    if config.memory.placement == "disk":  # a sweep would read and write the whole file every step
        return "catch_up"
    return "dense" if touched_share is None or touched_share >= DENSE_FROM else "catch_up"


@dataclass(frozen=True)
class TableRates:
    """Learning rates of a step."""

    vip: float
    body: float
    """Of hashed, aliased and unhashed rows."""
    gates: float


def table_multipliers(config: Config, num_rows: int) -> tuple[float, float]:
    """Learning rate of (VIP rows, the other rows) relative to the backbone's."""
    settings: TableLearningRate = config.memory.learning_rate
    if settings.multiplier == "sqrt_vocabulary":
        body = math.sqrt(config.model.vocabulary / config.model.width)
    elif settings.multiplier == "sqrt_rows":
        body = math.sqrt(num_rows / config.model.width)
    else:
        body = float(settings.multiplier)
    vip = body if settings.vip_multiplier is None else settings.vip_multiplier
    return vip, body


@dataclass(frozen=True)
class TableOptimizerSettings:
    """How a shard updates its rows and gates. Gates learn at the backbone's rate."""

    kind: str
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    gate_decay: float
    """Weight decay of the row gates."""
    vip_differs: bool
    """VIP rows have another learning rate."""
    has_vip: bool
    """There are VIP rows, here or on other ranks."""
    compiled: bool

    @staticmethod
    def of(config: Config, routing: Routing | None, num_rows: int, kind: str) -> "TableOptimizerSettings":
        optimizer, memory = config.optimizer, config.memory
        vip, body = table_multipliers(config, num_rows)
        return TableOptimizerSettings(
            kind=kind,
            betas=optimizer.betas,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay if memory.weight_decay is None else memory.weight_decay,
            gate_decay=optimizer.weight_decay if optimizer.decay_vectors else 0.0,
            vip_differs=vip != body,
            has_vip=routing is not None and routing.vip_rows > 0,
            compiled=config.train.compile,
        )

    def build(self, rows: Tensor, widths: list[int], num_vip: int, tensor_group: ProcessGroup) -> RowOptimizer:
        num_vip, two_rates = (num_vip, self.has_vip) if self.vip_differs else (0, False)
        return self._build(rows, widths, num_vip, two_rates, self.weight_decay, tensor_group)

    def build_for_gates(self, gates: Tensor) -> RowOptimizer:
        return self._build(gates, [1] * gates.shape[1], 0, False, self.gate_decay, ProcessGroup())

    def _build(
        self, values: Tensor, widths: list[int], num_vip: int, two_rates: bool, decay: float, columns: ProcessGroup
    ) -> RowOptimizer:
        if self.kind == FROZEN:
            return FrozenRows(values, num_vip)
        if self.kind == "adagrad":
            return RowAdagrad(values, num_vip, widths, self.eps, decay, columns)
        adamw = AdamW(self.betas, self.eps, decay)
        if self.kind == "catch_up":
            return CatchUpAdamW(values, num_vip, adamw, two_rates=two_rates, compiled=self.compiled)
        return (DenseAdamW if self.kind == "dense" else LazyAdamW)(values, num_vip, adamw)
