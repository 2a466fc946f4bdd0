"""Every engine and tensor degree, with sharded tables and without, follows the run of one process."""

import numpy as np
import pytest
from follow_helper import follow
from ranks_helper import run_ranks

STEPS, SEQUENCES = 12, 4
ENGINES = {
    "replicated": {"engine": "replicated"},
    "hsdp": {"engine": "hsdp"},
    "stage 1": {"engine": "deepspeed", "zero_stage": 1},
    "stage 2": {"engine": "deepspeed", "zero_stage": 2},
    "stage 3": {"engine": "deepspeed", "zero_stage": 3},
}
METHODS = ("xgram", "vanilla")


def settings_of(parallel, method, optimizer="catch_up"):
    import tiny_models as tiny

    sites = {"h": {"views": 1, "kernels": [3]}, "v": {"views": 2, "kernels": [3, 5]}}
    return tiny.config(
        model={"layers": 2, "heads": 4, "kv_heads": 4},
        memory={"method": method, "sites": sites, "optimizer": optimizer},
        optimizer={"clip_norm": 0.3, "eps": 1e-5},
        parallel=parallel,
        train={"micro_batch": 1, "global_batch": SEQUENCES, "steps": 100},
    )


def run(ranks, parallel, method, optimizer="catch_up"):
    import tiny_models as tiny

    from xgram_dist.model.build import build_lookup

    config = settings_of(parallel, method, optimizer)
    return follow(
        ranks,
        config,
        lambda mesh: build_lookup(config, tiny.routing(config), tiny.CPU, mesh),
        lambda step: tiny.tokens(config, SEQUENCES, 1, 12, seed=step),
        STEPS,
    )


def run_cases(ranks, cases):
    return [run(ranks, *case) for case in cases]


@pytest.fixture(scope="module")
def one_process():
    from xgram_dist.parallel.process_group import ProcessGroup

    return {method: run(ProcessGroup(), {"engine": "replicated"}, method) for method in METHODS}


@pytest.mark.parametrize(("size", "method"), [(1, "xgram"), (2, "xgram"), (2, "vanilla"), (4, "xgram")])
def test_every_engine_and_tensor_degree_follows_the_run_of_one_process(one_process, size, method):
    cases = {
        f"{name}, tensor {tensor}, {method}": ({**parallel, "tensor": tensor}, method)
        for name, parallel in ENGINES.items()
        for tensor in (1, 2)
        if size % tensor == 0
    }
    if size == 4 and method == "xgram":
        cases["replicated, tensor 4, xgram"] = ({"engine": "replicated", "tensor": 4}, "xgram")
        cases["hsdp, 2 x 2, xgram"] = ({"engine": "hsdp", "replicate": 2}, "xgram")
        sequence = {"engine": "deepspeed", "tensor": 2, "sequence_parallel": True}
        cases["stage 1, tensor 2, sequence parallel, xgram"] = (sequence, "xgram")
    results = run_ranks(run_cases, size, list(cases.values()), timeout=600)
    for of_rank in results:
        for name, (losses, norms) in zip(cases, of_rank, strict=True):
            expected = one_process[method]
            assert min(expected[1]) > 0.3  # clipping is at work in every step
            np.testing.assert_allclose(losses, expected[0], rtol=1e-4, err_msg=name)
            np.testing.assert_allclose(norms, expected[1], rtol=1e-5, err_msg=name)


def test_adagrad_has_one_number_for_a_row_whose_columns_lie_with_several_ranks():
    from xgram_dist.parallel.process_group import ProcessGroup

    losses, norms = run(ProcessGroup(), {"engine": "replicated"}, "xgram", "adagrad")
    for of_rank in run_ranks(run, 2, {"engine": "replicated", "tensor": 2}, "xgram", "adagrad"):
        np.testing.assert_allclose(of_rank[0], losses, rtol=1e-4)
        np.testing.assert_allclose(of_rank[1], norms, rtol=1e-5)
