"""Rows that a run touches, and what they take: against counts, and against shards that were trained."""

import itertools

import method_models as methods
import numpy as np
import pytest
import torch

from xgram_dist.estimate.comm import Axes
from xgram_dist.estimate.touched_rows import plan_touched_rows
from xgram_dist.estimate.traffic import build_traffic, zipf
from xgram_dist.tables.frequencies import expected_ngrams
from xgram_dist.tables.optimizers.build import TableOptimizerSettings
from xgram_dist.tables.records import record_width


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("tokens", [1, 50, 5000])
def test_ngrams_of_independent_tokens_are_counted(order, tokens):
    frequencies = zipf(20)
    frequencies[7] = 0
    p = frequencies / frequencies.sum()
    exact = sum(
        1 - (1 - np.prod([p[token] for token in gram])) ** tokens for gram in itertools.product(range(20), repeat=order)
    )
    assert expected_ngrams(frequencies, order, tokens) == pytest.approx(exact, rel=0.01)


def test_rows_touched_by_independent_tokens_are_as_drawn():
    """Of hashed n-grams: each order's distinct n-grams, over heads of their own."""
    config = methods.config("engram", train={"steps": 40, "global_batch": 4}, memory={"optimizer": "catch_up"})
    frequencies = zipf(config.model.vocabulary)
    traffic = build_traffic(config, frequencies, None, 1)
    method = methods_of(config)
    found = plan_touched_rows(config, Axes(2, 1, 1), "catch_up", build_traffic(config, frequencies, None, 2))
    assert found.tokens == 40 * 4 * config.model.sequence_length
    drawn = np.random.default_rng(3).choice(len(frequencies), (1, found.tokens), p=frequencies / frequencies.sum())
    keys = method.build_lookup(None, methods.tiny.CPU).planner._requests
    assert found.touched == pytest.approx(keys.count(drawn), rel=0.03)
    assert traffic.run_share(found.tokens) * found.rows == pytest.approx(found.touched)


def methods_of(config):
    from xgram_dist.model.methods.base import method_of

    return method_of(config)


def test_bytes_are_those_of_records():
    config = methods.config("engram", memory={"optimizer": "catch_up", "rows": "touched", "count_updates": True})
    found = plan_touched_rows(config, Axes(1, 1, 1), "catch_up", build_traffic(config, zipf(120), None, 1))
    made = methods_of(config).build_lookup(None, methods.tiny.CPU)
    (shard,) = made.shards
    assert found.kept
    assert found.record_bytes == 4 * shard.records.width
    settings = TableOptimizerSettings.of(config, None, 100, "catch_up")
    fields = settings.record_fields(6, 1, gated=True, counted=False)
    assert [field.name for field in fields if field.dtype == torch.int32] == [
        "rows.last",
        "rows.current",
        "gates.last",
        "gates.current",
        "hit",
    ]
    assert record_width(fields) == 32  # 3 x 6 + 3 x 1 + 5 in lines of 16
    made.close()


@pytest.mark.parametrize(("rows", "moments"), [("bf16", "fp32"), ("bf16", "bf16"), ("fp32", "bf16")])
def test_bytes_of_smaller_numbers_are_those_of_records(rows, moments):
    memory = {"optimizer": "catch_up", "rows": "touched", "rows_dtype": rows, "moments": moments}
    config = methods.config("engram", memory=memory)
    found = plan_touched_rows(config, Axes(1, 1, 1), "catch_up", build_traffic(config, zipf(120), None, 1))
    (shard,) = methods_of(config).build_lookup(None, methods.tiny.CPU).shards
    shard.create(shard.slots_of(np.arange(3)).max() + 1)
    state = shard.state_dict()
    saved = sum(tensor[0].nbytes for tensor in (state.columns | state.tables | state.rows).values()) + 8
    assert found.record_bytes == 4 * shard.records.width
    assert found.checkpoint_bytes == pytest.approx(found.touched * saved)
