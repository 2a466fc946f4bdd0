"""Bytes of device memory that the loss reads and writes in an optimizer step of one rank, counted without a GPU.

    python tools/loss_traffic.py recipes/0.73b/xgram-1x-50.yaml --ranks 16 [KEY=VALUE ...]

The loss and its gradient run on tensors without memory; each operation counts its inputs and outputs. For the compiled
passes inductor's scheduler counts what its fused kernels read and write. Matrix products are counted apart: they are
bound by arithmetic.
"""

import argparse
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._inductor import compile_fx, metrics
from torch._inductor import config as inductor_config
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from xgram_dist.config import Config, load_config
from xgram_dist.config.validate import accumulation
from xgram_dist.model import loss
from xgram_dist.parallel.device import DTYPES
from xgram_dist.parallel.tensor_parallel import SINGLE_RANK, TensorAxis

MATRIX_PRODUCTS = ("mm", "addmm", "addmm_")
ROWS_COUNTED = 8
"""Of a chunk, by inductor; a pass costs the same for each row."""


@dataclass
class Traffic:
    elementwise: float = 0.0
    matrix_products: float = 0.0

    def __mul__(self, times: float) -> "Traffic":
        return Traffic(self.elementwise * times, self.matrix_products * times)


class _Counter(TorchDispatchMode):
    """Inputs and outputs of every operation that is not a view."""

    def __init__(self) -> None:
        super().__init__()
        self.traffic = Traffic()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[-1]
        if not func.is_view and not name.startswith(("empty", "new_empty", "_unsafe_view")):
            size = sum(map(_nbytes, [*_tensors((args, kwargs)), *_tensors(out)]))
            if name == "gather":
                size = 2 * _nbytes(out) + _nbytes(args[2])
            elif name == "scatter_add_":
                size = 3 * _nbytes(args[3]) + _nbytes(args[2])
            if name in MATRIX_PRODUCTS:
                self.traffic.matrix_products += size
            else:
                self.traffic.elementwise += size
        return out

    def accumulate_matmul(self, total: Tensor, left: Tensor, right: Tensor) -> None:
        """As on a GPU: one matrix product."""
        self.traffic.matrix_products += 2 * _nbytes(total) + _nbytes(left) + _nbytes(right)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class _CountedPasses(loss.CompiledPasses):
    """Instead of running the compiled passes, adds what inductor says of them."""

    def __init__(self, counter: _Counter, vocabulary: int, dtype: torch.dtype):
        logits = torch.zeros(ROWS_COUNTED, vocabulary, dtype=dtype)
        index, is_local = torch.zeros(ROWS_COUNTED, dtype=torch.long), torch.ones(ROWS_COUNTED, dtype=torch.bool)
        numbers = [torch.zeros(ROWS_COUNTED) for _ in range(3)]
        self._counter = counter
        self._read = bytes_of_compiled(loss.softmax_statistics, [logits, index, is_local]) / ROWS_COUNTED
        self._replace = (
            bytes_of_compiled(loss.replace_by_gradient, [logits, *numbers[:2], index, numbers[2]]) / ROWS_COUNTED
        )

    def normalise(
        self, logits_NV: Tensor, index_N: Tensor, is_local_N: Tensor, axis: TensorAxis
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        self._counter.traffic.elementwise += self._read * len(logits_NV)
        largest, total, at_label = (logits_NV.new_empty(len(logits_NV), dtype=torch.float32) for _ in range(3))
        return logits_NV, largest, total, at_label

    def gradient(self, buffer_NV: Tensor, *_: Tensor) -> Tensor:
        self._counter.traffic.elementwise += self._replace * len(buffer_NV)
        return buffer_NV


def bytes_of_compiled(function: Callable[..., Any], arguments: Sequence[Tensor]) -> int:
    """Read and written by inductor's kernels for these arguments."""
    log = compile_fx.inductor_metrics_log
    before, level = metrics.num_bytes_accessed, log.level
    torch._dynamo.reset()
    try:
        log.setLevel(logging.INFO)  # inductor counts for this log only
        with inductor_config.patch(force_disable_caches=True), torch.no_grad():
            torch.compile(function, dynamic=False)(*arguments)
    finally:
        log.setLevel(level)
        torch._dynamo.reset()
    return metrics.num_bytes_accessed - before


def count(config: Config, ranks: int, *, compiled: bool) -> Traffic:
    """Of one rank in an optimizer step, tensor degree 1, with the weights of the head in fp32."""
    model, dtype = config.model, DTYPES[config.train.precision]
    counter = _Counter()
    passes: loss.ElementwisePasses = loss.EAGER
    if compiled:
        passes = _CountedPasses(counter, model.vocabulary, dtype)
    shape = (config.train.micro_batch, model.sequence_length)
    hidden = torch.empty(*shape, model.width, dtype=dtype, device="meta", requires_grad=True)
    weight = torch.empty(model.vocabulary, model.width, device="meta", requires_grad=True)
    labels = torch.empty(shape, dtype=torch.long, device="meta")
    with mock.patch.object(loss, "accumulate_matmul", counter.accumulate_matmul), counter:
        mean, _ = loss.vocab_parallel_cross_entropy(
            hidden, weight, labels, model.z_loss, model.loss_chunk, SINGLE_RANK, passes
        )
        mean.backward()
    return counter.traffic * accumulation(config, ranks)


def main() -> None:
    parser = argparse.ArgumentParser(description="Bytes that the loss reads and writes in a step of one rank.")
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--ranks", type=int, default=1)
    args = parser.parse_intermixed_args()
    config = load_config(args.recipe, args.overrides)
    print(f"loss_chunk {config.model.loss_chunk}; GB of one rank in a step")
    for compiled in (False, True):
        traffic = count(config, args.ranks, compiled=compiled)
        print(
            f"train.compile={str(compiled).lower():5}  elementwise {traffic.elementwise / 1e9:7.0f}"
            f"  matrix products {traffic.matrix_products / 1e9:7.0f}"
        )


if __name__ == "__main__":
    main()
