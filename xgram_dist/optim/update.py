"""One update of everything: the joint gradient norm, clipping, then backbone and tables.

The engine holds the backbone and decides by the joint norm; tables are updated by the ranks that own their rows. Two
scalars cross the wire for the norm.
"""

from typing import Any

import torch
from torch import Tensor

from xgram_dist.config import Config
from xgram_dist.engine.protocol import Engine, StepOutcome
from xgram_dist.memory.tables import store_of
from xgram_dist.memory.working_set import Lookup
from xgram_dist.optim.schedule import learning_rate
from xgram_dist.optim.tables import TableOptimizer, chosen_optimizer
from xgram_dist.parallel.mesh import Mesh


class Optimizer:
    def __init__(self, config: Config, engine: Engine, lookup: Lookup, mesh: Mesh, touched_share: float | None = None):
        """`touched_share`: of the rows, expected to be hit in a step; decides for memory.optimizer = auto."""
        self.config, self.engine, self.mesh = config, engine, mesh
        self.tables = store_of(lookup)
        self.table_optimizer: TableOptimizer | None = None
        if self.tables is not None:
            self.table_optimizer = TableOptimizer(config, self.tables, chosen_optimizer(config, touched_share))

    @torch.no_grad()
    def step(self, step: int, loss: Tensor) -> StepOutcome:
        """Clip by the joint norm and update. Where the norm or the loss is not finite, nothing is changed."""
        squares: Any = torch.zeros((), device=loss.device)
        if self.tables is not None:
            squares = self.mesh.world.all_reduce_sum(self.tables.gradient_square_sum().to(loss.device))
        outcome = self.engine.step(learning_rate(self.config, step), loss, squares)
        if self.tables is not None and self.table_optimizer is not None:
            if outcome.counted:
                if outcome.factor < 1:
                    self.tables.scale_gradients(outcome.factor)
                self.table_optimizer.step(step)
            else:
                self.table_optimizer.skip()
            self.tables.clear_gradients()
        return outcome
