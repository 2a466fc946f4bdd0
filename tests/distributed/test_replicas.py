"""Tables in several replicas (`memory.shard`): the run of one process, with replicas that are equal bit for bit."""

import numpy as np
import pytest
import torch
from ranks_helper import run_ranks
from test_sharded_tables import SITES

STEPS, SEQUENCES = 12, 12
CASES = {
    "50 %, catch-up": {"optimizer": "catch_up"},
    "50 %, dense": {"optimizer": "dense"},
    "50 %, windows of two, lazy": {"window": 2, "optimizer": "lazy"},
    "50 %, windows by size": {"window": "9KiB", "optimizer": "catch_up"},
    "50 %, touched rows": {"optimizer": "catch_up", "rows": "touched"},
    "50 %, host": {"optimizer": "catch_up", "rows": "touched", "placement": "host"},
    "50 %, overlap": {"optimizer": "catch_up", "overlap": True},
    "100 %": {"compression": 1.0, "optimizer": "catch_up"},
    "100 %, Adagrad": {"compression": 1.0, "optimizer": "adagrad"},
    "h and v": {"sites": SITES, "learning_rate": {"multiplier": 4.0, "vip_multiplier": 1.5}, "optimizer": "catch_up"},
}
ON_TWO_RANKS = ("50 %, catch-up", "50 %, windows by size", "100 %")


def train(ranks, memory, parallel=None, dtype=torch.float64, validate=True):
    import tiny_models as tiny

    from xgram_dist.engine import build_engine
    from xgram_dist.model.build import build_lookup
    from xgram_dist.parallel.mesh import build_mesh
    from xgram_dist.tables.exchange import shards_of
    from xgram_dist.train.step import JointOptimizer, train_step

    settings = tiny.config(memory=memory, parallel=parallel or {})
    mesh = build_mesh(settings, ranks)
    share = SEQUENCES // mesh.data.size
    micro_batches = share if "KiB" in str(settings.memory.window) else next(n for n in (3, 2) if share % n == 0)
    lookup = build_lookup(settings, tiny.routing(settings), tiny.CPU, mesh)
    owned = shards_of(lookup)
    if dtype == torch.float64:
        tiny.convert(owned, dtype)
    model = tiny.model(settings, dtype, tensor=mesh.tensor)
    optimizer = JointOptimizer(settings, build_engine(settings, model, mesh, tiny.CPU), lookup, mesh)
    losses, norms = [], []
    for step in range(1, STEPS + 1):
        batch = tiny.tokens(settings, SEQUENCES, 10, seed=step) // (1 if step % 2 else 6)
        mine = batch.view(mesh.data.size, micro_batches, -1, 10)[mesh.data.rank]
        result = train_step(settings, lookup, optimizer, mine, lookup.plan(mine).result(), step)
        losses.append(float(result.loss))
        norms.append(float(result.gradient_norm))
        if validate and step % 5 == 0:  # other tokens on every rank: reading catches rows up
            tokens = tiny.tokens(settings, mesh.data.size, 10, seed=100 + step)[mesh.data.rank].view(1, 1, 10)
            lookup.fetch(lookup.plan(tokens, whole=True).result()[0], training=False).wait()
    state = {}
    for shard in owned:
        shard.catch_up_all()
        kept = shard.state_dict()
        order = kept.row_ids.argsort()
        for name, tensor in (kept.columns | kept.tables | kept.rows).items():
            state[name] = tensor[order].detach().cpu().clone().numpy()
        state[f"{shard.slab.view}.row_ids"] = kept.row_ids[order].numpy()
    hit = owned.rows_hit()
    lookup.close()
    backbone = {name: value.detach().numpy() for name, value in model.named_parameters()}
    return losses, norms, state, backbone, (mesh.replicas.rank, mesh.rows.rank, mesh.tensor.rank), hit


def train_all(ranks, cases, dtype):
    return {name: train(ranks, *case, dtype=dtype) for name, case in cases.items()}


def check_replicas(results, expected):
    """All replicas of a rank's rows, with all their state, are the same bits."""
    by_place = {}
    for _, _, state, _, (replica, rows, tensor), _ in results:
        by_place.setdefault((rows, tensor), []).append((replica, state))
    for replicas in by_place.values():
        assert len(replicas) == expected
        for _, state in replicas[1:]:
            assert state.keys() == replicas[0][1].keys()
            for name, values in state.items():
                np.testing.assert_array_equal(values, replicas[0][1][name], err_msg=name)


@pytest.fixture(scope="module")
def one_process():
    from xgram_dist.parallel.process_group import ProcessGroup

    made = {}

    def get(case):
        memory = {key: value for key, value in CASES[case].items() if key not in ("window", "placement", "rows")}
        if memory.get("optimizer") == "catch_up":
            memory["optimizer"] = "dense"
        if repr(memory) not in made:
            made[repr(memory)] = train(ProcessGroup(), memory, validate=False)
        return made[repr(memory)]

    return get


@pytest.mark.parametrize("size", [2, 4])
def test_replicas_of_the_tables_are_equal_and_follow_the_run_of_one_process(one_process, size):
    names = ON_TWO_RANKS if size == 2 else [name for name in CASES if "rows" not in CASES[name]]
    cases = {name: ({**CASES[name], "shard": size // 2},) for name in names}
    results = run_ranks(train_all, size, cases, torch.float64)
    for case in cases:
        print(case)
        of_case = [one[case] for one in results]
        check_replicas(of_case, 2)
        losses, norms, tables, backbone, _, hit = one_process(case)
        assert sum(one[-1][0] for one in of_case) == hit[0]
        for rank_losses, rank_norms, _, rank_backbone, _, _ in of_case:
            np.testing.assert_allclose(rank_losses, losses, rtol=1e-10)
            np.testing.assert_allclose(rank_norms, norms, rtol=1e-9)
            for name, value in backbone.items():
                np.testing.assert_allclose(rank_backbone[name], value, rtol=1e-10, atol=1e-10, err_msg=name)
        first_replica = [state for _, _, state, _, (replica, _, _), _ in of_case if replica == 0]
        for name in (name for name in tables if name.endswith(".rows")):
            joined = np.concatenate([state[name] for state in first_replica])
            views = [key for key in first_replica[0] if key.endswith("row_ids")]
            rows = np.concatenate([state[views[0]] for state in first_replica])
            np.testing.assert_allclose(joined[np.argsort(rows)], tables[name], rtol=1e-10, atol=1e-10, err_msg=name)


def test_touched_rows_and_tiers_have_the_replicas_of_a_run_that_holds_all_rows():
    cases = {name: ({**CASES[name], "shard": 2},) for name in ("50 %, catch-up", "50 %, touched rows", "50 %, host")}
    results = run_ranks(train_all, 4, cases, torch.float32)
    for name in cases:
        of_case = [one[name] for one in results]
        check_replicas(of_case, 2)
        assert [one[:2] for one in of_case] == [one["50 %, catch-up"][:2] for one in results]


def test_replicas_beside_a_tensor_axis():
    memory = {"sites": SITES, "optimizer": "catch_up"}
    model = {"engine": "replicated", "tensor": 2}
    cases = {"replicas": ({**memory, "shard": 1}, model), "one": (memory, model)}
    results = run_ranks(train_all, 4, cases, torch.float32)
    check_replicas([one["replicas"] for one in results], 2)
    for one in results:
        np.testing.assert_allclose(one["replicas"][0], one["one"][0], rtol=1e-5)
        np.testing.assert_allclose(one["replicas"][1], one["one"][1], rtol=1e-5)
