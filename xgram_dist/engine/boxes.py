"""A stretch of a flattened array, as boxes of the array.

ZeRO cuts flattened parameters anywhere; checkpoints speak of offsets and sizes in each dimension. A stretch of a
matrix is at most three boxes: the rest of a row, whole rows, the start of a row.
"""

import math

from torch import Tensor

from xgram_dist.engine.protocol import Box

Extent = tuple[tuple[int, ...], tuple[int, ...]]


def place(offsets: tuple[int, ...], values: Tensor) -> tuple[slice, ...]:
    """The index of a box in its array."""
    return tuple(slice(offset, offset + size) for offset, size in zip(offsets, values.shape, strict=True))


def flat_boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Extent]:
    """(offsets, sizes) of boxes that are elements start..stop of the flattened array, in order."""
    if start >= stop:
        return []
    if not shape:
        return [((), ())]
    inner = math.prod(shape[1:])
    first, last = start // inner, (stop - 1) // inner
    if first == last:
        within = flat_boxes(shape[1:], start - first * inner, stop - first * inner)
        return [((first, *offsets), (1, *sizes)) for offsets, sizes in within]
    boxes: list[Extent] = []
    whole = -(-start // inner)  # rows from here on begin inside the stretch
    if start < whole * inner:
        boxes += flat_boxes(shape, start, whole * inner)
    end = stop // inner
    if whole < end:
        boxes.append(((whole, *(0 for _ in shape[1:])), (end - whole, *shape[1:])))
    return boxes + flat_boxes(shape, end * inner, stop)


def flat_views(shape: tuple[int, ...], start: int, flat: Tensor) -> list[Box]:
    """The same, with views of `flat`, which holds the elements from `start` on."""
    views, position = [], 0
    for offsets, sizes in flat_boxes(shape, start, start + flat.numel()):
        numel = math.prod(sizes)
        views.append((offsets, flat.narrow(0, position, numel).view(sizes)))
        position += numel
    return views
