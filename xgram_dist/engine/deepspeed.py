"""DeepSpeed's ZeRO, stages 1 to 3, with its optimizer state in host memory if wished.

DeepSpeed gets the backbone alone, our axes as its `mpu`, and torch's fused AdamW. Micro-batches, the joint gradient
norm, clipping and skipping are ours; reducing, sharding and gathering are its.
"""

import contextlib
import importlib
import os
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from xgram_dist.config import Config
from xgram_dist.engine.adamw import MOMENTS, build_adamw, create_state, set_rate
from xgram_dist.engine.base import BaseEngine
from xgram_dist.engine.boxes import flat_views, place
from xgram_dist.engine.deepspeed_config import deepspeed_config
from xgram_dist.engine.groups import Groups
from xgram_dist.engine.mpu import Mpu
from xgram_dist.engine.norm import NamedTensors
from xgram_dist.engine.protocol import Kind, Piece, StepOutcome
from xgram_dist.engine.zero import partitions_of
from xgram_dist.errors import UserError
from xgram_dist.model.transformer import Transformer
from xgram_dist.parallel.mesh import Mesh


class DeepSpeedEngine(BaseEngine):
    def __init__(self, config: Config, model: Transformer, mesh: Mesh, device: torch.device):
        settings = deepspeed_config(config, mesh.data.size)
        deepspeed = import_deepspeed(device)
        super().__init__(config, model, mesh, device, mesh.data)
        self.groups = Groups(device)
        named = dict(model.named_parameters())
        assert not any("tables" in name.split(".") for name in named), "tables stay outside of the engine's module"
        for name in self.tensor_dims:
            for mark in ("model_parallel", "tensor_model_parallel"):
                setattr(named[name], mark, True)
        buffers = {name: buffer.dtype for name, buffer in model.named_buffers()}
        # DeepSpeed makes its master weights from the bf16 ones.
        initial = {n: p.detach().clone() for n, p in named.items()} if config.train.precision == "bf16" else {}
        self.adamw = build_adamw(config, named.items())
        self.engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=self.adamw,
            config=settings,
            mpu=Mpu(mesh, self.groups),
            dist_init_required=False,
        )
        assert buffers == {name: buffer.dtype for name, buffer in model.named_buffers()}, "buffers keep their types"
        self.zero = partitions_of(self.engine.optimizer, {id(p): name for name, p in named.items()})
        create_state(self.adamw, self.zero.flats)
        for piece in self.pieces():
            if piece.kind == "weight" and initial:
                for offsets, values in piece.boxes:
                    values.copy_(initial[piece.name][place(offsets, values)])

    def loss(self, *args: Any) -> tuple[Tensor, Tensor]:
        # Stage 3's hooks write into the mappings they find among the arguments.
        own = (dict(argument) if isinstance(argument, Mapping) else argument for argument in args)
        loss, entropy = self.engine(*own, with_loss=True)
        if not torch.is_grad_enabled():
            self.zero.release()
        return loss, entropy

    def backward(self, loss: Tensor, *, last: bool) -> None:
        self.engine.set_gradient_accumulation_boundary(last)
        self.engine.backward(loss, scale_wrt_gas=False)

    def pieces(self) -> list[Piece]:
        flats = self.zero.flats
        arrays: dict[Kind, list[Tensor]] = {"weight": [flat.detach() for flat in flats]}
        arrays |= {kind: [self.adamw.state[flat][key] for flat in flats] for key, kind in MOMENTS.items()}
        found = {(name, kind): self._piece(name, kind) for name in self.shapes for kind in arrays}
        for stretch in self.zero.stretches:
            for kind, held in arrays.items():
                flat = held[stretch.flat].narrow(0, stretch.place, stretch.numel)
                found[stretch.name, kind].boxes += flat_views(self.shapes[stretch.name], stretch.start, flat)
        return list(found.values())

    def loaded(self) -> None:
        self.zero.refresh()

    def close(self) -> None:
        self.engine.destroy()
        self.groups.close()

    def _gradients(self) -> NamedTensors:
        gradients = self.zero.gradients()
        if self.config.parallel.zero_stage < 3 and self.mesh.data.size > 1 and gradients:  # sums; see deepspeed_config
            torch._foreach_mul_([gradient for _, gradient in gradients], 1 / self.mesh.data.size)
        return gradients

    def _finish(self, rate: float, outcome: StepOutcome) -> None:
        # DeepSpeed's step ends before it changes anything when the norm is not finite.
        self.zero.hand_norm(torch.full_like(outcome.norm, 0.0 if outcome.counted else float("inf")))
        set_rate(self.adamw, rate)
        self.engine.step()
        assert self.engine.was_step_applied() == outcome.counted
        if not outcome.counted:
            self.zero.forget()


def import_deepspeed(device: torch.device) -> Any:
    """DeepSpeed, without what it would compile on import or at its start."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    os.environ.setdefault("LOCAL_RANK", str(device.index or 0))
    try:
        import deepspeed  # type: ignore[import-untyped]
    except ImportError as error:
        raise UserError(
            "parallel.engine = deepspeed needs DeepSpeed, which is not installed; "
            "pip install 'xgram-dist[deepspeed]', or set parallel.engine=hsdp"
        ) from error
    if device.type == "cpu":
        # Its shared-memory collectives: a minute and a half of compiling. The number of ranks on this machine, which it
        # would ask another program for, again and again.
        os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    _import_muon()
    _hush()
    return deepspeed


def _import_muon() -> None:
    """Every ZeRO stage imports an optimizer that is not used here and whose import loads torch's compiler: seconds for
    each process. It is imported here, as plain functions."""
    with contextlib.suppress(ImportError, AttributeError):
        from deepspeed.runtime import compiler  # type: ignore[import-untyped]

        kept = compiler.compile
        compiler.compile = lambda: lambda function: function
        try:
            importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
        finally:
            compiler.compile = kept


def _hush() -> None:
    # It calls torch's collectives by their old names, in every step.
    warnings.filterwarnings("ignore", r".torch\.distributed\.\w+. is deprecated", FutureWarning)
    with contextlib.suppress(ImportError):
        from deepspeed.runtime import bf16_optimizer

        bf16_optimizer.see_memory_usage = lambda *args, **kwargs: None  # printed at its start, whatever the log level
