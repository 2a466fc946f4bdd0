"""What a step asks of the device beside arithmetic: host waits, copies through pageable memory, serial scatters.

The allow-list of host waits is that of tests/device, where the same steps run without a GPU. A wait or a pageable copy
leaves the device idle; a scatter that walks duplicates one after the other takes as long as the most frequent token has
positions. All cost speed, not correctness: they are warnings.

The step is that of the trainer's loop: exchange, forward and backward pass, update, and the agreement of the ranks.
"""

import importlib.util
import re
from collections import Counter

from xgram_dist.cluster.doctor.parity import VARIANTS, Case, TrainedModel, small_config
from xgram_dist.cluster.doctor.report import Context, Row
from xgram_dist.config import Config
from xgram_dist.parallel.call_site import Place
from xgram_dist.parallel.device import make_deterministic, record_device_operations, record_host_waits, synchronize
from xgram_dist.parallel.mesh import build_mesh, new_host_group
from xgram_dist.train.step import train_step

FINITE: Place = ("optim/clip.py", "clip_by_joint_norm")
"""Whether the step is finite decides whether it counts: the one wait that is meant."""

ENGINE_WAITS: dict[int, dict[Place, str]] = {
    2: {("deepspeed/accelerator/cuda_accelerator.py", "synchronize"): "end of a backward pass"},
    3: {
        ("deepspeed/accelerator/cuda_accelerator.py", "synchronize"): "before its optimizer",
        ("deepspeed/runtime/zero/stage3.py", "independent_gradient_partition_epilogue"): "end of a backward pass",
    },
}
"""By ZeRO stage. DeepSpeed makes them for its own streams: allowed any number of times."""

HOST_ROWS: dict[Place, str] = {
    ("tables/exchange_messages.py", "add_gradients"): "the host reads the gradients it applies"
}
"""With `memory.placement` host or disk: allowed any number of times."""

WARM_STEPS = 2
PAGEABLE_COPY = re.compile(r"Memcpy \w+ .*Pageable")
SERIAL_SCATTER = re.compile(r"indexing_backward_kernel|embedding_backward")
"""Kernels of `index_put_` with accumulation and of the backward pass of an embedding."""


def unexpected_waits(config: Config, waits: list[Place]) -> list[str]:
    """Those of a step that are not on the allow-list."""
    free = set(ENGINE_WAITS.get(config.parallel.zero_stage, {}) if config.parallel.engine == "deepspeed" else {})
    free |= set(HOST_ROWS if config.memory.placement != "device" else {})
    counted = Counter(place for place in waits if place not in free)
    counted[FINITE] -= 1
    return [f"{file} {function}, {count} a step" for (file, function), count in counted.items() if count > 0]


def watch_cases(context: Context) -> list[Case]:
    """Every engine and kind of table; `--quick`: the default ones."""
    if context.quick:
        return [Case("replicated", "fp32", False)]
    cases = [Case("replicated", "fp32", False, tables) for tables in VARIANTS]
    cases += [Case("hsdp", "bf16", False), Case("replicated", "bf16", True)]
    if importlib.util.find_spec("deepspeed") is not None:
        cases.append(Case("deepspeed", "bf16", False))
    return cases


def check_step(context: Context) -> list[Row]:
    if not context.on_gpu:
        needs = "run the doctor on a GPU; tests/device of the source tree counts them without one"
        return [Row(check, "skip", "no GPU", needs) for check in (WAITS_CHECK, COPIES_CHECK, SCATTER_CHECK)]
    rows = []
    for case in watch_cases(context):
        config = small_config(case, context.ranks.size)
        waits, operations = watch_step(context, config)
        rows.append(waits_row(f"{case}, {case.tables}", config, waits))
        rows.append(copies_row(f"{case}, {case.tables}", operations))
        if case.compiled:
            rows.append(scatter_row(operations))
    return rows


def watch_step(context: Context, config: Config) -> tuple[list[Place], list[str]]:
    """(host waits of a step, names of what the device runs in another)"""
    make_deterministic(config.train.compile)  # in which mode a compiler may fall back to serial scatters
    model = TrainedModel(config, build_mesh(config, context.ranks), context.device)
    agreement = new_host_group(context.ranks)

    def run_step(step: int) -> None:
        tokens = model.batch(step)
        windows = model.lookup.plan(tokens).result()
        train_step(config, model.lookup, model.optimizer, tokens, windows, step)
        agreement.all_reduce_integers(0, 0)

    try:
        for step in range(1, WARM_STEPS + 1):
            run_step(step)
        synchronize(context.device)
        with record_host_waits(context.device) as waits:
            run_step(WARM_STEPS + 1)
        with record_device_operations(context.device) as operations:
            run_step(WARM_STEPS + 2)
    finally:
        model.close()
        make_deterministic(False)
    return waits, operations


# Judgement

WAITS_CHECK = "host waits in a step"
COPIES_CHECK = "pageable copies in a step"
SCATTER_CHECK = "serial scatters in a compiled step"
BLIND = "nothing can be said: look at a trace of some steps (train.profile_from=10)"


def waits_row(case: str, config: Config, waits: list[Place]) -> Row:
    unexpected = unexpected_waits(config, waits)
    check, figures = f"{WAITS_CHECK} ({case})", {"waits": [" ".join(place) for place in waits]}
    if FINITE not in waits and not unexpected:
        return Row(check, "skip", "torch reported none, not even the one that is meant", BLIND, figures)
    if not unexpected:
        return Row(check, "pass", f"{len(waits)}, all of them meant", figures=figures)
    advice = "one is meant (is the step finite); the others cost speed, not correctness: report them"
    return Row(check, "warn", "; ".join(unexpected), advice, figures)


def copies_row(case: str, operations: list[str]) -> Row:
    check, copies = f"{COPIES_CHECK} ({case})", Counter(filter(PAGEABLE_COPY.match, operations))
    if not operations:
        return Row(check, "skip", "the profiler saw no operation", BLIND)
    if not copies:
        return Row(check, "pass", f"none of {len(operations)} operations")
    found = ", ".join(f"{count} x {name}" for name, count in copies.items())
    return Row(check, "warn", found, "the host waits in them: report them", {"copies": dict(copies)})


def scatter_row(operations: list[str]) -> Row:
    found = Counter(filter(SERIAL_SCATTER.search, operations))
    if not operations:
        return Row(SCATTER_CHECK, "skip", "the profiler saw no operation", BLIND)
    if not found:
        return Row(SCATTER_CHECK, "pass", f"none of {len(operations)} operations")
    named = ", ".join(f"{count} x {name[:60]}" for name, count in found.items())
    return Row(SCATTER_CHECK, "warn", named, "the compiler fell back: report it with the versions above", dict(found))
