"""Training runs whose losses, norms, weights and rows are brought together from any mesh."""

import numpy as np
import torch

HEAVY_HEAD = {"vocabulary": 60, "layers": 4, "heads": 4, "kv_heads": 4, "sequence_length": 16}
END_OF_TEXT = 3


def config_of(method, parallel, *, model=None, memory=None, train=None, **sections):
    import method_models as methods
    import tiny_models as tiny

    tree = {
        "model": {**HEAVY_HEAD, **(model or {})},
        "memory": {"optimizer": "catch_up", **(memory or {})} if method not in ("mole", "scone", "vanilla") else {},
        # Clipping is at work; a larger eps keeps AdamW from blowing up rounding where a gradient is all but zero.
        "optimizer": {"clip_norm": 0.3, "eps": 1e-4, "learning_rate": 1e-2},
        "parallel": {"engine": "replicated", **parallel},
        "train": {"micro_batch": 1, "global_batch": 4, "steps": 100, **(train or {})},
        **sections,
    }
    if method in ("xgram", "vanilla"):
        tree["memory"] |= {"method": method}
        return tiny.config(**tree)
    if method == "stem":
        tree["memory"]["stem"] = {"layers": [0, 1, 2, 3]}
    if method == "engram":
        tree["memory"]["engram"] = {"heads": 2, "rows": 40, "width": 24, "taps": 3, "layers": [0, 1, 2, 3]}
    return methods.config(method, **tree)


def batch_of(config, step):
    """All sequences of a step [S, T], of few tokens."""
    shape = config.train.global_batch, config.model.sequence_length
    return torch.randint(0, 9, shape, generator=torch.Generator().manual_seed(step))


def build(config, ranks, dtype):
    """(mesh, engine, lookup)"""
    import method_models as methods
    import tiny_models as tiny

    from xgram_dist.engine import build_engine
    from xgram_dist.model.build import build_lookup, of_method
    from xgram_dist.model.methods.base import table_layout
    from xgram_dist.parallel.device import DTYPES
    from xgram_dist.parallel.mesh import build_mesh

    torch.set_num_threads(1)
    mesh = build_mesh(config, ranks)
    masking = END_OF_TEXT if config.model.document_masking else None
    model = tiny.model(config, dtype, masking, mesh.tensor, mesh.context, mesh.pipeline)
    if dtype == torch.float32:
        model.compute_dtype = DTYPES[config.train.precision]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not config.train.freeze_backbone or of_method(name))
    engine = build_engine(config, model, mesh, tiny.CPU)
    keys = methods.grams(config) if config.memory.method == "scone" else None
    routing = tiny.routing(config) if table_layout(config).hashed else None
    lookup = build_lookup(config, routing, tiny.CPU, mesh, keys)
    if dtype != torch.float32 and hasattr(lookup, "shards"):
        tiny.convert(lookup.shards, dtype)
    return mesh, engine, lookup


def train(ranks, config, dtype=torch.float32, steps=20):
    """{"loss": .., "norm": .., "validation": .., "weights": {name: array}}, the same on every rank."""
    from xgram_dist.train.callbacks import Validation
    from xgram_dist.train.step import JointOptimizer, train_step

    mesh, engine, lookup = build(config, ranks, dtype)
    optimizer = JointOptimizer(config, engine, lookup, mesh)
    losses, norms, working = [], [], None
    for step in range(1, steps + 1):
        mine = batch_of(config, step).view(mesh.batch.size, -1, config.train.micro_batch, config.model.sequence_length)
        mine = mine[mesh.batch.rank]
        windows = lookup.plan(mine).result()
        result = train_step(config, lookup, optimizer, mine, windows, step, working=working)
        losses.append((float(result.loss), float(result.cross_entropy)))
        norms.append(float(result.gradient_norm))
    batches = [batch_of(config, number)[:2] for number in (91, 92, 93)]
    validation = Validation(config, mesh, engine, lookup, batches).loss(steps)
    found = {"loss": losses, "norm": norms, "validation": validation, "weights": weights_of(mesh, engine, lookup)}
    lookup.close()
    engine.close()
    return found


def weights_of(mesh, engine, lookup):
    """All parameters and the rows and gates of all tables, whole, by name."""
    from engine_helper import full_parameters
    from tiny_models import table_tensors

    from xgram_dist.tables.exchange import shards_of

    parts = {}
    for name, value in full_parameters(engine).items():
        parts[name] = (engine.tensor_dims.get(name), None, value.detach().double().numpy())
    rows = 0
    shards = shards_of(lookup)
    if shards is not None:
        rows, ids = shards.num_rows, shards[0].row_ids.numpy()
        for name, value in table_tensors(shards).items():
            columns = 1 if value.dim() == 2 and mesh.tensor.size > 1 else None
            parts[name] = (columns, ids, value.detach().double().numpy())
    everyone = mesh.world.all_gather_object((mesh.tensor.rank, parts))
    whole = {}
    for tensor, of_rank in everyone:
        for name, (dim, ids, value) in of_rank.items():
            shape = list(value.shape)
            if ids is not None:
                shape[0] = rows
            if dim is not None:
                shape[dim] *= mesh.tensor.size
            target = whole.setdefault(name, np.full(shape, np.nan))
            index = [slice(None)] * len(shape)
            if dim is not None:
                index[dim] = slice(tensor * value.shape[dim], (tensor + 1) * value.shape[dim])
            if ids is not None:
                index[0] = ids
            target[tuple(index)] = value
    assert not any(np.isnan(value).any() for value in whole.values())
    return whole


def assert_same(found, expected, tolerance, where):
    for key in ("loss", "norm", "validation"):
        np.testing.assert_allclose(found[key], expected[key], rtol=tolerance, atol=tolerance, err_msg=f"{where}: {key}")
    assert found["weights"].keys() == expected["weights"].keys(), where
    for name, value in found["weights"].items():
        np.testing.assert_allclose(
            value, expected["weights"][name], rtol=tolerance, atol=tolerance, err_msg=f"{where}: {name}"
        )
