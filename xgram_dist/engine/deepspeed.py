"""The backbone under DeepSpeed's ZeRO, stages 1 to 3, with or without its optimizer state in host memory.

DeepSpeed gets the backbone alone, our mesh as its `mpu`, and torch's fused AdamW. It reduces, shards and gathers.
Micro-batches, the joint gradient norm, clipping and skipping are ours. What depends on DeepSpeed's version is in
deepspeed_internals.py, which also imports it.
"""

from typing import Any

import torch
from torch import Tensor

from xgram_dist.config import Config
from xgram_dist.config.validate import accumulation
from xgram_dist.engine.base import Engine, ParameterShard, StateKind, chunks_of_flat_range
from xgram_dist.engine.deepspeed_internals import MeshAsMpu, find_partitions, import_deepspeed
from xgram_dist.errors import UserError, is_out_of_memory, one_line
from xgram_dist.model.transformer import Transformer
from xgram_dist.optim.backbone_adamw import MOMENTS, build_adamw, create_state, set_learning_rate
from xgram_dist.optim.clip import NamedTensors, StepOutcome
from xgram_dist.parallel.mesh import EngineGroups, Mesh


class DeepSpeedEngine(Engine):
    def __init__(self, config: Config, model: Transformer, mesh: Mesh, device: torch.device):
        settings = deepspeed_config(config, mesh.data.size)
        deepspeed = import_deepspeed(device)
        super().__init__(config, model, mesh, device, mesh.data)
        self.groups = EngineGroups(device)
        parameters = dict(model.named_parameters())
        assert not any("tables" in name.split(".") for name in parameters), "tables stay outside of the engine's module"
        for name in self.tensor_dims:
            for mark in ("model_parallel", "tensor_model_parallel"):
                setattr(parameters[name], mark, True)
        buffer_dtypes = {name: buffer.dtype for name, buffer in model.named_buffers()}
        # In bf16, DeepSpeed makes its master weights from rounded ones: they are overwritten below.
        bf16 = config.train.precision == "bf16"
        initial = {name: p.detach().clone() for name, p in parameters.items()} if bf16 else {}
        self.adamw = build_adamw(config, parameters.items())
        mpu = MeshAsMpu(mesh, self.groups)
        try:
            self.engine, *_ = deepspeed.initialize(
                model=model, optimizer=self.adamw, config=settings, mpu=mpu, dist_init_required=False
            )
        except Exception as error:
            extra = config.parallel.deepspeed
            if not extra or is_out_of_memory(error):
                raise
            # Without keys of the user's DeepSpeed takes the configuration, so it is one of these that it refuses.
            raise UserError(
                f"DeepSpeed refuses parallel.deepspeed = {one_line(repr(extra), 120)}: "
                f"{one_line(f'{type(error).__name__}: {error}', 200)}; correct or leave out these keys"
            ) from error
        assert buffer_dtypes == {name: buffer.dtype for name, buffer in model.named_buffers()}, (
            "buffers keep their dtype"
        )
        self.partitions = find_partitions(self.engine.optimizer, {id(p): name for name, p in parameters.items()})
        create_state(self.adamw, self.partitions.flat_weights)
        for shard in self.parameter_shards():
            if shard.kind == "weight" and initial:
                for chunk in shard.chunks:
                    chunk.tensor.copy_(initial[shard.name][chunk.slices])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # Stage 3's hooks write into dicts among the arguments: they get copies.
        copied = (dict(argument) if isinstance(argument, dict) else argument for argument in args)
        outputs = self.engine(*copied, **kwargs)
        if not torch.is_grad_enabled():
            self.partitions.release_gathered()
        return outputs

    def backward(self, loss: Tensor, *, last: bool) -> None:
        self.engine.set_gradient_accumulation_boundary(last)
        self.engine.backward(loss, scale_wrt_gas=False)

    def parameter_shards(self) -> list[ParameterShard]:
        weights = self.partitions.flat_weights
        arrays: dict[StateKind, list[Tensor]] = {"weight": [weight.detach() for weight in weights]}
        arrays |= {kind: [self.adamw.state[weight][key] for weight in weights] for key, kind in MOMENTS.items()}
        shards = {(name, kind): self._parameter_shard(name, kind, []) for name in self.shapes for kind in arrays}
        for segment in self.partitions.segments:
            for kind, flat_arrays in arrays.items():
                flat = segment.of(flat_arrays)
                chunks = chunks_of_flat_range(self.shapes[segment.name], flat, segment.start)
                shards[segment.name, kind].chunks += chunks
        return list(shards.values())

    def after_load(self) -> None:
        self.partitions.refresh_parameters()

    def close(self) -> None:
        self.engine.destroy()
        self.groups.close()

    def _local_gradients(self) -> NamedTensors:
        gradients = self.partitions.gradients()
        if self.config.parallel.zero_stage < 3 and self.mesh.data.size > 1 and gradients:
            # Sums: see gradient_allreduce_op below.
            torch._foreach_mul_([gradient for _, gradient in gradients], 1 / self.mesh.data.size)
        return gradients

    def _update(self, rate: float, outcome: StepOutcome) -> None:
        # DeepSpeed skips a step whose norm is not finite before it changes anything.
        self.partitions.norm = torch.tensor(0.0 if outcome.applied else float("inf"))
        set_learning_rate(self.adamw, rate)
        self.engine.step()
        assert self.engine.was_step_applied() == outcome.applied
        if not outcome.applied:
            self.partitions.clear_skipped()


# The configuration
#
# Every relevant key is set, because DeepSpeed's defaults may change. Two kinds of keys: those that follow from the
# recipe, which `parallel.deepspeed` may repeat but not contradict, and tuning keys, which it may set freely.

BUCKET_NUMEL = 50_000_000
"""Elements in one message of gradients or parameters."""
REPLICATED_BELOW = 10_000
"""Stage 3 replicates parameters with fewer elements (norms, biases): they are not worth a message."""

REFUSED = {
    "optimizer": "the recipe's section optimizer decides",
    "scheduler": "the recipe's section optimizer decides",
    "amp": "train.precision decides",
    "bfloat16": "train.precision decides",
    "managed_gradient_accumulation": "train.global_batch and train.micro_batch decide",
    "tensor_parallel": "parallel.tensor decides",
    "sequence_parallel_size": "parallel.sequence_parallel and parallel.context decide",
    "pipeline": "parallel.pipeline decides",
    "expert_parallel": "there is no expert parallelism here",
    "compile": "train.compile decides",
    "zero_optimization.cpu_offload": "parallel.offload decides",
    "zero_optimization.offload_param": "parameters stay on the device; parallel.offload moves the optimizer state",
    "zero_optimization.zenflow": "its updates are not those of AdamW",
}
"""Keys of `parallel.deepspeed` that must not be set, and why."""

DECIDED_BY = {
    "train_batch_size": "train.global_batch",
    "train_micro_batch_size_per_gpu": "train.micro_batch",
    "gradient_accumulation_steps": "train.global_batch, train.micro_batch and the number of ranks",
    "gradient_clipping": "optimizer.clip_norm",
    "bf16": "train.precision",
    "fp16": "train.precision",
    "torch_autocast": "train.precision",
    "zero_optimization.stage": "parallel.zero_stage",
    "zero_optimization.offload_optimizer": "parallel.offload",
}
"""The recipe key that decides a DeepSpeed key, for messages."""


def deepspeed_config(config: Config, data_size: int) -> dict[str, Any]:
    """DeepSpeed's JSON for a recipe. `data_size`: ranks of the data axis."""
    if config.parallel.zero_stage == 3 and config.train.compile:
        raise UserError(
            "parallel.zero_stage = 3 does not work with train.compile = true, since its hooks break compiled graphs; "
            "set parallel.zero_stage=2, parallel.engine=hsdp or train.compile=false"
        )
    extra = config.parallel.deepspeed
    for path, reason in REFUSED.items():
        if _has(extra, path):
            raise UserError(f"parallel.deepspeed.{path} cannot be set: {reason}; leave it out")
    required = _required_keys(config, data_size)
    _check_consistent(extra, required, "")
    return _merged(_merged(_tuning_keys(config), extra), required)


def _required_keys(config: Config, data_size: int) -> dict[str, Any]:
    train, parallel = config.train, config.parallel
    return {
        # DeepSpeed takes every rank of the data axis for one with sequences of its own.
        "train_batch_size": train.global_batch * parallel.context,
        "train_micro_batch_size_per_gpu": train.micro_batch,
        "gradient_accumulation_steps": accumulation(config, data_size),
        "gradient_clipping": 0.0,  # gradients are clipped by the joint norm before DeepSpeed's step
        "prescale_gradients": False,
        "gradient_predivide_factor": 1.0,
        # For a mean, stage 2 would divide in bf16 before it reduces in fp32; stage 3 knows no sum.
        "gradient_allreduce_op": "mean" if parallel.zero_stage == 3 else "sum",
        "fp16": {"enabled": False},
        "bf16": {
            "enabled": train.precision == "bf16",
            "immediate_grad_update": True,
            "check_grad_overflow": True,
            "bf16_master_weights_and_grads": False,
            "bf16_optimizer_states": False,
        },
        "torch_autocast": {"enabled": False},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # torch's fused AdamW runs on the host, too, and compiles nothing
        "zero_optimization": {
            "stage": parallel.zero_stage,
            "offload_optimizer": {"device": "cpu" if parallel.offload else "none", "ratio": 1.0},
            "ignore_unused_parameters": True,
            "elastic_checkpoint": False,
            "legacy_stage1": False,
            "zero_hpz_partition_size": 1,
            "zero_quantized_weights": False,
            "zero_quantized_nontrainable_weights": False,
            "zero_quantized_gradients": False,
        },
    }


def _tuning_keys(config: Config) -> dict[str, Any]:
    stage = config.parallel.zero_stage
    return {
        "log_level": "error",
        "steps_per_print": None,
        "wall_clock_breakdown": False,
        "memory_breakdown": False,
        "dump_state": False,
        "timers": {"throughput": {"enabled": False}},
        "zero_optimization": {
            "overlap_comm": stage > 1,
            "contiguous_gradients": True,
            "reduce_scatter": True,
            "reduce_bucket_size": BUCKET_NUMEL,
            "use_multi_rank_bucket_allreduce": True,
            "allgather_partitions": True,
            "allgather_bucket_size": BUCKET_NUMEL,
            "round_robin_gradients": False,
            "sub_group_size": 1_000_000_000,
            "offload_optimizer": {"pin_memory": config.parallel.offload},
            "stage3_prefetch_bucket_size": BUCKET_NUMEL,
            "stage3_param_persistence_threshold": REPLICATED_BELOW,
            "stage3_max_live_parameters": 1_000_000_000,
            "stage3_max_reuse_distance": 0,
            "stage3_gather_16bit_weights_on_model_save": False,
        },
    }


def _check_consistent(extra: dict[str, Any], required: dict[str, Any], prefix: str) -> None:
    for key, value in extra.items():
        if key not in required:
            continue
        path, needed = f"{prefix}{key}", required[key]
        if isinstance(needed, dict):
            if not isinstance(value, dict):
                raise UserError(f"parallel.deepspeed.{path} = {value!r} must be a section of keys, or be left out")
            _check_consistent(value, needed, f"{path}.")
        elif value != needed or isinstance(value, bool) != isinstance(needed, bool):
            decides = next((DECIDED_BY[at] for at in DECIDED_BY if path == at or path.startswith(f"{at}.")), None)
            raise UserError(
                f"parallel.deepspeed.{path} = {value!r} contradicts this recipe, which needs {needed!r}; "
                f"leave it out{f' and set {decides}' if decides else ''}"
            )


def _has(tree: Any, path: str) -> bool:
    for key in path.split("."):
        if not isinstance(tree, dict) or key not in tree:
            return False
        tree = tree[key]
    return True


def _merged(base: dict[str, Any], override: dict[str, Any]) -> dict[str, Any]:
    """Sections are merged key by key."""
    merged = dict(base)
    for key, value in override.items():
        inner = merged.get(key)
        merged[key] = _merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return merged
