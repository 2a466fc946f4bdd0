"""What needs no ranks: DeepSpeed's configuration from a recipe, chunks of flat ranges, DeepSpeed missing."""

import json
import sys

import pytest
import tiny_models as tiny
import torch
from hypothesis import given
from hypothesis import strategies as st

from xgram_dist.engine import build_engine
from xgram_dist.engine.base import chunks_of_flat_range, extents_of_flat_range
from xgram_dist.engine.deepspeed import deepspeed_config
from xgram_dist.errors import UserError
from xgram_dist.parallel.mesh import single_mesh


def config(deepspeed=None, train=None, **parallel):
    parallel = {"engine": "deepspeed", "deepspeed": deepspeed or {}, **parallel}
    return tiny.config(parallel=parallel, train={"global_batch": 24, "micro_batch": 2, **(train or {})})


def test_follows_the_recipe():
    made = deepspeed_config(config(zero_stage=2, offload=True, train={"precision": "bf16"}), 4)
    assert made["gradient_accumulation_steps"] == 3
    assert made["train_batch_size"] == 24
    assert made["gradient_clipping"] == 0.0
    assert made["bf16"]["enabled"]
    assert made["data_types"]["grad_accum_dtype"] == made["communication_data_type"] == "fp32"
    assert made["zero_optimization"]["stage"] == 2
    assert made["zero_optimization"]["offload_optimizer"] == {"device": "cpu", "ratio": 1.0, "pin_memory": True}
    assert json.loads(json.dumps(made)) == made


def test_more_keys_are_merged_in():
    extra = {"zero_optimization": {"stage": 1, "reduce_bucket_size": 77}, "wall_clock_breakdown": True}
    made = deepspeed_config(config(extra), 1)
    assert made["zero_optimization"]["reduce_bucket_size"] == 77
    assert made["zero_optimization"]["stage"] == 1
    assert made["wall_clock_breakdown"]


@pytest.mark.parametrize(
    ("extra", "named", "way_out"),
    [
        ({"gradient_clipping": 1.0}, "gradient_clipping = 1.0", "optimizer.clip_norm"),
        ({"train_batch_size": 12}, "train_batch_size = 12", "train.global_batch"),
        ({"bf16": {"enabled": True}}, "bf16.enabled = True", "train.precision"),
        ({"bf16": True}, "bf16 = True", "section"),
        ({"fp16": {"enabled": True}}, "fp16.enabled", "train.precision"),
        ({"zero_optimization": {"stage": 3}}, "zero_optimization.stage = 3", "parallel.zero_stage"),
        ({"zero_optimization": {"stage": True}}, "zero_optimization.stage = True", "parallel.zero_stage"),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
            "zero_optimization.offload_optimizer.device",
            "parallel.offload",
        ),
        ({"zero_optimization": {"offload_param": {"device": "cpu"}}}, "zero_optimization.offload_param", "offload"),
        ({"optimizer": {"type": "Adam"}}, "deepspeed.optimizer", "section optimizer"),
        ({"scheduler": {}}, "deepspeed.scheduler", "section optimizer"),
        ({"communication_data_type": "bf16"}, "communication_data_type = 'bf16'", "'fp32'"),
        ({"tensor_parallel": {"autotp_size": 2}}, "deepspeed.tensor_parallel", "parallel.tensor"),
    ],
)
def test_contradictions_are_refused_by_name(extra, named, way_out):
    with pytest.raises(UserError) as refused:
        deepspeed_config(config(extra), 1)
    assert f"parallel.deepspeed.{named.removeprefix('deepspeed.')}" in str(refused.value)
    assert way_out in str(refused.value)


def test_stage_3_is_not_compiled():
    with pytest.raises(UserError, match=r"train\.compile"):
        deepspeed_config(config(zero_stage=3, train={"compile": True}), 1)


@pytest.mark.parametrize(
    "extra",
    [
        {"zero_optimization": {"reduce_bucket_size": "many"}},
        {"zero_optimization": {"no_such_key": 1}},
        {"activation_checkpointing": 7},
        {"comms_logger": {"enabled": "perhaps"}},
        {"steps_per_print": {"a": [1, {"b": "x" * 500}]}, "flops_profiler": []},
    ],
)
def test_nonsense_for_deepspeed_is_one_sentence(extra):
    made = config(extra)
    with pytest.raises(UserError) as refused:
        build_engine(made, tiny.model(made), single_mesh(), torch.device("cpu"))
    assert "DeepSpeed refuses parallel.deepspeed = {" in str(refused.value)
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) <= 400
    if torch.distributed.is_initialized():  # DeepSpeed's world of one process
        torch.distributed.destroy_process_group()


def test_missing_deepspeed_names_the_way_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    settings = config()
    with pytest.raises(UserError, match=r"pip install 'xgram-dist\[deepspeed\]'.*parallel.engine=hsdp"):
        build_engine(settings, tiny.model(settings), single_mesh(), tiny.CPU)


@given(st.lists(st.integers(1, 5), max_size=4).map(tuple), st.data())
def test_chunks_are_the_flat_range(shape, data):
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    start = data.draw(st.integers(0, whole.numel()))
    stop = data.draw(st.integers(start, whole.numel()))
    extents = extents_of_flat_range(shape, start, stop)
    assert len(extents) <= max(1, 2 * len(shape) - 1)
    chunks = chunks_of_flat_range(shape, whole.flatten()[start:stop], start)
    assert [chunk.offsets for chunk in chunks] == [offsets for offsets, _ in extents]
    found = [whole[chunk.slices] for chunk in chunks]
    for there, chunk in zip(found, chunks, strict=True):
        assert torch.equal(there, chunk.tensor)
    joined = torch.cat([there.flatten() for there in found]) if found else whole.flatten()[:0]
    assert torch.equal(joined, whole.flatten()[start:stop])
