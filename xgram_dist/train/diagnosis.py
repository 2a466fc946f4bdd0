"""A few figures of `xgram-dist diagnose` in the course of training, through the run's own engine, tables and ranks.

The first batches of the validation go through the network with hooks on it (diagnose/watch.py), dealt to the ranks in
turn; sums over all ranks give the figures. Nothing is gathered, whatever the engine and the tensor degree.
"""

import torch
from torch import Tensor

from xgram_dist.config import Config
from xgram_dist.diagnose.activation import SiteNorms
from xgram_dist.diagnose.cosines import PARTS, LayerCosines, layer_cosines
from xgram_dist.diagnose.sums import Sums, mean_of
from xgram_dist.diagnose.views import ViewCosines, view_cosines
from xgram_dist.diagnose.watch import CUT, watching
from xgram_dist.engine.protocol import Engine
from xgram_dist.memory.tables import store_of
from xgram_dist.memory.working_set import Lookup
from xgram_dist.parallel.mesh import Mesh

BATCHES = 4
"""Of the validation."""


class Diagnosis:
    def __init__(self, config: Config, mesh: Mesh, engine: Engine, lookup: Lookup, batches: list[Tensor]):
        self._layers, self._mesh, self._engine, self._lookup = config.model.layers, mesh, engine, lookup
        self._batches = batches[:BATCHES]

    @torch.no_grad()
    def run(self, warmup: float) -> dict[str, float]:
        """Figures by name, on every rank; `warmup` is the injection's factor now."""
        data, tensor, device = self._mesh.data, self._mesh.tensor, self._engine.device
        sums = Sums()
        store = store_of(self._lookup)
        names = [name for state in (store.states if store is not None else ()) for name in state.slab.columns()]
        views = ViewCosines(sums, names, CUT, tensor)
        observers = (LayerCosines(sums), views, SiteNorms(sums, CUT, tensor))

        def see(what: str, layer: int, name: str, value: Tensor) -> None:
            for one in observers:
                one.see(what, layer, name, value)

        factor = torch.tensor(warmup, device=device, dtype=torch.float64)
        with watching(self._engine.model, see):  # type: ignore[attr-defined]
            for first in range(0, len(self._batches), data.size):
                mine = first + data.rank
                sums.counts = mine < len(self._batches)
                tokens_BT = self._batches[mine if sums.counts else 0]
                working = self._lookup.fetch(self._lookup.plan(tokens_BT, whole=True).result()[0], training=False)
                self._engine.loss(tokens_BT.to(device, non_blocking=True), working.slots, working.values, factor)
                views.retrieved(working.values, working.slots)
        totals = sums.over(self._mesh.world)
        cosines = layer_cosines(totals, self._layers)
        found = {f"cosine_{part}_{layer}": v for part in PARTS for layer, v in enumerate(cosines[part])}
        found |= {f"views_{stage}": one["mean"] for stage, one in view_cosines(totals, views.groups).items()}
        sites = [name for name in totals if name.startswith("site.")]
        found |= {f"injected_{name.removeprefix('site.')}": mean_of(totals, name) for name in sites}
        return {name: value for name, value in found.items() if value is not None}


def build_diagnosis(
    config: Config, mesh: Mesh, engine: Engine, lookup: Lookup, batches: list[Tensor]
) -> Diagnosis | None:
    return Diagnosis(config, mesh, engine, lookup, batches) if config.train.diagnose_every else None
