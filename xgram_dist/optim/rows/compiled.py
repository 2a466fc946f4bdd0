"""Passes over gathered rows that a compiler makes one loop of: any number of rows, all else fixed."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def compiled_pass(function: Callable[..., Any]) -> Callable[..., Any]:
    # Multiply and add in one instruction: on a CPU these passes are as much arithmetic as memory.
    options: dict[str, str | int | bool | Callable[..., Any]] = {"cpp.enable_floating_point_contract_flag": "fast"}
    return torch.compile(function, fullgraph=True, options=options)


def any_count(*tensors: Tensor) -> None:
    """Their first axis is the number of rows, for which nothing is compiled anew."""
    for tensor in tensors:
        torch._dynamo.maybe_mark_dynamic(tensor, 0)


def other_name(tensor: Tensor) -> Tensor:
    """The same memory as a tensor that a compiler takes for another one. For a pass that reads distinct rows and then
    writes them: not knowing that no row is read after it was written, it would write all to memory of its own first."""
    return torch.utils.dlpack.from_dlpack(tensor)
