"""Records staged from host memory to a device of twins: the values of the CPU, through copies that stop nothing."""

import pytest
from isolated import run_isolated
from staging_run import STEPS, run_staging
from stub_cuda import reason_to_skip

pytestmark = pytest.mark.skipif(reason_to_skip() is not None, reason=str(reason_to_skip()))


def test_staged_records_have_the_bits_of_the_cpu_and_copies_do_not_stop_the_host():
    found = run_isolated(run_staging)
    assert found["same"], "a step read other values"
    assert found["written"], "other values were written back"
    assert found["copies"] >= 2 * STEPS, "the copies were not seen"
    assert not found["stopping"]
    assert not found["waits"]
