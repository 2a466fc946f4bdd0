"""Sequences that are cut over ranks: losses, norms and weights of every method follow the run of one process."""

import copy
import json
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from ranks_helper import run_ranks

STEPS, SEQUENCES, LENGTH, END = 20, 4, 32, 3
MODEL = {
    "layers": 2,
    "width": 16,
    "heads": 4,
    "kv_heads": 2,
    "sequence_length": LENGTH,
    "init_std": 0.1,
    "z_loss": 0.01,
}
MASKED = {"document_masking": True, "label_masking": True}
SITES = {
    "h": {"views": 1, "kernels": [3]},
    "qk": {"views": 1, "kernels": [2]},
    "v": {"views": 2, "kernels": [3, 5]},
    "o": {"views": 1, "kernels": [4], "layers": [1]},
}
TRAIN = {"activation_checkpointing": True, "accumulation": "tokens"}
METHODS = ("vanilla", "ple", "retoken", "mort", "stem", "engram", "mole", "scone")
CASES = {
    "xgram, documents": {"model": MASKED, "train": TRAIN},
    "all sites": {"memory": {"sites": SITES}},
    "all sites, documents": {"memory": {"sites": SITES}, "model": MASKED},
    "engram, documents": {"method": "engram", "model": MASKED},
    **{method: {"method": method} for method in METHODS},
}
"""By name: what differs from a small model of X-gram."""
TENSOR = {"context": 2, "tensor": 2}
"""Of eight ranks, the others have other sequences."""
ENGINES = {
    "hsdp": {"engine": "hsdp", "context": 2},
    "stage 1": {"engine": "deepspeed", "zero_stage": 1, "context": 2},
    "stage 3": {"engine": "deepspeed", "zero_stage": 3, "context": 2},
}


def settings_of(case, parallel):
    import method_models as methods
    import tiny_models as tiny

    sections = copy.deepcopy(CASES[case])
    method = sections.pop("method", "xgram")
    changed = {
        "model": MODEL | sections.get("model", {}),
        # A larger eps keeps AdamW from blowing up rounding where a gradient is all but zero.
        "optimizer": {"clip_norm": 0.3, "eps": 1e-4},
        "parallel": {"engine": "replicated", **parallel},
        "train": {"micro_batch": 1, "global_batch": SEQUENCES, "steps": 100} | sections.get("train", {}),
    }
    memory = sections.get("memory", {})
    if method in methods.MEMORY:
        if method in methods.WITH_TABLES:
            memory = {"optimizer": "catch_up", **memory}
        return methods.config(method, memory=memory, **changed)
    memory = {"method": method, **({} if method == "vanilla" else {"optimizer": "catch_up"}), **memory}
    return tiny.config(memory=memory, **changed)


def batch_of(step):
    tokens = torch.randint(0, 9, (SEQUENCES, 1, LENGTH), generator=torch.Generator().manual_seed(step))
    tokens[0, 0, 3:30] = 5  # sequences with different numbers of labels, and a document over all chunks
    return tokens


def run(ranks, case, parallel, dtype=torch.float64, steps=STEPS):
    """(losses, norms, {parameter or rows: (values, global shape, offsets)}) on this rank."""
    import method_models as methods
    import tiny_models as tiny

    from xgram_dist.engine import build_engine
    from xgram_dist.model.build import build_lookup
    from xgram_dist.parallel.mesh import build_mesh
    from xgram_dist.tables.exchange import ShardedTables
    from xgram_dist.train.step import JointOptimizer, train_step

    torch.set_num_threads(1)
    config = settings_of(case, parallel)
    mesh = build_mesh(config, ranks)
    model = tiny.model(config, dtype, END, mesh.tensor, mesh.context)
    engine = build_engine(config, model, mesh, tiny.CPU)
    keys = methods.grams(config) if config.memory.method == "scone" else None
    routing = tiny.routing(config) if config.memory.method == "xgram" else None
    lookup = build_lookup(config, routing, tiny.CPU, mesh, keys, END)
    if isinstance(lookup, ShardedTables):
        tiny.convert(lookup.shards, dtype)
    optimizer = JointOptimizer(config, engine, lookup, mesh)
    losses, norms = [], []
    for step in range(1, steps + 1):
        mine = batch_of(step).chunk(mesh.batch.size)[mesh.batch.rank]
        result = train_step(config, lookup, optimizer, mine, lookup.plan(mine).result(), step)
        losses.append(float(result.loss))
        norms.append(float(result.gradient_norm))
    weights = state_of(engine, lookup, mesh)
    lookup.close()
    engine.close()
    return losses, norms, weights


@torch.no_grad()
def state_of(engine, lookup, mesh):
    """Parts of what is trained: name -> [(values, where in the whole)]."""
    import tiny_models as tiny

    from xgram_dist.tables.exchange import shards_of

    found = {}
    for shard in engine.parameter_shards():
        if shard.kind == "weight":
            for offsets, tensor in shard.chunks:
                offset = list(offsets)
                if shard.tensor_dim is not None:
                    offset[shard.tensor_dim] += mesh.tensor.rank * shard.shape[shard.tensor_dim]
                place = tuple(slice(o, o + n) for o, n in zip(offset, tensor.shape, strict=True))
                found.setdefault(shard.name, []).append((place, tensor.double().numpy()))
    for shard in shards_of(lookup) or ():
        for name, values in tiny.table_tensors([shard]).items():
            rows = shard.row_ids.numpy()
            place = (rows,)
            if values.dim() == 2:
                width = values.shape[1]
                place = (rows, slice(mesh.tensor.rank * width, (mesh.tensor.rank + 1) * width))
            found[name] = [(place, values.double().numpy())]
    return found


def run_cases(ranks, cases):
    return [run(ranks, *case) for case in cases]


@pytest.fixture(scope="module")
def alone():
    """Runs of one process, each made once."""
    from xgram_dist.parallel.process_group import ProcessGroup

    made = {}

    def get(case, dtype=torch.float64, steps=STEPS):
        if (case, dtype) not in made:
            made[case, dtype] = run(ProcessGroup(), case, {}, dtype, steps)
        return made[case, dtype]

    return get


def assert_follows(results, expected, tolerance, where):
    losses, norms, weights = expected
    for of_rank in results:
        np.testing.assert_allclose(of_rank[0], losses, rtol=tolerance, err_msg=where)
        np.testing.assert_allclose(of_rank[1], norms, rtol=tolerance, err_msg=where)
    for name, parts in weights.items():
        whole = np.zeros([max(1, n) for n in _shape_of(parts)])
        for place, values in parts:
            whole[place] = values
        covered = np.zeros(whole.shape, dtype=bool)
        for of_rank in results:
            for place, values in of_rank[2].get(name, []):
                np.testing.assert_allclose(
                    values, whole[place], rtol=tolerance, atol=tolerance, err_msg=f"{where}: {name}"
                )
                covered[place] = True
        assert covered.all(), f"{where}: {name}"


def _shape_of(parts):
    shapes = []
    for place, values in parts:
        first, *rest = place if place else (slice(0, 1),)
        rows = first.stop if isinstance(first, slice) else int(first.max()) + 1
        shapes.append((rows, *(one.stop for one in rest)) if place else values.shape)
    return np.max(shapes, axis=0).tolist() if shapes[0] else []


def cases_of(size):
    """(case, parallel) of a number of ranks."""
    if size == 8:
        return [("all sites, documents", TENSOR)]
    if size == 2:
        return [(case, {"context": 2}) for case in CASES]
    with_tensor = ("all sites", "xgram, documents", "mort", "engram", "stem", "mole", "scone")
    return [
        *((case, TENSOR) for case in with_tensor),
        *((case, {"context": 4}) for case in ("all sites, documents", "engram")),
        *((case, {"context": 2}) for case in ("xgram, documents", "mort")),
        ("all sites, documents", {**TENSOR, "sequence_parallel": True}),
    ]


@pytest.mark.parametrize("size", [2, 4, 8])
def test_fp64_runs_equal_those_of_one_process(alone, size):
    cases = cases_of(size)
    results = run_ranks(run_cases, size, cases, timeout=600)
    for number, (case, axes) in enumerate(cases):
        assert_follows([of_rank[number] for of_rank in results], alone(case), 1e-10, f"{case}, {axes}, {size} ranks")
        assert np.mean(alone(case)[0][-3:]) < alone(case)[0][0], case


def compiled_hidden(ranks):
    """Hidden states of compiled blocks with the mask of a GPU, and of plain ones with that of the CPU; graphs made."""
    import tiny_models as tiny

    from xgram_dist.model import transformer
    from xgram_dist.model.document_attention import build_block_mask
    from xgram_dist.parallel.mesh import build_mesh

    model = MODEL | {"document_masking": True, "width": 64, "sequence_length": 520}
    config = tiny.config(model=model, memory={"sites": SITES}, parallel={"engine": "replicated", "context": ranks.size})
    mesh = build_mesh(config, ranks)
    plain, compiled = (tiny.model(config, end_of_text=END, context=mesh.context) for _ in range(2))
    lookup = tiny_lookup(config, mesh)
    graphs = []

    def count(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    for block in compiled.blocks:
        block.compile(backend=count, fullgraph=True)
    found = []
    for seed in range(2):
        tokens = tiny.tokens(config, 2, 520, seed=seed)
        working = tiny.fetch(lookup, tokens, training=False)
        inputs = tokens, working.slots, working.values, torch.tensor(1.0)
        with torch.no_grad():
            expected = plain(*inputs)
            with mock.patch.object(transformer, "build_document_mask", build_block_mask):
                found.append((compiled(*inputs).numpy(), expected.numpy()))
    torch._dynamo.reset()
    lookup.close()
    return found, len(graphs)


def tiny_lookup(config, mesh):
    import tiny_models as tiny

    from xgram_dist.model.build import build_lookup

    return build_lookup(config, tiny.routing(config), tiny.CPU, mesh)


def test_compiled_blocks_have_no_graph_break():
    """As on a GPU, where the mask of flex_attention is an argument of the compiled block."""
    for found, graphs in run_ranks(compiled_hidden, 2):
        for compiled, plain in found:
            np.testing.assert_allclose(compiled, plain, rtol=1e-4, atol=1e-5)
        assert graphs == 2  # layers differ in their sites; micro-batches share them


KEPT = {
    "fp32": {"train": {"precision": "fp32", "micro_batch": 2, "global_batch": 2}},
    "fp32, recomputed": {
        "train": {"precision": "fp32", "micro_batch": 2, "global_batch": 2, "activation_checkpointing": True}
    },
    "bf16": {"train": {"precision": "bf16", "micro_batch": 2, "global_batch": 2}},
}


def kept_config(case, context):
    import tiny_models as tiny

    model = {"layers": 2, "width": 64, "ffn_width": 112, "sequence_length": 256, "loss_chunk": 64}
    parallel = {"engine": "replicated", "context": context}
    return tiny.config(model=model, memory={"sites": SITES}, parallel=parallel, **KEPT[case])


def kept_bytes(ranks):
    """What autograd keeps between forward and backward, without parameters and the working set."""
    import tiny_models as tiny

    from xgram_dist.parallel.device import DTYPES
    from xgram_dist.parallel.mesh import build_mesh

    found = {}
    for case in KEPT:
        config = kept_config(case, ranks.size)
        mesh = build_mesh(config, ranks)
        model, lookup = tiny.model(config, context=mesh.context), tiny_lookup(config, mesh)
        model.compute_dtype = DTYPES[config.train.precision]
        tokens = tiny.tokens(config, 1, 2, config.model.sequence_length)
        working = tiny.fetch(lookup, tokens)
        known = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *working.values.values())}
        kept = {}

        def pack(tensor, known=known, kept=kept):
            storage = tensor.untyped_storage()
            is_mask = tensor.dtype == torch.bool
            is_cast_weight = tensor.dim() == 2 and tensor.dtype == torch.bfloat16 and tensor.shape[0] != 256
            if storage.data_ptr() not in known and not is_mask and not is_cast_weight:
                kept[storage.data_ptr()] = storage
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model.loss(tokens[0], working.slots[0], working.values, torch.tensor(1.0, dtype=torch.float64))
        lookup.close()
        head = config.model.vocabulary * config.model.width * 4  # its gradient is formed in forward
        found[case] = sum(storage.nbytes() for storage in kept.values()) - head
    return found


def test_activations_are_within_a_tenth_of_what_is_planned():
    from xgram_dist.estimate.comm import Axes
    from xgram_dist.estimate.memory import block_activation_bytes, plan_activations

    for found in run_ranks(kept_bytes, 2):
        for case, real in found.items():
            config = kept_config(case, 2)
            planned = {one.key: one.bytes for one in plan_activations(config, Axes.of(config, 2))}
            expected = planned["activations"] + planned["keys_and_values"]
            if config.train.activation_checkpointing:  # one block of them is there in backward only
                tokens = 256  # two halves of sequences
                expected -= max(block_activation_bytes(config, layer, 1) for layer in range(2)) * tokens
                expected -= planned["keys_and_values"]
            print(case, expected / real)
            assert expected == pytest.approx(real, rel=0.1), case


def extended(ranks, config, folder, start):
    from xgram_dist.train.checkpointing import StartCheckpoint
    from xgram_dist.train.spikes import Spikes
    from xgram_dist.train.trainer import Trainer

    torch.set_num_threads(1)
    begin = None
    if start is not None:
        begin = StartCheckpoint.find(Path(start), Path(folder), weights_only=True, fresh=False)
    with mock.patch.object(Spikes, "is_spike", return_value=True):  # so that every step leaves a record
        assert Trainer(config, Path(folder), False, ranks, start_from=begin).run() == 0


def test_a_run_of_short_sequences_goes_on_with_four_times_the_context(data, tmp_path):
    """As recipes/extend: another theta, a stage of the data between, sequences shared by ranks."""
    from train_helpers import read_metrics, small_config

    from xgram_dist.parallel.process_group import ProcessGroup

    def config(context, **sections):
        train = {"steps": 4, "global_batch": 4, "micro_batch": 1, "validation_sequences": 4}
        parallel = {"engine": "replicated", "context": context}
        return small_config(data, train=train, parallel=parallel, **sections)

    long = {"model": {"sequence_length": 128, "rope_theta": 2e6}}
    long["data"] = {"stages": [{"from_tokens": 0, "sequence_length": 64}, {"from_tokens": 1024}]}
    extended(ProcessGroup(), config(1), str(tmp_path / "short"), None)
    extended(ProcessGroup(), config(1, **long), str(tmp_path / "one"), str(tmp_path / "short"))
    run_ranks(extended, 2, config(2, **long), str(tmp_path / "two"), str(tmp_path / "short"))
    one, two = (read_metrics(tmp_path / name, "train") for name in ("one", "two"))
    for key in ("loss", "gradient_norm"):
        np.testing.assert_allclose([r[key] for r in two], [r[key] for r in one], rtol=1e-5)
    validated = [read_metrics(tmp_path / name, "end")[0]["validation_loss"] for name in ("one", "two")]
    np.testing.assert_allclose(*validated, rtol=1e-5)
    for step in (1, 4):  # micro-batches with their whole losses, each once
        records = [
            json.loads((tmp_path / name / f"spikes/step-{step:08d}.json").read_text()) for name in ("one", "two")
        ]
        micro_batches = [sorted(one["micro_batch"] for one in record["micro_batches"]) for record in records]
        assert micro_batches[0] == micro_batches[1]
        losses = [[one["loss"] for one in record["micro_batches"]] for record in records]
        np.testing.assert_allclose(*losses, rtol=1e-5)
    assert one[0]["loss"] < read_metrics(tmp_path / "short", "train")[0]["loss"]  # it does not begin anew


def test_engines_that_compute_in_fp32_stay_near(alone):
    cases = [("all sites, documents", axes, torch.float32) for axes in ENGINES.values()]
    results = run_ranks(run_cases, 4, cases, timeout=600)
    for number, name in enumerate(ENGINES):
        expected = alone("all sites, documents", torch.float32)
        assert_follows([of_rank[number] for of_rank in results], expected, 1e-5, name)
