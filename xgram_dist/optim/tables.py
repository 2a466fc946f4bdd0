"""The tables' optimizer: one row optimizer for each slab's rows and one for its gates.

VIP rows and the other rows have their own learning-rate multiplier; row gates learn at the backbone's rate and do
not decay.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from xgram_dist.config import Config
from xgram_dist.memory.store import SlabState, Store
from xgram_dist.optim.rows.adagrad import RowAdagrad
from xgram_dist.optim.rows.catch_up import CatchUpAdamW
from xgram_dist.optim.rows.dense import DenseAdamW
from xgram_dist.optim.rows.lazy import LazyAdamW
from xgram_dist.optim.rows.protocol import RowOptimizer
from xgram_dist.optim.schedule import learning_rate, table_multipliers, warmup_factor
from xgram_dist.parallel.ranks import Ranks

DENSE_FROM = 0.1
"""Share of rows hit in a step from which a sweep over all rows is the faster exact AdamW (docs/design.md)."""


def chosen_optimizer(config: Config, touched_share: float | None) -> str:
    """What `memory.optimizer` comes to, given the share of rows a step is expected to hit."""
    if config.memory.optimizer != "auto":
        return config.memory.optimizer
    return "dense" if touched_share is None or touched_share >= DENSE_FROM else "catch_up"


class TableOptimizer:
    def __init__(self, config: Config, store: Store, kind: str):
        self.config, self.store, self.kind = config, store, kind
        optimizer, memory = config.optimizer, config.memory
        decay = optimizer.weight_decay if memory.weight_decay is None else memory.weight_decay
        self.rows: list[RowOptimizer] = []
        self.gates: list[RowOptimizer | None] = []
        self._multipliers = []
        for state in store.states:
            vip, body = table_multipliers(config, state.slab.rows)
            self._multipliers.append((vip, body))
            cut = store.vip_rows if vip != body else 0
            two = vip != body and store.has_vip
            rows = self._make(state.rows, cut, decay, state.widths, two, state.tensor)
            gates = None if state.gates is None else self._make(state.gates, 0, 0.0, [1] * state.gates.shape[1], False)
            self.rows.append(rows)
            self.gates.append(gates)
            _attach(state, rows, gates)

    def _make(
        self,
        values: Tensor,
        cut: int,
        decay: float,
        widths: list[int],
        two_rates: bool,
        columns: Ranks | None = None,
    ) -> RowOptimizer:
        """`columns`: who holds other columns of the same rows."""
        optimizer = self.config.optimizer
        if self.kind == "adagrad":
            return RowAdagrad(values, cut, widths, optimizer.eps, decay, columns)
        settings = values, cut, optimizer.betas, optimizer.eps, decay
        if self.kind == "catch_up":
            return CatchUpAdamW(*settings, two_rates=two_rates, compiled=self.config.train.compile)
        return (DenseAdamW if self.kind == "dense" else LazyAdamW)(*settings)

    @torch.no_grad()
    def step(self, step: int) -> None:
        base = learning_rate(self.config, step)
        warm = warmup_factor(self.config, step) if self.config.memory.learning_rate.warmup else 1.0
        for state, rows, gates, (vip, body) in zip(
            self.store.states, self.rows, self.gates, self._multipliers, strict=True
        ):
            if state.gradient is None:
                continue
            touched = state.gradient.touched
            factor = state.gradient.factor
            rows.update(touched, state.gradient.rows, (base * vip * warm, base * body * warm), factor)
            if gates is not None and state.gradient.gates is not None:
                gates.update(touched, state.gradient.gates, (base, base), factor)

    @torch.no_grad()
    def skip(self) -> None:
        """The step is not taken: rows that were brought up to date for it are closed again."""
        for state, rows, gates in zip(self.store.states, self.rows, self.gates, strict=True):
            for one in (rows, gates):
                if one is not None and state.gradient is not None:
                    one.close()
                    one.settle(state.gradient.touched, moments=True)


def _attach(state: SlabState, rows: RowOptimizer, gates: RowOptimizer | None) -> None:
    optimizers = [rows] if gates is None else [rows, gates]

    def opening(rows_R: Tensor, parts: list[slice], out_RW: Tensor, gates_RJ: Tensor | None) -> Iterator[None]:
        filling = [rows.open(rows_R, parts, out_RW)]
        if gates is not None and gates_RJ is not None:
            filling.append(gates.open(rows_R, parts, gates_RJ))
        for _ in zip(*filling, strict=True):
            yield

    def opened(rows_R: Tensor) -> tuple[Tensor, Tensor | None]:
        return rows.opened(rows_R), None if gates is None else gates.opened(rows_R)

    def settle(rows_R: Tensor, moments: bool) -> None:
        for one in optimizers:
            one.settle(rows_R, moments=moments)

    def settle_all() -> None:
        for one in optimizers:
            one.settle_all()

    state.settle, state.settle_all, state.opening, state.opened = settle, settle_all, opening, opened
