"""The backbone's parameters as one rank of the tensor axis holds them: shapes, in the units that FSDP gathers."""

import math
from dataclasses import dataclass

from xgram_dist.config.schema import Config
from xgram_dist.memory.layout import (
    RESIDUAL_SITES,
    extraction_settings,
    ngram_width,
    resolved_layers,
    site_layers,
    site_width,
    table_sites,
)

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Backbone:
    root: tuple[Shape, ...]
    """Embedding and final norm; scone: the side network too."""
    blocks: tuple[tuple[Shape, ...], ...]
    head: tuple[Shape, ...]

    @property
    def units(self) -> tuple[tuple[Shape, ...], ...]:
        return (self.root, *self.blocks, self.head)

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return tuple(shape for unit in self.units for shape in unit)

    @property
    def numel(self) -> int:
        return numel(self.shapes)


def numel(shapes: tuple[Shape, ...]) -> int:
    return sum(math.prod(shape) for shape in shapes)


def matrices(shapes: tuple[Shape, ...]) -> tuple[Shape, ...]:
    return tuple(shape for shape in shapes if len(shape) > 1)


def shard_numel(shapes: tuple[Shape, ...], ranks: int) -> int:
    """Of the first rank, when each parameter is cut by its first dimension into equal parts, rounded up. So many times
    the ranks is what is gathered and scattered."""
    return sum(-(-shape[0] // ranks) * math.prod(shape[1:]) for shape in shapes)


def backbone_shapes(config: Config, tensor: int) -> Backbone:
    model = config.model
    table = (model.vocabulary // tensor, model.width)
    return Backbone(
        root=(table, (model.width,), *side_network(config, tensor)),
        blocks=tuple(_block(config, layer, tensor) for layer in range(model.layers)),
        head=(table,),
    )


def _block(config: Config, layer: int, tensor: int) -> tuple[Shape, ...]:
    model = config.model
    width, inner = model.width, model.ffn_width // tensor
    replaced = config.memory.method == "stem" and layer in site_layers(config, "up")
    ffn = (*((inner, width),) * (1 if replaced else 2), (width, inner))
    return ((width,), *_attention(config, tensor), (width,), *ffn, *method_shapes(config, layer, tensor))


def _attention(config: Config, tensor: int) -> tuple[Shape, ...]:
    width = config.model.width
    query, kv = width // tensor, site_width(config, "v") // tensor
    return ((query, width), (kv, width), (kv, width), (width, query), (query,), (kv,))


def side_network(config: Config, tensor: int) -> tuple[Shape, ...]:
    if config.memory.method != "scone":
        return ()
    width, inner = config.model.width, config.model.ffn_width // tensor
    block = ((width,), *_attention(config, tensor), (width,), (inner, width), (inner, width), (width, inner))
    return block * config.memory.scone.layers


def method_shapes(config: Config, layer: int, tensor: int) -> tuple[Shape, ...]:
    """What the memory method has in a block beside its tables."""
    memory, width = config.memory, config.model.width
    if memory.method in ("xgram", "ple"):
        return _sites(config, layer, tensor)
    if memory.method == "mole":
        inner = (memory.mole.width or config.model.ffn_width) // tensor
        experts = ((inner, width), (inner, width), (width, inner)) * memory.mole.experts
        there = layer in resolved_layers(config, memory.mole.layers)
        return ((width,), *experts, (memory.mole.experts, width)) if there else ()
    for site, settings in table_sites(config).items():
        if layer not in site_layers(config, site):
            return ()
        if site == "ffn":
            return ((width,),) * settings.views
        if site == "block":
            return ((settings.views, width), (settings.views,), (width,))
        if site == "ngram":
            projections = ((width, ngram_width(config)),) * 2
            return (*projections, (width,), (width,), (width,), (memory.engram.taps, width))
    return ()


def _sites(config: Config, layer: int, tensor: int) -> tuple[Shape, ...]:
    found: list[Shape] = []
    for site, settings in table_sites(config).items():
        if layer not in site_layers(config, site):
            continue
        found.append((settings.views,))
        width = site_width(config, site) // (1 if site in RESIDUAL_SITES else tensor)
        for taps in extractor_taps(config, site):
            found.append((taps, width))
            found += [(taps, width), (width,)] if extraction_settings(config).gate else []
    return tuple(found)


def extractor_taps(config: Config, site: str) -> list[int]:
    """Convolution length of each extractor that a site has in a layer."""
    extraction, settings = extraction_settings(config), table_sites(config)[site]
    if not extraction.enabled or config.memory.method != "xgram":
        return []
    return [settings.kernels[v % len(settings.kernels)] for v in range(1 if extraction.shared else settings.views)]
