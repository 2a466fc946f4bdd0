"""What hooks see of blocks that other memory methods may have."""

from typing import Any

import torch
from torch import Tensor, nn

from xgram_dist.eval.activations import injection_sites, observe_forward


class Scaled(nn.Module):
    def __init__(self, factor: float, own_loss: bool = False):
        super().__init__()
        self.factor, self.own_loss = factor, own_loss

    def forward(self, x: Tensor) -> Any:
        return (self.factor * x, torch.zeros(())) if self.own_loss else self.factor * x


class Block(nn.Module):
    """No `ffn` module; a site that multiplies, one that gives a factor, one with a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Scaled(2.0)
        self.sites = nn.ModuleDict({"ffn": Scaled(3.0), "up": Scaled(5.0), "block": Scaled(7.0, own_loss=True)})

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.sites["ffn"](self.attention(x)) + self.sites["up"](x)
        added, loss = self.sites["block"](x)
        return y + added, loss


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block()])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[0](x)[0]


class Means:
    def __init__(self) -> None:
        self.seen: dict[tuple[str, str], float] = {}

    def observe(self, kind: str, layer: int, site: str, value: Tensor) -> None:
        self.seen[kind, site] = float(value.mean())


def test_changes_additions_and_outputs_with_a_loss() -> None:
    model, x, observer = Model(), torch.ones(1, 2, 3), Means()
    with observe_forward(model, [observer]):
        model(x)
    seen = observer.seen
    assert seen == {
        ("input", ""): 1.0,
        ("attention", ""): 2.0,
        ("injected", "ffn"): 6.0 - 2.0,
        ("injected", "block"): 7.0,
        ("hidden", ""): 6.0 + 5.0 + 7.0,
    }
    assert injection_sites(model) == {"ffn": [0], "block": [0]}
    seen.clear()
    model(x)
    assert not seen  # all hooks are gone
