"""From a recipe to table optimizers: which kind, and at which learning rates."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from xgram_dist.config import Config
from xgram_dist.config.schema import TableLearningRate
from xgram_dist.errors import UserError
from xgram_dist.parallel.process_group import ProcessGroup
from xgram_dist.tables.layout import Slab
from xgram_dist.tables.optimizers.adagrad import RowAdagrad
from xgram_dist.tables.optimizers.adamw import AdamW, DenseAdamW, LazyAdamW
from xgram_dist.tables.optimizers.adamw_catchup import CatchUpAdamW
from xgram_dist.tables.optimizers.base import FrozenRows, OwnMemory, RowOptimizer, StateMemory
from xgram_dist.tables.optimizers.rounding import KEY, column_keys
from xgram_dist.tables.records import Field
from xgram_dist.tables.routing import Routing

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
FROZEN = "frozen"
"""The kind for tables that are only read."""
DENSE_FROM = 0.1
"""Share of rows touched in a step from which the dense sweep is the faster exact AdamW (docs/measurements.md)."""


ALL_ROWS = 1 << 24
"""Rows of a table up to which `memory.rows` = auto keeps all of them."""


def keeps_touched_rows(config: Config, num_rows: int, optimizer: str) -> bool:
    """Whether shards keep records of touched rows only (`memory.rows`). `optimizer`: the kind. A sweep needs all rows;
    for tables that are only read the size alone decides."""
    rows = "auto" if optimizer == FROZEN else config.memory.rows
    if rows == "touched" and optimizer == "dense":
        raise UserError(
            "memory.rows = touched keeps no rows that a sweep could update, but memory.optimizer = dense; set "
            "memory.optimizer=catch_up, which is the same AdamW, or memory.rows=all"
        )
    large = num_rows > ALL_ROWS or config.memory.placement == "disk" or config.memory.update == "device"
    return rows == "touched" or (rows == "auto" and optimizer != "dense" and large)


def stages_records(config: Config, optimizer: str, device: torch.device) -> bool:
    """Whether records of touched rows, of host memory or of a disk, are copied to the device, where they are read and
    updated (`memory.update`). By default not to a CPU, which reads them where they lie."""
    if optimizer == FROZEN or config.memory.placement == "device":
        return False
    return config.memory.update == "device" or (config.memory.update == "auto" and device.type != "cpu")


def rounds_rows(config: Config) -> bool:
    """Whether rows or their moments are in bf16: a sweep over all rows does not round."""
    return "bf16" in (config.memory.rows_dtype, config.memory.moments)


def choose_optimizer(config: Config, touched_share: float | None) -> str:
    """The kind that `memory.optimizer` asks for. `auto` decides by the share of rows that a step is expected to touch;
    None: unknown."""
    if config.memory.optimizer != "auto":
        return config.memory.optimizer
    # On disk a sweep would read and write the whole file every step.
    if config.memory.rows == "touched" or config.memory.placement == "disk" or rounds_rows(config):
        return "catch_up"
    if config.memory.update == "device":
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
    seed: int = 0
    """Of the random bits that round rows and moments."""
    rows_dtype: torch.dtype = torch.float32
    moments_dtype: torch.dtype = torch.float32
    """Of the rows' moments; those of gates are fp32."""

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
            seed=config.train.seed,
            rows_dtype=torch.float32 if kind == FROZEN else DTYPES[memory.rows_dtype],
            moments_dtype=DTYPES[memory.moments],
        )

    @property
    def rounds(self) -> bool:
        """Whether rows or their moments are rounded when they are written."""
        return self.kind != FROZEN and torch.bfloat16 in (self.rows_dtype, self.moments_dtype)

    def build(
        self,
        rows: Tensor,
        slab: Slab,
        num_vip: int,
        tensor_group: ProcessGroup,
        memory: StateMemory | None = None,
    ) -> RowOptimizer:
        """`memory`: for the state of rows; by default of the optimizer's own."""
        num_vip, two_rates = (num_vip, self.has_vip) if self.vip_differs else (0, False)
        widths, keys_W = [table.width for table in slab.tables], None
        if self.rounds:
            names = [table.name for table in slab.tables]
            keys_W = column_keys(self.seed, names, widths, tensor_group.rank, rows.device)
            memory = memory or OwnMemory(rows, self.moments_dtype)
        return self._build(rows, widths, num_vip, two_rates, self.weight_decay, tensor_group, memory, keys_W)

    def build_for_gates(self, gates: Tensor, memory: StateMemory | None = None) -> RowOptimizer:
        return self._build(gates, [1] * gates.shape[1], 0, False, self.gate_decay, ProcessGroup(), memory)

    def _build(
        self,
        values: Tensor,
        widths: list[int],
        num_vip: int,
        two_rates: bool,
        decay: float,
        columns: ProcessGroup,
        memory: StateMemory | None,
        keys_W: Tensor | None = None,
    ) -> RowOptimizer:
        if self.kind == FROZEN:
            return FrozenRows(values, num_vip)
        if self.kind == "adagrad":
            return RowAdagrad(values, num_vip, widths, self.eps, decay, columns, memory)
        adamw = AdamW(self.betas, self.eps, decay)
        if self.kind == "catch_up":
            options = {"two_rates": two_rates, "compiled": self.compiled}
            return CatchUpAdamW(values, num_vip, adamw, **options, memory=memory, column_keys_W=keys_W)
        if self.kind == "lazy":
            return LazyAdamW(values, num_vip, adamw, memory, keys_W)
        assert memory is None, "a sweep over all rows has no records of touched ones"
        return DenseAdamW(values, num_vip, adamw)

    def record_fields(self, width: int, num_tables: int, *, gated: bool, counted: bool) -> list[Field]:
        """What a record holds of a row: its values and gates, what the optimizers of both keep, whether it was hit, and
        if they are `counted`, its updates."""
        kinds = [("rows", width)] + ([("gates", num_tables)] if gated else [])
        numbers, steps = list[Field](), list[Field]()
        for name, columns in kinds:
            of_rows = name == "rows"
            numbers.append(Field(name, columns, self.rows_dtype if of_rows else torch.float32))
            if self.kind == "adagrad":
                numbers.append(Field(f"{name}.accumulator", num_tables))
            elif self.kind != FROZEN:
                dtype = self.moments_dtype if of_rows else torch.float32
                numbers += [Field(f"{name}.{moment}", columns, dtype) for moment in ("first", "second")]
            if self.kind == "catch_up":
                steps += [Field(f"{name}.{step}", 1, torch.int32) for step in ("last", "current")]
            if of_rows and self.rounds:
                steps.append(Field(f"{name}.{KEY}", 1, torch.int32))
        flags = ["hit", *(["updates"] if counted else [])]
        return numbers + steps + [Field(name, 1, torch.int32) for name in flags]
