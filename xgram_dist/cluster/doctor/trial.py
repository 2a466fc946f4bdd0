"""A timed run on synthetic tokens: tokens a second, MFU and seconds by phase, the share of the exchange, peak memory.

On a GPU the model is the paper's Small backbone with X-gram tables (1x, 50 %), with the largest micro-batch of those
listed that fits; on the CPU a small one. A recipe of one's own takes its place. Tokens follow Zipf's law: no data is
needed. The first steps compile and allocate; they are not timed.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from xgram_dist.cluster.doctor.parity import TrainedModel
from xgram_dist.cluster.doctor.report import Context, Row, gather
from xgram_dist.config import Config, build_config
from xgram_dist.errors import UserError
from xgram_dist.estimate.comm import Axes
from xgram_dist.estimate.layout import LayoutEstimate, plan_layout
from xgram_dist.estimate.step_time import Machine
from xgram_dist.estimate.traffic import Traffic, zipf_traffic
from xgram_dist.model.methods.base import load_recipe, method_of
from xgram_dist.parallel.device import (
    free_and_total_memory,
    make_deterministic,
    peak_flops,
    peak_memory,
    synchronize,
)
from xgram_dist.parallel.mesh import build_mesh, new_host_group
from xgram_dist.train.profiling import Utilization
from xgram_dist.train.step import train_step

WARM_STEPS = 2
EXCHANGE = ("fetch", "wait", "return")
"""Phases in which a step moves vectors and gradients of tables."""
MAX_EXCHANGE_SHARE = 0.2
SLOWER_THAN_PLANNED = 1.5
STRAGGLER = 1.2
"""Compute seconds of the slowest rank, relative to the median."""
MICRO_BATCHES = 2
SMALL_BACKBONE = {
    "vocabulary": 151_936,
    "layers": 10,
    "width": 1536,
    "ffn_width": 4096,
    "heads": 12,
    "kv_heads": 6,
    "sequence_length": 8192,
}
CPU_BACKBONE = {
    "vocabulary": 4096,
    "layers": 2,
    "width": 128,
    "ffn_width": 256,
    "heads": 4,
    "kv_heads": 2,
    "sequence_length": 128,
}
GPU_CHOICES: tuple[dict[str, Any], ...] = (
    {"micro_batch": 4, "activation_checkpointing": False},
    {"micro_batch": 2, "activation_checkpointing": False},
    {"micro_batch": 1, "activation_checkpointing": False},
    {"micro_batch": 1, "activation_checkpointing": True},
)
"""Keys of `train`, the fastest first."""
USABLE_SHARE = 0.9
"""Of the free memory."""


def trial_config(context: Context) -> Config:
    if context.recipe is not None:
        config = load_recipe(str(context.recipe), context.overrides)
        if method_of(config).num_ngram_keys or not config.model.vocabulary:
            raise UserError(
                f"memory.method = {config.memory.method} needs n-gram keys of real data; give another --recipe"
            )
        return config
    if not context.on_gpu:
        return _config(context, CPU_BACKBONE, {"micro_batch": 2, "precision": "fp32"})
    limit = USABLE_SHARE * min(gather(context, lambda: free_and_total_memory(context.device)[0]))
    configs = [_config(context, SMALL_BACKBONE, {"compile": True, **keys}) for keys in GPU_CHOICES]
    traffic_of = zipf_traffic(configs[0])  # the choices have the same tables
    fitting = [config for config in configs if predict(context, config, traffic_of).device_bytes <= limit]
    return (fitting or configs[-1:])[0]


def _config(context: Context, model: dict[str, int], train: dict[str, Any]) -> Config:
    ranks = context.ranks.size
    return build_config(
        {
            "name": "doctor",
            "model": model,
            "memory": {"method": "xgram", "compression": 0.5, "sites": {"v": {"views": 2, "kernels": [3, 5]}}},
            "parallel": {"engine": "hsdp" if ranks > 1 and context.on_gpu else "replicated"},
            "train": {"global_batch": ranks * MICRO_BATCHES * train["micro_batch"], "deterministic": False, **train},
        }
    )


def predict(context: Context, config: Config, traffic_of: Callable[[int], Traffic | None]) -> LayoutEstimate:
    """What `xgram-dist plan` says, with the bandwidths that were measured. `traffic_of`: by ranks of the data axis."""
    peak = peak_flops(context.device)
    known: dict[str, Any] = context.measured if peak is None else {**context.measured, "flops": peak / 1e12}
    machine = replace(Machine(), **known)
    axes = Axes.of(config, context.ranks.size)
    return plan_layout(config, axes, machine, traffic_of(axes.rows))


def check_trial(context: Context) -> list[Row]:
    config = trial_config(context)
    make_deterministic(config.train.deterministic)
    model = TrainedModel(config, build_mesh(config, context.ranks), context.device)
    try:
        figures = run_trial(context, model)
    finally:
        model.close()
        make_deterministic(False)
    return judge_trial(context, config, figures)


def run_trial(context: Context, model: TrainedModel) -> dict[str, Any]:
    """Steps until the time is over; the next step is planned while the current one trains, as in a run."""
    device, agreement = context.device, new_host_group(context.ranks)
    phases = model.mesh.world.phases
    phases.step = 0
    phases.take()
    steps, started, finite, step = 0, 0.0, True, 0
    tokens = model.batch(1)
    planned = model.lookup.plan(tokens)
    while True:
        step += 1
        windows, current = planned.result(), tokens
        tokens = model.batch(step + 1)
        planned = model.lookup.plan(tokens)
        result = train_step(model.config, model.lookup, model.optimizer, current, windows, step)
        finite = finite and result.applied
        if step <= WARM_STEPS:
            synchronize(device)
            phases.take()
            started = time.monotonic()
            continue
        steps += 1
        over, _ = agreement.all_reduce_integers(int(time.monotonic() - started >= context.seconds), 0)
        if over:
            break
    synchronize(device)
    seconds = (time.monotonic() - started) / steps
    planned.exception()  # the other ranks complete it too
    return {
        "steps": steps,
        "step_seconds": seconds,
        "phases": {name.removeprefix("seconds_"): taken for name, taken in phases.take().items()},
        "tokens_per_second": model.config.train.global_batch * model.config.model.sequence_length / seconds,
        "loss": float(result.loss),
        "finite": finite,
        "peak_memory": peak_memory(device),
    }


def judge_trial(context: Context, config: Config, figures: dict[str, Any]) -> list[Row]:
    everyone = gather(context, lambda: figures)
    figures = {**everyone[0], "by_rank": everyone}
    seconds, phases = figures["step_seconds"], figures["phases"]
    rows = [_finite_row(context, config, everyone), _speed_row(context, config, figures)]
    exchange = sum(phases.get(name, 0.0) for name in EXCHANGE) / seconds
    parts = ", ".join(f"{name} {100 * taken / seconds:.0f} %" for name, taken in phases.items() if name != "plan")
    rows.append(Row("seconds by phase", "pass", f"{parts} of {seconds:.3g} s", figures={"seconds": phases}))
    found = f"{100 * exchange:.1f} % of a step"
    if context.ranks.size == 1:
        rows.append(
            Row("share of the exchange", "skip", f"one rank; reading local rows takes {found}", "run on several ranks")
        )
    elif exchange > MAX_EXCHANGE_SHARE and context.on_gpu:
        advice = "look at the links above; memory.wire=bf16 halves its bytes"
        rows.append(Row("share of the exchange", "warn", found, advice, {"share": exchange}))
    else:
        rows.append(Row("share of the exchange", "pass", found, figures={"share": exchange}))
    return [*rows, *_straggler_rows(context, everyone), *_plan_rows(context, config, figures)]


def _finite_row(context: Context, config: Config, everyone: list[dict[str, Any]]) -> Row:
    figures = everyone[0]
    model = f"{config.name}, {figures['steps']} steps, loss {figures['loss']:.4f}"
    bad = [rank for rank, one in enumerate(everyone) if not one["finite"]]
    if bad:
        advice = "run the parity checks; train with train.precision=fp32 to see whether bf16 is the cause"
        return Row("timed run", "fail", f"{model}: loss or gradient not finite ({context.where(bad)})", advice)
    return Row("timed run", "pass", model)


def _speed_row(context: Context, config: Config, figures: dict[str, Any]) -> Row:
    used = Utilization(config, context.ranks.size, context.device).figures(figures["tokens_per_second"])
    found = f"{figures['tokens_per_second']:,.0f} tokens/s, {used['model_tflops']:.3g} model TFLOP/s a rank"
    figures = {**figures, **used}
    if "utilisation" not in used:
        advice = "the peak of this device is not known: give --recipe and train.peak_tflops"
        return Row("MFU", "skip", found, advice, figures)
    compute = used["utilisation"] * figures["step_seconds"] / figures["phases"]["compute"]
    found = f"{100 * used['utilisation']:.1f} % ({100 * compute:.1f} % within compute); {found}"
    return Row("MFU", "pass", found, figures={**figures, "compute_utilisation": compute})


def _straggler_rows(context: Context, everyone: list[dict[str, Any]]) -> list[Row]:
    if context.ranks.size < 2 or not context.on_gpu:
        return []
    compute = [one["phases"]["compute"] for one in everyone]
    slow = [rank for rank, taken in enumerate(compute) if taken > STRAGGLER * statistics.median(compute)]
    if slow:
        ratio = max(compute) / statistics.median(compute)
        found = f"{context.where(slow)} computes {ratio:.2f} times as long as the median"
        return [
            Row(
                "slow ranks",
                "warn",
                found,
                "all wait for the slowest: look at its clocks and temperature (nvidia-smi -q)",
            )
        ]
    return [Row("slow ranks", "pass", "none")]


def _plan_rows(context: Context, config: Config, figures: dict[str, Any]) -> list[Row]:
    if not context.on_gpu:
        return [Row("against the plan", "skip", "no GPU: the plan is for GPUs", "run the doctor on a GPU")]
    planned = predict(context, config, zipf_traffic(config))
    peak = max(one["peak_memory"] for one in figures["by_rank"])
    ratio = figures["step_seconds"] / planned.time.one_by_one
    time_found = f"{figures['step_seconds']:.3g} s a step, planned {planned.time.one_by_one:.3g} s"
    memory_found = f"{peak / 1e9:.1f} GB at most, planned {planned.device_bytes / 1e9:.1f} GB"
    slower = ratio > SLOWER_THAN_PLANNED
    advice = "profile some steps (train.profile_from=10) and compare the seconds by phase with 'xgram-dist plan'"
    more = peak > 1.1 * planned.device_bytes
    leave_room = "leave that much more room when you plan with --memory-per-rank"
    return [
        Row(
            "step time against the plan",
            "warn" if slower else "pass",
            time_found,
            advice if slower else "",
            {"ratio": ratio},
        ),
        Row("memory against the plan", "warn" if more else "pass", memory_found, leave_room if more else ""),
    ]
