"""The methods that have a site of their own, at inference. Needs torch alone: an exported folder holds a copy.

What each computes stands in memory/methods/. Side networks (MoLE's experts, SCONE's) have become tables.
Keys are tokens, or (engram, scone) depend on the tokens before: those are remembered in the cache.
Shapes: B batch, T new positions, D width, E width of an n-gram's rows side by side, K keys of a position, U distinct
keys, M views.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .parts import Positions, Recent, RMSNorm, mixed, taps_of, wide

NAME = {"ngram": "layers.all.ngram.0", "input": "layers.all.input.0"}
"""Tables that serve all layers."""
SMALLEST = 1e-6


@dataclass(frozen=True)
class Hashing:
    """Engram's: as memory/ngrams/hashing.py has it."""

    orders: tuple[int, ...]
    multipliers: tuple[tuple[tuple[int, ...], ...], ...]
    rows: tuple[tuple[int, ...], ...]
    outside: int


@dataclass(frozen=True)
class Own:
    """A site that a method has for itself."""

    site: str
    """ffn (retoken), block (mort), up (stem), ngram (engram), experts (mole), input (scone)."""
    layers: tuple[int, ...]
    views: int = 1
    top: int = 1
    """mort: views that a position reads."""
    width: int = 0
    """engram: of the rows of a layer side by side."""
    taps: int = 1
    reach: int = 0
    """Tokens before a position that decide its key."""
    hashing: Hashing | None = None

    @staticmethod
    def of(tree: Mapping[str, Any]) -> "Own":
        found = dict(tree)
        if found["hashing"] is not None:
            found["hashing"] = Hashing(**{key: _tuples(value) for key, value in found["hashing"].items()})
        return Own(**{**found, "layers": tuple(found["layers"])})


def _tuples(value: Any) -> Any:
    return tuple(_tuples(one) for one in value) if isinstance(value, list | tuple) else value


class Retoken(nn.Module):
    def __init__(self, own: Own, width: int, layer: int):
        super().__init__()
        self.tables = [f"layers.{layer}.ffn.{view}" for view in range(own.views)]
        for view in range(own.views):
            self.register_parameter(f"scale_{view}", nn.Parameter(torch.zeros(width)))

    def forward(self, ffn_BTD: Tensor, values: Mapping[str, Tensor], at: Positions) -> Tensor:
        out = wide(ffn_BTD)
        for view, name in enumerate(self.tables):
            direction = F.embedding(at.slots, F.normalize(values[name], dim=-1))
            out = out * (1 + self.get_parameter(f"scale_{view}") * direction)
        return out.to(ffn_BTD.dtype)


class Mort(nn.Module):
    def __init__(self, own: Own, width: int, layer: int, layers: int):
        super().__init__()
        self.top, self.depth = own.top, 1 / math.sqrt(2 * layers)
        self.tables = [f"layers.{layer}.block.{view}" for view in range(own.views)]
        self.router = nn.Parameter(torch.zeros(own.views, width))
        self.router_bias = nn.Parameter(torch.zeros(own.views))
        self.scale = nn.Parameter(torch.zeros(width))

    def forward(self, normed_BTD: Tensor, values: Mapping[str, Tensor], at: Positions) -> Tensor:
        chance_BTM = torch.sigmoid(F.linear(wide(normed_BTD), self.router, self.router_bias))
        best, index = chance_BTM.topk(self.top, -1)
        weights_BTM = torch.zeros_like(chance_BTM).scatter(-1, index, best / best.sum(-1, keepdim=True))
        rows = [F.embedding(at.slots, values[name]) for name in self.tables]
        parts = [weights_BTM[..., m : m + 1] * row for m, row in enumerate(rows)]
        mix = sum(parts[1:], parts[0])
        return (self.depth * self.scale * F.normalize(mix, dim=-1)).to(normed_BTD.dtype)


class Stem(nn.Module):
    def __init__(self, layer: int):
        super().__init__()
        self.table = f"layers.{layer}.up.0"

    def forward(self, values: Mapping[str, Tensor], at: Positions, dtype: torch.dtype) -> Tensor:
        return F.embedding(at.slots, values[self.table]).to(dtype)


class Engram(nn.Module):
    def __init__(self, own: Own, width: int, eps: float, layer: int):
        super().__init__()
        assert own.hashing is not None
        self.layer, heads = layer, sum(len(of_order) for of_order in own.hashing.rows)
        first = own.layers.index(layer) * heads
        self.keys = slice(first, first + heads)
        self.value, self.key = (nn.Parameter(torch.zeros(width, own.width)) for _ in range(2))
        self.key_norm, self.query_norm, self.output_norm = (RMSNorm(width, eps) for _ in range(3))
        self.kernel = nn.Parameter(torch.zeros(own.taps, width))

    def forward(self, x_BTD: Tensor, values: Mapping[str, Tensor], at: Positions, cache: Recent | None) -> Tensor:
        e_BTE = F.embedding(at.slots[..., self.keys], values[NAME["ngram"]]).flatten(2).to(x_BTD.dtype)
        key = wide(self.key_norm(F.linear(e_BTE, self.key.to(e_BTE.dtype))))
        score = (key * wide(self.query_norm(x_BTD))).sum(-1, keepdim=True) / math.sqrt(x_BTD.shape[-1])
        gate = torch.sigmoid(score.sign() * score.abs().clamp_min(SMALLEST).sqrt())
        y = gate * wide(F.linear(e_BTE, self.value.to(e_BTE.dtype)))
        normed, reach = self.output_norm(y), len(self.kernel) - 1
        name = f"engram.{self.layer}"
        whole = F.pad(normed, (0, 0, reach, 0)) if cache is None else cache.window(name, normed, reach)
        conv = mixed(taps_of(whole, y.shape[1], len(self.kernel), at), self.kernel)
        return x_BTD + (y + F.silu(conv)).to(x_BTD.dtype)


class Mole(nn.Module):
    def __init__(self, own: Own, width: int, layer: int):
        super().__init__()
        self.tables = [f"layers.{layer}.experts.{expert}" for expert in range(own.views)]
        self.router = nn.Parameter(torch.zeros(own.views, width))

    def forward(self, normed_BTD: Tensor, values: Mapping[str, Tensor], at: Positions) -> Tensor:
        weights_BTM = torch.softmax(wide(F.linear(normed_BTD, self.router.to(normed_BTD.dtype))), -1)
        answers = [F.embedding(at.slots, values[name]) for name in self.tables]
        parts = [weights_BTM[..., j : j + 1] * answer for j, answer in enumerate(answers)]
        return sum(parts[1:], parts[0]).to(normed_BTD.dtype)


def build_own(own: Own, spec: Any, layer: int) -> nn.Module:
    """`spec`: of the decoder."""
    if own.site == "ffn":
        return Retoken(own, spec.width, layer)
    if own.site == "block":
        return Mort(own, spec.width, layer, spec.layers)
    if own.site == "up":
        return Stem(layer)
    if own.site == "ngram":
        return Engram(own, spec.width, spec.norm_eps, layer)
    assert own.site == "experts", own.site
    return Mole(own, spec.width, layer)


class KeyMap(nn.Module):
    """Tokens -> keys, where they are not the same: of new positions, by the tokens before them."""

    def __init__(self, own: Own, document_end: int | None, sizes: list[int]):
        """`sizes`: of the arrays that `load` gives: the folding (engram); codes and numbers of each level (scone)."""
        super().__init__()
        self.own, self.end = own, document_end
        for number, size in enumerate(sizes):
            self.register_buffer(f"array_{number}", torch.zeros(size, dtype=torch.int64))

    def load(self, arrays: list[Tensor]) -> None:
        for number, array in enumerate(arrays):
            self.get_buffer(f"array_{number}").copy_(array)

    def forward(self, tokens_BT: Tensor, real_BT: Tensor | None, cache: Recent | None) -> Tensor:
        """[B, T, K] (engram), or [B, T]; `real_BT`: False for padding."""
        # One more than the token, so that zero stands for what lies before the sequence.
        shown = tokens_BT + 1 if real_BT is None else (tokens_BT + 1) * real_BT
        reach, new = self.own.reach, tokens_BT.shape[1]
        whole = shown[..., None]
        whole = F.pad(whole, (0, 0, reach, 0)) if cache is None else cache.window("tokens", whole, reach)
        back = [whole[:, reach - step : reach - step + new, 0] - 1 for step in range(reach + 1)]
        return self._hashed(back) if self.own.site == "ngram" else self._matched(back)

    def _hashed(self, back: list[Tensor]) -> Tensor:
        hashing = self.own.hashing
        assert hashing is not None
        ids, apart = [], torch.zeros_like(back[0], dtype=torch.bool)
        for step, tokens in enumerate(back):
            if step and self.end is not None:
                apart = apart | (tokens == self.end)
            folded = self.get_buffer("array_0")[tokens.clamp_min(0)]
            ids.append(torch.where((tokens < 0) | apart, hashing.outside, folded))
        keys, first_row = [], 0
        for of_layer in hashing.multipliers:
            for multipliers, heads in zip(of_layer, hashing.rows, strict=True):
                mix = ids[0] * multipliers[0]
                for moved, multiplier in zip(ids[1:], multipliers[1:], strict=False):
                    mix = mix ^ (moved * multiplier)
                for rows in heads:
                    keys.append(mix % rows + first_row)
                    first_row += rows
        return torch.stack(keys, -1)

    def _matched(self, back: list[Tensor]) -> Tensor:
        found, place = torch.zeros_like(back[0]), back[0]
        alive = back[0] >= 0
        for level, before in enumerate(back[1:]):
            codes, numbers = (self.get_buffer(f"array_{2 * level + part}") for part in range(2))
            if len(codes) == 0:
                break
            wanted = place * (1 << 31) + before
            place = torch.searchsorted(codes, wanted).clamp_max(len(codes) - 1)
            alive = alive & (codes[place] == wanted) & (before >= 0)
            found = torch.where(alive, numbers[place], found)
        return found
