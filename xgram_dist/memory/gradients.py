"""The gradients of a slab's tables side by side, as they will travel.

Autograd gives each table's leaf a gradient of its own; joined before they are sent, all would be in memory twice. So a
table's gradient moves to its columns of one tensor when it first comes, and from then on autograd adds to it there.
Shapes: U vectors of the working set, W slab width.
"""

import warnings

import torch
from torch import Tensor

# That columns of a wider tensor are not contiguous is what is wanted here.
warnings.filterwarnings("ignore", message="grad and param do not obey the gradient layout contract")


class SlabGradients:
    def __init__(self, vectors_UW: Tensor):
        self._like = vectors_UW
        self._memory: Tensor | None = None  # made when it is needed: activations may need the space before

    def follow(self, leaf: Tensor, columns: slice) -> None:
        """Have the gradients of this leaf added up in these columns."""

        def move(leaf: Tensor) -> None:
            self.put(columns, leaf.grad)
            leaf.grad = self._columns(columns)

        leaf.register_post_accumulate_grad_hook(move)

    @torch.no_grad()
    def put(self, columns: slice, gradient: Tensor | None) -> None:
        """What these columns are in the end; None: nothing depended on them."""
        own = self._columns(columns)
        if gradient is None:
            own.zero_()
        elif gradient.data_ptr() != own.data_ptr() or gradient.stride() != own.stride():
            own.copy_(gradient)

    def whole(self) -> Tensor:
        """[U, W], when all columns have been put."""
        assert self._memory is not None
        return self._memory

    def _columns(self, columns: slice) -> Tensor:
        if self._memory is None:
            self._memory = torch.empty_like(self._like)
        return self._memory[:, columns]
