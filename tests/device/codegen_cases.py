"""The compiled parts of a step, as inductor sees them on a GPU: sizes of the 0.73B recipe on 16 ranks, in bf16."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from cuda_codegen import CudaCode, compile_for_cuda, set_up_inductor
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from xgram_dist.model.loss import replace_by_gradient, softmax_statistics
from xgram_dist.model.methods.base import load_recipe
from xgram_dist.parallel.device import make_deterministic, writes_in_any_order
from xgram_dist.tables.optimizers.adamw import _step_rows_
from xgram_dist.tables.optimizers.adamw_catchup import _caught_up_
from xgram_dist.tables.optimizers.catchup_math import RowCorrection

RECIPE = Path(__file__).resolve().parents[2] / "recipes/0.73b/xgram-1x-50.yaml"
SHARD_ROWS, WIDTH, TOUCHED = 4748, 7680, 4233
DEGREE = 12
DEVICE = torch.device("cuda", 0)


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, device="cuda", dtype=dtype)


def step_rows() -> tuple[Callable[..., Any], list[Tensor]]:
    """One AdamW step on gathered rows."""
    table = [empty(SHARD_ROWS, WIDTH) for _ in range(5)]
    rows = [empty(TOUCHED, dtype=torch.int64), empty(TOUCHED, WIDTH), empty(TOUCHED, WIDTH)]
    return _step_rows_, [*table, *rows, *(empty(TOUCHED, 1) for _ in range(7))]


def caught_up() -> tuple[Callable[..., Any], list[Tensor]]:
    """Gathering rows and applying the steps they missed."""

    def read(out: Tensor, values: Tensor, first: Tensor, second: Tensor, rows: Tensor, *missed: Tensor) -> None:
        _caught_up_(out, values, first, second, rows, RowCorrection(*missed), 1e-4, 1e-32)

    table = [empty(SHARD_ROWS, WIDTH) for _ in range(3)]
    missed = [empty(TOUCHED, DEGREE + 1), *(empty(TOUCHED, 1) for _ in range(3))]
    return read, [empty(TOUCHED, WIDTH), *table, empty(TOUCHED, dtype=torch.int64), *missed]


def softmax() -> tuple[Callable[..., Any], list[Tensor]]:
    """The first pass over a chunk of logits."""
    logits, index = _logits()
    return softmax_statistics, [logits, index, empty(len(index), dtype=torch.bool)]


def loss_gradient() -> tuple[Callable[..., Any], list[Tensor]]:
    """The second pass, which overwrites the logits with their gradient."""
    logits, index = _logits()
    return replace_by_gradient, [logits, empty(len(index)), empty(len(index)), index, empty(len(index))]


def _logits() -> tuple[Tensor, Tensor]:
    model = load_recipe(RECIPE).model
    tokens = model.loss_chunk
    return empty(tokens, model.vocabulary, dtype=torch.bfloat16), empty(tokens, dtype=torch.int64)


CASES = {
    "step_rows": step_rows,
    "caught_up": caught_up,
    "softmax": softmax,
    "loss_gradient": loss_gradient,
}
ROW_PASSES = ("step_rows", "caught_up")


def describe(name: str, deterministic: bool, build: bool) -> dict[str, Any]:
    """What inductor makes of a case."""
    set_up_inductor()
    make_deterministic(deterministic)
    with FakeTensorMode(allow_non_fake_inputs=True):
        function, inputs = CASES[name]()
        graph = make_fx(function, _allow_non_fake_inputs=True)(*inputs)
    with writes_in_any_order(DEVICE) if name in ROW_PASSES else nullcontext():  # as `compile_pass` runs them
        return summarise(compile_for_cuda(graph, inputs), build)


def describe_defect() -> dict[str, Any]:
    """A scatter that inductor cannot write in deterministic mode."""
    set_up_inductor()
    make_deterministic(True)

    def scatter(table: Tensor, rows: Tensor, values: Tensor) -> None:
        table.index_put_((rows,), values, accumulate=True)

    with FakeTensorMode():
        inputs = [empty(SHARD_ROWS, WIDTH), empty(TOUCHED, dtype=torch.int64), empty(TOUCHED, WIDTH)]
        graph = make_fx(scatter)(*inputs)
    return summarise(compile_for_cuda(graph, inputs), False)


def summarise(code: CudaCode, build: bool) -> dict[str, Any]:
    built = code.build() if build else {}
    return {"kernels": code.kernels, "fallbacks": code.fallbacks, "atomics": code.atomics, "built": built}
