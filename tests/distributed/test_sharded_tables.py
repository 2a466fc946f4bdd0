"""Tables spread over ranks equal tables in one process: loss, joint norm, weights, for any number of ranks."""

import numpy as np
import pytest
import torch
from ranks_helper import run_ranks

STEPS = 6
MICRO_BATCHES = 12
CASES = {
    "50 %": {"sites": {"v": {"views": 2, "kernels": [3, 5]}}},
    "100 %": {"compression": 1.0},
    "h and v, VIP rows slower": {
        "sites": {"h": {"views": 1, "kernels": [3]}, "v": {"views": 2, "kernels": [3, 5]}},
        "learning_rate": {"multiplier": 4.0, "vip_multiplier": 1.5},
    },
}


def train(ranks, case):
    """A few steps in fp64 on this rank's share of the batch -> losses, norms, the tables' rows this rank owns."""
    import tiny_models as tiny

    from xgram_dist.memory.sharded_tables import owned_tables
    from xgram_dist.optim.update import Optimizer
    from xgram_dist.train.build import build_lookup
    from xgram_dist.train.step import train_step

    settings = tiny.config(memory=CASES[case])
    lookup = build_lookup(settings, tiny.routing(settings), tiny.CPU, ranks)
    owned = owned_tables(lookup)
    for state in owned.states:
        state.rows = state.rows.double()
        if state.gates is not None:
            state.gates = state.gates.double()
    model = tiny.model(settings, torch.float64)
    optimizer = Optimizer(settings, model, lookup, ranks)
    losses, norms = [], []
    for step in range(1, STEPS + 1):
        batch = tiny.tokens(settings, MICRO_BATCHES, 1, 10, seed=step)
        mine = batch[ranks.rank * MICRO_BATCHES // ranks.size : (ranks.rank + 1) * MICRO_BATCHES // ranks.size]
        result = train_step(settings, model, lookup, optimizer, mine, step)
        losses.append(float(result.loss))
        norms.append(float(result.gradient_norm))
    tables = {
        name: (owned.states[0].owned.numpy(), value.detach().numpy()) for name, value in owned.named_tensors().items()
    }
    backbone = {name: value.detach().numpy() for name, value in model.named_parameters()}
    return losses, norms, tables, backbone


def joined(results, name):
    rows = np.concatenate([tables[name][0] for _, _, tables, _ in results])
    values = np.concatenate([tables[name][1] for _, _, tables, _ in results])
    assert sorted(rows.tolist()) == list(range(len(rows)))  # every row has one owner
    return values[np.argsort(rows)]


@pytest.fixture(scope="module")
def one_process():
    made = {}

    def get(case):
        if case not in made:
            from xgram_dist.parallel.ranks import Ranks

            made[case] = train(Ranks(), case)
        return made[case]

    return get


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("case", CASES)
def test_training_on_ranks_equals_training_in_one_process(one_process, case, size):
    losses, norms, tables, backbone = one_process(case)
    results = run_ranks(train, size, case)
    for rank_losses, rank_norms, _, rank_backbone in results:
        np.testing.assert_allclose(rank_losses, losses, rtol=1e-10)
        np.testing.assert_allclose(rank_norms, norms, rtol=1e-10)
        for name, value in backbone.items():
            np.testing.assert_allclose(rank_backbone[name], value, rtol=1e-9, atol=1e-12, err_msg=name)
    assert len(tables) > 0
    for name in tables:
        np.testing.assert_allclose(joined(results, name), tables[name][1], rtol=1e-9, atol=1e-12, err_msg=name)


def odd_batches(ranks):
    """Batches that leave owners without requests; returns what came back against the formula."""
    import tiny_models as tiny

    from xgram_dist.memory.sharded_tables import ShardedTables

    settings = tiny.config(memory=CASES["50 %"])
    sharded = ShardedTables(settings, tiny.routing(settings), tiny.CPU, ranks)
    from xgram_dist.memory.local_tables import LocalTables

    whole = LocalTables(settings, tiny.routing(settings), tiny.CPU)
    worst = 0.0
    for asked in (torch.tensor([5]), torch.full((3, 4), 7), torch.arange(120), torch.tensor([ranks.rank])):
        got, expected = sharded.fetch(asked), whole.fetch(asked)
        for name, value in got.values.items():
            worst = max(worst, float((value[got.slots] - expected.values[name][expected.slots]).abs().max()))
    return worst


def test_one_token_equal_tokens_and_all_tokens_come_back_right_from_every_owner():
    assert max(run_ranks(odd_batches, 4)) < 1e-6


def repeat(ranks):
    losses, norms, tables, _ = train(ranks, "50 %")
    return losses, norms, {name: value for name, (_, value) in tables.items()}


def test_a_run_on_ranks_repeats_bitwise():
    first, second = run_ranks(repeat, 3), run_ranks(repeat, 3)
    for (losses, norms, tables), (again, norms_again, tables_again) in zip(first, second, strict=True):
        assert losses == again
        assert norms == norms_again
        assert all(np.array_equal(tables[name], tables_again[name]) for name in tables)
