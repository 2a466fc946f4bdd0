"""A model that is cut into stages trains as it does in one process: losses, norms, weights and rows after 20 steps."""

import pytest
import torch
from pipeline_helper import assert_same, config_of, train
from ranks_helper import run_ranks

from xgram_dist.config.validate import accumulation
from xgram_dist.errors import UserError
from xgram_dist.model.methods.base import check_method
from xgram_dist.model.pipeline_stages import block_costs, plan_stages

METHODS = ("xgram", "ple", "retoken", "mort", "stem", "engram", "mole", "scone", "vanilla")
FP64, FP32 = "float64", "float32"
TOLERANCE = {FP64: 1e-10, FP32: 1e-5}
H_AND_V = {"sites": {"v": {"views": 2, "kernels": [3, 5]}, "h": {"views": 1, "kernels": [3]}}}
MASKED = {"model": {"document_masking": True}}
TWO, LOOPED = {"pipeline": 2}, {"pipeline": 2, "virtual_stages": 2}
FILLED = {"pipeline_schedule": "zero_bubble"}
CUT = {"pipeline": 2, "context": 2}

CASES = {
    2: [
        *((method, TWO, FP64, {}) for method in METHODS),
        *((method, LOOPED, FP64, {}) for method in ("xgram", "mort", "engram", "mole")),
        ("xgram", {**TWO, **FILLED}, FP64, {}),
        ("mort", {**LOOPED, **FILLED}, FP64, {}),
    ],
    4: [
        ("xgram", {**TWO, "tensor": 2}, FP64, {}),
        ("xgram", {**TWO, "tensor": 2, "sequence_parallel": True}, FP64, {"memory": H_AND_V}),
        ("mort", {"pipeline": 4}, FP64, {}),
        ("xgram", TWO, FP64, {"memory": {"shard": 1}}),
        ("xgram", TWO, FP64, {"train": {"accumulation": "tokens"}}),
        ("ple", TWO, FP64, {"train": {"activation_checkpointing": True}, "memory": {"overlap": True}}),
        ("xgram", {**TWO, "engine": "hsdp"}, FP32, {}),
        ("xgram", {**LOOPED, "engine": "hsdp"}, FP32, {"memory": {"overlap": True}}),
        ("xgram", {**TWO, "engine": "hsdp", "tensor": 2}, FP32, {}),
        ("mole", {**TWO, "engine": "hsdp"}, FP32, {}),
        ("xgram", {**TWO, "engine": "hsdp"}, FP32, {"train": {"freeze_backbone": True}}),
        ("xgram", {**TWO, "engine": "deepspeed"}, FP32, {}),
        ("scone", {**LOOPED, "engine": "deepspeed"}, FP32, {}),
        *((method, CUT, FP64, MASKED if method in ("mort", "engram") else {}) for method in METHODS),
        ("xgram", {**CUT, **FILLED}, FP64, {"memory": H_AND_V, **MASKED}),
        ("xgram", {**CUT, "engine": "hsdp"}, FP32, {"train": {"activation_checkpointing": True}}),
        ("xgram", {**CUT, "engine": "deepspeed"}, FP32, {"memory": {"overlap": True}}),
    ],
    8: [
        ("xgram", {**TWO, "tensor": 2}, FP64, {"memory": H_AND_V}),
        ("mort", {**LOOPED, "engine": "hsdp"}, FP32, {"train": {"global_batch": 8}}),
        ("xgram", {**CUT, "tensor": 2}, FP64, {"memory": H_AND_V}),
        ("engram", {**CUT, "tensor": 2}, FP64, MASKED),
    ],
}
STEPS = 20


def train_all(ranks, cases, steps):
    torch.use_deterministic_algorithms(True)
    return [
        train(ranks, config_of(method, keys, **others), getattr(torch, dtype), steps)
        for method, keys, dtype, others in cases
    ]


@pytest.mark.parametrize("size", CASES)
def test_a_pipeline_trains_as_one_process_does(size):
    from xgram_dist.parallel.process_group import ProcessGroup

    cases, steps = CASES[size], STEPS
    alone = {}
    for method, _, dtype, others in cases:
        plain = {**others, "memory": {**others.get("memory", {}), "shard": "world"}}
        key = method, dtype, str(others)
        if key not in alone:
            (alone[key],) = train_all(ProcessGroup(), [(method, {}, dtype, plain)], steps)
    for rank, of_rank in enumerate(run_ranks(train_all, size, cases, steps, timeout=1500)):
        for (method, keys, dtype, others), found in zip(cases, of_rank, strict=True):
            expected = alone[method, dtype, str(others)]
            assert any(norm > 0.3 for norm in expected["norm"]), "clipping is not at work"
            assert_same(found, expected, TOLERANCE[dtype], f"rank {rank} of {size}: {method} {keys} {others}")


def test_stages_are_cut_by_cost():
    even = plan_stages(config_of("vanilla", TWO, model={"vocabulary": 4}))
    assert [list(stage.layers) for stage in even] == [[0, 1], [2, 3]]
    assert [(stage.is_first, stage.is_last) for stage in even] == [(True, False), (False, True)]
    # A head that is worth two blocks.
    config = config_of("vanilla", TWO)
    vocabulary = round(2 * block_costs(config)[0] / config.model.width)
    heavy = plan_stages(config_of("vanilla", TWO, model={"vocabulary": vocabulary}))
    assert [list(stage.layers) for stage in heavy] == [[0, 1, 2], [3]]
    looped = plan_stages(config_of("vanilla", LOOPED))
    assert [list(stage.layers) for stage in looped] == [[0], [1], [2], [3]]


@pytest.mark.parametrize(
    ("method", "parallel", "others", "sentence"),
    [
        ("vanilla", {"pipeline": 5}, {}, "model.layers = 4 cannot be cut into parallel.pipeline = 5"),
        ("vanilla", {"virtual_stages": 2}, {}, "parallel.virtual_stages = 2 is of a pipeline, but the recipe has"),
        ("vanilla", {"engine": "deepspeed", "zero_stage": 2, **TWO}, {}, "parallel.zero_stage = 2 is not offered with"),
        ("vanilla", {"engine": "deepspeed", "offload": True, **TWO}, {}, "parallel.offload = true is not offered"),
        ("xgram", TWO, {"memory": {"window": 1}}, "memory.window = 1 is not offered with parallel.pipeline = 2"),
        ("vanilla", TWO, {"train": {"check_finite": "layers"}}, "train.check_finite = layers is not offered with"),
        ("vanilla", TWO, {"train": {"diagnose_every": 5}}, "train.diagnose_every = 5 is not offered with"),
        ("vanilla", {**TWO, **FILLED, "engine": "hsdp"}, {}, "parallel.engine = hsdp is not offered with"),
        ("vanilla", {**TWO, **FILLED}, {"train": {"compile": True}}, "train.compile = true is not offered with"),
        ("mole", {**TWO, "engine": "deepspeed"}, {}, "memory.method = mole reads the token embedding in every stage"),
        ("engram", TWO, {"memory": {"shard": 1}}, "memory.shard = 1 is not offered with memory.method = engram"),
        ("xgram", TWO, {"memory": {"sites": {"v": {"layers": [0]}}}}, "has no tables in layers 2, 3, all that rank 1"),
    ],
)
def test_what_does_not_combine_is_refused_by_name(method, parallel, others, sentence):
    with pytest.raises(UserError) as caught:
        check_method(config_of(method, parallel, **others))
    assert sentence in str(caught.value)


def test_a_pipeline_needs_a_micro_batch_for_each_rank():
    with pytest.raises(UserError, match=r"a rank 1 micro-batch a step, but parallel.pipeline = 2 needs at least 2"):
        accumulation(config_of("vanilla", TWO), 4)
    looped = config_of("vanilla", {"pipeline": 3}, model={"layers": 6}, train={"global_batch": 7})
    assert accumulation(looped, 1) == 7
    with pytest.raises(UserError, match=r"needs a multiple of 3"):
        config_of("vanilla", {"pipeline": 3, "virtual_stages": 2}, model={"layers": 6}, train={"global_batch": 7})
