"""The stages of this rank in a pipeline (`parallel.pipeline`), on torch.distributed.pipelining.

    train       forward and backward of a step's micro-batches, in the order of the library's schedule
    evaluate    the forward pass of one batch through all stages
    sum_shared  gradients of the parameters that every stage holds

Ranks of the pipeline axis have the same tokens and other layers (model/pipeline_stages.py). Each reads its tables in
the working set of its own stage, which the library knows nothing of: it moves the residual stream and its gradient
between neighbours, and decides which micro-batch is next. Schedules: 1F1B; interleaved, with several stages a rank;
zero bubble, which computes the gradients of inputs first and those of weights where a rank would wait.

Collectives on the pipeline axis: sends between neighbours; all-reduces of the losses of a step, and, in `clip`, of the
square sum and of the gradients of shared parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage as LibraryStage
from torch.distributed.pipelining import Schedule1F1B, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from xgram_dist.model.layers import at_least_fp32
from xgram_dist.model.pipeline_stages import PipelineStage
from xgram_dist.optim.clip import NamedTensors
from xgram_dist.tables.working_set import WorkingSet

if TYPE_CHECKING:
    from xgram_dist.engine.base import Engine


class Pipeline:
    def __init__(self, engine: Engine):
        self._engine, self._group = engine, engine.mesh.pipeline
        self._stages = engine.model.stages
        self._num_stages = self._group.size * len(self._stages)
        self._schedules: dict[torch.Size, Any] = {}
        """By micro-batches, sequences and tokens."""
        self._step: StepOfStages | None = None

    def train(
        self, fetched: list[WorkingSet], tokens_ABT: Tensor, warmup: Tensor, weights_A: Tensor | None
    ) -> list[tuple[Tensor, Tensor]]:
        """(loss, cross-entropy) of each micro-batch, the same on all stages. Gradients as after `Engine.backward` of
        each, the last one included. `fetched`: all windows of the step."""
        shape = tokens_ABT.shape
        if shape not in self._schedules:
            self._schedules[shape] = self._build_schedule(shape)
        schedule = self._schedules[shape]
        self._step = step = StepOfStages(self._engine, fetched, tokens_ABT, warmup, weights_A, len(self._stages))
        try:
            # A target has to be given, and is cut into micro-batches; our labels are those of the tokens.
            schedule.step(target=torch.arange(len(tokens_ABT)), return_outputs=False)
        except RuntimeError as error:
            raise error.__cause__ or error from None  # the library wraps what a stage raises
        finally:
            self._step = None
        step.end()
        sums_A2 = self._group.all_reduce_sum(torch.stack([torch.stack(found) for found in step.found]))
        return [(loss, entropy) for loss, entropy in sums_A2]

    @torch.no_grad()
    def evaluate(
        self, tokens_BT: Tensor, slots: Tensor, values: Mapping[str, Tensor], warmup: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(loss, cross-entropy) of a batch, on all stages."""
        assert not torch.is_grad_enabled()
        group, size = self._group, self._group.size
        found = [torch.zeros((), device=tokens_BT.device, dtype=torch.float64) for _ in range(2)]
        for stage in self._stages:
            x = None
            if not stage.is_first:
                x = self._residual_stream(tokens_BT.shape)
                dist.recv(x, group=group.group, group_src=(group.rank - 1) % size)
            out, extra = self._engine.forward(tokens_BT, slots, values, warmup, with_loss=True, stage=stage, x=x)
            if stage.is_last:
                found = [found[0] + out, found[1] + extra]
                continue
            dist.send(out.contiguous(), group=group.group, group_dst=(group.rank + 1) % size)
            if extra is not None:
                found[0] = found[0] + extra
        loss, entropy = group.all_reduce_sum(torch.stack(found))
        return loss, entropy

    def sum_shared(self, gradients: NamedTensors) -> NamedTensors:
        """Sums gradients of shared parameters over the stages, in place. Returns those that count in this stage's share
        of the norm."""
        shared = self._engine.model.shared
        for name, gradient in gradients:
            if name in shared:
                self._group.all_reduce_sum(gradient)
        return gradients if self._group.first else [one for one in gradients if one[0] not in shared]

    def _residual_stream(self, shape: torch.Size, device: torch.device | None = None) -> Tensor:
        """Memory for what passes from stage to stage."""
        config, model = self._engine.config, self._engine.model
        length = model.axis.sequence_axis.local_size(shape[-1] // model.context.size)
        size = (shape[-2], length, config.model.width)
        return torch.empty(size, dtype=model.compute_dtype, device=device or self._engine.device)

    def _build_schedule(self, shape: torch.Size) -> Any:
        x = self._residual_stream(shape, torch.device("meta")).requires_grad_()
        stages = [TrainedStage(self, stage, self._num_stages, x) for stage in self._stages]
        arguments: dict[str, Any] = {"loss_fn": lambda loss, target: loss, "scale_grads": False}
        if self._engine.config.parallel.pipeline_schedule == "zero_bubble":
            return ScheduleInterleavedZeroBubble(stages, shape[0], **arguments)  # type: ignore[arg-type]
        if len(stages) > 1:
            return ScheduleInterleaved1F1B(stages, shape[0], **arguments)  # type: ignore[arg-type]
        return Schedule1F1B(stages[0], shape[0], **arguments)

    @property
    def step(self) -> StepOfStages:
        assert self._step is not None
        return self._step

    @property
    def engine(self) -> Engine:
        return self._engine

    @property
    def group(self) -> Any:
        """torch's process group."""
        return self._group.group


class StepOfStages:
    """What the stages of a rank read and find in one step."""

    def __init__(
        self,
        engine: Engine,
        fetched: list[WorkingSet],
        tokens_ABT: Tensor,
        warmup: Tensor,
        weights_A: Tensor | None,
        num_stages: int,
    ):
        """`num_stages`: of this rank."""
        self._engine, self._fetched, self._tokens_ABT, self._warmup = engine, fetched, tokens_ABT, warmup
        self._inputs = [(slots_BT, working.values) for working in fetched for slots_BT in working.slots]
        """Of each micro-batch: slots, and the values they are of."""
        self._weights_A = weights_A
        zero = torch.zeros((), device=tokens_ABT.device, dtype=torch.float64)
        self.found = [(zero, zero)] * len(tokens_ABT)
        """(loss, cross-entropy) of each micro-batch, as far as found on this rank."""
        self._auxiliary: dict[tuple[int, int], Tensor] = {}
        """By stage and micro-batch: auxiliary losses on their way to a backward pass."""
        self._backwards = num_stages * len(tokens_ABT)
        """Backward passes that are to come."""
        self._reduces = False
        """Whether the engine has been told of the last backward pass."""

    def forward(self, stage: PipelineStage, number: int, x: Tensor | None) -> Tensor:
        """Of a micro-batch: the residual stream; of the last stage, the loss to start the backward pass from."""
        slots_BT, values = self._inputs[number]
        out, extra = self._engine.forward(
            self._tokens_ABT[number], slots_BT, values, self._warmup, with_loss=True, stage=stage, x=x
        )
        loss, entropy = (out, extra) if stage.is_last else (extra, None)
        if loss is not None:
            loss = loss if self._weights_A is None else loss * self._weights_A[number]
            before = self.found[number]
            self.found[number] = before[0] + loss.detach(), before[1]
        if entropy is not None:
            entropy = entropy if self._weights_A is None else entropy * self._weights_A[number]
            self.found[number] = self.found[number][0], entropy.detach().double()
        if stage.is_last:
            assert loss is not None
            return loss / len(self._tokens_ABT)
        if loss is not None:
            self._auxiliary[stage.number, number] = loss / len(self._tokens_ABT)
        return out.contiguous()

    def outputs(self, stage: PipelineStage, number: int, output: Tensor, gradient: Tensor | None) -> NamedOutputs:
        """What the backward pass of a micro-batch starts from: (output, its gradient), and an auxiliary loss."""
        auxiliary = self._auxiliary.pop((stage.number, number), None)
        starts = [(output, gradient), (auxiliary, None)]
        return [(tensor, value) for tensor, value in starts if tensor is not None and tensor.requires_grad]

    def backward(self, outputs: NamedOutputs) -> None:
        """Of a micro-batch, through the engine, to which it looks like that of a loss."""
        self._backwards -= 1
        last = self._backwards == 0
        if last:
            for working in self._fetched:
                working.begin_return()
        loss = torch.zeros((), device=self._tokens_ABT.device, requires_grad=True)
        for tensor, gradient in outputs:
            one = tensor if gradient is None else _AsLoss.apply(tensor, gradient)
            loss = one if len(outputs) == 1 else loss + one
        self._reduces |= last
        self._engine.backward(loss, last=last)

    def leaves(self) -> list[Tensor]:
        return [value for working in self._fetched for value in working.values.values() if value.requires_grad]

    def end(self) -> None:
        """Where backward passes went past the engine (zero bubble), the engine still has to reduce."""
        if not self._reduces:
            self._engine.backward(torch.zeros((), device=self._tokens_ABT.device, requires_grad=True), last=True)


NamedOutputs = list[tuple[Tensor, Tensor | None]]
"""Tensors, with the gradients that come for them; None: a loss."""


class _AsLoss(torch.autograd.Function):
    """A number whose backward pass gives the tensor this gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return at_least_fp32(tensor.new_zeros(()))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return gradient, None


class TrainedStage(LibraryStage):
    """A stage as the library's schedules run it. Forward and backward go through the engine, which shards parameters
    and reduces gradients in its own way. Memory to receive in is allocated for a micro-batch when it is on its way; the
    library's own would be held for all micro-batches of a step."""

    def __init__(self, pipeline: Pipeline, stage: PipelineStage, num_stages: int, x: Tensor):
        """`x`: a residual stream on the meta device."""
        self._pipeline, self._stage, self._number = pipeline, stage, 0
        out = torch.empty((), device="meta", requires_grad=True) if stage.is_last else x
        model = pipeline.engine.model
        # Whose parameters are those of the stage: for the gradients of weights alone.
        parts = [model.blocks.get_submodule(str(layer)) for layer in stage.layers]
        parts += [module for module in (model.norm, model.head) if stage.is_last and module is not None]
        super().__init__(
            nn.ModuleList(parts),
            stage.number,
            num_stages,
            pipeline.engine.device,
            input_args=x,
            output_args=out,
            group=pipeline.group,
        )

    # Compute

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._number = fwd_chunk_id
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self._release(self.args_recv_info[fwd_chunk_id])  # the graph holds what it needs
        return output

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._pipeline.step.forward(self._stage, self._number, *(args or (None,)))

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        self._number = bwd_chunk_id
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        self._release(self.grad_recv_info[bwd_chunk_id])

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        self._number = bwd_chunk_id
        super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[Tensor | None, ...], Any]:
        step = self._pipeline.step
        if backward_type == "weight":
            stage_backward_weight(iter(self._weights()), bwd_kwargs["param_groups"])
            return (), None
        output, gradients, inputs = (bwd_kwargs[key] for key in ("stage_output", "output_grads", "input_values"))
        output = output[0] if isinstance(output, tuple) else output
        outputs = step.outputs(self._stage, self._number, output, None if gradients is None else gradients[0])
        if backward_type == "input":
            tensors = [tensor for tensor, _ in outputs]
            starts = [torch.ones_like(tensor) if value is None else value for tensor, value in outputs]
            found, groups = stage_backward_input(tensors, starts, inputs, iter(self._weights()))
            return tuple(one if one is None else one.contiguous() for one in found), groups
        step.backward(outputs)
        found = tuple(x.grad if x.grad is None else x.grad.contiguous() for x in inputs)
        for x in inputs:
            x.grad = None
        return found, None

    def _weights(self) -> list[Any]:
        """All leaves that get a gradient in this stage: parameters, and vectors of the working set."""
        model = self._pipeline.engine.model
        shared = [p for name, p in model.named_parameters() if name in model.shared]
        return [*(p for p in (*self.submod.parameters(), *shared) if p.requires_grad), *self._pipeline.step.leaves()]

    # Memory to receive in

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        for number in reversed(range(num_microbatches)):
            super()._setup_forward_recv_info(1, has_backward)
            self.args_recv_info[number] = self.args_recv_info[0]
            self._release(self.args_recv_info[number])

    def _create_grad_recv_info(self, act_send_info: dict[int, Any]) -> Any:
        infos = super()._create_grad_recv_info(act_send_info)
        self._release(infos)
        return infos

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        self._allocate(self.args_recv_info[fwd_chunk_id])
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        self._allocate(self.grad_recv_info[bwd_chunk_id])
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def _allocate(self, infos: Any) -> None:
        for info in infos:
            if not info.is_root_arg and info.tensor_meta is not None:
                meta = info.tensor_meta
                info.buffer = torch.empty(meta.shape, dtype=meta.dtype, device=self.device)

    @staticmethod
    def _release(infos: Any) -> None:
        for info in infos:
            info.buffer = None
