"""Muon of the backbone's matrices (`optimizer.matrices = muon`): torch's own, also where rows are sharded.

An update of Muon is a function of the whole gradient of a matrix. Where a rank holds a range of rows, each matrix has
an owner among the ranks that share it, which keeps the whole matrix and its momentum and runs torch.optim.Muon on them:

    step      gradients of the rows to the owners    all-to-all
              Muon, on whole matrices
              updated rows back                      all-to-all

So a rank holds as many momenta and copies of weights as its share of the matrices, and results equal those of one
process bit for bit, given the same gradients.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from xgram_dist.config import Config
from xgram_dist.parallel.process_group import ProcessGroup

MOMENTUM = 0.95


def is_muons(config: Config, name: str, shape: tuple[int, ...]) -> bool:
    """Matrices of attention and feed-forward: not embedding and head, nor what belongs to the memory method."""
    in_block = name.startswith("blocks.") and ".sites." not in name
    return config.optimizer.matrices == "muon" and in_block and len(shape) == 2


class BackboneMuon:
    def __init__(self, config: Config, matrices: Mapping[str, tuple[Tensor, tuple[int, ...]]], shard: ProcessGroup):
        """`matrices`: by name, the rows that this rank holds, which `step` updates, and the shape of the whole. Ranks
        of `shard` hold equal ranges of rows in rank order; the last ones may be shorter or empty. Collective."""
        self.matrices, self._shard = dict(matrices), shard
        names = list(self.matrices)
        # The largest first, each to the rank that owns least.
        load, self._owner = [0] * shard.size, dict[str, int]()
        for name in sorted(names, key=lambda n: -torch.Size(self.matrices[n][1]).numel()):
            self._owner[name] = load.index(min(load))
            load[self._owner[name]] += torch.Size(self.matrices[name][1]).numel()
        self._of_rank = [[name for name in names if self._owner[name] == rank] for rank in range(shard.size)]
        self._whole: dict[str, Tensor] = {}
        """The matrices that this rank owns."""
        for name in self._of_rank[shard.rank]:
            rows, shape = self.matrices[name]
            self._whole[name] = rows if shard.size == 1 else rows.new_empty(shape)
        self.momentum = {name: torch.zeros_like(whole, requires_grad=False) for name, whole in self._whole.items()}
        """Of the matrices that this rank owns."""
        if self._whole:
            self._muon = torch.optim.Muon(
                self._whole.values(),
                lr=config.optimizer.learning_rate,
                weight_decay=config.optimizer.weight_decay,
                momentum=MOMENTUM,
                adjust_lr_fn="match_rms_adamw",
            )
            for name, whole in self._whole.items():
                self._muon.state[whole] = {"momentum_buffer": self.momentum[name]}
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """After rows were overwritten. Collective."""
        if self._shard.size > 1 and self.matrices:
            for name, whole in self._to_owners({n: rows for n, (rows, _) in self.matrices.items()}).items():
                self._whole[name].copy_(whole)

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Updates the rows by their `grad`. Collective."""
        if not self.matrices:
            return
        if self._shard.size > 1:
            gradients = {n: rows.grad if rows.numel() else rows for n, (rows, _) in self.matrices.items()}
            assert all(gradient is not None for gradient in gradients.values())
            for name, gradient in self._to_owners(gradients).items():  # type: ignore[arg-type]
                self._whole[name].grad = gradient
        if self._whole:
            self._muon.param_groups[0]["lr"] = rate
            self._muon.step()
        if self._shard.size > 1:
            self._from_owners()

    def _rows_of(self, name: str, rank: int) -> slice:
        rows = self.matrices[name][1][0]
        size = -(-rows // self._shard.size)
        return slice(min(rank * size, rows), min((rank + 1) * size, rows))

    def _numel(self, names: list[str], rank: int) -> int:
        """Of the rows that the rank holds of these matrices."""
        counts = ((self._rows_of(name, rank), self.matrices[name][1][1]) for name in names)
        return sum((rows.stop - rows.start) * width for rows, width in counts)

    def _to_owners(self, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The whole of each owned matrix, from every rank's rows."""
        size, rank = self._shard.size, self._shard.rank
        sent = torch.cat([rows[name].reshape(-1) for names in self._of_rank for name in names])
        sent_counts = [self._numel(names, rank) for names in self._of_rank]
        mine = self._of_rank[rank]
        received, work = self._shard.all_to_all(sent, sent_counts, [self._numel(mine, other) for other in range(size)])
        work.wait()
        whole = {name: torch.empty_like(self._whole[name], requires_grad=False) for name in mine}
        start = 0
        for other in range(size):
            for name in mine:
                target = whole[name][self._rows_of(name, other)]
                target.copy_(received[start : start + target.numel()].view_as(target))
                start += target.numel()
        return whole

    def _from_owners(self) -> None:
        """The updated rows of every matrix, from its owner."""
        size, rank = self._shard.size, self._shard.rank
        mine = self._of_rank[rank]
        parts = [self._whole[name][self._rows_of(name, other)].reshape(-1) for other in range(size) for name in mine]
        sent = torch.cat(parts) if parts else next(iter(self.matrices.values()))[0].new_empty(0)
        sent_counts = [self._numel(mine, other) for other in range(size)]
        received, work = self._shard.all_to_all(sent, sent_counts, [self._numel(n, rank) for n in self._of_rank])
        work.wait()
        start = 0
        for names in self._of_rank:
            for name in names:
                rows, _ = self.matrices[name]
                rows.copy_(received[start : start + rows.numel()].view_as(rows))
                start += rows.numel()
