"""`Engine`: the interface of training, checkpoints and evaluation to a sharded backbone.

    for each micro-batch:   loss, cross_entropy = engine.loss(tokens, slots, values, warmup)
                            engine.backward(loss / micro_batches, last=...)
    in a pipeline:          engine.pipeline.train(...) makes these calls for its stages (pipeline.py)
    outcome = engine.clip(mean_loss, table_squares)      the joint norm: clip the step, or skip it
    engine.update(learning_rate, outcome)

The leaves of the working set in `values` receive their gradient in the same backward pass, in fp32, neither scaled nor
averaged. The backbone's gradients are means over the data axis after the last backward pass of a step.

A checkpoint sees an engine as a list of `ParameterShard`: the chunks of each master weight and moment that this rank
holds, as live fp32 views.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from xgram_dist.config import Config
from xgram_dist.engine.pipeline import Pipeline
from xgram_dist.model.transformer import Transformer
from xgram_dist.optim.backbone_adamw import MOMENTS, build_adamw, create_state, set_learning_rate, set_step_count
from xgram_dist.optim.backbone_muon import BackboneMuon, is_muons
from xgram_dist.optim.clip import NamedTensors, SpikeGuard, StepOutcome, backbone_square_sum, clip_by_joint_norm
from xgram_dist.parallel.mesh import Mesh
from xgram_dist.parallel.process_group import ProcessGroup
from xgram_dist.parallel.tensor_parallel import tensor_dims

StateKind = Literal["weight", "first_moment", "second_moment"]


class Chunk(NamedTuple):
    """A rectangular part of a tensor."""

    offsets: tuple[int, ...]
    tensor: Tensor

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index of the chunk in the tensor it is part of."""
        return tuple(slice(start, start + size) for start, size in zip(self.offsets, self.tensor.shape, strict=True))


@dataclass
class ParameterShard:
    """What this rank holds of one parameter, or of one of its moments."""

    name: str
    kind: StateKind
    shape: tuple[int, ...]
    """Of the parameter as the model builds it: under tensor parallelism, of this rank's shard."""
    tensor_dim: int | None
    """The dimension that is sharded over the tensor axis; None: replicated over it."""
    chunks: list[Chunk]
    """Of `shape`; empty where this rank holds nothing. Live fp32 views, to be read or overwritten in place."""


class Engine(ABC):
    adamw: torch.optim.AdamW

    def __init__(self, config: Config, model: Transformer, mesh: Mesh, device: torch.device, shard: ProcessGroup):
        """`shard`: the ranks over which the state is sharded; it is replicated over all others of the data axis."""
        self.config, self.model, self.mesh, self.device, self.shard = config, model, mesh, device, shard
        self.shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        self.tensor_dims = tensor_dims(model)
        """The dimension that is sharded over the tensor axis, for each such parameter."""
        self.spike_guard = SpikeGuard(config.train.spike_sigmas)
        self._step_count = 0
        self.pipeline = Pipeline(self) if mesh.pipeline.size > 1 else None

    def loss(self, *args: Any) -> tuple[Tensor, Tensor]:
        """`Transformer.loss` through the engine; under `torch.no_grad`, too, for validation. Where parameters are
        sharded, every rank of the data axis must call it the same number of times. In a pipeline it is for validation
        alone: all stages call it, and get the same."""
        if self.pipeline is not None:
            return self.pipeline.evaluate(*args)
        loss, entropy = self.forward(*args, with_loss=True)
        return loss, entropy

    @abstractmethod
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """`Transformer.forward` through the engine."""

    @abstractmethod
    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Of one micro-batch. `loss` is already divided by their number. `last`: this is the last one of the step."""

    @torch.no_grad()
    def clip(self, loss: Tensor, table_squares: Tensor) -> StepOutcome:
        """Clips by the joint norm. A step whose norm or loss is not finite, or a spike, will be skipped.

        `loss`: of the step, the same on every rank. `table_squares`: square sum of all table gradients, already reduced
        over ranks. The tables may be updated between `clip` and `update`."""
        gradients = self._local_gradients()
        counted = gradients
        if self.pipeline is not None:
            counted = self.pipeline.sum_shared(gradients)
        squares = backbone_square_sum(
            counted, self.tensor_dims, shard=self.shard, tensor=self.mesh.tensor, device=self.device
        )
        self.mesh.pipeline.all_reduce_sum(squares)
        outcome = clip_by_joint_norm(squares, table_squares, loss, self.config.optimizer.clip_norm, self.spike_guard)
        if outcome.factor < 1 and gradients:
            torch._foreach_mul_([gradient for _, gradient in gradients], outcome.factor)
        return outcome

    @torch.no_grad()
    def update(self, rate: float, outcome: StepOutcome) -> None:
        """Updates with learning rate `rate`, unless the step is skipped. `outcome`: of `clip`. Gradients are cleared
        either way."""
        self._update(rate, outcome)
        self._step_count += outcome.applied

    @abstractmethod
    def _local_gradients(self) -> NamedTensors:
        """This rank's shards of the reduced gradients, by parameter. `clip` scales them in place."""

    @abstractmethod
    def _update(self, rate: float, outcome: StepOutcome) -> None:
        """Updates the weights if the step is applied; clears the gradients."""

    @abstractmethod
    def parameter_shards(self) -> list[ParameterShard]:
        """Every master weight and moment that this rank holds. What is replicated appears on each rank."""

    @abstractmethod
    def after_load(self) -> None:
        """Call on all ranks after the chunks of `parameter_shards` were overwritten: updates what derives from them."""

    @property
    def step_count(self) -> int:
        """Steps that AdamW has applied: its bias correction. A checkpoint saves and sets it beside the shards."""
        return self._step_count

    @step_count.setter
    def step_count(self, count: int) -> None:
        self._step_count = count
        set_step_count(self.adamw, count)

    def close(self) -> None:
        """Removes hooks and process groups that the engine made."""
        return

    def _parameter_shard(self, name: str, kind: StateKind, chunks: list[Chunk]) -> ParameterShard:
        return ParameterShard(name, kind, self.shapes[name], self.tensor_dims.get(name), chunks)


class LocalEngine(Engine):
    """An engine whose AdamW runs over plain tensors of this rank: one chunk of each parameter."""

    def __init__(
        self,
        config: Config,
        model: Transformer,
        mesh: Mesh,
        device: torch.device,
        shard: ProcessGroup,
        weights: dict[str, Chunk],
    ):
        """`weights`: this rank's chunk, which may be empty, of the master weights of each parameter of `model`."""
        super().__init__(config, model, mesh, device, shard)
        self.weights = weights
        self.parameters = dict(model.named_parameters())
        self.frozen = {name for name, parameter in self.parameters.items() if not parameter.requires_grad}
        self.muon = BackboneMuon(
            config,
            {n: (chunk.tensor, self.shapes[n]) for n, chunk in weights.items() if self._is_muons(n)},
            shard,
        )
        elsewhere = self.frozen | set(self.muon.matrices)
        held = {n: chunk.tensor for n, chunk in weights.items() if chunk.tensor.numel() and n not in elsewhere}
        self.adamw = build_adamw(config, held.items())
        create_state(self.adamw, held.values())

    def _is_muons(self, name: str) -> bool:
        return is_muons(self.config, name, self.shapes[name]) and name not in self.frozen

    def _local_gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Of the shape of the parameter's chunk."""
        return parameter.grad

    def _local_gradients(self) -> NamedTensors:
        gradients = ((name, self._local_gradient(parameter)) for name, parameter in self.parameters.items())
        return [(name, gradient) for name, gradient in gradients if gradient is not None and gradient.numel()]

    def _update(self, rate: float, outcome: StepOutcome) -> None:
        if outcome.applied:
            for name, gradient in self._local_gradients():
                self.weights[name].tensor.grad = gradient
            set_learning_rate(self.adamw, rate)
            self.adamw.step()
            self.muon.step(rate)
        for name, parameter in self.parameters.items():
            self.weights[name].tensor.grad = parameter.grad = None

    def parameter_shards(self) -> list[ParameterShard]:
        shards = []
        for name, (offsets, weight) in self.weights.items():
            state = self.adamw.state.get(weight, {}) if weight.numel() else {}
            chunks = [Chunk(offsets, weight.detach())] if weight.numel() else []
            shards.append(self._parameter_shard(name, "weight", chunks))
            if name in self.frozen:
                continue
            if name in self.muon.matrices:
                momentum = self.muon.momentum.get(name)
                chunks = [] if momentum is None else [Chunk((0, 0), momentum)]
                shards.append(self._parameter_shard(name, "first_moment", chunks))
                continue
            for key, kind in MOMENTS.items():
                chunks = [Chunk(offsets, state[key])] if state else []
                shards.append(self._parameter_shard(name, kind, chunks))
        return shards


# Ranges of a flattened tensor as chunks of the tensor. ZeRO cuts flattened parameters anywhere, whereas a checkpoint
# has offsets and sizes in each dimension. A range of a matrix is at most three chunks: the rest of a row, whole rows,
# the start of a row.

Extent = tuple[tuple[int, ...], tuple[int, ...]]
"""(offsets, sizes)"""


def chunks_of_flat_range(shape: tuple[int, ...], flat: Tensor, start: int) -> list[Chunk]:
    """Chunks, which are views of `flat`: the elements of the flattened tensor from `start` on."""
    chunks, position = [], 0
    for offsets, sizes in extents_of_flat_range(shape, start, start + flat.numel()):
        numel = math.prod(sizes)
        chunks.append(Chunk(offsets, flat.narrow(0, position, numel).view(sizes)))
        position += numel
    return chunks


def extents_of_flat_range(shape: tuple[int, ...], start: int, stop: int) -> list[Extent]:
    """Of the chunks that make up elements start..stop of the flattened tensor, in order."""
    if start >= stop:
        return []
    if not shape:
        return [((), ())]
    row_numel = math.prod(shape[1:])
    first_row, last_row = start // row_numel, (stop - 1) // row_numel
    if first_row == last_row:
        within = extents_of_flat_range(shape[1:], start - first_row * row_numel, stop - first_row * row_numel)
        return [((first_row, *offsets), (1, *sizes)) for offsets, sizes in within]
    extents: list[Extent] = []
    first_whole = -(-start // row_numel)
    if start < first_whole * row_numel:
        extents += extents_of_flat_range(shape, start, first_whole * row_numel)
    end_whole = stop // row_numel
    if first_whole < end_whole:
        extents.append(((first_whole, *(0 for _ in shape[1:])), (end_whole - first_whole, *shape[1:])))
    return extents + extents_of_flat_range(shape, end_whole * row_numel, stop)
