"""The copy of the state that is written while training goes on.

It lies in host memory, in buffers that are kept from one save to the next: fetched anew from the system each time, page
by page, they would cost more than the copying.
"""

import torch
from torch import Tensor

from xgram_dist.checkpoint.boxes import Box, Spread, State
from xgram_dist.parallel.device import empty_on_host, synchronize

Key = tuple[str, tuple[int, ...]]
"""Name of a tensor and offsets of a box of it."""


class HostCopy:
    def __init__(self) -> None:
        self._buffers: dict[Key, Tensor] = {}
        self._only: set[Key] | None = None

    def only(self, keys: set[Key]) -> None:
        """What this rank writes of the state: from now on no more is copied. Other ranks write the rest."""
        self._only = keys
        self._buffers = {key: buffer for key, buffer in self._buffers.items() if key in keys}

    @torch.no_grad()
    def of(self, state: State) -> State:
        """A copy, good until the next one is made."""
        copied: State = {}
        devices = set()
        for name, spread in state.items():
            boxes = []
            for box in spread.boxes:
                if self._only is None or (name, box.offsets) in self._only:
                    boxes.append(Box(box.offsets, self._buffer((name, box.offsets), box.tensor)))
                    boxes[-1].tensor.copy_(box.tensor, non_blocking=True)
                    devices.add(box.tensor.device)
            copied[name] = Spread(spread.shape, spread.dtype, boxes)
        for device in devices:
            synchronize(device)
        return copied

    def _buffer(self, key: Key, tensor: Tensor) -> Tensor:
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = self._buffers[key] = empty_on_host(tensor)
        return buffer
