"""The backbone's parameters as one rank of the tensor axis holds them: shapes, in the units that FSDP gathers."""

import math
from dataclasses import dataclass

from xgram_dist.config.schema import Config
from xgram_dist.memory.layout import RESIDUAL_SITES, site_layers, site_width

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Backbone:
    root: tuple[Shape, ...]
    """Embedding and final norm."""
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
        root=(table, (model.width,)),
        blocks=tuple(_block(config, layer, tensor) for layer in range(model.layers)),
        head=(table,),
    )


def _block(config: Config, layer: int, tensor: int) -> tuple[Shape, ...]:
    model = config.model
    width, inner, kv = model.width, model.ffn_width // tensor, site_width(config, "v") // tensor
    query = width // tensor
    attention = ((query, width), (kv, width), (kv, width), (width, query), (query,), (kv,))
    ffn = ((inner, width), (inner, width), (width, inner))
    return ((width,), *attention, (width,), *ffn, *_sites(config, layer, tensor))


def _sites(config: Config, layer: int, tensor: int) -> tuple[Shape, ...]:
    memory = config.memory
    found: list[Shape] = []
    for site, settings in memory.sites.items() if memory.method != "vanilla" else ():
        if layer not in site_layers(config, site):
            continue
        found.append((settings.views,))
        width = site_width(config, site) // (1 if site in RESIDUAL_SITES else tensor)
        for taps in extractor_taps(config, site):
            found.append((taps, width))
            found += [(taps, width), (width,)] if memory.extraction.gate else []
    return tuple(found)


def extractor_taps(config: Config, site: str) -> list[int]:
    """Convolution length of each extractor that a site has in a layer."""
    extraction, settings = config.memory.extraction, config.memory.sites[site]  # type: ignore[index]
    if not extraction.enabled:
        return []
    return [settings.kernels[v % len(settings.kernels)] for v in range(1 if extraction.shared else settings.views)]
