"""How much of the token is left at each depth: cosines of what layers give with what went in.

The paper's Sim: mean over positions of the cosine of a layer's attention output, feed-forward output or hidden state
with the input embedding of the position's token; and of each hidden state with that of the first layer.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from xgram_dist.diagnose.sums import Sums, Totals, mean_of

PARTS = ("attention", "ffn", "hidden", "first_state")


class LayerCosines:
    def __init__(self, sums: Sums):
        self._sums = sums
        self._input: Tensor | None = None
        self._first: Tensor | None = None

    def see(self, what: str, layer: int, name: str, value: Tensor) -> None:
        if what == "input":
            self._input = value
        if what not in PARTS:
            return
        assert self._input is not None
        self._add(f"cosine.{what}.{layer}", value, self._input)
        if what == "hidden":
            self._first = value if layer == 0 else self._first
            assert self._first is not None
            self._add(f"cosine.first_state.{layer}", value, self._first)

    def _add(self, name: str, one: Tensor, other: Tensor) -> None:
        cosines = F.cosine_similarity(one.double(), other.double(), dim=-1)
        self._sums.add(name, torch.stack((cosines.sum(), cosines.new_tensor(cosines.numel()))))


def layer_cosines(totals: Totals, layers: int) -> dict[str, list[float | None]]:
    """By part, a value a layer."""
    return {part: [mean_of(totals, f"cosine.{part}.{layer}") for layer in range(layers)] for part in PARTS}
