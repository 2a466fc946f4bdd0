"""Rows of served batches on a device of twins: the values of the CPU, and one wait a batch, for its token ids."""

import pytest
from isolated import run_isolated
from serving_run import BATCHES, run_serving
from stub_cuda import reason_to_skip

pytestmark = pytest.mark.skipif(reason_to_skip() is not None, reason=str(reason_to_skip()))


def test_rows_travel_through_pinned_memory_and_the_host_waits_for_token_ids_alone():
    found = run_isolated(run_serving)
    assert found["same"], "a batch read other values"
    assert found["copies"] > 6 * BATCHES, "the copies were not seen"
    assert not found["stopping"]
    assert found["waits"] == BATCHES


def test_a_network_that_does_not_wait_for_its_rows_is_found():
    assert not run_isolated(run_serving, "the network does not wait")["same"]
