"""The compiled parts of a step, as inductor sees them on a GPU: sizes of the 0.73B recipe on 16 ranks, in bf16."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from cuda_codegen import CudaCode, compile_for_cuda, compile_training, set_up_inductor
from fake_device import flash_attention
from torch import Tensor
from torch._functorch import config as functorch_config
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from xgram_dist.model import injection
from xgram_dist.model.gather import LongRows, Slots, sort_slots
from xgram_dist.model.loss import replace_by_gradient, softmax_statistics
from xgram_dist.model.methods.base import load_recipe, method_of, table_layout
from xgram_dist.model.transformer import Block
from xgram_dist.parallel.device import make_deterministic, recompute_elementwise, writes_in_any_order
from xgram_dist.tables.optimizers.adamw import _step_rows_
from xgram_dist.tables.optimizers.adamw_catchup import _caught_up_
from xgram_dist.tables.optimizers.catchup_math import RowCorrection

RECIPE = Path(__file__).resolve().parents[2] / "recipes/0.73b/xgram-1x-50.yaml"
SHARD_ROWS, WIDTH, TOUCHED = 4748, 7680, 4233
DISTINCT = 35_900
"""Tokens of a micro-batch of 8 x 8,192."""
SITES = {"v": [], "v and h": ["memory.sites.h.views=1", "memory.sites.h.kernels=[3]"]}
"""Of a block: those of the recipe, and with one at the residual stream."""
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
    tokens = model.loss_chunk // 2  # inductor counts bytes of up to 1e9 elements
    return empty(tokens, model.vocabulary, dtype=torch.bfloat16), empty(tokens, dtype=torch.int64)


CASES = {
    "step_rows": step_rows,
    "caught_up": caught_up,
    "softmax": softmax,
    "loss_gradient": loss_gradient,
}
ROW_PASSES = ("step_rows", "caught_up")


def describe(name: str, deterministic: bool) -> dict[str, Any]:
    """What inductor makes of a case."""
    make_deterministic(deterministic)
    with FakeTensorMode(allow_non_fake_inputs=True):
        function, inputs = CASES[name]()
        graph = make_fx(function, _allow_non_fake_inputs=True)(*inputs)
    with writes_in_any_order(DEVICE) if name in ROW_PASSES else nullcontext():  # as `compile_pass` runs them
        return summarise(compile_for_cuda(graph, inputs), build=name in ROW_PASSES)


def describe_scatter() -> dict[str, Any]:
    """A defect: a scatter that inductor cannot write in deterministic mode."""
    make_deterministic(True)

    def scatter(table: Tensor, rows: Tensor, values: Tensor) -> None:
        table.index_put_((rows,), values, accumulate=True)

    with FakeTensorMode():
        inputs = [empty(SHARD_ROWS, WIDTH), empty(TOUCHED, dtype=torch.int64), empty(TOUCHED, WIDTH)]
        graph = make_fx(scatter)(*inputs)
    return summarise(compile_for_cuda(graph, inputs), build=False)


# A block with its table sites, forward and backward


def _plain_lookup() -> Any:
    """Rows are read by torch's embedding, not by `gather_rows`."""
    return mock.patch.object(injection, "gather_rows", lambda values, slots: F.embedding(slots.rows, values))


def _keeps_everything() -> Any:
    return functorch_config.patch(aggressive_recomputation=False)


def describe_block(sites: str, deterministic: bool, defect: Any = nullcontext) -> dict[str, dict[str, Any]]:
    """What inductor makes of a block, compiled as `build_model` does: {"forward": .., "backward": ..}."""
    make_deterministic(deterministic)
    recompute_elementwise(DEVICE)
    flash = mock.patch.object(F, "scaled_dot_product_attention", flash_attention)
    with defect(), flash, FakeTensorMode(allow_non_fake_inputs=True):
        forward, backward = compile_training(*_block(sites))
    return {"forward": summarise(forward, build=False), "backward": summarise(backward, build=False)}


def _block(sites: str) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """(function, its arguments) of the second block, in bf16, as DeepSpeed holds it."""
    config = load_recipe(RECIPE, SITES[sites])
    model, batch = config.model, config.train.micro_batch
    block = Block(method_of(config), 1)
    state = {name: empty(*p.shape, dtype=torch.bfloat16).requires_grad_() for name, p in block.named_parameters()}
    state |= {name: empty(*buffer.shape, dtype=buffer.dtype) for name, buffer in block.named_buffers()}
    widths = {table.name: table.width for table in table_layout(config).tables}
    tables = {site: list(module.tables) for site, module in block.sites.items()}  # type: ignore[arg-type,union-attr]
    leaves = [empty(DISTINCT, widths[name]).requires_grad_() for listed in tables.values() for name in listed]
    slots = sort_slots(empty(batch, model.sequence_length, dtype=torch.int64), DISTINCT)
    assert slots.long is not None
    x = empty(batch, model.sequence_length, model.width, dtype=torch.bfloat16).requires_grad_()
    rotary = [empty(model.sequence_length, model.width // model.heads // 2) for _ in range(2)]
    fixed = [*rotary, empty(dtype=torch.float64), *slots[:3], *slots.long]

    def run(x: Tensor, cos: Tensor, sin: Tensor, warmup: Tensor, *rest: Tensor) -> Tensor:
        rows, order, starts, *of_long_rows = rest[:6]
        remaining = iter(rest[6:])
        values = {site: [next(remaining) for _ in listed] for site, listed in tables.items()}
        named = dict(zip(state, remaining, strict=True))
        read = Slots(rows, order, starts, LongRows(*of_long_rows))
        return torch.func.functional_call(block, named, (x, (cos, sin), values, read, warmup, None, None))

    return run, [x, *fixed, *leaves, *state.values()]


def summarise(code: CudaCode, *, build: bool) -> dict[str, Any]:
    return {
        "kernels": code.kernels,
        "launches": code.launches,
        "fallbacks": code.fallbacks,
        "atomics": code.atomics,
        "traffic": code.traffic,
        "built": code.build() if build else {},
    }


def describe_step() -> dict[str, list[tuple[str, int]]]:
    """Bytes that inductor's kernels read and write, by compiled part of a step of the recipe."""
    set_up_inductor()
    block = describe_block("v", deterministic=True)
    found = {f"block {direction}": block[direction] for direction in block}
    found |= {name: describe(name, deterministic=True) for name in ("softmax", "loss_gradient")}
    return {name: one["traffic"] for name, one in found.items()}


def describe_all() -> dict[str, Any]:
    """Everything that test_inductor.py looks at, in one process: importing inductor takes longer than most cases."""
    set_up_inductor()
    return {
        **{name: describe(name, deterministic=True) for name in CASES},
        "block": describe_block("v", deterministic=True),
        "block, v and h": describe_block("v and h", deterministic=False),
        "scatter": describe_scatter(),
        "plain lookup, deterministic": describe_block("v", deterministic=True, defect=_plain_lookup),
        "plain lookup": describe_block("v", deterministic=False, defect=_plain_lookup),
        "keeps everything": describe_block("v", deterministic=True, defect=_keeps_everything),
    }
