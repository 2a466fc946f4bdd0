"""The doctor's checks of a GPU, on a device of twins: what they would do on a machine with one.

If one of these fails, `xgram-dist doctor` would report a sound GPU as faulty, or miss a host wait or a wrong number.
"""

from typing import Any

import pytest
from doctor_run import run_device_checks
from isolated import run_isolated
from stub_cuda import reason_to_skip

from xgram_dist.cluster.doctor.parity import VARIANTS

pytestmark = pytest.mark.skipif(reason_to_skip() is not None, reason=str(reason_to_skip()))


@pytest.fixture(scope="module")
def found() -> dict[str, list[tuple[str, str, str]]]:
    return run_isolated(run_device_checks)


def test_a_sound_device_passes(found: dict[str, Any]) -> None:
    assert [row for row in found["sound"] if row[1] != "pass"] == []
    parity = [row for row in found["sound"] if row[0].startswith("parity")]
    waits = [row for row in found["sound"] if row[0].startswith("host waits")]
    assert len(parity) == 3 + len(VARIANTS) - 1
    assert len(waits) == 2 + len(VARIANTS)
    assert all(row[2].startswith("1,") for row in waits if "host memory" not in row[0])  # they do see waits


def test_a_host_wait_in_the_loop_is_a_warning_that_names_it(found: dict[str, Any]) -> None:
    ((_, status, text), _) = found["a number is read"]
    assert status == "warn"
    assert "cluster/doctor/step_watch.py run_step, 1 a step" in text


def test_wrong_numbers_fail_parity(found: dict[str, Any]) -> None:
    ((_, status, text),) = found["other tokens"]
    assert status == "fail"
    assert "from step 1" in text
