"""Every engine on 1 to 4 real ranks: the training of one process with plain AdamW; skipped steps, saving, restoring."""

import engine_helper as helper
import pytest
import tiny_models as tiny
import torch
from ranks_helper import run_ranks


def parity(world, states):
    """In fp32, all engines. `states`: saved by others, to be loaded here. Returns what each engine would save."""
    size, saved = world.size, {}
    plain = helper.Plain(helper.settings(size, {"engine": "replicated"}), size)
    expected = [plain.step(step) for step in range(1, helper.STEPS + 1)]
    evaluated = None
    cases = [*helper.ENGINES, *([{"engine": "hsdp", "replicate": 2, "reshard": False}] if size % 2 == 0 else [])]
    for number, parallel in enumerate(cases):
        where = f"{parallel} on {size}"
        config = helper.settings(size, parallel)
        steps, run = helper.train_skip_and_restore(config, world, where)
        helper.assert_close(steps, expected, where)
        helper.assert_weights(run, plain.weights(), where)
        value = run.evaluate()
        evaluated = value if evaluated is None else evaluated
        assert value == pytest.approx(evaluated, rel=1e-6), where
        saved[number] = helper.whole_state(run, where)
        if states:
            load(run, states[(number + 2) % len(states)], where)
        run.close()
    return saved


def load(run, state, where):
    """What another engine on another number of ranks saved, and two steps from there."""
    plain = helper.Plain(run.config, run.mesh.data.size, state)

    def saved_chunk(shard, number):
        return torch.from_numpy(state[shard.name, shard.kind])[shard.chunks[number].slices]

    helper.write(run, saved_chunk, state["step"])
    run.position = 10
    for step in (11, 12):
        helper.assert_close([run.step()], [plain.step(step)], f"{where}: loaded")
    helper.assert_weights(run, plain.weights(), f"{where}: loaded", tolerance=1e-6)


def variants(world):
    """bf16; optimizer state in host memory; activation checkpointing; stage 3 with whole vectors."""
    size = world.size
    plain = helper.Plain(helper.settings(size, {"engine": "replicated"}), size)
    expected = [plain.step(step) for step in range(1, helper.STEPS + 1)]
    for parallel in (*helper.ENGINES, {**helper.STAGES[0], "offload": True}, {**helper.STAGES[2], "offload": True}):
        where = f"{parallel} in bf16"
        steps, run = helper.train_skip_and_restore(helper.settings(size, parallel, precision="bf16"), world, where)
        for found, wanted in zip(steps, expected, strict=True):
            assert found[0] == pytest.approx(wanted[0], rel=2e-3), where
            assert found[1] == pytest.approx(wanted[1], rel=0.15), where
        helper.whole_state(run, where)
        run.close()
    whole_vectors = {"zero_optimization": {"stage3_param_persistence_threshold": 1000}}
    for parallel in (
        {"engine": "hsdp"},
        {**helper.STAGES[1], "offload": True},
        {**helper.STAGES[2], "offload": True},
        {**helper.STAGES[2], "deepspeed": whole_vectors},
    ):
        where = f"{parallel}, checkpointing"
        steps, run = helper.train_skip_and_restore(helper.settings(size, parallel, checkpointing=True), world, where)
        helper.assert_close(steps, expected, where)
        helper.assert_weights(run, plain.weights(), where)
        run.close()


def shares(world):
    """What a rank holds between steps, in shares of the fp32 parameters."""
    found = {}
    for name, parallel in {"hsdp": {"engine": "hsdp"}, "stage 3": helper.STAGES[2]}.items():
        config = helper.settings(world.size, parallel, method="vanilla")
        share = 4 * sum(p.numel() for p in tiny.model(config).parameters()) / world.size
        before = helper.live_bytes()
        run = helper.Run(config, world)
        run.step()
        between = helper.live_bytes() - before
        run.evaluate()
        found[name] = between / share, (helper.live_bytes() - before) / share
        run.close()
        del run  # or it would count for the next one
    return found, 4 * helper.CUT_ALL["zero_optimization"]["reduce_bucket_size"] / share


def tensor_parallel(world):
    """Two ranks share each layer: the joint norm counts every gradient once."""
    data = world.size // 2
    plain = helper.Plain(helper.settings(data, {"engine": "replicated"}), data)
    expected = [plain.step(step) for step in (1, 2)]
    for parallel in helper.ENGINES:
        where = f"{parallel}, tensor 2"
        run = helper.Run(helper.settings(data, {**parallel, "tensor": 2}), world)
        assert run.engine.tensor_dims
        helper.assert_close([run.step(), run.step()], expected, where)
        helper.assert_weights(run, plain.weights(), where)
        run.close()


def two(world):
    variants(world)
    return parity(world, None)


def four(world):
    found = shares(world)
    tensor_parallel(world)
    parity(world, None)
    return found


def test_one_rank():
    run_ranks(parity, 1, None, timeout=240)


def test_two_and_three_ranks_and_from_two_to_three():
    saved = run_ranks(two, 2, timeout=240)[0]
    run_ranks(parity, 3, saved, timeout=240)


def test_four_ranks():
    for found, bucket in run_ranks(four, 4, timeout=240):
        # Weights and two moments; stage 3: also the gradients, and in any precision a second copy of the weights.
        assert found["hsdp"] == pytest.approx((3, 3), abs=0.1)
        assert found["stage 3"] == pytest.approx((5 + bucket, 5 + bucket), abs=0.1)
