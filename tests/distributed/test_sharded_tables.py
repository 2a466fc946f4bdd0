"""Tables spread over ranks equal tables in one process: loss, joint norm, weights, for any number of ranks."""

import numpy as np
import pytest
import torch
from ranks_helper import run_ranks

from xgram_dist.model.methods.base import table_layout

STEPS = 20
SEQUENCES = 12
SITES = {"h": {"views": 1, "kernels": [3]}, "v": {"views": 2, "kernels": [3, 5]}}
CASES = {
    "50 %": {},
    "50 %, windows of two": {"window": 2},
    "50 %, windows by size": {"window": "9KiB", "optimizer": "lazy"},
    "50 %, catch-up": {"optimizer": "catch_up", "placement": "host"},
    "50 %, catch-up, windows": {"optimizer": "catch_up", "window": 2},
    "100 %": {"compression": 1.0},
    "100 %, catch-up": {"compression": 1.0, "optimizer": "catch_up", "window": 3},
    "100 %, Adagrad, host": {"compression": 1.0, "optimizer": "adagrad", "placement": "host"},
    "h and v, VIP rows slower": {"sites": SITES, "learning_rate": {"multiplier": 4.0, "vip_multiplier": 1.5}},
    "h and v, catch-up": {
        "sites": SITES,
        "learning_rate": {"multiplier": 4.0, "vip_multiplier": 1.5},
        "optimizer": "catch_up",
    },
    "lazy": {"optimizer": "lazy", "window": 1},
    "Adagrad": {"optimizer": "adagrad"},
}
LOSSY = {"bf16 wire": {"wire": "bf16"}}


def train(ranks, memory, dtype=torch.float64, steps=STEPS):
    """Some steps on this rank's share of the batch -> losses, norms, the tables' rows this rank owns, backbone."""
    import tiny_models as tiny

    from xgram_dist.engine import build_engine
    from xgram_dist.model.build import build_lookup
    from xgram_dist.parallel.mesh import single_mesh
    from xgram_dist.tables.exchange import shards_of
    from xgram_dist.train.step import JointOptimizer, train_step

    settings = tiny.config(memory=memory)
    share = SEQUENCES // ranks.size
    micro_batches = share if "KiB" in str(settings.memory.window) else next(n for n in (3, 2) if share % n == 0)
    lookup = build_lookup(settings, tiny.routing(settings), tiny.CPU, single_mesh(ranks))
    owned = shards_of(lookup)
    tiny.convert(owned, dtype)
    model = tiny.model(settings, dtype)
    mesh = single_mesh(ranks)
    optimizer = JointOptimizer(settings, build_engine(settings, model, mesh, tiny.CPU), lookup, mesh)
    losses, norms = [], []
    for step in range(1, steps + 1):
        # Half the steps see few tokens, so that rows are left out for some steps and then hit again.
        batch = tiny.tokens(settings, SEQUENCES, 10, seed=step) // (1 if step % 2 else 6)
        mine = batch.view(ranks.size, micro_batches, -1, 10)[ranks.rank]
        result = train_step(settings, lookup, optimizer, mine, lookup.plan(mine).result(), step)
        losses.append(float(result.loss))
        norms.append(float(result.gradient_norm))
    tables = {
        name: (owned[0].row_ids.numpy(), value.detach().numpy()) for name, value in tiny.table_tensors(owned).items()
    }
    lookup.close()
    backbone = {name: value.detach().numpy() for name, value in model.named_parameters()}
    return losses, norms, tables, backbone


def train_all(ranks, names, dtype):
    """Many cases in one set of processes: starting them takes longer than training."""
    return {name: train(ranks, (CASES | LOSSY)[name], dtype) for name in names}


def joined(results, name):
    rows = np.concatenate([tables[name][0] for _, _, tables, _ in results])
    values = np.concatenate([tables[name][1] for _, _, tables, _ in results])
    assert sorted(rows.tolist()) == list(range(len(rows)))  # every row has one owner
    return values[np.argsort(rows)]


@pytest.fixture(scope="module")
def one_process():
    """The reference: one process, exact AdamW by dense sweep where a case is AdamW, one window, in fp64."""
    made = {}

    def get(case):
        memory = {key: value for key, value in (CASES | LOSSY)[case].items() if key not in ("window", "wire")}
        if memory.get("optimizer") == "catch_up":
            memory["optimizer"] = "dense"
        key = repr(memory)
        if key not in made:
            from xgram_dist.parallel.process_group import ProcessGroup

            made[key] = train(ProcessGroup(), memory)
        return made[key]

    return get


def compare(results, reference, tolerance, floor):
    losses, norms, tables, backbone = reference
    for rank_losses, rank_norms, _, rank_backbone in results:
        np.testing.assert_allclose(rank_losses, losses, rtol=tolerance)
        np.testing.assert_allclose(rank_norms, norms, rtol=10 * tolerance)
        for name, value in backbone.items():
            np.testing.assert_allclose(rank_backbone[name], value, rtol=tolerance, atol=floor, err_msg=name)
    assert len(tables) > 0
    for name in tables:
        np.testing.assert_allclose(joined(results, name), tables[name][1], rtol=tolerance, atol=floor, err_msg=name)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_training_on_ranks_equals_training_in_one_process(one_process, size):
    results = run_ranks(train_all, size, list(CASES), torch.float64)
    for case in CASES:
        print(case)
        compare([of_rank[case] for of_rank in results], one_process(case), 1e-10, 1e-10)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_in_single_precision_too(one_process, size):
    cases = ["50 %, windows of two", "50 %, catch-up", "100 %, catch-up", "lazy", "Adagrad"]
    results = run_ranks(train_all, size, cases, torch.float32)
    for case in cases:
        print(case)
        compare([of_rank[case] for of_rank in results], one_process(case), 1e-5, 2e-5)


def test_bf16_on_the_wire_costs_its_rounding_and_no_more(one_process):
    (result, *_) = run_ranks(train_all, 2, ["bf16 wire"], torch.float32)
    losses = one_process("bf16 wire")[0]
    np.testing.assert_allclose(result["bf16 wire"][0], losses, rtol=2e-3)
    assert not np.allclose(result["bf16 wire"][0], losses, rtol=1e-7)  # it was really used


def odd_batches(ranks):
    """Batches that leave owners without requests, or have no token at all; the worst difference that came back."""
    import tiny_models as tiny

    worst = 0.0
    for memory in (CASES["50 %"], CASES["100 %"]):
        settings = tiny.config(memory=memory)
        from xgram_dist.parallel.mesh import single_mesh
        from xgram_dist.tables.exchange import ShardedTables

        sharded = ShardedTables(settings, table_layout(settings), tiny.routing(settings), tiny.CPU, single_mesh(ranks))
        whole = ShardedTables(settings, table_layout(settings), tiny.routing(settings), tiny.CPU)
        first = ranks.rank == 0
        for asked in (
            torch.tensor([5]),
            torch.full((3, 4), 7),
            torch.arange(120),
            torch.tensor([ranks.rank]),
            torch.arange(9 if first else 0),
        ):
            got, expected = tiny.fetch(sharded, asked), tiny.fetch(whole, asked)
            for name, value in got.values.items():
                difference = (value[got.slots] - expected.values[name][expected.slots]).abs()
                worst = max([worst, *difference.view(-1).tolist()])
                value.grad = torch.ones_like(value)
            sharded.give_back(got)
            tiny.drop_gradients(sharded.shards)
    return worst


@pytest.mark.parametrize("size", [4, 7])
def test_one_token_equal_tokens_all_tokens_and_none_come_back_right_from_every_owner(size):
    assert max(run_ranks(odd_batches, size)) < 1e-6


def repeat(ranks):
    losses, norms, tables, _ = train(ranks, CASES["50 %, catch-up"], torch.float32)
    return losses, norms, {name: value for name, (_, value) in tables.items()}


def test_a_run_on_ranks_repeats_bitwise():
    first, second = run_ranks(repeat, 3), run_ranks(repeat, 3)
    for (losses, norms, tables), (again, norms_again, tables_again) in zip(first, second, strict=True):
        assert losses == again
        assert norms == norms_again
        assert all(np.array_equal(tables[name], tables_again[name]) for name in tables)
