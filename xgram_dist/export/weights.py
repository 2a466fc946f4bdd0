"""The tensors of a checkpoint under the names of a Hugging Face model, as streams."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xgram_dist.checkpoint.storage import FolderReader
from xgram_dist.export.shards import Stream
from xgram_dist.inference.computed import SIDE, ComputedTables
from xgram_dist.inference.modeling_xgram import module_name
from xgram_dist.inference.open import Checkpoint
from xgram_dist.inference.rows import MappedTables
from xgram_dist.inference.weights import read_whole

BLOCK_ELEMENTS = 1 << 22
BACKBONE = "backbone."
MOMENTS = (".first_moment", ".second_moment")


@dataclass(frozen=True)
class Weights:
    streams: dict[str, Stream]
    tables: list[dict[str, Any]]
    accesses: list[int]
    gated: bool
    keys: list[int]
    """Sizes of the arrays by which n-grams are looked up."""


def xgram_weights(checkpoint: Checkpoint, dtype: torch.dtype) -> Weights:
    reader = FolderReader(checkpoint.folder, checkpoint.manifest)
    names = [name for name in backbone_names(checkpoint) if not any(part in name for part in SIDE)]
    streams = {f"decoder.{name}": _parameter(reader, name, dtype) for name in names}
    tables, keys = checkpoint.tables(reader, verify=True), checkpoint.keys()
    arrays = [] if keys is None else keys.arrays
    streams |= {
        f"key_map.array_{n}": _whole(torch.from_numpy(array.astype(np.int64))) for n, array in enumerate(arrays)
    }
    sizes = [len(array) for array in arrays]
    if tables is None:
        return Weights(streams, [], [], False, sizes)
    listed: list[dict[str, Any]] = []
    if isinstance(tables, ComputedTables):
        for made in tables.tables:
            listed.append({"name": made.name, "rows": made.rows, "width": made.width, "view": 0})
            rows_of = _rows(tables, made.name, (made.rows, made.width), dtype)
            streams[f"tables.{module_name(made.name)}.rows"] = rows_of
        return Weights(streams, listed, [], False, sizes)
    for number, slab in enumerate(tables.slabs):
        for table in slab.slab.tables:
            rows, width = slab.slab.rows, table.width
            listed.append({"name": table.name, "rows": rows, "width": width, "view": number})
            prefix = f"tables.{module_name(table.name)}"
            streams[f"{prefix}.rows"] = _rows(tables, table.name, (rows, width), dtype)
            if slab.gates is not None:
                streams[f"{prefix}.gates"] = _gates(tables, table.name, rows)
        if tables.routing is not None:
            view = tables.routing.views[slab.slab.view]
            for key, values in (
                ("offsets", view.offsets),
                ("rows", view.rows.astype(np.int64)),
                ("coefficients", view.coefficients),
            ):
                streams[f"views.{number}.{key}"] = _whole(torch.from_numpy(values.copy()))
    accesses = [] if tables.routing is None else [len(tables.routing.views[s.slab.view].rows) for s in tables.slabs]
    return Weights(streams, listed, accesses, tables.slabs[0].gates is not None, sizes)


STOCK = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.query.weight": "self_attn.q_proj.weight",
    "attention.key.weight": "self_attn.k_proj.weight",
    "attention.value.weight": "self_attn.v_proj.weight",
    "attention.output.weight": "self_attn.o_proj.weight",
    "attention.query_norm.weight": "self_attn.q_norm.weight",
    "attention.key_norm.weight": "self_attn.k_norm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn.gate.weight": "mlp.experts.0.gate_proj.weight",
    "ffn.up.weight": "mlp.experts.0.up_proj.weight",
    "ffn.down.weight": "mlp.experts.0.down_proj.weight",
}
OUTSIDE = {
    "embedding": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}


def stock_weights(checkpoint: Checkpoint, dtype: torch.dtype) -> dict[str, Stream]:
    """Of a vanilla backbone as OLMoE with one expert, whose router has nothing to choose."""
    reader = FolderReader(checkpoint.folder, checkpoint.manifest)
    streams = {}
    for name in backbone_names(checkpoint):
        if name in OUTSIDE:
            streams[OUTSIDE[name]] = _parameter(reader, name, dtype)
        else:
            _, number, rest = name.split(".", 2)
            streams[f"model.layers.{number}.{STOCK[rest]}"] = _parameter(reader, name, dtype)
    model = checkpoint.config.model
    for layer in range(model.layers):
        streams[f"model.layers.{layer}.mlp.gate.weight"] = _whole(torch.zeros(1, model.width, dtype=dtype))
    return streams


def backbone_names(checkpoint: Checkpoint) -> list[str]:
    return [
        name.removeprefix(BACKBONE)
        for name in checkpoint.manifest.tensors
        if name.startswith(BACKBONE) and not name.endswith(MOMENTS)
    ]


def _parameter(reader: FolderReader, name: str, dtype: torch.dtype) -> Stream:
    shape = tuple(reader.manifest.tensors[BACKBONE + name].shape)
    # Small vectors keep their digits.
    kept = dtype if len(shape) > 1 and ".sites." not in name else torch.float32

    def blocks() -> Iterator[Tensor]:
        whole = torch.empty(shape)
        read_whole(reader, BACKBONE + name, whole)
        yield whole

    return Stream(shape, kept, blocks)


def _rows(tables: MappedTables | ComputedTables, name: str, shape: tuple[int, int], dtype: torch.dtype) -> Stream:
    step = max(1, BLOCK_ELEMENTS // shape[1])

    def blocks() -> Iterator[Tensor]:
        for start in range(0, shape[0], step):
            yield tables.rows(name, start, min(start + step, shape[0]))

    return Stream(shape, dtype, blocks)


def _gates(tables: MappedTables, name: str, rows: int) -> Stream:
    def blocks() -> Iterator[Tensor]:
        yield tables.gates(name)

    return Stream((rows,), torch.float32, blocks)


def _whole(tensor: Tensor) -> Stream:
    return Stream(tuple(tensor.shape), tensor.dtype, lambda: iter([tensor]))
