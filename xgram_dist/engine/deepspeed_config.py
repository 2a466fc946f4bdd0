"""A recipe as DeepSpeed's JSON, every relevant key set: what is absent would take a default that may change.

Two kinds of keys: those that follow from the recipe, which `parallel.deepspeed` may repeat but not contradict, and
those that only tune, which it may set freely.
"""

from typing import Any

from xgram_dist.config import Config
from xgram_dist.config.check import accumulation
from xgram_dist.errors import UserError

BUCKET = 50_000_000
"""Elements in one message of gradients or parameters."""
WHOLE_BELOW = 10_000
"""Stage 3 keeps parameters with fewer elements, norms and biases, whole on every rank: too small to be worth a
message."""

REFUSED = {
    "optimizer": "the recipe's section optimizer decides",
    "scheduler": "the recipe's section optimizer decides",
    "amp": "train.precision decides",
    "bfloat16": "train.precision decides",
    "managed_gradient_accumulation": "train.global_batch and train.micro_batch decide",
    "tensor_parallel": "parallel.tensor decides",
    "sequence_parallel_size": "parallel.sequence_parallel decides",
    "pipeline": "layers are not pipelined here",
    "expert_parallel": "there are no experts here",
    "compile": "train.compile decides",
    "zero_optimization.cpu_offload": "parallel.offload decides",
    "zero_optimization.offload_param": "parameters stay on the device; parallel.offload moves the optimizer's state",
    "zero_optimization.zenflow": "its updates are not those of AdamW",
}
"""Keys that must not be set, and why."""


def deepspeed_config(config: Config, data_size: int) -> dict[str, Any]:
    """`data_size`: ranks of the data axis."""
    if config.parallel.zero_stage == 3 and config.train.compile:
        raise UserError(
            "parallel.zero_stage = 3 cannot be had with train.compile: its hooks would cut compiled blocks to pieces; "
            "set parallel.zero_stage=2, parallel.engine=hsdp or train.compile=false"
        )
    extra = config.parallel.deepspeed
    for path, reason in REFUSED.items():
        if _has(extra, path):
            raise UserError(f"parallel.deepspeed.{path} cannot be set: {reason}; leave it out")
    ours = _follows(config, data_size)
    _check(extra, ours, "")
    return _merged(_merged(_tuning(config), extra), ours)


def _follows(config: Config, data_size: int) -> dict[str, Any]:
    train, parallel = config.train, config.parallel
    return {
        "train_batch_size": train.global_batch,
        "train_micro_batch_size_per_gpu": train.micro_batch,
        "gradient_accumulation_steps": accumulation(config, data_size),
        "gradient_clipping": 0.0,  # clipped by the joint norm, before DeepSpeed's update
        "prescale_gradients": False,
        "gradient_predivide_factor": 1.0,
        # Stage 2 would divide by the number of ranks in bf16, before it reduces in fp32; stage 3 has no sum.
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
        "zero_force_ds_cpu_optimizer": False,  # torch's fused AdamW runs on the host too, without a compiler
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


def _tuning(config: Config) -> dict[str, Any]:
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
            "reduce_bucket_size": BUCKET,
            "use_multi_rank_bucket_allreduce": True,
            "allgather_partitions": True,
            "allgather_bucket_size": BUCKET,
            "round_robin_gradients": False,
            "sub_group_size": 1_000_000_000,
            "offload_optimizer": {"pin_memory": config.parallel.offload},
            "stage3_prefetch_bucket_size": BUCKET,
            "stage3_param_persistence_threshold": WHOLE_BELOW,
            "stage3_max_live_parameters": 1_000_000_000,
            "stage3_max_reuse_distance": 0,
            "stage3_gather_16bit_weights_on_model_save": False,
        },
    }


WHENCE = {
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
"""Where a key's value comes from, for messages."""


def _check(extra: dict[str, Any], ours: dict[str, Any], prefix: str) -> None:
    for key, value in extra.items():
        if key not in ours:
            continue
        path = f"{prefix}{key}"
        if isinstance(ours[key], dict):
            if not isinstance(value, dict):
                raise UserError(f"parallel.deepspeed.{path} = {value!r} must be a section of keys, or be left out")
            _check(value, ours[key], f"{path}.")
        elif value != ours[key] or isinstance(value, bool) != isinstance(ours[key], bool):
            decides = next((WHENCE[at] for at in WHENCE if path == at or path.startswith(f"{at}.")), None)
            raise UserError(
                f"parallel.deepspeed.{path} = {value!r} contradicts this recipe, which needs {ours[key]!r}; "
                f"leave it out{f' and set {decides}' if decides else ''}"
            )


def _has(tree: Any, path: str) -> bool:
    for key in path.split("."):
        if not isinstance(tree, dict) or key not in tree:
            return False
        tree = tree[key]
    return True


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """`above` wins, key by key."""
    both = dict(below)
    for key, value in above.items():
        inner = both.get(key)
        both[key] = _merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return both
