"""Does this device compute what the CPU computes? Kernels, training steps, repetition bit for bit.

The reference runs live: one process, on the CPU, in fp32, without torch.compile. `tests/golden` holds the same code on
the CPU to stored numbers, bit for bit. The device side is what a run uses: its engine, tables sharded over all ranks,
its precision. Tolerances are relative, on the loss and the gradient norm of every step.
"""

import importlib.util
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from xgram_dist.cluster.doctor.report import Context, Row
from xgram_dist.config import Config, build_config
from xgram_dist.engine import build_engine
from xgram_dist.model.build import build_lookup, build_model
from xgram_dist.model.loss import vocab_parallel_cross_entropy
from xgram_dist.model.methods.base import method_of, table_layout
from xgram_dist.parallel.device import make_deterministic, release_cached_memory
from xgram_dist.parallel.mesh import Mesh, build_mesh, single_mesh
from xgram_dist.parallel.process_group import ProcessGroup
from xgram_dist.tables.layout import routing_settings
from xgram_dist.tables.lookup import segment_sums
from xgram_dist.tables.ngrams import Folding
from xgram_dist.tables.routing_build import build_routing
from xgram_dist.train.step import JointOptimizer, train_step

STEPS, VARIANT_STEPS, REPEATED_STEPS = 20, 5, 5
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}
"""Of loss and gradient norm, relative, over 20 steps. Ranks and kernels add in another order."""
KERNEL_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Of a kernel's results, relative to the largest of them."""
Losses = list[tuple[float, float]]
"""(loss, gradient norm) of each step."""


HASHED = {
    "method": "xgram",
    "compression": 0.5,
    "routing": {"vip": 16, "buckets": 8},
    "sites": {"v": {"views": 2, "kernels": [3, 5]}, "h": {"views": 1, "kernels": [3]}},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "hashed tables": HASHED,
    "catch-up in windows": {**HASHED, "optimizer": "catch_up", "window": 1},
    "rows in host memory": {**HASHED, "optimizer": "adagrad", "placement": "host"},
    "zero-copy rows, bf16 wire": {
        "method": "xgram",
        "compression": 1.0,
        "optimizer": "lazy",
        "wire": "bf16",
        "sites": HASHED["sites"],
    },
    "n-grams": {"method": "engram", "compression": 1.0, "engram": {"heads": 2, "rows": 400, "width": 32, "taps": 3}},
}
"""Tables that take other paths on the device: the section `memory`."""


class Case(NamedTuple):
    engine: str
    precision: str
    compiled: bool
    tables: str = "hashed tables"

    def __str__(self) -> str:
        return f"{self.engine}, {self.precision}" + (", compiled" if self.compiled else "")


def small_config(case: Case, ranks: int) -> Config:
    """A model of 0.1 M parameters with tables and two micro-batches a rank."""
    return build_config(
        {
            "name": "doctor",
            "model": {
                "vocabulary": 512,
                "layers": 2,
                "width": 64,
                "ffn_width": 128,
                "heads": 4,
                "kv_heads": 2,
                "sequence_length": 32,
                "loss_chunk": 32,
            },
            "memory": VARIANTS[case.tables],
            "optimizer": {"learning_rate": 1e-3},
            "parallel": {"engine": case.engine},
            "train": {
                "steps": STEPS,
                "global_batch": 2 * ranks,
                "micro_batch": 1,
                "precision": case.precision,
                "compile": case.compiled,
            },
        }
    )


def zipf_tokens(config: Config, sequences: int, seed: int) -> Tensor:
    """[sequences, T], the n-th token 1/n as frequent as the first."""
    share = 1.0 / np.arange(1, config.model.vocabulary + 1)
    random = np.random.default_rng(seed)
    drawn = random.choice(len(share), size=(sequences, config.model.sequence_length), p=share / share.sum())
    return torch.from_numpy(drawn)


class TrainedModel:
    """Backbone, tables and optimizer of a recipe on a mesh."""

    def __init__(self, config: Config, mesh: Mesh, device: torch.device):
        self.config, self.mesh, self.device = config, mesh, device
        layout, routing = table_layout(config), None
        if layout.hashed:
            frequencies = 1.0 / np.arange(1, config.model.vocabulary + 1)
            routing = build_routing(frequencies, routing_settings(config), layout.num_views)
        mesh.world.phases.device = device
        model = build_model(config, device, None, mesh)
        self.engine = build_engine(config, model, mesh, device)
        keys = Folding.identity(config.model.vocabulary) if method_of(config).num_ngram_keys else None
        self.lookup = build_lookup(config, routing, device, mesh, keys)
        self.optimizer = JointOptimizer(config, self.engine, self.lookup, mesh)

    def batch(self, step: int) -> Tensor:
        """[A,B,T]: this rank's part of the step's tokens."""
        train, batch = self.config.train, self.mesh.batch
        tokens = zipf_tokens(self.config, train.global_batch, step)
        mine = tokens[batch.rank * len(tokens) // batch.size : (batch.rank + 1) * len(tokens) // batch.size]
        return mine.view(-1, train.micro_batch, self.config.model.sequence_length)

    def losses(self, steps: int) -> Losses:
        found = []
        for step in range(1, steps + 1):
            tokens = self.batch(step)
            windows = self.lookup.plan(tokens).result()
            result = train_step(self.config, self.lookup, self.optimizer, tokens, windows, step)
            found.append((result.loss, result.gradient_norm))
        return [(float(loss), float(norm)) for loss, norm in found]

    def close(self) -> None:
        self.lookup.close()
        self.engine.close()
        release_cached_memory(self.device)


def train_small(config: Config, mesh: Mesh, device: torch.device, steps: int) -> Losses:
    model = TrainedModel(config, mesh, device)
    try:
        return model.losses(steps)
    finally:
        model.close()


# Training


def check_training(context: Context) -> list[Row]:
    """Losses and norms of 20 steps on all ranks against one process on the CPU."""
    if not context.on_gpu and context.ranks.size == 1:
        needs = "run on a GPU, or on several ranks: the reference is one process on the CPU"
        return [Row(f"parity of {STEPS} steps with the CPU", "skip", "one CPU rank is the reference itself", needs)]
    make_deterministic(True)
    try:
        config = small_config(Case("replicated", "fp32", False), context.ranks.size)
        # The step's phases of a single process must not mix with those of the ranks.
        reference = train_small(config, single_mesh(ProcessGroup()), torch.device("cpu"), STEPS)
        return [_parity_row(context, case, reference) for case in parity_cases(context)]
    finally:
        make_deterministic(False)


def check_variants(context: Context) -> list[Row]:
    """Five steps with other tables: windows, rows in host memory, zero-copy reads, n-grams."""
    check = "parity of other tables with the CPU"
    if not context.on_gpu and context.ranks.size == 1:
        return [Row(check, "skip", "one CPU rank is the reference itself", "run on a GPU, or on several ranks")]
    if context.quick:
        return [Row(check, "skip", "left out", "run the doctor without --quick")]
    make_deterministic(True)
    try:
        return [_variant_row(context, name) for name in VARIANTS if name != Case._field_defaults["tables"]]
    finally:
        make_deterministic(False)


def _variant_row(context: Context, tables: str) -> Row:
    config = small_config(Case("replicated", "fp32", False, tables), context.ranks.size)
    reference = train_small(config, single_mesh(ProcessGroup()), torch.device("cpu"), VARIANT_STEPS)
    found = train_small(config, build_mesh(config, context.ranks), context.device, VARIANT_STEPS)
    # What crosses the wire in bf16 is rounded on several ranks only.
    rounded = config.memory.wire == "bf16" and context.ranks.size > 1
    return compare_losses(tables, found, reference, TOLERANCE["bf16" if rounded else "fp32"])


def parity_cases(context: Context) -> list[Case]:
    cases = [Case("replicated", "fp32", False)]
    if context.quick:
        return cases
    cases.append(Case("hsdp", "fp32", False))
    if importlib.util.find_spec("deepspeed") is not None:
        cases.append(Case("deepspeed", "fp32", False))
    if context.on_gpu:
        cases += [Case("replicated", "fp32", True), Case("replicated", "bf16", True)]
    return cases


def _parity_row(context: Context, case: Case, reference: Losses) -> Row:
    config = small_config(case, context.ranks.size)
    found = train_small(config, build_mesh(config, context.ranks), context.device, STEPS)
    return compare_losses(str(case), found, reference, TOLERANCE[case.precision])


def compare_losses(case: str, found: Losses, reference: Losses, tolerance: float) -> Row:
    check = f"parity of {len(reference)} steps with the CPU ({case})"
    pairs = [(a, b) for ours, theirs in zip(found, reference, strict=True) for a, b in zip(ours, theirs, strict=True)]
    errors = [abs(a - b) / abs(b) if math.isfinite(a) else math.inf for a, b in pairs]
    worst = max(errors)
    text = f"loss {found[-1][0]:.5f} (CPU {reference[-1][0]:.5f}), error {worst:.1e} at most, {tolerance:g} allowed"
    figures = {"device": found, "cpu": reference, "error": worst, "tolerance": tolerance}
    if worst <= tolerance:
        return Row(check, "pass", text, figures=figures)
    first = next(i for i, error in enumerate(errors) if error > tolerance) // 2 + 1
    advice = (
        "do not train here yet: repeat with train.compile=false and another engine to see which part differs, and keep "
        "the JSON, which has the losses of every step"
    )
    return Row(check, "fail", f"{text}, from step {first}", advice, figures)


def check_repetition(context: Context) -> list[Row]:
    """`train.deterministic=true`: two runs are equal bit for bit."""
    make_deterministic(True)
    try:
        config = small_config(Case("replicated", "fp32", False), context.ranks.size)
        mesh = build_mesh(config, context.ranks)
        first, second = (train_small(config, mesh, context.device, REPEATED_STEPS) for _ in range(2))
    finally:
        make_deterministic(False)
    return [compare_repeated(first, second)]


def compare_repeated(first: Losses, second: Losses) -> Row:
    if first == second:
        return Row("repetition bit for bit", "pass", f"two runs of {len(first)} steps are equal")
    step = next(i for i, (a, b) in enumerate(zip(first, second, strict=True), 1) if a != b)
    advice = "train.deterministic=true does not hold here; keep the JSON and report it with the versions above"
    return Row("repetition bit for bit", "fail", f"two runs differ from step {step}", advice, {"runs": [first, second]})


# Kernels

Kernel = Callable[[torch.device, torch.dtype], list[Tensor]]


def check_kernels(context: Context) -> list[Row]:
    """Attention, the loss head and the segment sums of the tables, forward and backward, against the CPU in fp32."""
    if not context.on_gpu:
        return [Row("kernels against the CPU", "skip", "no GPU", "run the doctor on a GPU")]
    return compare_kernels(context.device)


def compare_kernels(device: torch.device, kernels: "dict[str, Kernel] | None" = None) -> list[Row]:
    rows = []
    for name, kernel in (kernels or KERNELS).items():
        expected = kernel(torch.device("cpu"), torch.float32)
        for dtype, tolerance in KERNEL_TOLERANCE.items():
            found = [tensor.float().cpu() for tensor in kernel(device, dtype)]
            error = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True))
            check = f"{name} against the CPU ({str(dtype).removeprefix('torch.')})"
            text = f"error {error:.1e}, {tolerance:g} allowed"
            if error <= tolerance:
                rows.append(Row(check, "pass", text))
            else:
                rows.append(Row(check, "fail", text, "this kernel is wrong here: report it with the versions above"))
    return rows


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _leaf(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    return tensor.to(device, dtype).requires_grad_()


def _attention(device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    q, k, v = (_leaf(_random(2, 4, 256, 64, seed=n), device, dtype) for n in range(3))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return [out.detach(), *torch.autograd.grad(out.float().square().mean(), (q, k, v))]


def _loss_head(device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    hidden = _leaf(_random(2, 128, 64), device, dtype)
    weight = _random(1024, 64, seed=1).to(device).requires_grad_()
    labels = (torch.arange(256).view(2, 128) * 7 % 1024).to(device)
    loss, _ = vocab_parallel_cross_entropy(hidden, weight, labels, z_loss=1e-4, chunk=64)
    return [loss.detach(), *torch.autograd.grad(loss, (hidden, weight))]


def _segment_sums(device: torch.device, _: torch.dtype) -> list[Tensor]:
    """Rows are fp32 whatever the precision."""
    index = (torch.arange(4096) * 31 % 512).to(device)
    starts = torch.arange(0, 4096, 8).to(device)
    weights = _random(4096, seed=2).to(device)
    return [segment_sums(_random(512, 96).to(device), index, starts, weights)]


KERNELS: dict[str, Kernel] = {
    "attention": _attention,
    "loss head": _loss_head,
    "segment sums of table rows": _segment_sums,
}
