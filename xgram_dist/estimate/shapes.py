"""Parameter shapes of one tensor-parallel rank, read from a model built on the meta device.

In: a recipe and the size of its tensor axis. Out: the shapes of the real `Transformer`'s parameters, grouped into the
units that FSDP gathers. Nothing is allocated and no process group is needed. Table rows are not parameters of the
network; `tables.py` of this package estimates them.
"""

import math
from dataclasses import dataclass, field
from functools import lru_cache

import torch

from xgram_dist.config.schema import Config
from xgram_dist.model.pipeline_stages import PipelineStage
from xgram_dist.model.transformer import Transformer
from xgram_dist.parallel.tensor_parallel import TensorAxis

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ParameterShapes:
    root: tuple[Shape, ...]
    """What is in no other unit: the embedding, the final norm, SCONE's side network."""
    blocks: tuple[tuple[Shape, ...], ...]
    head: tuple[Shape, ...]
    method: tuple[Shape, ...]
    """What the memory method adds. The units above contain these too."""

    @property
    def units(self) -> tuple[tuple[Shape, ...], ...]:
        return (self.root, *self.blocks, self.head)

    @property
    def all(self) -> tuple[Shape, ...]:
        return tuple(shape for unit in self.units for shape in unit)

    @property
    def numel(self) -> int:
        return numel(self.all)


def parameter_shapes(
    config: Config, tensor: int = 1, stages: tuple[PipelineStage, ...] | None = None
) -> ParameterShapes:
    """Of rank 0 of a tensor axis with `tensor` ranks; all its ranks hold the same shapes. `stages`: of a rank of a
    pipeline; None: all layers."""
    return _build(_Model(config.model_dump_json(include={"model", "memory"}), tensor, stages, config))


def numel(shapes: tuple[Shape, ...]) -> int:
    return sum(math.prod(shape) for shape in shapes)


def matrices(shapes: tuple[Shape, ...]) -> tuple[Shape, ...]:
    return tuple(shape for shape in shapes if len(shape) > 1)


def shard_numel(shapes: tuple[Shape, ...], ranks: int) -> int:
    """Elements on rank 0 when FSDP shards each parameter on dim 0. Padded to a multiple of the ranks: times `ranks` it
    is what an all-gather or a reduce-scatter moves."""
    return sum(-(-shape[0] // ranks) * math.prod(shape[1:]) for shape in shapes)


@dataclass(frozen=True)
class _Model:
    """A cache key. A recipe has dicts and cannot be hashed, so its sections that decide shapes stand as JSON."""

    sections: str
    tensor: int
    stages: tuple[PipelineStage, ...] | None
    config: Config = field(compare=False)


@lru_cache(maxsize=32)
def _build(model: _Model) -> ParameterShapes:
    with torch.device("meta"):
        network = Transformer(model.config, axis=TensorAxis(size=model.tensor), stages=model.stages)
    units: dict[str, list[Shape]] = {"root": [], "head": []}
    units |= {f"blocks.{layer}": [] for layer, _ in network.blocks.named_children()}
    method: list[Shape] = []
    for name, parameter in network.named_parameters():
        shape = tuple(parameter.shape)
        unit = ".".join(name.split(".")[:2]) if name.startswith("blocks.") else name.split(".")[0]
        units[unit if unit in units else "root"].append(shape)
        if ".sites." in name or name.startswith("side."):
            method.append(shape)
    root, head, *blocks = (tuple(shapes) for shapes in units.values())
    return ParameterShapes(root, tuple(blocks), head, tuple(method))
