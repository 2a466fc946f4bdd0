"""With `memory.overlap` a run is the same, bit for bit, as without: losses, weights, tables, optimizer state."""

import hashlib
import signal
from pathlib import Path

import pytest
from ranks_helper import run_ranks
from train_helpers import read_metrics, small_config

from xgram_dist.checkpoint.folder import checkpoints_at
from xgram_dist.checkpoint.reader import CheckpointReader

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
    "50 %, layers that differ by view": {
        "optimizer": "lazy",
        "sites": {"h": {"views": 1, "kernels": [3]}, "v": {"views": 2, "kernels": [3], "layers": [1]}},
    },
    "100 %, catch-up": {"optimizer": "catch_up", "compression": 1.0},
    "100 %, dense, windows, bf16": {"optimizer": "dense", "compression": 1.0, "window": 1, "wire": "bf16"},
    "100 %, Adagrad, host": {"optimizer": "adagrad", "compression": 1.0, "placement": "host"},
}


def digest(tensors):
    whole = hashlib.sha256()
    for tensor in tensors:
        whole.update(tensor.detach().contiguous().view(-1).numpy().tobytes())
    return whole.hexdigest()


def train(ranks, parallel, memory, train_keys=None, message_bytes=1):
    """Some steps, one of which is skipped -> what must not depend on the overlap; how often vectors were early."""
    import tiny_models as tiny

    from xgram_dist.engine import build_engine
    from xgram_dist.model.build import build_lookup
    from xgram_dist.parallel.mesh import build_mesh
    from xgram_dist.tables import layout
    from xgram_dist.train.step import JointOptimizer, train_step

    layout.MESSAGE_BYTES = message_bytes  # 1: a message for each layer
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

    give_back = lookup.give_back

    def check_sent(working):
        """All gradients have left during the backward pass, or none."""
        assert working._leaves.gradients._next == (-1 if lookup.overlap else 0)
        give_back(working)

    lookup.give_back = check_sent
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
            assert (never, early) == (0, 0 if "windows" in name else STEPS - 1), name
            assert plain == overlapped, name


@pytest.mark.parametrize("size", [2, 3])
def test_tables_of_every_kind(size):
    assert_equal(size, {name: (ENGINES["replicated"], memory) for name, memory in TABLES.items()})


def test_every_engine():
    kinds = "50 %, catch-up", "100 %, dense, windows, bf16"
    assert_equal(2, {f"{name}, {kind}": (ENGINES[name], TABLES[kind]) for name in ENGINES for kind in kinds})


def test_a_slab_that_is_one_message():
    assert_equal(2, {"100 %, catch-up": (ENGINES["hsdp"], TABLES["100 %, catch-up"], {}, 1 << 20)})


def test_activation_checkpointing_and_a_tensor_axis():
    cases = {"checkpointing": (ENGINES["hsdp"], TABLES["50 %, catch-up"], {"activation_checkpointing": True})}
    for name in ("replicated", "stage 2"):
        cases[f"{name}, tensor 2"] = ({**ENGINES[name], "tensor": 2}, TABLES["50 %, catch-up"])
    parallel = {**ENGINES["replicated"], "tensor": 2, "sequence_parallel": True}
    cases["sequence parallel"] = (parallel, TABLES["50 %, catch-up"])
    assert_equal(4, cases)


def run_trainer(ranks, data, folder, overlap):
    """A whole run that validates and saves on its way, is stopped by a signal after step 5, and resumed; what its
    metrics and its last checkpoint say."""
    from xgram_dist.tables import layout
    from xgram_dist.train.trainer import Trainer

    layout.MESSAGE_BYTES = 1
    folder = Path(folder) / f"overlap-{overlap}"
    memory = {**small_config(data).memory.model_dump(mode="json"), "optimizer": "catch_up", "overlap": overlap}
    config = small_config(
        data,
        memory=memory,
        train={"steps": 9, "validate_every": 3, "global_batch": 8, "micro_batch": 2, "log_every": 1},
        checkpoint={"every": 2},
    )
    trainer = Trainer(config, folder, True, ranks)
    train_one = trainer._train

    def train_and_stop(step):
        result = train_one(step)
        early = step != 3 and overlap  # step 3 is followed by a validation
        assert (trainer.next_working is not None) == early
        if step == 5 and ranks.first:
            signal.raise_signal(signal.SIGTERM)
        return result

    trainer._train = train_and_stop
    assert trainer.run() == 130
    trainer = Trainer(config, folder, False, ranks)
    assert trainer.resumed
    assert trainer.run() == 0
    assert trainer.next_working is None
    if not ranks.first:
        return None
    keys = ("kind", "step", "loss", "gradient_norm")
    records = [record for record in read_metrics(folder) if record["kind"] in ("train", "validation")]
    reader = CheckpointReader(checkpoints_at(folder)[-1])
    names = sorted(name for name in reader.manifest.tensors if not name.startswith("rng."))
    saved = [f"{name} {digest([reader.tensor(name)])}" for name in names]
    return [[record.get(key) for key in keys] for record in records], saved


def run_trainers(ranks, data, folder):
    return [run_trainer(ranks, data, folder, overlap) for overlap in (False, True)]


def test_a_run_that_validates_saves_stops_and_resumes(data, tmp_path):
    (plain, overlapped), _ = run_ranks(run_trainers, 2, data, str(tmp_path))
    assert [step for kind, step, *_ in plain[0] if kind == "validation"] == [3, 6, 9]
    assert plain == overlapped
