"""`TableSites`: tables added to a model that somebody else wrote, at the outputs of some of its linear layers.

    sites = TableSites({f"layers.{n}.v": block.self_attn.v_proj for n, block in enumerate(model.model.layers)})
    tables = TokenTables(sites.widths, vocabulary)
    rows = tables.fetch(tables.plan(tokens))
    sites.use(rows.values, rows.slots[0])        before the forward pass of a micro-batch
    loss = model(tokens, labels=tokens).loss

Make it before the model is wrapped or sharded and before its optimizer: each layer gets an `XgramInjection` of its own
as the submodule `memory`, whose parameters are the model's.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from xgram_dist.errors import UserError
from xgram_dist.library.modules import XgramInjection
from xgram_dist.model.gather import Slots, sort_slots


class TableSites:
    def __init__(
        self,
        sites: Mapping[str, nn.Module],
        *,
        views: int = 2,
        kernels: Sequence[int] = (3, 5),
        depth_scaling: bool = True,
        init_std: float = 0.02,
    ):
        """`sites`: by name, the linear layers to whose outputs features are added. The first is scaled by 1, the next
        by sqrt(2), as the paper scales its layers, unless `depth_scaling` is False. The tables of a site are NAME.0 to
        NAME.(views - 1)."""
        if not sites:
            raise UserError("sites is empty; name at least one linear layer")
        self.widths: dict[str, int] = {}
        """Columns of each table: what `TokenTables` takes."""
        self._values: dict[str, Tensor] | None = None
        self._slots = Slots(nn.Parameter().detach())
        for number, (name, module) in enumerate(sites.items()):
            width = getattr(module, "out_features", None)
            if not isinstance(width, int):
                raise UserError(f"site '{name}' is a {type(module).__name__}, which has no out_features; name a linear")
            if hasattr(module, "memory"):
                raise UserError(f"site '{name}' has tables already; a linear layer takes one site")
            tables = [f"{name}.{view}" for view in range(views)]
            self.widths |= dict.fromkeys(tables, width)
            scale = (number + 1) ** 0.5 if depth_scaling else 1.0
            parameter = next(module.parameters())
            memory = XgramInjection(tables, width, kernels, scale=scale, init_std=init_std)
            module.memory = memory.to(parameter.device)  # type: ignore[assignment]
            module.register_forward_hook(self._add)

    def use(self, values: Mapping[str, Tensor], slots: Tensor) -> None:
        """What the next forward passes read: `values` of the working set, and the row in them of each position."""
        self._values = dict(values)
        self._slots = sort_slots(slots, len(next(iter(self._values.values()))))

    def _add(self, module: Any, inputs: Any, output: Tensor) -> Tensor:
        if self._values is None:
            raise UserError("the model reads tables, but no rows were given; call `use(rows.values, rows.slots[0])`")
        return output + module.memory(self._values, self._slots).to(output.dtype)
