"""With `memory.overlap` a run is the same, bit for bit, as without: losses, weights, tables, optimizer state."""

import hashlib
from pathlib import Path

import pytest
from ranks_helper import run_ranks
from train_helpers import read_metrics, small_config

STEPS, SKIPPED = 6, 3
SITES = {"h": {"views": 1, "kernels": [3]}, "v": {"views": 2, "kernels": [3, 5]}}
ENGINES = {
    "replicated": {"engine": "replicated"},
    "hsdp": {"engine": "hsdp"},
    "stage 1": {"engine": "deepspeed", "zero_stage": 1},
    "stage 2": {"engine": "deepspeed", "zero_stage": 2},
    "stage 3": {"engine": "deepspeed", "zero_stage": 3},
}
TABLES = {
    "50 %, catch-up": {"optimizer": "catch_up", "sites": SITES},
    "50 %, catch-up, windows": {"optimizer": "catch_up", "window": 1, "sites": SITES},
    "50 %, dense": {"optimizer": "dense"},
    "50 %, Adagrad, bf16": {"optimizer": "adagrad", "wire": "bf16"},
    "100 %, catch-up": {"optimizer": "catch_up", "compression": 1.0},
    "100 %, dense, windows, bf16": {"optimizer": "dense", "compression": 1.0, "window": 1, "wire": "bf16"},
    "100 %, Adagrad, host": {"optimizer": "adagrad", "compression": 1.0, "placement": "host"},
}


def digest(tensors):
    whole = hashlib.sha256()
    for tensor in tensors:
        whole.update(tensor.detach().contiguous().view(-1).numpy().tobytes())
    return whole.hexdigest()


def train(ranks, parallel, memory, train_keys=None):
    """Some steps, one of which is skipped -> what must not depend on the overlap; how often vectors were early."""
    import tiny_models as tiny

    from xgram_dist.engine import build_engine
    from xgram_dist.model.build import build_lookup
    from xgram_dist.parallel.mesh import build_mesh
    from xgram_dist.train.step import JointOptimizer, train_step

    config = tiny.config(
        model={"heads": 4, "kv_heads": 4},
        memory=memory,
        optimizer={"clip_norm": 0.3},
        parallel=parallel,
        train={"micro_batch": 1, "global_batch": 2 * ranks.size // parallel.get("tensor", 1), **(train_keys or {})},
    )
    mesh = build_mesh(config, ranks)
    model = tiny.model(config, tensor=mesh.tensor)
    engine = build_engine(config, model, mesh, tiny.CPU)
    lookup = build_lookup(config, tiny.routing(config), tiny.CPU, mesh)
    optimizer = JointOptimizer(config, engine, lookup, mesh)

    def tokens(step):
        # Half the steps see few tokens, so that rows are left out for some steps and then hit again.
        return tiny.tokens(config, mesh.data.size, 2, 1, 12, seed=step)[mesh.data.rank] // (1 if step % 2 else 6)

    found, early, working = [], 0, None
    planned = lookup.plan(tokens(1))
    for step in range(1, STEPS + 1):
        windows = planned.result()
        planned = lookup.plan(tokens(step + 1))
        if step == SKIPPED:
            backward = engine.backward
            engine.backward = lambda loss, last, run=backward: run(loss * float("nan"), last=last)
        ahead = lookup.overlap and step < STEPS
        result = train_step(
            config, lookup, optimizer, tokens(step), windows, step, working=working, upcoming=planned if ahead else None
        )
        if step == SKIPPED:
            engine.backward = backward
        working = result.next_working
        early += working is not None
        assert result.applied == (step != SKIPPED)
        found += [float(result.loss).hex(), float(result.gradient_norm).hex()]
    planned.result()
    found.append(digest(chunk.tensor for shard in engine.parameter_shards() for chunk in shard.chunks))
    for shard in lookup.shards:
        state = shard.state_dict()
        parts = state.columns, state.tables, state.rows, state.replicated
        found += [f"{name} {digest([tensor])}" for part in parts for name, tensor in part.items()]
    lookup.close()
    engine.close()
    return found, early


def train_both(ranks, cases):
    """[(without overlap, with it)] of each case."""
    return [
        [train(ranks, parallel, {**memory, "overlap": overlap}, *more) for overlap in (False, True)]
        for parallel, memory, *more in cases
    ]


def assert_equal(size, cases):
    for of_rank in run_ranks(train_both, size, list(cases.values())):
        for name, ((plain, never), (overlapped, early)) in zip(cases, of_rank, strict=True):
            assert (never, early) == (0, STEPS - 1), name
            assert plain == overlapped, name


@pytest.mark.parametrize("size", [2, 3])
def test_tables_of_every_kind(size):
    assert_equal(size, {name: (ENGINES["replicated"], memory) for name, memory in TABLES.items()})


def test_every_engine():
    kinds = "50 %, catch-up", "100 %, dense, windows, bf16"
    assert_equal(2, {f"{name}, {kind}": (ENGINES[name], TABLES[kind]) for name in ENGINES for kind in kinds})


def test_activation_checkpointing_and_a_tensor_axis():
    cases = {"checkpointing": (ENGINES["hsdp"], TABLES["50 %, catch-up"], {"activation_checkpointing": True})}
    for name in ("replicated", "stage 2"):
        cases[f"{name}, tensor 2"] = ({**ENGINES[name], "tensor": 2}, TABLES["50 %, catch-up"])
    parallel = {**ENGINES["replicated"], "tensor": 2, "sequence_parallel": True}
    cases["sequence parallel"] = (parallel, TABLES["50 %, catch-up"])
    assert_equal(4, cases)


def run_trainer(ranks, data, folder, overlap, stop_after=None):
    """A whole run with validation on its way; with `stop_after` it stops there by a signal, and is resumed."""
    import signal

    from xgram_dist.train.trainer import Trainer

    config = small_config(
        Path(data),
        memory={**small_config(Path(data)).memory.model_dump(mode="json"), "optimizer": "catch_up", "overlap": overlap},
        train={"steps": 8, "validate_every": 3, "global_batch": 8, "micro_batch": 2, "log_every": 1},
        checkpoint={"every": 2},
    )
    first = Trainer(config, Path(folder), fresh=True, ranks=ranks)
    if stop_after is not None:
        trained = first._train

        def train_and_stop(step):
            result = trained(step)
            if step == stop_after:
                signal.raise_signal(signal.SIGTERM)
            return result

        first._train = train_and_stop
        assert first.run() == 130
        assert (first.next_working is not None) == overlap
        first = Trainer(config, Path(folder), fresh=False, ranks=ranks)
        assert first.resumed
    assert first.run() == 0
    if ranks.first:
        return [digest(saved_state(Path(folder)))], numbers(Path(folder))
    return None


def saved_state(run):
    from xgram_dist.checkpoint.folder import checkpoints_at
    from xgram_dist.checkpoint.safetensors_io import SafetensorsFile

    raise NotImplementedError


def numbers(run):
    keys = ("kind", "step", "loss", "gradient_norm")
    return [
        [str(record.get(key)) for key in keys] for record in read_metrics(run) if record["kind"] in ("train", "validation")
    ]
