"""Every method on several ranks, engines and tensor degrees follows its run of one process."""

import numpy as np
import pytest
from follow_helper import follow
from ranks_helper import run_ranks

STEPS, SEQUENCES = 8, 4
METHODS = ("ple", "retoken", "mort", "stem", "engram", "mole", "scone")
LAYOUTS = {
    2: {
        "replicated": {"engine": "replicated"},
        "replicated, tensor 2": {"engine": "replicated", "tensor": 2},
        "hsdp": {"engine": "hsdp"},
        "stage 1": {"engine": "deepspeed", "zero_stage": 1},
        "stage 3": {"engine": "deepspeed", "zero_stage": 3},
    },
    4: {
        "hsdp, tensor 2": {"engine": "hsdp", "tensor": 2},
        "stage 2, tensor 2": {"engine": "deepspeed", "zero_stage": 2, "tensor": 2},
    },
}


def run(ranks, parallel, method, window="step"):
    import method_models as methods

    config = methods.config(
        method,
        memory={"optimizer": "catch_up", "window": window} if method in methods.WITH_TABLES else {},
        model={"layers": 2, "heads": 4, "kv_heads": 4},
        optimizer={"clip_norm": 0.3, "eps": 1e-5},
        parallel=parallel,
        train={"micro_batch": 1, "global_batch": SEQUENCES, "steps": 100},
    )
    return follow(
        ranks,
        config,
        lambda mesh: methods.lookup(config, mesh),
        lambda step: methods.repeating(config, SEQUENCES, 1, 12, seed=step),
        STEPS,
    )


def run_cases(ranks, cases):
    return [run(ranks, parallel, method) for parallel, method in cases]


@pytest.fixture(scope="module")
def one_process():
    from xgram_dist.parallel.process_group import ProcessGroup

    return {method: run(ProcessGroup(), {"engine": "replicated"}, method) for method in METHODS}


@pytest.mark.parametrize("size", LAYOUTS)
def test_every_method_follows_its_run_of_one_process(one_process, size):
    cases = [(name, method) for name in LAYOUTS[size] for method in METHODS]
    results = run_ranks(run_cases, size, [(LAYOUTS[size][name], method) for name, method in cases], timeout=900)
    for of_rank in results:
        for (name, method), (losses, norms) in zip(cases, of_rank, strict=True):
            expected = one_process[method]
            np.testing.assert_allclose(losses, expected[0], rtol=1e-4, err_msg=f"{method}, {name}")
            np.testing.assert_allclose(norms, expected[1], rtol=1e-4, err_msg=f"{method}, {name}")


@pytest.mark.parametrize("method", ["mort", "engram"])
def test_a_window_a_micro_batch_gives_the_same_step(one_process, method):
    from xgram_dist.parallel.process_group import ProcessGroup

    losses, norms = run(ProcessGroup(), {"engine": "replicated"}, method, window=1)
    np.testing.assert_allclose(losses, one_process[method][0], rtol=1e-5)
    np.testing.assert_allclose(norms, one_process[method][1], rtol=1e-5)


def test_losses_fall(one_process):
    for method, (losses, _) in one_process.items():
        assert np.mean(losses[-2:]) < losses[0], method
