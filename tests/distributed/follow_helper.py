"""Runs that are to follow one another: the same batches through the whole step, on any engine and number of ranks."""

import torch


def follow(ranks, config, lookup_of, batch_of, steps):
    """(losses, joint norms). `lookup_of`: of a mesh; `batch_of`: of a step, all ranks' sequences [S, 1, length]."""
    import tiny_models as tiny

    from xgram_dist.engine import build_engine
    from xgram_dist.parallel.mesh import build_mesh
    from xgram_dist.train.step import JointOptimizer, train_step

    torch.set_num_threads(1)
    mesh = build_mesh(config, ranks)
    engine = build_engine(config, tiny.model(config, tensor=mesh.tensor), mesh, tiny.CPU)
    lookup = lookup_of(mesh)
    optimizer = JointOptimizer(config, engine, lookup, mesh)
    losses, norms = [], []
    for step in range(1, steps + 1):
        batch = batch_of(step)
        share = len(batch) // mesh.data.size
        mine = batch[mesh.data.rank * share : (mesh.data.rank + 1) * share]
        result = train_step(config, lookup, optimizer, mine, lookup.plan(mine).result(), step)
        losses.append(float(result.loss))
        norms.append(float(result.gradient_norm))
    lookup.close()
    engine.close()
    return losses, norms
