"""Small models for numeric tests, and the paper's formulas written as plainly as possible."""

import copy

import numpy as np
import torch

from xgram_dist.config import build_config
from xgram_dist.model.build import build_lookup, initialise
from xgram_dist.model.methods.base import method_of, table_layout
from xgram_dist.model.pipeline_stages import stages_of_rank
from xgram_dist.model.transformer import Transformer
from xgram_dist.parallel.context_parallel import context_axis
from xgram_dist.parallel.tensor_parallel import global_shape_and_offset, tensor_axis, tensor_dim, tensor_slice
from xgram_dist.tables.layout import routing_settings
from xgram_dist.tables.routing_build import build_routing
from xgram_dist.tables.shard import Shard

CPU = torch.device("cpu")

BASE = {
    "name": "tiny",
    "model": {
        "vocabulary": 120,
        "layers": 3,
        "width": 16,
        "ffn_width": 24,
        "heads": 4,
        "kv_heads": 2,
        "sequence_length": 12,
    },
    "memory": {
        "method": "xgram",
        "compression": 0.5,
        "sites": {"v": {"views": 2, "kernels": [3, 5]}},
        "routing": {"vip": 4, "buckets": 4},
    },
    "parallel": {"engine": "replicated"},
    "train": {"precision": "fp32", "global_batch": 4, "micro_batch": 2, "steps": 100},
}


def config(**sections):
    """BASE with keys replaced: config(memory={"compression": 1.0})."""
    tree = copy.deepcopy(BASE)
    for section, values in sections.items():
        if isinstance(values, dict):
            tree.setdefault(section, {}).update(values)
        else:
            tree[section] = values
    return build_config(tree)


def routing(settings):
    if settings.memory.method == "vanilla" or settings.memory.compression == 1:
        return None
    counts = 1000.0 / (np.arange(settings.model.vocabulary) * 7 % settings.model.vocabulary + 1.0)
    return build_routing(counts / counts.sum(), routing_settings(settings), table_layout(settings).num_views)


def tables(settings, dtype=torch.float32):
    made = build_lookup(settings, routing(settings), CPU)

    def uneven(gates):
        """Not all alike, so that a gate read from the wrong row or table shows."""
        return gates + torch.randn(gates.shape, generator=torch.Generator().manual_seed(5))

    convert(made.shards, dtype, uneven)
    return made


def convert(shards, dtype, change_gates=lambda gates: gates):
    """Rows, gates and optimizers of another type."""
    for number, shard in enumerate(shards):
        gates = None if shard.gates is None else change_gates(shard.gates).to(dtype)
        shards._shards[number] = Shard(
            shard.slab, shard.row_ids, shard.rows.to(dtype), gates, shard.tensor_group, shards.settings, shards.num_vip
        )


def drop_gradients(shards):
    for shard in shards:
        shard.step = None


def table_tensors(shards):
    """The rows held here, caught up, and their gates: `NAME.rows` [S, width], `NAME.gates` [S]."""
    found = {}
    for shard in shards:
        shard.catch_up_all()
        for number, (name, columns) in enumerate(shard.slab.columns().items()):
            found[f"{name}.rows"] = shard.rows[:, columns]
            if shard.gates is not None:
                found[f"{name}.gates"] = shard.gates[:, number]
    return found


def fetch(tables, tokens, training=True):
    """The working set of these tokens, in one window."""
    return tables.fetch(tables.plan(tokens, whole=True).result()[0], training=training)


def dense_gradients(state):
    """(rows, gates) of a slab's gradient as dense tensors, zero where nothing was read."""
    rows = torch.zeros_like(state.rows)
    gates = None if state.gates is None else torch.zeros_like(state.gates)
    if state.gradient is not None:
        rows[state.gradient.touched_R] = state.gradient.rows_RW * state.gradient.factor
        if gates is not None:
            gates[state.gradient.touched_R] = state.gradient.gates_RJ * state.gradient.factor
    return rows, gates


def model(settings, dtype=torch.float32, end_of_text=None, tensor=None, context=None, pipeline=None):
    if pipeline is not None and pipeline.size > 1:
        return _stages_of(model(settings, dtype, end_of_text, tensor, context), settings, pipeline)
    axis = tensor_axis(tensor, settings.parallel.sequence_parallel)
    made = Transformer(settings, dtype, end_of_text, axis, context_axis(context, method_of(settings).reach))
    initialise(made, settings)
    made.activation_checkpointing = settings.train.activation_checkpointing
    # Move what starts at a special value, so that a forgotten factor shows.
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if ".sites." in name:
                noise = torch.randn(global_shape_and_offset(parameter, made.axis)[0], generator=generator)
                parameter.add_(0.3 * tensor_slice(noise, tensor_dim(parameter), made.axis))
    return made.to(dtype)


def _stages_of(whole, settings, pipeline):
    """The part of a model that a rank of a pipeline has."""
    stages = stages_of_rank(settings, pipeline)
    made = Transformer(settings, whole.compute_dtype, whole.end_of_text, whole.axis, whole.context, stages)
    made.activation_checkpointing = whole.activation_checkpointing
    values = dict(whole.named_parameters())
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            parameter.copy_(values[name])
    return made.to(next(whole.parameters()).dtype)


def tokens(settings, *shape, seed=0):
    return torch.randint(0, settings.model.vocabulary, shape, generator=torch.Generator().manual_seed(seed))


def literal_retrieval(made, name, token):
    """e(token) of one table, as a loop over the accesses of the token."""
    for state, row_map in zip(made.shards, made.planner.access_lists, strict=True):
        for number, (table, columns) in enumerate(state.slab.columns().items()):
            if table != name:
                continue
            if row_map is None:
                return state.rows[token, columns].clone()
            begin, end = row_map.offsets[token], row_map.offsets[token + 1]
            total = torch.zeros(columns.stop - columns.start, dtype=state.rows.dtype)
            for entry in range(int(begin), int(end)):
                row = int(row_map.rows[entry])
                factor = torch.tensor(row_map.coefficients[entry]).to(total.dtype)
                if state.gates is not None:
                    factor = factor * torch.sigmoid(state.gates[row, number])
                total = total + factor * state.rows[row, columns]
            return total
    raise KeyError(name)


def literal_shortconv(extractor, e_TW, documents=None):
    """The gated convolution of one sequence, as sums over positions and taps."""
    n = e_TW / torch.sqrt((e_TW**2).mean(1, keepdim=True) + 1e-5) if extractor.normalised else e_TW
    out = torch.zeros_like(e_TW)
    for t in range(e_TW.shape[0]):
        content = torch.zeros_like(e_TW[0])
        gate = torch.zeros_like(e_TW[0]) + (extractor.gate_bias if extractor.gate_bias is not None else 0)
        for j in range(extractor.taps):
            if t - j < 0 or (documents is not None and documents[t - j] != documents[t]):
                continue
            content = content + extractor.content[j] * n[t - j]
            if extractor.gate is not None:
                gate = gate + extractor.gate[j] * n[t - j]
        if extractor.gate is not None:
            content = content * gate / (1 + torch.exp(-gate))
        out[t] = e_TW[t] + content
    return out
