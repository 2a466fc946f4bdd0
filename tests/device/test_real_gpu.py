"""The same checks on a GPU that is there; skipped without one.

pytest tests/device/test_real_gpu.py

They are those of `xgram-dist doctor`, which an installed package has without this folder.
"""

from pathlib import Path

import pytest
import torch

from xgram_dist.cluster.doctor import parity, step_watch
from xgram_dist.cluster.doctor.report import Context
from xgram_dist.parallel.process_group import ProcessGroup

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CHECKS = {
    "kernels": parity.check_kernels,
    "engines": parity.check_training,
    "tables": parity.check_variants,
    "repetition": parity.check_repetition,
    "host waits and copies": step_watch.check_step,
}


@pytest.mark.parametrize("name", CHECKS)
def test_the_device_checks_pass(name: str, tmp_path: Path) -> None:
    context = Context(
        ranks=ProcessGroup(),
        nodes=["here"],
        device=torch.device("cuda", 0),
        folder=tmp_path,
        quick=False,
        seconds=1.0,
        recipe=None,
        overrides=[],
    )
    assert [row for row in CHECKS[name](context) if row.status != "pass"] == []
