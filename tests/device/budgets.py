"""What a training step may do on a GPU: every number that the device tests hold the product to.

A change that makes the product better lowers a number here; nothing else has to change.
"""

from typing import Any

from stub_cuda import stops_the_host

from xgram_dist.cluster.doctor import step_watch
from xgram_dist.parallel.call_site import Place

# Host waits of a step: (file, function), what, how often.

FINITE: tuple[Place, str] = (step_watch.FINITE, "reads numbers")
WAITS: dict[tuple[Place, str], int] = {FINITE: 1}

LOGGED_WAITS: dict[tuple[Place, str], int] = {
    FINITE: 1,
    (("parallel/device.py", "synchronize"), "synchronize"): 1,
    (("train/trainer.py", "_report_step"), "reads numbers"): 3,
}
"""Of a step with a status line, every `train.log_every` steps: loss, cross-entropy and gradient norm are read."""

ENGINE_WAITS = {f"zero_stage={stage}": set(waits) for stage, waits in step_watch.ENGINE_WAITS.items()}
"""Waits inside DeepSpeed, by the word of the recipe: allowed any number of times."""

# Copies that stop the host. On the device: none. With rows in host memory: `step_watch.HOST_ROWS`.


def unexpected(found: dict[str, Any], words: list[str], waits: dict[tuple[Place, str], int] | None = None) -> list[str]:
    """One line for each deviation of a step from this file. `found`: of `Ledger.of`. `words`: the recipe's overrides,
    which say what is allowed. `waits`: those of the step, if not `WAITS`."""
    expected = WAITS if waits is None else waits
    lines = [f"fault: {what} at {where}" for where, what in found["faults"]]
    tolerated = {
        place for name, waits in ENGINE_WAITS.items() if any(name in word for word in words) for place in waits
    }
    counted = {key: count for key, count in found["waits"].items() if key[0] not in tolerated}
    for key in sorted({*counted, *expected}):
        count, allowed = counted.get(key, 0), expected.get(key, 0)
        if count != allowed:
            lines.append(f"host wait: {key[1]} at {key[0]}, {count} a step, {allowed} allowed")
    copies = step_watch.HOST_ROWS if "memory.placement=host" in words else {}
    for key, count in found["copies"].items():
        if stops_the_host(key[1]) and key[0] not in copies:
            lines.append(f"copy: {key[1]} at {key[0]}, {count} a step")
    return lines


# Bytes of device memory of a step, by part (traffic.py): 0.73B with 1x-50 tables on 16 ranks, one micro-batch of
# 8 x 8,192 tokens a rank, nothing compiled. GB, without matrix products and attention.

TRAFFIC_GB: dict[str, float] = {
    "head": 383.0,
    "blocks": 1195.0,
    "extraction": 1012.0,
    "scatter": 11.6,
    "exchange": 20.8,
    "update": 40.5,
}

COMPILED_TRAFFIC_GB: dict[str, float] = {
    "block forward": 4.7,
    "block backward": 14.4,
    "softmax": 1.25,
    "loss_gradient": 2.5,
}
"""Of one call of a compiled part, by inductor's count: a block of 8 x 8,192 tokens, half a chunk of logits (4,096 x
151,936)."""

# Inductor's code for the compiled parts of a step (codegen_cases.py), in deterministic mode.

KERNELS: dict[str, int] = {"step_rows": 1, "caught_up": 1, "softmax": 2, "loss_gradient": 1}
"""Most Triton kernels. The second of `softmax` reads one logit a token."""

BLOCK_KERNELS: dict[str, dict[str, int]] = {
    "block": {"forward": 11, "backward": 31},
    "block, v and h": {"forward": 12, "backward": 42},
}
"""Most launches of Triton kernels in a block: with the recipe's two tables at v, and with one more at h."""

NO_FALLBACK = {"index_put_", "index_put", "scatter_add_", "index_add_", "embedding_dense_backward"}
"""Operations that no compiled part may call: in deterministic mode they walk duplicates one after the other. Gradients
of table rows are `_embedding_bag_forward_only`: sums over sorted positions."""


# Planning, on the host.

PLANNING_SHARE = 0.7
"""Most CPU seconds of planning a step, over the predicted step; up to 8 threads share them. Measured: 0.4 at most."""
