"""The sites of memory methods at inference, and their n-gram keys. Needs torch alone: an exported folder holds a copy.

What each computes stands in model/methods. Networks over tokens alone (MoLE's experts, SCONE's) have become tables.
Keys are tokens, or (engram, scone) depend on the tokens before, which the cache remembers. To give a method its form at
inference, add its module here and to `SITE_MODULES`, and describe it in the method's `decoder_spec`.
Shapes: B batch, T new positions, D width, E width of an n-gram's rows side by side, K keys of a position, U distinct
keys, M views.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .decoder_layers import ConvolutionCache, Positions, RMSNorm, at_least_fp32, shifted_copies, weighted_sum

NGRAM_TABLE, INPUT_TABLE = "layers.all.ngram.0", "layers.all.input.0"
"""Tables that serve all layers."""
MIN_SCORE = 1e-6


@dataclass(frozen=True)
class NgramHash:
    """Engram's hash (tables/ngrams.py)."""

    orders: tuple[int, ...]
    multipliers: tuple[tuple[tuple[int, ...], ...], ...]
    """[layer][order][position]"""
    rows: tuple[tuple[tuple[int, ...], ...], ...]
    """[layer][order][head]"""
    outside: int
    """The id of what lies before the sequence; not used with a `pad_token`."""
    pad_token: int | None = None
    """The token whose id stands for what lies before the sequence."""


@dataclass(frozen=True)
class MethodSite:
    """The site of a method that reads the network's state, or that is at the input."""

    method: str
    """Its name in SITE_MODULES."""
    site: str
    """Where it acts: ffn, block, up, ngram, experts (see `decoder.Block`), or input."""
    layers: tuple[int, ...]
    views: int = 1
    top: int = 1
    """mort: views that a position reads."""
    width: int = 0
    """engram: width of a layer's rows side by side."""
    taps: int = 1
    """engram: length of its convolution."""
    reach: int = 0
    """Tokens before a position that decide its key."""
    hashing: NgramHash | None = None
    gate_eps: float = 0.0
    """engram: epsilon of the norms of key and query."""
    output_eps: float = 0.0
    """engram: epsilon of the norm before the convolution."""

    @staticmethod
    def of(tree: Mapping[str, Any]) -> "MethodSite":
        fields = {key: _tuples(value) for key, value in tree.items()}
        if fields.get("hashing") is not None:
            fields["hashing"] = NgramHash(**{key: _tuples(value) for key, value in fields["hashing"].items()})
        return MethodSite(**fields)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list | tuple) else value


# Modules. Each is built from the decoder's spec (`decoder.Spec`), its site and its layer.


class Retoken(nn.Module):
    def __init__(self, spec: Any, site: MethodSite, layer: int):
        super().__init__()
        self.tables = [f"layers.{layer}.ffn.{view}" for view in range(site.views)]
        for view in range(site.views):
            self.register_parameter(f"scale_{view}", nn.Parameter(torch.zeros(spec.width)))

    def forward(self, ffn_BTD: Tensor, values: Mapping[str, Tensor], at: Positions) -> Tensor:
        out = at_least_fp32(ffn_BTD)
        for view, name in enumerate(self.tables):
            direction = F.embedding(at.slots, F.normalize(values[name], dim=-1))
            out = out * (1 + self.get_parameter(f"scale_{view}") * direction)
        return out.to(ffn_BTD.dtype)


class Mort(nn.Module):
    def __init__(self, spec: Any, site: MethodSite, layer: int):
        super().__init__()
        self.top, self.depth_factor = site.top, 1 / math.sqrt(2 * spec.layers)
        self.tables = [f"layers.{layer}.block.{view}" for view in range(site.views)]
        self.router = nn.Parameter(torch.zeros(site.views, spec.width))
        self.router_bias = nn.Parameter(torch.zeros(site.views))
        self.scale = nn.Parameter(torch.zeros(spec.width))

    def forward(self, normed_BTD: Tensor, values: Mapping[str, Tensor], at: Positions) -> Tensor:
        probability_BTM = torch.sigmoid(F.linear(at_least_fp32(normed_BTD), self.router, self.router_bias))
        best, index = probability_BTM.topk(self.top, -1)
        weights_BTM = torch.zeros_like(probability_BTM).scatter(-1, index, best / best.sum(-1, keepdim=True))
        rows = [F.embedding(at.slots, values[name]) for name in self.tables]
        weighted = [weights_BTM[..., m : m + 1] * row for m, row in enumerate(rows)]
        mix = sum(weighted[1:], weighted[0])
        return (self.depth_factor * self.scale * F.normalize(mix, dim=-1)).to(normed_BTD.dtype)


class Stem(nn.Module):
    def __init__(self, spec: Any, site: MethodSite, layer: int):
        super().__init__()
        self.table = f"layers.{layer}.up.0"

    def forward(self, values: Mapping[str, Tensor], at: Positions, dtype: torch.dtype) -> Tensor:
        return F.embedding(at.slots, values[self.table]).to(dtype)


class Engram(nn.Module):
    def __init__(self, spec: Any, site: MethodSite, layer: int):
        super().__init__()
        assert site.hashing is not None
        self.layer, num_heads = layer, sum(len(heads) for heads in site.hashing.rows[0])
        first = site.layers.index(layer) * num_heads
        self.keys = slice(first, first + num_heads)
        self.value, self.key = (nn.Parameter(torch.zeros(spec.width, site.width)) for _ in range(2))
        self.key_norm, self.query_norm = (RMSNorm(spec.width, site.gate_eps) for _ in range(2))
        self.output_norm = RMSNorm(spec.width, site.output_eps)
        self.kernel = nn.Parameter(torch.zeros(site.taps, spec.width))

    def forward(
        self, x_BTD: Tensor, values: Mapping[str, Tensor], at: Positions, cache: ConvolutionCache | None
    ) -> Tensor:
        e_BTE = F.embedding(at.slots[..., self.keys], values[NGRAM_TABLE]).flatten(2).to(x_BTD.dtype)
        key = at_least_fp32(self.key_norm(F.linear(e_BTE, self.key.to(e_BTE.dtype))))
        score = (key * at_least_fp32(self.query_norm(x_BTD))).sum(-1, keepdim=True) / math.sqrt(x_BTD.shape[-1])
        gate = torch.sigmoid(score.sign() * score.abs().clamp_min(MIN_SCORE).sqrt())
        y = gate * at_least_fp32(F.linear(e_BTE, self.value.to(e_BTE.dtype)))
        normed, reach = self.output_norm(y), len(self.kernel) - 1
        name = f"engram.{self.layer}"
        whole = F.pad(normed, (0, 0, reach, 0)) if cache is None else cache.extend(name, normed, reach)
        conv = weighted_sum(shifted_copies(whole, y.shape[1], len(self.kernel), at), self.kernel)
        return x_BTD + (y + F.silu(conv)).to(x_BTD.dtype)


class Mole(nn.Module):
    def __init__(self, spec: Any, site: MethodSite, layer: int):
        super().__init__()
        self.tables = [f"layers.{layer}.experts.{expert}" for expert in range(site.views)]
        self.router = nn.Parameter(torch.zeros(site.views, spec.width))

    def forward(self, normed_BTD: Tensor, values: Mapping[str, Tensor], at: Positions) -> Tensor:
        logits_BTM = F.linear(normed_BTD, self.router.to(normed_BTD.dtype))
        weights_BTM = torch.softmax(at_least_fp32(logits_BTM), -1)
        outputs = [F.embedding(at.slots, values[name]) for name in self.tables]
        weighted = [weights_BTM[..., j : j + 1] * output for j, output in enumerate(outputs)]
        return sum(weighted[1:], weighted[0]).to(normed_BTD.dtype)


SITE_MODULES: dict[str, Callable[[Any, MethodSite, int], nn.Module]] = {
    "retoken": Retoken,
    "mort": Mort,
    "stem": Stem,
    "engram": Engram,
    "mole": Mole,
}
"""By method. SCONE's site, `input`, has a table alone."""


# Keys


class KeyMap(nn.Module):
    """Maps new tokens, and those before them, to keys; for methods whose keys are n-grams."""

    def __init__(self, site: MethodSite, document_end: int | None, sizes: list[int]):
        """`sizes`: of the arrays that `load` takes: the folding (engram); codes and numbers of each level (scone)."""
        super().__init__()
        self.site, self.document_end = site, document_end
        for number, size in enumerate(sizes):
            self.register_buffer(f"array_{number}", torch.zeros(size, dtype=torch.int64))

    def load(self, arrays: list[Tensor]) -> None:
        for number, array in enumerate(arrays):
            self.get_buffer(f"array_{number}").copy_(array)

    def forward(self, tokens_BT: Tensor, real_BT: Tensor | None, cache: ConvolutionCache | None) -> Tensor:
        """[B, T, K] (engram), or [B, T] (scone); `real_BT`: False for padding."""
        # One more than the token, so that zero stands for what lies before the sequence.
        shown = tokens_BT + 1 if real_BT is None else (tokens_BT + 1) * real_BT
        reach, new = self.site.reach, tokens_BT.shape[1]
        whole = shown[..., None]
        whole = F.pad(whole, (0, 0, reach, 0)) if cache is None else cache.extend("tokens", whole, reach)
        shifted = [whole[:, reach - steps : reach - steps + new, 0] - 1 for steps in range(reach + 1)]
        return self.keys(shifted)

    def keys(self, shifted: list[Tensor]) -> Tensor:
        """`shifted`: the token of each position, and those 1, 2, .. before it; -1: none."""
        return self._hashed(shifted) if self.site.hashing is not None else self._matched(shifted)

    def _hashed(self, shifted: list[Tensor]) -> Tensor:
        """The rows of hashed n-grams."""
        hashing = self.site.hashing
        assert hashing is not None
        folding = self.get_buffer("array_0")
        outside = hashing.outside if hashing.pad_token is None else folding[hashing.pad_token]
        ids, other_document = [], torch.zeros_like(shifted[0], dtype=torch.bool)
        for steps, tokens in enumerate(shifted):
            if steps and self.document_end is not None:
                other_document = other_document | (tokens == self.document_end)
            ids.append(torch.where((tokens < 0) | other_document, outside, folding[tokens.clamp_min(0)]))
        keys, first_row = [], 0
        for layer_multipliers, layer_rows in zip(hashing.multipliers, hashing.rows, strict=True):
            for multipliers, heads in zip(layer_multipliers, layer_rows, strict=True):
                mixed = ids[0] * multipliers[0]
                for previous, multiplier in zip(ids[1:], multipliers[1:], strict=False):
                    mixed = mixed ^ (previous * multiplier)
                for rows in heads:
                    keys.append(mixed % rows + first_row)
                    first_row += rows
        return torch.stack(keys, -1)

    def _matched(self, shifted: list[Tensor]) -> Tensor:
        """The number of the longest f-gram that ends at each position, 0 for none (tables/fgrams.py)."""
        numbers_BT, index = torch.zeros_like(shifted[0]), shifted[0]
        alive = shifted[0] >= 0
        for level, previous in enumerate(shifted[1:]):
            codes, numbers = (self.get_buffer(f"array_{2 * level + part}") for part in range(2))
            if len(codes) == 0:
                break
            wanted = index * (1 << 31) + previous
            index = torch.searchsorted(codes, wanted).clamp_max(len(codes) - 1)
            alive = alive & (codes[index] == wanted) & (previous >= 0)
            if self.document_end is not None:
                alive = alive & (previous != self.document_end)
            numbers_BT = torch.where(alive, numbers[index], numbers_BT)
        return numbers_BT
