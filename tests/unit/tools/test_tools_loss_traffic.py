"""tools/loss_traffic.py: what the loss of the paper's recipe reads and writes."""

import pytest
from tools_helpers import ROOT, load_tool

from xgram_dist.config import load_config

loss_traffic = load_tool("loss_traffic")


@pytest.fixture(scope="module")
def config():
    return load_config(ROOT / "recipes/0.73b/xgram-1x-50.yaml")


def test_compiled_passes_read_the_logits_twice_and_write_them_once(config):
    """The head is bound by memory bandwidth: a pass more is a tenth of its time on a GPU."""
    traffic = loss_traffic.count(config, 16, compiled=True)
    tokens = config.train.global_batch * config.model.sequence_length // 16
    logits = 2 * tokens * config.model.vocabulary
    rest = 8 * config.model.vocabulary * config.model.width * (2 + 6 * 4)  # weight and gradient, each micro-batch
    assert 3 * logits <= traffic.elementwise <= 3 * logits + rest
    assert traffic.elementwise < 1.0e12


def test_eager_passes_are_counted_one_by_one(config):
    traffic = loss_traffic.count(config, 16, compiled=False)
    assert 3.0e12 < traffic.elementwise < 5.0e12
