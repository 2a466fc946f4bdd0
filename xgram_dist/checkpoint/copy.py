"""The copy of the state that is written while training goes on.

It lies in host memory, in buffers that are kept from one save to the next: fetched anew from the system each time, page
by page, they would cost more than the copying. Tables that are columns of one slab are copied with it in one piece, and
taken apart by the thread that writes.
"""

from collections import Counter

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
        wanted = {
            (name, box.offsets): box.tensor
            for name, spread in state.items()
            for box in spread.boxes
            if self._only is None or (name, box.offsets) in self._only
        }
        wholes = _wholes(list(wanted.values()))
        copies: dict[Key, Tensor] = {}
        slabs: dict[int, Tensor] = {}
        for key, tensor in wanted.items():
            base = wholes.get(id(tensor._base))
            if base is None:
                copies[key] = self._copied(key, tensor)
                continue
            if id(base) not in slabs:
                slabs[id(base)] = self._copied(key, base)
            offset = tensor.storage_offset() - base.storage_offset()
            copies[key] = slabs[id(base)].as_strided(tensor.shape, tensor.stride(), offset)
        for device in {tensor.device for tensor in wanted.values()}:
            synchronize(device)
        return {
            name: Spread(
                spread.shape,
                spread.dtype,
                [Box(b.offsets, copies[name, b.offsets]) for b in spread.boxes if (name, b.offsets) in copies],
            )
            for name, spread in state.items()
        }

    def _copied(self, key: Key, tensor: Tensor) -> Tensor:
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = self._buffers[key] = empty_on_host(tensor)
        return buffer.copy_(tensor, non_blocking=True)


def _wholes(tensors: list[Tensor]) -> dict[int, Tensor]:
    """Tensors of one piece, all of which is wanted as parts; by id."""
    bases, wanted = {}, Counter[int]()
    for tensor in tensors:
        base = tensor._base
        if base is not None and base.is_contiguous() and base.dtype == tensor.dtype:
            bases[id(base)] = base
            wanted[id(base)] += tensor.numel()
    return {key: base for key, base in bases.items() if wanted[key] >= base.numel()}
