"""ZeRO's inside: where a rank's fp32 state and reduced gradients lie, for each of DeepSpeed's three optimizers.

    ZeroPartitions     stages 1 and 2: parameters flattened group by group, the flat array cut over ranks
    Bf16Partitions     stage 1 in bf16 with fp32 gradients, which DeepSpeed gives an optimizer of its own
    Stage3Partitions   stage 3: each parameter cut by itself

DeepSpeed has no public view of this that does not gather, so these read its attributes (of version 0.19). The gradient
norm is ours: `hand_norm` puts it in the place of DeepSpeed's, whose own step then leaves everything as it is when the
norm is not finite.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from xgram_dist.engine.norm import NamedTensors


class Stretch(NamedTuple):
    """Part of a flattened parameter, in one of this rank's flat arrays."""

    name: str
    start: int
    """Its first element in the parameter."""
    flat: int
    """Which flat array."""
    place: int
    """Its first element there."""
    numel: int


class Partitions(ABC):
    def __init__(self, optimizer: Any, names: dict[int, str]):
        """`names`: of parameters, by id."""
        self.optimizer, self.names = optimizer, names
        self.norm = torch.zeros(())
        self.stretches: list[Stretch] = []

    def hand_norm(self, norm: Tensor) -> None:
        self.norm = norm

    @property
    @abstractmethod
    def flats(self) -> list[Tensor]:
        """This rank's master weights: what AdamW updates."""

    @abstractmethod
    def gradients(self) -> NamedTensors:
        """After the last backward pass: the reduced gradients of `stretches`, to be scaled in place."""

    def forget(self) -> None:
        """After a step that was skipped: clear what DeepSpeed itself does not."""
        return

    def release(self) -> None:
        """After a forward pass without a backward pass: let go of gathered parameters."""
        return

    @abstractmethod
    def refresh(self) -> None:
        """Bring the module's parameters in line with the master weights."""

    def _cut_gradients(self) -> NamedTensors:
        return self._cut([flat.grad for flat in self.flats if flat.grad is not None])

    def _cut(self, arrays: list[Tensor]) -> NamedTensors:
        return [(s.name, arrays[s.flat].view(-1).narrow(0, s.place, s.numel)) for s in self.stretches]


def _linked(groups: list[list[Any]], names: dict[int, str]) -> list[Stretch]:
    """From the links that DeepSpeed keeps between a module's parameters and the flat arrays."""
    found = []
    for number, group in enumerate(groups):
        for parameter in group:
            link = parameter._hp_mapping
            if link is not None:
                within, at = link.lp_fragment_address, link.hp_fragment_address
                found.append(Stretch(names[id(parameter)], within.start, number, at.start, at.numel))
    return found


class ZeroPartitions(Partitions):
    def __init__(self, optimizer: Any, names: dict[int, str]):
        super().__init__(optimizer, names)
        self.stretches = _linked(optimizer.bit16_groups, names)
        optimizer.scaled_global_norm = lambda norm_type=2: self.norm
        optimizer.check_overflow = lambda partition_gradients=True: None

    @property
    def flats(self) -> list[Tensor]:
        return list(self.optimizer.single_partition_of_fp32_groups)

    def gradients(self) -> NamedTensors:
        optimizer = self.optimizer
        if optimizer.cpu_offload:
            optimizer._wait_for_offload_copies()
            return self._cut_gradients()
        found = []
        for number, parameters in enumerate(optimizer.params_in_partition):
            given = [g for g in optimizer.averaged_gradients[number] if not getattr(g, "_zero_padding", False)]
            found += [(self.names[id(p)], g) for p, g in zip(parameters, given, strict=False)]
        return found

    def forget(self) -> None:
        # With offloading, fp32 sums of a skipped step would be added to.
        for number in self.optimizer.averaged_gradients:
            self.optimizer.averaged_gradients[number] = None

    def refresh(self) -> None:
        self.optimizer.update_lp_params()


class Bf16Partitions(Partitions):
    def __init__(self, optimizer: Any, names: dict[int, str]):
        super().__init__(optimizer, names)
        self.stretches = _linked(optimizer.bf16_groups, names)
        optimizer.get_grads_for_norm = lambda for_clipping=False: ([self.norm], {})

    @property
    def flats(self) -> list[Tensor]:
        return list(self.optimizer.fp32_groups_flat_partition)

    def gradients(self) -> NamedTensors:
        return self._cut(self.optimizer.fp32_groups_gradient_flat_partition)

    def refresh(self) -> None:
        self.optimizer.update_lp_params()


class Stage3Partitions(Partitions):
    def __init__(self, optimizer: Any, names: dict[int, str]):
        super().__init__(optimizer, names)
        for number, group in enumerate(optimizer.fp16_groups):
            place = 0
            for parameter in group:
                share = parameter.partition_numel()
                start = share * optimizer._get_param_partition_rank(parameter)
                numel = max(0, min(share, parameter.ds_numel - start))  # the last ranks' are padded
                if numel:
                    self.stretches.append(Stretch(names[id(parameter)], start, number, place, numel))
                place += share
        optimizer._get_norm_groups = lambda: [self.norm]

    @property
    def flats(self) -> list[Tensor]:
        return list(self.optimizer.fp32_partitioned_groups_flat)

    def gradients(self) -> NamedTensors:
        optimizer = self.optimizer
        if optimizer.offload_optimizer:
            return self._cut_gradients()
        found = []
        for number, parameters in enumerate(optimizer.fp16_groups):
            given = optimizer.averaged_gradients[number]
            found += [(self.names[id(p)], g) for p, g in zip(parameters, given, strict=True)]
        return found

    def release(self) -> None:
        self.optimizer.empty_partition_cache()  # its prefetching has begun to gather for a backward pass

    def refresh(self) -> None:
        self.release()
        optimizer = self.optimizer
        for number in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(number)
        if optimizer.persistent_parameters:
            optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)


def partitions_of(optimizer: Any, names: dict[int, str]) -> Partitions:
    kinds: dict[str, Callable[[Any, dict[int, str]], Partitions]] = {
        "DeepSpeedZeroOptimizer": ZeroPartitions,
        "BF16_Optimizer": Bf16Partitions,
        "DeepSpeedZeroOptimizer_Stage3": Stage3Partitions,
    }
    return kinds[type(optimizer).__name__](optimizer, names)
