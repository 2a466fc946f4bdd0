"""The network at inference: the training model's arithmetic, with a cache, for one process.

In: tokens [B,T], the row of each token among the retrieved vectors (slots [B,T]), those vectors by table name, and what
earlier calls left in a cache. Out: hidden states [B,T,D]; `logits` makes [B,T,V] of them. Parameters have the names of
the training model. The files `decoder*.py` need torch alone: an exported Hugging Face folder holds copies of them.

The cache holds keys and values of attention and, for the short convolutions, the last k - 1 retrieved vectors of each
view. Sequences of a batch may be padded at the left (`real` is False for padding).
Shapes: B batch, P positions in the cache, T new ones, D width, C key/value width, H heads, G key/value heads, K head
width, W width of a site, U distinct tokens, V vocabulary.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .decoder_batched_sites import BatchedSites
from .decoder_layers import (
    CONV_EPS,
    PADDING,
    ConvolutionCache,
    Positions,
    RMSNorm,
    at_least_fp32,
    linear,
    shifted_copies,
    weighted_sum,
)
from .decoder_methods import INPUT_TABLE, SITE_MODULES, MethodSite


@dataclass(frozen=True)
class Injection:
    """One site of one layer."""

    layer: int
    site: str
    width: int
    views: int
    taps: tuple[int, ...]
    """Length of each convolution: one for each view, one for all, or none."""
    scale: float
    """All constant factors: depth, number of views, warm-up."""

    def table(self, view: int) -> str:
        return f"layers.{self.layer}.{self.site}.{view}"


@dataclass(frozen=True)
class Spec:
    """All that defines a decoder; `dataclasses.asdict` and `Spec.of` convert to and from JSON."""

    vocabulary: int
    layers: int
    width: int
    ffn_width: int
    heads: int
    kv_heads: int
    context: int
    """Longest sequence it was trained with."""
    rope_theta: float
    norm_eps: float
    injections: tuple[Injection, ...] = ()
    method_site: MethodSite | None = None
    """Of a method whose site is not an injection."""
    normalised: bool = True
    """Convolutions read normalised vectors."""
    gated: bool = True
    """Convolutions have a gate branch."""
    document_end: int | None = None
    """With document masking, the token that ends a document."""
    head_width: int | None = None
    """None: width / heads."""
    norms_after: bool = False
    """Norms are of the outputs of attention and feed-forward, not of their inputs."""
    qk_norm: str = "width"
    """width: over all heads; head: over each; none."""
    rope_scaling: Mapping[str, float] | None = None
    """factor, low_frequency, high_frequency and original_length."""

    @property
    def width_of_head(self) -> int:
        return self.head_width or self.width // self.heads

    @staticmethod
    def of(tree: Mapping[str, Any]) -> "Spec":
        sites = tuple(Injection(**{**site, "taps": tuple(site["taps"])}) for site in tree.get("injections", ()))
        own = None if tree.get("method_site") is None else MethodSite.of(tree["method_site"])
        return Spec(**{**tree, "injections": sites, "method_site": own})


def rotary_rates(spec: Spec, device: torch.device) -> Tensor:
    """Angle of each pair of dimensions from a position to the next [K/2], in fp64."""
    width = spec.width_of_head
    rates = spec.rope_theta ** -(torch.arange(0, width, 2, dtype=torch.float64, device=device) / width)
    if spec.rope_scaling is None:
        return rates
    scaling = spec.rope_scaling
    turns = scaling["original_length"] * rates / (2 * math.pi)
    kept = (turns - scaling["low_frequency"]) / (scaling["high_frequency"] - scaling["low_frequency"])
    return torch.lerp(rates / scaling["factor"], rates, kept.clamp(0, 1))


class Cache(ConvolutionCache):
    """Adds the keys and values of attention, in buffers that grow by doubling."""

    def __init__(self) -> None:
        super().__init__()
        self.length = 0
        self._buffers: list[tuple[Tensor, Tensor]] = []
        self._lengths: list[int] = []

    def get_seq_length(self) -> int:
        return self.length

    def update(self, keys_BGTK: Tensor, values_BGTK: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Append new positions; returns all of the layer so far."""
        new = keys_BGTK.shape[2]
        if layer == len(self._buffers):
            self._buffers.append((keys_BGTK, values_BGTK))
            self._lengths.append(0)
        start = self._lengths[layer]
        end = start + new
        if start and end > self._buffers[layer][0].shape[2]:
            spare = max(end, 2 * start) - start
            self._buffers[layer] = tuple(  # type: ignore[assignment]
                F.pad(buffer[:, :, :start], (0, 0, 0, spare)) for buffer in self._buffers[layer]
            )
        keys, values = self._buffers[layer]
        if start:
            keys[:, :, start:end], values[:, :, start:end] = keys_BGTK, values_BGTK
        self._lengths[layer] = end
        self.length = max(self.length, end)
        return keys[:, :, :end], values[:, :, :end]


class ShortConv(nn.Module):
    """out = e + content * SiLU(gate), both convolutions causal and depthwise; tap 0 is the current position."""

    def __init__(self, width: int, taps: int, gated: bool, normalised: bool):
        super().__init__()
        self.taps, self.normalised = taps, normalised
        self.content = nn.Parameter(torch.zeros(taps, width))
        self.gate = nn.Parameter(torch.zeros(taps, width)) if gated else None
        self.gate_bias = nn.Parameter(torch.zeros(width)) if gated else None

    def forward(self, name: str, values_UW: Tensor, at: Positions, cache: ConvolutionCache | None) -> Tensor:
        e = F.embedding(at.slots, values_UW)
        n = e
        if self.normalised:
            n = e * F.embedding(at.slots, torch.rsqrt(values_UW.square().mean(-1, keepdim=True) + CONV_EPS))
        reach, new = self.taps - 1, e.shape[1]
        whole = F.pad(n, (0, 0, reach, 0)) if cache is None else cache.extend(name, n, reach)
        copies = shifted_copies(whole, new, self.taps, at)
        content = weighted_sum(copies, self.content)
        gate = None if self.gate is None else weighted_sum(copies, self.gate)
        if gate is None:
            return e + content
        assert self.gate_bias is not None
        return e + content * F.silu(gate + self.gate_bias)


class Site(nn.Module):
    """The weighted sum of a site's views."""

    def __init__(self, injection: Injection, spec: Spec):
        super().__init__()
        self.injection = injection
        self.gain = nn.Parameter(torch.ones(injection.views))
        self.extractors = nn.ModuleList(
            ShortConv(injection.width, taps, spec.gated, spec.normalised) for taps in injection.taps
        )

    def forward(
        self, values: Mapping[str, Tensor], at: Positions, cache: ConvolutionCache | None, dtype: torch.dtype
    ) -> Tensor:
        total: Tensor | None = None
        factors = self.gain * self.injection.scale
        for view in range(self.injection.views):
            name = self.injection.table(view)
            if len(self.extractors):
                out = self.extractors[view % len(self.extractors)](name, values[name], at, cache)
            else:
                out = F.embedding(at.slots, values[name])
            total = out * factors[view] if total is None else total + out * factors[view]
        assert total is not None
        return total.to(dtype)


class Attention(nn.Module):
    """Grouped-query, with QK-norm over the whole width; what is injected is added before the norm."""

    def __init__(self, spec: Spec, layer: int):
        super().__init__()
        self.layer, self.heads, self.kv_heads = layer, spec.heads, spec.kv_heads
        self.head_width, self.qk_norm = spec.width_of_head, spec.qk_norm
        q_width, kv_width = spec.heads * self.head_width, spec.kv_heads * self.head_width
        self.query, self.key = linear(spec.width, q_width), linear(spec.width, kv_width)
        self.value, self.output = linear(spec.width, kv_width), linear(q_width, spec.width)
        self.query_norm: nn.Module | None = None
        self.key_norm: nn.Module | None = None
        if spec.qk_norm != "none":
            widths = (self.head_width, self.head_width) if spec.qk_norm == "head" else (q_width, kv_width)
            self.query_norm, self.key_norm = (RMSNorm(width, spec.norm_eps) for width in widths)

    def forward(self, x_BTD: Tensor, deltas: Mapping[str, Tensor], at: Positions, cache: Any) -> Tensor:
        q, k, v = self.query(x_BTD), self.key(x_BTD), self.value(x_BTD)
        if "q" in deltas:
            per_head = deltas["q"].unflatten(-1, (self.kv_heads, self.head_width))
            q = q + per_head.repeat_interleave(self.heads // self.kv_heads, dim=2).flatten(2)
        if "k" in deltas:
            k = k + deltas["k"]
        if "v" in deltas:
            v = v + deltas["v"]
        q = self._rotated(q, self.query_norm, self.heads, at)
        k = self._rotated(k, self.key_norm, self.kv_heads, at)
        v = v.unflatten(-1, (self.kv_heads, self.head_width)).transpose(1, 2)
        if cache is not None:
            k, v = cache.update(k, v, self.layer)
        mixed = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=at.mask,
            is_causal=at.mask is None and q.shape[2] > 1,
            enable_gqa=self.heads != self.kv_heads,
        )
        out = self.output(mixed.transpose(1, 2).flatten(2))
        return out + deltas["o"] if "o" in deltas else out

    def _rotated(self, x_BTC: Tensor, norm: nn.Module | None, heads: int, at: Positions) -> Tensor:
        if norm is not None and self.qk_norm == "width":
            x_BTC = norm(x_BTC)
        x_BTHK = x_BTC.unflatten(-1, (heads, self.head_width))
        if norm is not None and self.qk_norm == "head":
            x_BTHK = norm(x_BTHK)
        first, second = at_least_fp32(x_BTHK.transpose(1, 2)).chunk(2, dim=-1)
        turned = (first * at.cos - second * at.sin, second * at.cos + first * at.sin)
        return torch.cat(turned, dim=-1).to(x_BTC.dtype)


class SwiGLU(nn.Module):
    def __init__(self, width: int, inner: int, has_up: bool):
        super().__init__()
        self.gate, self.down = linear(width, inner), linear(inner, width)
        self.up = linear(width, inner) if has_up else None

    def forward(self, x_BTD: Tensor, up: Tensor | None) -> Tensor:
        """`up`: in place of the up projection."""
        if self.up is not None:
            up = self.up(x_BTD)
        assert up is not None
        return self.down(F.silu(self.gate(x_BTD)) * up)


class Block(nn.Module):
    """x <- x + delta_h;  x <- x + attention(norm x);  x <- x + ffn(norm x); or, with norms after,
    x + norm(attention(x)) and x + norm(ffn(x)). Sites of methods as in training."""

    def __init__(self, spec: Spec, layer: int):
        super().__init__()
        self.norms_after = spec.norms_after
        self.attention_norm = RMSNorm(spec.width, spec.norm_eps)
        self.attention = Attention(spec, layer)
        self.ffn_norm = RMSNorm(spec.width, spec.norm_eps)
        own = spec.method_site if spec.method_site is not None and layer in spec.method_site.layers else None
        self.ffn = SwiGLU(spec.width, spec.ffn_width, own is None or own.site != "up")
        sites: dict[str, nn.Module] = {i.site: Site(i, spec) for i in spec.injections if i.layer == layer}
        self.sites = nn.ModuleDict(sites)
        self.method_site = None if own is None else own.site
        if own is not None:
            self.sites[own.site] = SITE_MODULES[own.method](spec, own, layer)

    def forward(
        self, x: Tensor, values: Mapping[str, Tensor], at: Positions, cache: Any, deltas: dict[str, Tensor] | None
    ) -> Tensor:
        """`deltas`: what the injections add, if it is already computed."""
        if deltas is None:
            deltas = {
                site: injection(values, at, cache, x.dtype)
                for site, injection in self.sites.items()
                if site != self.method_site
            }
        if "qk" in deltas:
            deltas["q"] = deltas["k"] = deltas.pop("qk")
        if "h" in deltas:
            x = x + deltas.pop("h")
        if self.method_site == "ngram":
            x = self.sites["ngram"](x, values, at, cache)
        attended = self.attention(x if self.norms_after else self.attention_norm(x), deltas, at, cache)
        x = x + (self.attention_norm(attended) if self.norms_after else attended)
        normed = x if self.norms_after else self.ffn_norm(x)
        out = self.ffn(normed, self.sites["up"](values, at, x.dtype) if self.method_site == "up" else None)
        if self.method_site == "ffn":
            out = self.sites["ffn"](out, values, at)
        if self.norms_after:
            out = self.ffn_norm(out)
        if self.method_site in ("block", "experts"):
            out = out + self.sites[self.method_site](normed, values, at)
        return x + out


class Decoder(nn.Module):
    def __init__(self, spec: Spec):
        super().__init__()
        self.spec = spec
        self.embedding = nn.Parameter(torch.zeros(spec.vocabulary, spec.width))
        self.blocks = nn.ModuleList(Block(spec, layer) for layer in range(spec.layers))
        self.norm = RMSNorm(spec.width, spec.norm_eps)
        self.head = linear(spec.width, spec.vocabulary)
        self._batched_sites: BatchedSites | None = None

    def forward(
        self,
        tokens_BT: Tensor,
        slots_BT: Tensor,
        values: Mapping[str, Tensor],
        cache: Any = None,
        real: Tensor | None = None,
    ) -> Tensor:
        """`cache`: a `Cache`, or one of Hugging Face's that is also a `ConvolutionCache`. `real` [B, P+T]: False for
        padding."""
        x = F.embedding(tokens_BT, self.embedding)
        if self.spec.method_site is not None and self.spec.method_site.site == "input":
            x = x + F.embedding(slots_BT, values[INPUT_TABLE]).to(x.dtype)
        at = self._positions(tokens_BT, slots_BT, cache, real)
        deltas = self._batched_deltas(values, at, cache, x.dtype)
        for layer, block in enumerate(self.blocks):
            x = block(x, values, at, cache, None if deltas is None else deltas.get(layer, {}))
        return self.norm(x)

    def _batched_deltas(
        self, values: Mapping[str, Tensor], at: Positions, cache: Any, dtype: torch.dtype
    ) -> dict[int, dict[str, Tensor]] | None:
        """What the injections of all layers add, for a single token after a cached prefix; None: each block computes
        its own. Stacked parameters are kept from token to token, and built again for a new sequence."""
        single = cache is not None and cache.get_seq_length() > 0 and at.slots.shape[1] == 1 and at.documents is None
        if not single or torch.is_grad_enabled() or not self.spec.injections or self.spec.method_site is not None:
            self._batched_sites = None
            return None
        if self._batched_sites is None:
            sites = {(layer, n): s for layer, b in enumerate(self.blocks) for n, s in b.sites.items()}  # type: ignore[operator, union-attr]
            if not all(len(site.extractors) for site in sites.values()):
                return None
            self._batched_sites = BatchedSites(sites)
        return self._batched_sites.deltas(values, at.slots, cache, dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        return at_least_fp32(self.head(hidden))

    def _positions(self, tokens_BT: Tensor, slots_BT: Tensor, cache: Any, real: Tensor | None) -> Positions:
        past, new, device = 0 if cache is None else cache.get_seq_length(), tokens_BT.shape[1], tokens_BT.device
        order = torch.arange(past + new, device=device)
        where = order[past:] if real is None else (real.long().cumsum(1) - 1).clamp_min(0)[:, past:]
        # Angles in fp64, as in training: far positions would lose digits.
        rates = rotary_rates(self.spec, device)
        angles = where[..., None].double() * rates
        if real is not None:
            angles = angles[:, None]
        documents = self._documents(tokens_BT, cache, None if real is None else real[:, past:])
        mask = None
        if documents is not None:
            same = documents[:, past:, None] == documents[:, None, :]
            mask = (same & (order[past:, None] >= order))[:, None]
        elif past and new > 1:
            mask = order[past:, None] >= order
        return Positions(angles.cos().float(), angles.sin().float(), mask, documents, slots_BT)

    def _documents(self, tokens_BT: Tensor, cache: Any, real_BT: Tensor | None) -> Tensor | None:
        """The document of every position so far; None where documents and padding do not matter."""
        before = None if cache is None else cache.documents
        if self.spec.document_end is None and before is None and (real_BT is None or bool(real_BT.all())):
            return None
        if real_BT is None:
            real_BT = torch.ones_like(tokens_BT, dtype=torch.bool)
        end = -1 if self.spec.document_end is None else self.spec.document_end
        ends = ((tokens_BT == end) & real_BT).long()
        first = torch.zeros_like(ends[:, 0]) if cache is None or before is None else cache.next_document
        counted = first[:, None] + ends.cumsum(1)
        new = torch.where(real_BT.bool(), counted - ends, PADDING)
        documents = new if before is None else torch.cat((before, new), 1)
        if cache is not None:
            cache.documents, cache.next_document = documents, counted[:, -1]
        return documents
