"""All that depends on DeepSpeed's version, which is 0.19: its import, its `mpu`, and the attributes of its optimizers.

    import_deepspeed   the one import, without what DeepSpeed would compile or print
    MeshAsMpu          our mesh as Megatron's `mpu`, which DeepSpeed asks for its process groups
    find_partitions    where a rank's fp32 weights and reduced gradients are:
        Stage12Partitions    stages 1 and 2: parameters flattened group by group, each flat array cut over the ranks
        Bf16Partitions       stage 1 in bf16 with fp32 gradients, for which DeepSpeed has an optimizer of its own
        Stage3Partitions     stage 3: each parameter cut by itself

DeepSpeed has no public view of its partitions that does not gather them, so these classes read its attributes. Nor can
it be given a gradient norm: the methods that compute it are replaced by ours, which return the joint norm.
"""

import contextlib
import importlib
import os
import warnings
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from xgram_dist.errors import UserError
from xgram_dist.optim.clip import NamedTensors
from xgram_dist.parallel.mesh import EngineGroups, Mesh

# Import


def import_deepspeed(device: torch.device) -> Any:
    _set_device_variables(device)
    try:
        import deepspeed  # type: ignore[import-untyped]
    except ImportError as error:
        raise UserError(
            "parallel.engine = deepspeed needs DeepSpeed, which is not installed; "
            "pip install 'xgram-dist[deepspeed]', or set parallel.engine=hsdp"
        ) from error
    if device.type == "cpu":
        # Its shared-memory collectives take 90 s to compile. Without LOCAL_SIZE it starts a program, each time, to ask
        # for the number of ranks on this machine.
        os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    _import_muon_uncompiled()
    _silence()
    return deepspeed


def _set_device_variables(device: torch.device) -> None:
    """DeepSpeed takes LOCAL_RANK for the index of its GPU, which is 0 where a rank sees one GPU only."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    if device.type == "cuda":
        os.environ["LOCAL_RANK"] = str(device.index)
    os.environ.setdefault("LOCAL_RANK", "0")


def _import_muon_uncompiled() -> None:
    """Every ZeRO stage imports Muon, which is not used here and whose decorators load torch's compiler: seconds for
    each process. It is imported here, with those decorators disabled."""
    with contextlib.suppress(ImportError, AttributeError):
        from deepspeed.runtime import compiler  # type: ignore[import-untyped]

        original = compiler.compile
        compiler.compile = lambda: lambda function: function
        try:
            importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
        finally:
            compiler.compile = original


def _silence() -> None:
    # It calls torch's collectives by deprecated names in every step.
    warnings.filterwarnings("ignore", r".torch\.distributed\.\w+. is deprecated", FutureWarning)
    with contextlib.suppress(ImportError):
        from deepspeed.runtime import bf16_optimizer

        bf16_optimizer.see_memory_usage = lambda *args, **kwargs: None  # prints whatever the log level


# Process groups


class MeshAsMpu:
    def __init__(self, mesh: Mesh, groups: EngineGroups):
        self.mesh = mesh
        self.data_group, self.tensor_group = groups.group_of(mesh.data), groups.group_of(mesh.tensor)

    def get_data_parallel_group(self) -> Any:
        return self.data_group

    def get_data_parallel_group_ranks(self) -> list[int]:
        return dist.get_process_group_ranks(self.data_group)

    def get_data_parallel_rank(self) -> int:
        return self.mesh.data.rank

    def get_data_parallel_world_size(self) -> int:
        return self.mesh.data.size

    def get_model_parallel_group(self) -> Any:
        return self.tensor_group

    def get_model_parallel_rank(self) -> int:
        return self.mesh.tensor.rank

    def get_model_parallel_world_size(self) -> int:
        return self.mesh.tensor.size

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size


# Partitions


class FlatSegment(NamedTuple):
    """A range of a flattened parameter in one of this rank's flat arrays."""

    name: str
    start: int
    """First element, in the parameter."""
    array: int
    """Which flat array."""
    offset: int
    """First element, in the flat array."""
    numel: int

    def of(self, arrays: list[Tensor]) -> Tensor:
        return arrays[self.array].view(-1).narrow(0, self.offset, self.numel)


class Partitions(ABC):
    def __init__(self, optimizer: Any, names: dict[int, str]):
        """`names`: of parameters, by id."""
        self.optimizer, self.names = optimizer, names
        self.norm = torch.zeros(())
        """What DeepSpeed takes for the gradient norm; in host memory, where it is read without waiting."""
        self.segments: list[FlatSegment] = []

    @property
    @abstractmethod
    def flat_weights(self) -> list[Tensor]:
        """This rank's master weights, which AdamW updates."""

    @abstractmethod
    def gradients(self) -> NamedTensors:
        """After the last backward pass: the reduced gradients of `segments`, which may be scaled in place."""

    def clear_skipped(self) -> None:
        """After a skipped step: clears what DeepSpeed does not clear."""
        return

    def release_gathered(self) -> None:
        """After a forward pass without a backward pass: frees gathered parameters."""
        return

    @abstractmethod
    def refresh_parameters(self) -> None:
        """Copies the master weights into the module's parameters."""

    def _split(self, arrays: list[Tensor]) -> NamedTensors:
        return [(segment.name, segment.of(arrays)) for segment in self.segments]

    def _split_offloaded_gradients(self) -> NamedTensors:
        return self._split([weight.grad for weight in self.flat_weights if weight.grad is not None])


class Stage12Partitions(Partitions):
    def __init__(self, optimizer: Any, names: dict[int, str]):
        super().__init__(optimizer, names)
        self.segments = _mapped_segments(optimizer.bit16_groups, names)
        optimizer.scaled_global_norm = lambda norm_type=2: self.norm
        optimizer.check_overflow = lambda partition_gradients=True: None

    @property
    def flat_weights(self) -> list[Tensor]:
        return list(self.optimizer.single_partition_of_fp32_groups)

    def gradients(self) -> NamedTensors:
        optimizer = self.optimizer
        if optimizer.cpu_offload:
            optimizer._wait_for_offload_copies()
            return self._split_offloaded_gradients()
        named = []
        for group, parameters in enumerate(optimizer.params_in_partition):
            gradients = [g for g in optimizer.averaged_gradients[group] if not getattr(g, "_zero_padding", False)]
            named += [(self.names[id(p)], g) for p, g in zip(parameters, gradients, strict=False)]
        return named

    def clear_skipped(self) -> None:
        # With offloading, the next step would be added to these fp32 sums.
        for group in self.optimizer.averaged_gradients:
            self.optimizer.averaged_gradients[group] = None

    def refresh_parameters(self) -> None:
        self.optimizer.update_lp_params()


class Bf16Partitions(Partitions):
    def __init__(self, optimizer: Any, names: dict[int, str]):
        super().__init__(optimizer, names)
        self.segments = _mapped_segments(optimizer.bf16_groups, names)
        optimizer.get_grads_for_norm = lambda for_clipping=False: ([self.norm], {})
        from deepspeed.runtime import bf16_optimizer

        # It would move the norm to the device, reduce it over the tensor axis, and read it back.
        bf16_optimizer.get_global_norm_of_tensors = lambda input_tensors, **_: input_tensors[0]

    @property
    def flat_weights(self) -> list[Tensor]:
        return list(self.optimizer.fp32_groups_flat_partition)

    def gradients(self) -> NamedTensors:
        return self._split(self.optimizer.fp32_groups_gradient_flat_partition)

    def refresh_parameters(self) -> None:
        self.optimizer.update_lp_params()


class Stage3Partitions(Partitions):
    def __init__(self, optimizer: Any, names: dict[int, str]):
        super().__init__(optimizer, names)
        for group, parameters in enumerate(optimizer.fp16_groups):
            offset = 0
            for parameter in parameters:
                local_numel = parameter.partition_numel()
                start = local_numel * optimizer._get_param_partition_rank(parameter)
                numel = max(0, min(local_numel, parameter.ds_numel - start))  # the last partitions are padded
                if numel:
                    self.segments.append(FlatSegment(names[id(parameter)], start, group, offset, numel))
                offset += local_numel
        optimizer._get_norm_groups = lambda: [self.norm]

    @property
    def flat_weights(self) -> list[Tensor]:
        return list(self.optimizer.fp32_partitioned_groups_flat)

    def gradients(self) -> NamedTensors:
        optimizer = self.optimizer
        if optimizer.offload_optimizer:
            return self._split_offloaded_gradients()
        named = []
        for group, parameters in enumerate(optimizer.fp16_groups):
            gradients = optimizer.averaged_gradients[group]
            named += [(self.names[id(p)], g) for p, g in zip(parameters, gradients, strict=True)]
        return named

    def release_gathered(self) -> None:
        self.optimizer.empty_partition_cache()  # its prefetch has begun to gather for a backward pass

    def refresh_parameters(self) -> None:
        self.release_gathered()
        optimizer = self.optimizer
        for group in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(group)
        if optimizer.persistent_parameters:
            optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)


def _mapped_segments(groups: list[list[Any]], names: dict[int, str]) -> list[FlatSegment]:
    """From DeepSpeed's mapping between the module's parameters (lp) and the flat fp32 arrays (hp)."""
    segments = []
    for group, parameters in enumerate(groups):
        for parameter in parameters:
            mapping = parameter._hp_mapping
            if mapping is not None:
                lp, hp = mapping.lp_fragment_address, mapping.hp_fragment_address
                segments.append(FlatSegment(names[id(parameter)], lp.start, group, hp.start, hp.numel))
    return segments


PARTITIONS: dict[str, type[Partitions]] = {
    "DeepSpeedZeroOptimizer": Stage12Partitions,
    "BF16_Optimizer": Bf16Partitions,
    "DeepSpeedZeroOptimizer_Stage3": Stage3Partitions,
}
"""By the class of DeepSpeed's optimizer."""


def find_partitions(optimizer: Any, names: dict[int, str]) -> Partitions:
    return PARTITIONS[type(optimizer).__name__](optimizer, names)
