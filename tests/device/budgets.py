"""What a training step may do on a GPU: every number that the device tests hold the product to.

A change that makes the product better lowers a number here; nothing else has to change.
"""

from typing import Any

from stub_cuda import Place, stops_the_host

# Host waits of a step: (file, function), what, how often.

FINITE: tuple[Place, str] = (("optim/clip.py", "clip_by_joint_norm"), "reads numbers")
"""Whether the step is finite decides whether it counts: the one wait that is meant."""

WAITS: dict[tuple[Place, str], int] = {FINITE: 1}

_DEEPSPEED_EPILOGUE = ("deepspeed/runtime/zero/stage3.py", "independent_gradient_partition_epilogue")
ENGINE_WAITS: dict[str, dict[tuple[Place, str], str]] = {
    "zero_stage=2": {
        (("deepspeed/accelerator/cuda_accelerator.py", "synchronize"), "synchronize"): "end of a backward pass",
    },
    "zero_stage=3": {
        (("deepspeed/accelerator/cuda_accelerator.py", "synchronize"), "synchronize"): "before its optimizer",
        (_DEEPSPEED_EPILOGUE, "Stream.synchronize"): "end of a backward pass",
    },
}
"""Waits inside DeepSpeed, which it makes for its own streams: allowed any number of times."""

# Copies that stop the host. On the device: none.

HOST_PLACEMENT_COPIES: dict[tuple[Place, str], str] = {
    (("tables/exchange.py", "give_back"), "to host, blocking, pageable"): "the host reads the gradients it applies",
}
"""With `memory.placement=host`."""


def unexpected(found: dict[str, Any], words: list[str]) -> list[str]:
    """One line for each deviation of a step from this file. `found`: of `Ledger.of`. `words`: the recipe's overrides,
    which say what is allowed."""
    lines = [f"fault: {what} at {where}" for where, what in found["faults"]]
    tolerated = {key for name, waits in ENGINE_WAITS.items() if any(name in word for word in words) for key in waits}
    counted = {key: count for key, count in found["waits"].items() if key not in tolerated}
    for key in sorted({*counted, *WAITS}):
        count, allowed = counted.get(key, 0), WAITS.get(key, 0)
        if count != allowed:
            lines.append(f"host wait: {key[1]} at {key[0]}, {count} a step, {allowed} allowed")
    copies = HOST_PLACEMENT_COPIES if "memory.placement=host" in words else {}
    for key, count in found["copies"].items():
        if stops_the_host(key[1]) and key not in copies:
            lines.append(f"copy: {key[1]} at {key[0]}, {count} a step")
    return lines


# Inductor's code for the compiled parts of a step (codegen_cases.py), in deterministic mode.

KERNELS: dict[str, int] = {"step_rows": 1, "caught_up": 1, "softmax": 2, "loss_gradient": 1}
"""Most Triton kernels. The second of `softmax` reads one logit a token."""

NO_FALLBACK = {"index_put_", "index_put", "scatter_add_", "index_add_", "embedding_dense_backward"}
"""Operations that no compiled part may call: in deterministic mode they walk duplicates one after the other."""


# Planning, on the host.

PLANNING_SHARE = 0.7
"""Most CPU seconds of planning a step, over the predicted step; up to 8 threads share them. Measured: 0.4 at most."""
