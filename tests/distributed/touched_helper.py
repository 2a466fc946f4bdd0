"""Runs whose shards keep all rows, or touched rows only: the same batches, and what the shards hold in the end."""

import functools
import tempfile

import numpy as np
import torch

SEQUENCES, LENGTH = 4, 12
HISTORY = 5
"""Steps after which all rows are caught up; a run of a real length does it every 4096."""
SKIPPED = 4
"""The step whose loss is made infinite, so that it is skipped."""
HASHED = {
    "method": "xgram",
    "compression": 0.5,
    "sites": {"h": {"views": 1, "kernels": [3]}, "v": {"views": 2, "kernels": [3, 5]}},
    "routing": {"vip": 4, "buckets": 4},
    "learning_rate": {"multiplier": 4.0, "vip_multiplier": 1.5},
    "weight_decay": 0.3,
}
CASES = {
    "xgram, catch-up": ("xgram", {"optimizer": "catch_up"}),
    "xgram, catch-up, windows": ("xgram", {"optimizer": "catch_up", "window": 1}),
    "xgram, catch-up, windows by size": ("xgram", {"optimizer": "catch_up", "window": "20KiB"}),
    "xgram, lazy, host": ("xgram", {"optimizer": "lazy", "placement": "host"}),
    "xgram, catch-up, disk": ("xgram", {"optimizer": "catch_up", "placement": "disk"}),
    "xgram, windows, disk": ("xgram", {"window": 1, "placement": "disk"}),
    "xgram, Adagrad, counted, disk": ("xgram", {"optimizer": "adagrad", "count_updates": True, "placement": "disk"}),
    "xgram, catch-up, host": ("xgram", {"optimizer": "catch_up", "placement": "host"}),
    "xgram, windows, host": ("xgram", {"optimizer": "catch_up", "window": 1, "placement": "host"}),
    "xgram, Adagrad, counted, host": ("xgram", {"optimizer": "adagrad", "count_updates": True, "placement": "host"}),
    "ple, host": ("ple", {"optimizer": "catch_up", "placement": "host", "window": 2, "wire": "bf16"}),
    "engram, overlap, host": ("engram", {"optimizer": "catch_up", "overlap": True, "placement": "host"}),
    "engram, overlap, disk": ("engram", {"overlap": True, "placement": "disk"}),
    "xgram, Adagrad, counted": ("xgram", {"optimizer": "adagrad", "count_updates": True}),
    "xgram, bf16 wire": ("xgram", {"optimizer": "catch_up", "wire": "bf16"}),
    "xgram, bf16": ("xgram", {"optimizer": "catch_up", "rows_dtype": "bf16", "moments": "bf16"}),
    "xgram, bf16 rows, windows, disk": ("xgram", {"window": 1, "rows_dtype": "bf16", "placement": "disk"}),
    "xgram, lazy, bf16 moments": ("xgram", {"optimizer": "lazy", "moments": "bf16"}),
    "ple": ("ple", {"optimizer": "catch_up", "count_updates": True}),
    "ple, lazy": ("ple", {"optimizer": "lazy", "window": 2}),
    "retoken": ("retoken", {"optimizer": "catch_up"}),
    "mort": ("mort", {"optimizer": "catch_up"}),
    "stem": ("stem", {"optimizer": "adagrad"}),
    "ple, bf16 wire, disk": ("ple", {"window": 2, "wire": "bf16", "placement": "disk"}),
    "retoken, disk": ("retoken", {"placement": "disk"}),
    "mort, disk": ("mort", {"window": 1, "placement": "disk"}),
    "stem, disk": ("stem", {"optimizer": "adagrad", "placement": "disk"}),
    "retoken, host": ("retoken", {"optimizer": "catch_up", "window": 1, "placement": "host"}),
    "mort, host": ("mort", {"optimizer": "catch_up", "wire": "bf16", "placement": "host"}),
    "stem, host": ("stem", {"optimizer": "adagrad", "placement": "host"}),
    "engram": ("engram", {"optimizer": "catch_up"}),
    "engram, windows, overlap": ("engram", {"optimizer": "catch_up", "window": 1, "overlap": True}),
}


def case_config(case, rows, **parallel):
    import method_models as methods

    method, memory = CASES[case]
    if memory.get("placement") == "disk":  # all rows are kept in memory
        tier = {"placement": "host", "optimizer": memory.get("optimizer", "catch_up")}
        memory = {**memory, **(tier if rows == "all" else {"folder": tempfile.mkdtemp()})}
    elif memory.get("placement") == "host" and rows == "touched":  # as on a GPU
        memory = {**memory, "update": "device"}
    methods.MEMORY["xgram"] = HASHED
    methods.MEMORY["engram"]["engram"]["rows"] = 1500
    return methods.config(
        method,
        memory={**memory, "rows": rows},
        model={"layers": 2, "vocabulary": 400},
        optimizer={"eps": 1e-5, "decay_vectors": True, "clip_norm": 0.5},
        parallel={"engine": "replicated", **parallel},
        train={"micro_batch": 1, "global_batch": SEQUENCES, "steps": 100},
    )


def batch(config, step):
    """Few tokens in most steps, so that rows are left out for long, and are first hit late."""
    few = 6 if step % 4 else config.model.vocabulary
    return torch.randint(0, few, (SEQUENCES, 1, LENGTH), generator=torch.Generator().manual_seed(step))


def shorten_history():
    from xgram_dist.tables.optimizers import adamw_catchup, build

    build.CatchUpAdamW = functools.partial(adamw_catchup.CatchUpAdamW, history=HISTORY)


def train(ranks, case, rows, steps, **parallel):
    """(losses, for each tensor of the shards its rows by global id). Validation in between, a skipped step, plans that
    are read in another order than they were made, plans that are never read."""
    import tiny_models as tiny

    from xgram_dist.engine import build_engine
    from xgram_dist.model.build import build_lookup
    from xgram_dist.parallel.mesh import build_mesh
    from xgram_dist.train.step import JointOptimizer, train_step

    shorten_history()
    torch.set_num_threads(1)
    config = case_config(case, rows, **parallel)
    mesh = build_mesh(config, ranks)
    engine = build_engine(config, tiny.model(config, tensor=mesh.tensor), mesh, tiny.CPU)
    lookup = build_lookup(config, tiny.routing(config), tiny.CPU, mesh)
    optimizer = JointOptimizer(config, engine, lookup, mesh)
    losses = []
    share = SEQUENCES // mesh.data.size
    mine = slice(mesh.data.rank * share, (mesh.data.rank + 1) * share)
    plan = lookup.plan(batch(config, 1)[mine])
    for step in range(1, steps + 1):
        tokens, windows, plan = batch(config, step)[mine], plan.result(), lookup.plan(batch(config, step + 1)[mine])
        if step % 3 == 0:
            unseen = torch.arange(step, step + LENGTH)[None].expand(share, 1, LENGTH) % config.model.vocabulary
            working = lookup.fetch(lookup.plan(unseen, whole=True).result()[0], training=False)
            losses.append([float(values.double().sum()) for values in working.values.values()])
        if step == SKIPPED:
            engine.clip, clip = functools.partial(refuse, engine.clip), engine.clip
        result = train_step(config, lookup, optimizer, tokens, windows, step)
        if step == SKIPPED:
            assert not result.applied
            engine.clip = clip
        losses.append(float(result.loss))
    held = [state_of(shard) for shard in lookup.shards]
    plan.result()
    lookup.close()
    engine.close()
    return losses, held


def refuse(clip, loss, squares):
    return clip(loss * float("inf"), squares)


def state_of(shard):
    """Name -> {global row: bytes}, and what is replicated."""
    state = shard.state_dict()
    rows = {
        name: dict(zip(state.row_ids.tolist(), map(bytes_of, tensor), strict=True))
        for tensors in (state.columns, state.tables, state.rows)
        for name, tensor in tensors.items()
    }
    return rows, {name: bytes_of(tensor) for name, tensor in state.replicated.items()}


def bytes_of(row):
    numbers = row.detach().contiguous()
    if numbers.dtype == torch.bfloat16:
        numbers = numbers.float()
    return (numbers.int() if numbers.dtype == torch.bool else numbers).numpy().tobytes()


def compare(case, every, touched):
    """Every record is the row of the run that keeps all rows, and other rows were never hit or caught up."""
    assert every[0] == touched[0], case
    for (all_rows, all_replicated), (touched_rows, touched_replicated) in zip(every[1], touched[1], strict=True):
        assert all_replicated == touched_replicated, case
        assert all_rows.keys() == touched_rows.keys()
        for name, by_row in touched_rows.items():
            assert 0 < len(by_row) < len(all_rows[name]), (case, name, len(by_row), len(all_rows[name]))
            for row, numbers in by_row.items():
                assert numbers == all_rows[name][row], (case, name, row)
            if name.endswith(".hit"):
                assert not any(
                    np.frombuffer(all_rows[name][row], np.int32)[0] for row in all_rows[name].keys() - by_row
                )


def run_cases(ranks, cases, rows, steps, parallel):
    return [train(ranks, case, rows, steps, **parallel) for case in cases]


def train_with_numbers(ranks, case, steps, wide):
    """With the numbers and the deduplication of huge tables, or with those of small ones."""
    import pytest

    from xgram_dist.tables import exchange_plan, ngrams, requests, touched_rows

    with pytest.MonkeyPatch.context() as patch:
        if wide:
            patch.setattr(touched_rows, "LARGEST_TABLE", 8)
            for module in (touched_rows, requests, ngrams, exchange_plan):
                patch.setattr(module, "MAX_INT32", 8)
        return train(ranks, case, "touched", steps)


def huge_config(rows):
    import method_models as methods

    methods.MEMORY["engram"]["engram"]["rows"] = rows
    return methods.config(
        "engram",
        model={"layers": 2},
        optimizer={"eps": 1e-5},
        train={"micro_batch": 1, "global_batch": SEQUENCES, "steps": 100},
    )


def train_huge(ranks, rows, steps):
    """(losses, rows created here, bytes of their records)."""
    import tiny_models as tiny

    from xgram_dist.engine import build_engine
    from xgram_dist.model.build import build_lookup
    from xgram_dist.parallel.mesh import build_mesh
    from xgram_dist.train.step import JointOptimizer, train_step

    torch.set_num_threads(1)
    config = huge_config(rows)
    mesh = build_mesh(config, ranks)
    engine = build_engine(config, tiny.model(config), mesh, tiny.CPU)
    lookup = build_lookup(config, None, tiny.CPU, mesh)
    optimizer = JointOptimizer(config, engine, lookup, mesh)
    share, losses = SEQUENCES // mesh.data.size, []
    for step in range(1, steps + 1):
        mine = batch(config, step)[mesh.data.rank * share : (mesh.data.rank + 1) * share]
        losses.append(float(train_step(config, lookup, optimizer, mine, lookup.plan(mine).result(), step).loss))
    records = lookup.shards[0].records
    lookup.close()
    engine.close()
    return losses, records.num_created, records.nbytes
