"""NaN hunting (`train.check_finite = layers`): which module was the first to give a value that is not finite, and
whether it does so again.

Hooks on every module note for each output, and for the gradient of each output, whether all of it is finite. The notes
stay on the device, so a step does not wait for them; they are read when a step was skipped. The order of notes is the
order of computation, so the first bad one names the module. Compiled blocks run eagerly, because compiled code does not
call hooks.

A step that is not finite is then done again from the newest checkpoint, once (`Trainer.run`). Runs repeat bit for bit.
If the step is finite this time, a device has miscalculated since that checkpoint; if not, it is the data or the recipe.
"""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from xgram_dist.parallel.process_group import ProcessGroup

DEVICE, DATA, UNKNOWN = "device", "data or recipe", "unknown"
ELSEWHERE = "a gradient of weights or rows"
"""All outputs and their gradients were finite."""


@dataclass(frozen=True)
class Finding:
    """The first value that is not finite, over all ranks."""

    module: str
    direction: str
    """forward: the module's output; backward: the gradient of its output."""
    micro_batch: int
    rank: int
    host: str
    device: str
    bad_weights: bool
    """The module's own weights hold such a value."""

    def __str__(self) -> str:
        if self.module == ELSEWHERE:
            return f"first not finite: {self.module}"
        what = "output" if self.direction == "forward" else "gradient of the output"
        weights = ", whose weights are not finite" if self.bad_weights else ""
        where = f"micro-batch {self.micro_batch} of rank {self.rank} ({self.host}, {self.device})"
        return f"first not finite: the {what} of {self.module}{weights}, in {where}"

    def as_record(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Suspect:
    """A step that was not finite, and that is to be done again."""

    step: int
    finding: Finding
    checkpoint: int
    """Step of the checkpoint that it is done again from."""


class FiniteWatch:
    def __init__(self, model: nn.Module, device: torch.device):
        self._model, self._device = model, device
        self._notes: list[tuple[str, str, int, Tensor]] = []
        """(module, direction, micro-batch, whether all is finite)"""
        self._micro_batch, self._enabled = -1, False
        model.register_forward_pre_hook(self._begin_micro_batch)
        for name, module in model.named_modules():
            if hasattr(module, "_compiled_call_impl"):
                module._compiled_call_impl = None
            if name:
                module.register_forward_hook(self._hook(name))

    @contextmanager
    def step(self) -> Iterator[None]:
        """What runs within is noted."""
        self._notes.clear()
        self._micro_batch, self._enabled = -1, True
        try:
            yield
        finally:
            self._enabled = False

    def first(self, ranks: ProcessGroup) -> Finding:
        """Of the last step. All ranks call it: one all-gather."""
        finite = torch.stack([note[3] for note in self._notes]).tolist() if self._notes else []
        at = next((number for number, good in enumerate(finite) if not good), None)
        own = None
        if at is not None:
            name, direction, micro_batch, _ = self._notes[at]
            module = self._model.get_submodule(name)
            bad = not all(bool(_local(weight).isfinite().all()) for weight in module.parameters(recurse=False))
            own = (at, Finding(name, direction, micro_batch, ranks.rank, socket.gethostname(), str(self._device), bad))
        found = [one for one in ranks.all_gather_object(own) if one is not None]
        if not found:
            return Finding(ELSEWHERE, "backward", -1, -1, "", "", False)
        return min(found, key=lambda one: one[0])[1]

    def _begin_micro_batch(self, *_: Any) -> None:
        self._micro_batch += 1

    def _hook(self, name: str) -> Any:
        def after(_: nn.Module, inputs: Any, outputs: Any) -> None:
            if not self._enabled:
                return
            micro_batch = self._micro_batch
            for value in outputs if isinstance(outputs, tuple) else (outputs,):
                if not isinstance(value, Tensor) or not value.is_floating_point():
                    continue
                self._note(name, "forward", micro_batch, value)
                if value.requires_grad:
                    value.register_hook(lambda gradient: self._note(name, "backward", micro_batch, gradient))

        return after

    def _note(self, name: str, direction: str, micro_batch: int, value: Tensor) -> None:
        self._notes.append((name, direction, micro_batch, value.detach().isfinite().all()))


def _local(weight: Tensor) -> Tensor:
    """This rank's shard: looking at the whole would be a collective, and other ranks do not look."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


def verdict(suspect: Suspect, finding: Finding | None) -> tuple[str, str]:
    """(what it is, a sentence), after the step was done again. `finding`: of this time; None: the step was finite."""
    step, before, start = suspect.step, suspect.finding, f"again from the checkpoint of step {suspect.checkpoint}"
    if finding is None:
        device = f"{before.device} of {before.host} (rank {before.rank})" if before.rank >= 0 else "some rank's"
        return DEVICE, (
            f"step {step}: finite when done {start}: the fault does not repeat, so a device miscalculated; suspect the "
            f"device {device}"
        )
    if (finding.module, finding.direction, finding.rank) == (before.module, before.direction, before.rank):
        return DATA, f"step {step}: not finite {start} either, at the same place: the data or the recipe; {finding}"
    return UNKNOWN, f"step {step}: not finite {start} either, but elsewhere; {finding}; before: {before}"
