"""Figures of a forward pass: layer cosines, cosines between views, norms of what is injected.

`observe_forward` puts hooks on the training network and passes what they see to observers. An observer adds sums over
positions to `RunningSums`. A figure is a pure function of the sums over all batches and ranks, so it does not depend on
how batches are spread over ranks. Used by `xgram-dist diagnose` on a checkpoint and by `train.diagnose_every` in a run.

Collectives: `RunningSums.all_reduce` is one all-reduce over host memory. Observers of columns that are split over the
tensor axis all-reduce partial sums of squares over that axis during the forward pass.

Shapes: B batch, T positions, D model width, W width of a site, V views.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import combinations
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from xgram_dist.parallel.process_group import ProcessGroup

BLOCK_PARTS = ("attention", "ffn")
TRANSFORMING_SITES = ("ngram", "ffn")
"""Sites that map a hidden state to a new one: what they inject is the difference."""
SCALING_SITES = ("up",)
"""Sites that give a factor; nothing is added, so nothing is injected."""
TENSOR_PARALLEL_SITES = ("q", "k", "v", "qk", "up")
"""Sites whose columns are split over the tensor axis; at the others every rank has all columns."""

# ---- observing a forward pass


class Observer(Protocol):
    def observe(self, kind: str, layer: int, site: str, value: Tensor) -> None:
        """`kind`: input, attention, ffn or hidden [B,T,D]; at a site: extracted (once for each view, in order) or
        injected [B,T,W]. `site` is empty for the first four."""


@contextmanager
def observe_forward(model: nn.Module, observers: Sequence[Observer]) -> Iterator[None]:
    """Hooks on every block's `attention`, `ffn` and `sites`, where it has them. Compiled blocks run eagerly meanwhile,
    because compiled code does not call hooks."""

    def see(kind: str, layer: int, site: str, value: Tensor) -> None:
        for observer in observers:
            observer.observe(kind, layer, site, value)

    def hook(module: nn.Module, kind: str, layer: int, site: str = "", *, difference: bool = False) -> Any:
        def after(_: nn.Module, inputs: Any, outputs: Any) -> None:
            value = outputs[0] if isinstance(outputs, tuple) else outputs  # the second is an auxiliary loss
            see(kind, layer, site, value - inputs[0] if difference else value)

        return module.register_forward_hook(after)

    blocks: list[nn.Module] = list(model.blocks)  # type: ignore[arg-type]
    compiled = [block._compiled_call_impl for block in blocks]
    handles: list[Any] = [blocks[0].register_forward_pre_hook(lambda _, inputs: see("input", 0, "", inputs[0]))]
    for layer, block in enumerate(blocks):
        block._compiled_call_impl = None
        for part in BLOCK_PARTS:
            if isinstance(getattr(block, part, None), nn.Module):
                handles.append(hook(getattr(block, part), part, layer))
        for site, module in _injecting_modules(block).items():
            for extractor in getattr(module, "extractors", ()):
                handles.append(hook(extractor, "extracted", layer, site))
            handles.append(hook(module, "injected", layer, site, difference=site in TRANSFORMING_SITES))
        handles.append(hook(block, "hidden", layer))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for block, call in zip(blocks, compiled, strict=True):
            block._compiled_call_impl = call


def injection_sites(model: nn.Module) -> dict[str, list[int]]:
    """The layers of each site at which something is injected."""
    layers_of: dict[str, list[int]] = {}
    for layer, block in enumerate(model.blocks):  # type: ignore[arg-type]
        for site in _injecting_modules(block):
            layers_of.setdefault(site, []).append(layer)
    return layers_of


def _injecting_modules(block: nn.Module) -> dict[str, nn.Module]:
    sites = getattr(block, "sites", None)
    named = sites.items() if isinstance(sites, nn.ModuleDict) else ()
    return {site: module for site, module in named if site not in SCALING_SITES}


# ---- sums over batches and ranks

Totals = dict[str, Tensor]
"""Sums over all batches and ranks, in host memory, fp64."""


class RunningSums:
    """Named fp64 sums. Every rank must add under the same names, in any order."""

    def __init__(self) -> None:
        self.enabled = True
        """False: zeros are added. For a rank that repeats a batch only to take part in collectives."""
        self._sums: dict[str, Tensor] = {}

    def add(self, name: str, value: Tensor) -> None:
        value = value.detach().double()
        if not self.enabled:
            value = torch.zeros_like(value)
        self._sums[name] = self._sums[name] + value if name in self._sums else value

    def all_reduce(self, ranks: ProcessGroup) -> Totals:
        """All sums over all ranks, on every rank, in one message."""
        names = sorted(self._sums)
        if not names:
            return {}
        flat = torch.cat([self._sums[name].reshape(-1).cpu() for name in names])
        flat = ranks.host.all_reduce_sum(flat)
        parts = flat.split([self._sums[name].numel() for name in names])
        return {name: part.view(self._sums[name].shape) for name, part in zip(names, parts, strict=True)}


def mean_of(totals: Totals, name: str) -> float | None:
    """The mean from a pair (sum, count); None if nothing was counted."""
    if name not in totals or not totals[name][1]:
        return None
    return float(totals[name][0] / totals[name][1])


# ---- layer cosines: how much of the token is left at each depth
#
# The paper's Sim: mean over positions of the cosine between a layer's attention output, feed-forward output or hidden
# state and the input embedding of the position's token; and between each hidden state and that of the first layer.

COSINE_PARTS = ("attention", "ffn", "hidden", "first_state")


class LayerCosines:
    def __init__(self, sums: RunningSums):
        self._sums = sums
        self._input: Tensor | None = None
        self._first_state: Tensor | None = None

    def observe(self, kind: str, layer: int, site: str, value: Tensor) -> None:
        if kind == "input":
            self._input = value
        if kind not in COSINE_PARTS:
            return
        assert self._input is not None
        self._add(f"cosine.{kind}.{layer}", value, self._input)
        if kind == "hidden":
            self._first_state = value if layer == 0 else self._first_state
            assert self._first_state is not None
            self._add(f"cosine.first_state.{layer}", value, self._first_state)

    def _add(self, name: str, a: Tensor, b: Tensor) -> None:
        cosines = F.cosine_similarity(a.double(), b.double(), dim=-1)
        self._sums.add(name, torch.stack((cosines.sum(), cosines.new_tensor(cosines.numel()))))


def layer_cosines(totals: Totals, layers: int) -> dict[str, list[float | None]]:
    """For each part, a value a layer."""
    return {part: [mean_of(totals, f"cosine.{part}.{layer}") for layer in range(layers)] for part in COSINE_PARTS}


# ---- view cosines: whether parallel views hold different things
#
# Pairwise cosines, mean over positions, of the vectors as retrieved (the paper's figure) and as they come out of the
# extractors. Views of a site are tables whose names differ in their last number alone.

VIEW_STAGES = ("retrieved", "extracted")


class ViewCosines:
    def __init__(
        self,
        sums: RunningSums,
        tables: list[str],
        split_sites: tuple[str, ...] = (),
        tensor: ProcessGroup | None = None,
    ):
        """`tables`: names of all tables. `tensor`: the ranks that share a vector's columns at `split_sites`."""
        self._sums, self._split_sites, self._tensor = sums, split_sites, tensor or ProcessGroup()
        self.groups = {site: views for site, views in _view_groups(tables).items() if len(views) > 1}
        self._extracted: dict[str, list[Tensor]] = {}

    def add_retrieved(self, values: Mapping[str, Tensor], slots: Tensor) -> None:
        """`values`: vectors of the distinct tokens, by table. `slots`: which of them each position reads."""
        for group, names in self.groups.items():
            vectors = [values[name] for name in names]
            if len({tuple(vector.shape) for vector in vectors}) > 1:
                continue
            counts = torch.bincount(slots.reshape(-1), minlength=len(vectors[0]))
            self._add("retrieved", group, vectors, counts)

    def observe(self, kind: str, layer: int, site: str, value: Tensor) -> None:
        group = f"layers.{layer}.{site}"
        if kind == "extracted" and group in self.groups:
            self._extracted.setdefault(group, []).append(value)
        elif kind == "injected" and group in self._extracted:
            vectors = self._extracted.pop(group)
            if len(vectors) == len(self.groups[group]):
                self._add("extracted", group, vectors, None)

    def _add(self, stage: str, group: str, vectors: list[Tensor], counts: Tensor | None) -> None:
        """`counts`: how many positions read each vector; None: one each."""
        pairs = list(combinations(range(len(vectors)), 2))
        flat = [vector.double().flatten(0, -2) for vector in vectors]
        squares = [vector.square().sum(-1) for vector in flat]
        products = torch.stack([*squares, *((flat[i] * flat[j]).sum(-1) for i, j in pairs)])
        if group.rsplit(".", 1)[1] in self._split_sites:
            self._tensor.all_reduce_sum(products)
        norms = products[: len(vectors)].sqrt().clamp_min(1e-30)
        for number, (i, j) in enumerate(pairs):
            cosines = products[len(vectors) + number] / (norms[i] * norms[j])
            weights = torch.ones_like(cosines) if counts is None else counts.double()
            self._sums.add(f"views.{stage}.{group}.{i}-{j}", torch.stack(((cosines * weights).sum(), weights.sum())))


def view_cosines(totals: Totals, groups: dict[str, list[str]]) -> dict[str, Any]:
    """For each stage that occurred: the mean over all pairs of all sites, and the pairs of each site."""
    stages: dict[str, Any] = {}
    for stage in VIEW_STAGES:
        sites: dict[str, Any] = {}
        for group, names in groups.items():
            pairs = {
                f"{i}-{j}": mean_of(totals, f"views.{stage}.{group}.{i}-{j}")
                for i, j in combinations(range(len(names)), 2)
            }
            values = [value for value in pairs.values() if value is not None]
            if values:
                sites[group] = {"mean": sum(values) / len(values), "pairs": pairs}
        if sites:
            values = [value for site in sites.values() for value in site["pairs"].values()]
            stages[stage] = {"mean": sum(values) / len(values), "sites": sites}
    return stages


def _view_groups(tables: list[str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for name in tables:
        group, _, view = name.rpartition(".")
        if group and view.isdigit():
            groups.setdefault(group, []).append(name)
    return groups


# ---- activation magnitude: norms of what is injected
#
# The paper's M(token): the mean, over the token's occurrences and over the layers, of the L2 norm of the injected
# vector. Here for each site, and over all sites of all layers.

BINS_PER_DECADE = 2


class TokenNorms:
    """Sums of injected norms, by site and token. Needs whole vectors: no tensor axis."""

    def __init__(self, sums: RunningSums, vocabulary: int):
        self._sums, self._vocabulary = sums, vocabulary
        self._tokens: Tensor | None = None

    def begin_batch(self, tokens_BT: Tensor) -> None:
        """The tokens of the next forward pass."""
        self._tokens = tokens_BT.reshape(-1)
        self._sums.add("occurrences", torch.bincount(self._tokens, minlength=self._vocabulary))

    def observe(self, kind: str, layer: int, site: str, value: Tensor) -> None:
        if kind != "injected":
            return
        assert self._tokens is not None
        norms = value.double().norm(dim=-1).reshape(-1)
        self._sums.add(f"norms.{site}", torch.bincount(self._tokens, norms, minlength=self._vocabulary))


class SiteNorms:
    """Mean injected norm of each site over all tokens, on any layout."""

    def __init__(self, sums: RunningSums, split_sites: tuple[str, ...] = (), tensor: ProcessGroup | None = None):
        """`tensor`: the ranks that share a vector's columns at `split_sites`."""
        self._sums, self._split_sites, self._tensor = sums, split_sites, tensor or ProcessGroup()

    def observe(self, kind: str, layer: int, site: str, value: Tensor) -> None:
        if kind != "injected":
            return
        squares = value.double().square().sum(-1)
        if site in self._split_sites:
            self._tensor.all_reduce_sum(squares)
        self._sums.add(f"site.{site}", torch.stack((squares.sqrt().sum(), squares.new_tensor(squares.numel()))))


def activation_magnitudes(totals: Totals, sites: dict[str, list[int]]) -> dict[str, NDArray[np.float64]]:
    """M of every token, by site and over `all`; NaN for tokens that did not occur. `sites`: the layers of each."""
    occurrences = totals["occurrences"].numpy()
    sums = {site: totals[f"norms.{site}"].numpy() for site in sites}
    counts = {site: len(layers) for site, layers in sites.items()}
    sums["all"], counts["all"] = np.sum(list(sums.values()), axis=0), sum(counts.values())
    with np.errstate(invalid="ignore", divide="ignore"):
        return {name: np.where(occurrences > 0, sums[name] / (occurrences * counts[name]), np.nan) for name in sums}


def magnitude_by_frequency(
    magnitude: NDArray[np.float64], frequency: NDArray[np.float64], occurrences: NDArray[np.float64]
) -> dict[str, Any]:
    """Means over the tokens of each frequency band, half a decade wide, and the correlation with log frequency. All
    arrays are by token."""
    known = np.isfinite(magnitude) & (frequency > 0)
    band = np.floor(np.log10(frequency, where=known, out=np.zeros_like(frequency)) * BINS_PER_DECADE)
    bands = []
    for number in np.unique(band[known]):
        members = known & (band == number)
        bands.append(
            {
                "from": float(10 ** (number / BINS_PER_DECADE)),
                "to": float(10 ** ((number + 1) / BINS_PER_DECADE)),
                "tokens": int(members.sum()),
                "occurrences": int(occurrences[members].sum()),
                "magnitude": float(magnitude[members].mean()),
            }
        )
    return {"bands": bands, "correlation": correlation(np.log(frequency[known]), magnitude[known])}


def correlation(a: NDArray[np.float64], b: NDArray[np.float64]) -> float | None:
    """Pearson's; None if there are fewer than two values or one side is constant."""
    if len(a) < 2 or not a.std() or not b.std():
        return None
    return float(np.corrcoef(a, b)[0, 1])
