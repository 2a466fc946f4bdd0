"""Export of a checkpoint to a Hugging Face folder: weights, configuration, tokenizer, code, settings, model card.

A model with tables is exported with its own modelling code, which needs torch and transformers only. A vanilla backbone
needs none: pre-norm with QK-norm over the whole width is what the stock OLMoE computes with one expert. Only document
masking has no stock form. Tensors are streamed block by block, so that no table has to fit in memory. The folder is
written under another name and renamed when it is complete.
"""

import dataclasses
import functools
import json
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xgram_dist import __version__
from xgram_dist.checkpoint.manifest import TOUCHED_VERSION
from xgram_dist.checkpoint.reader import CheckpointReader
from xgram_dist.checkpoint.tensor_file import DTYPE_NAMES, encode_header
from xgram_dist.config import Config, dump_config
from xgram_dist.console import Progress
from xgram_dist.errors import UserError
from xgram_dist.estimate.flops import plan_budget
from xgram_dist.inference.hf import (
    configuration_xgram,
    decoder,
    decoder_batched_sites,
    decoder_layers,
    decoder_methods,
    decoder_tables,
    modeling_xgram,
)
from xgram_dist.inference.hf.decoder_tables import RowFormat
from xgram_dist.inference.mapped_tables import MappedTables
from xgram_dist.inference.model import Checkpoint
from xgram_dist.model.methods.base import ComputedTables, method_of, table_layout
from xgram_dist.parallel.device import DTYPES
from xgram_dist.tables.optimizers.build import ALL_ROWS

SHARD_BYTES = 4 << 30
INDEX = "model.safetensors.index.json"
BLOCK_ELEMENTS = 1 << 22
BACKBONE = "backbone."
TABLES = "tables.views."
"""What the names of rows begin with; they have files of their own, which a server maps instead of loading them."""
CODE = (
    configuration_xgram,
    decoder_layers,
    decoder_batched_sites,
    decoder_methods,
    decoder_tables,
    decoder,
    modeling_xgram,
)
"""Modules that are copied into the folder."""


ReadRows = Callable[[int, int], Tensor]


@dataclass(frozen=True)
class TensorStream:
    """A tensor that comes in blocks of its first dimension."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    blocks: Callable[[], Iterator[Tensor]]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def write_shards(folder: Path, tensors: dict[str, TensorStream], progress: Callable[[int], None]) -> int:
    """Write safetensors files, with an index if there are several; returns the bytes. `progress` gets the bytes
    written."""
    backbone = {name: stream for name, stream in tensors.items() if not name.startswith(TABLES)}
    rows = {name: stream for name, stream in tensors.items() if name.startswith(TABLES)}
    files = {}
    for kind, members in (("backbone" if rows else "model", backbone), ("tables", rows)):
        shards = _shards(members)
        for number, shard in enumerate(shards, start=1):
            files[kind if len(shards) == 1 else f"{kind}-{number:05d}-of-{len(shards):05d}"] = shard
    for name, shard in files.items():
        _write_shard(folder / f"{name}.safetensors", shard, progress)
    total = sum(stream.nbytes for stream in tensors.values())
    if len(files) > 1:
        weight_map = {tensor: f"{name}.safetensors" for name, shard in files.items() for tensor in shard}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
    return total


def _shards(tensors: dict[str, TensorStream]) -> list[dict[str, TensorStream]]:
    """The tensors of each file. Wide dtypes come first, so that every tensor is aligned."""
    shards: list[dict[str, TensorStream]] = []
    for name, stream in sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize):
        if not shards or sum(one.nbytes for one in shards[-1].values()) + stream.nbytes > SHARD_BYTES:
            shards.append({})
        shards[-1][name] = stream
    return shards


def _write_shard(path: Path, tensors: dict[str, TensorStream], progress: Callable[[int], None]) -> None:
    layout = {name: (DTYPE_NAMES[stream.dtype], list(stream.shape), stream.nbytes) for name, stream in tensors.items()}
    with path.open("wb") as file:
        file.write(encode_header(layout, {"format": "pt"}))
        for name, stream in tensors.items():
            written = 0
            for block in stream.blocks():
                data = block.to(stream.dtype).contiguous().view(-1).view(torch.uint8).numpy().data
                file.write(data)
                written += len(data)
                progress(len(data))
            assert written == stream.nbytes, name


@dataclass(frozen=True)
class ExportedWeights:
    """The tensors of an exported model, and what its configuration says about the tables."""

    streams: dict[str, TensorStream]
    tables: list[dict[str, Any]]
    accesses: list[int]
    """Accesses of each view; empty without routing."""
    keys: list[int]
    """Sizes of the arrays by which n-grams are looked up."""

    def add_view(self, widths: dict[str, int], num_rows: int, row_format: str, read: ReadRows) -> None:
        """Tables that stand side by side. `read(start, stop)`: rows of all of them in fp32."""
        number = len({table["view"] for table in self.tables})
        self.tables.extend({"name": n, "rows": num_rows, "width": w, "view": number} for n, w in widths.items())
        stored = RowFormat(row_format, tuple(widths.values()))
        shape = (num_rows, stored.stored_width)

        def encoded(start: int, stop: int) -> Tensor:
            return stored.encode(read(start, stop))

        self.streams[f"{TABLES}{number}.rows"] = rows_stream(encoded, shape, stored.dtype)


def xgram_weights(checkpoint: Checkpoint, dtype: torch.dtype, row_format: str) -> ExportedWeights:
    """The tensors of a checkpoint under the names of our modelling code."""
    reader = checkpoint.reader
    computed = method_of(checkpoint.config).computed_parameters
    names = [name for name in backbone_names(reader) if not any(part in name for part in computed)]
    streams = {f"decoder.{name}": _parameter(reader, name, dtype) for name in names}
    arrays = [] if reader.ngram_keys is None else reader.ngram_keys.arrays
    streams |= {
        f"key_map.array_{n}": _whole(torch.from_numpy(array.astype(np.int64))) for n, array in enumerate(arrays)
    }
    weights = ExportedWeights(streams, [], [], [len(array) for array in arrays])
    tables = checkpoint.tables()
    if tables is None or isinstance(tables, MappedTables):
        _add_trained_tables(reader, weights, row_format)
    else:
        num_rows = {rows for rows, _ in tables.shapes.values()}
        assert len(num_rows) == 1, "computed tables have the same keys"
        widths = {name: width for name, (_, width) in tables.shapes.items()}
        weights.add_view(widths, num_rows.pop(), row_format, functools.partial(_computed_rows, tables))
    return weights


def _add_trained_tables(reader: CheckpointReader, weights: ExportedWeights, row_format: str) -> None:
    """Add rows in global order, caught up, times their gates; token -> row maps where there are any."""
    layout = table_layout(reader.config)
    if layout.num_rows > ALL_ROWS and reader.manifest.version == TOUCHED_VERSION:
        raise UserError(
            f"'{reader.folder}' saves touched rows of tables of {layout.num_rows:,}, and an exported model has all of "
            f"them: too many; use 'generate' and 'eval', which read the checkpoint itself"
        )
    for number, slab in enumerate(layout.slabs):
        widths = {table.name: table.width for table in slab.tables}
        weights.add_view(widths, slab.rows, row_format, functools.partial(_trained_rows, reader, list(widths)))
        if reader.routing is not None:
            view = reader.routing.views[slab.view]
            weights.accesses.append(len(view.rows))
            for key, values in (
                ("offsets", view.offsets),
                ("rows", view.rows.astype(np.int64)),
                ("coefficients", view.coefficients),
            ):
                weights.streams[f"tables.routes.{number}.{key}"] = _whole(torch.from_numpy(values.copy()))


STOCK_NAMES = {
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
"""OLMoE's names of the parameters of a block."""
STOCK_OUTER_NAMES = {
    "embedding": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}


def stock_weights(checkpoint: Checkpoint, dtype: torch.dtype) -> dict[str, TensorStream]:
    """A vanilla backbone as OLMoE with one expert, whose router has no choice."""
    reader, streams = checkpoint.reader, {}
    for name in backbone_names(reader):
        if name in STOCK_OUTER_NAMES:
            streams[STOCK_OUTER_NAMES[name]] = _parameter(reader, name, dtype)
        else:
            _, number, rest = name.split(".", 2)
            streams[f"model.layers.{number}.{STOCK_NAMES[rest]}"] = _parameter(reader, name, dtype)
    model = checkpoint.config.model
    for layer in range(model.layers):
        streams[f"model.layers.{layer}.mlp.gate.weight"] = _whole(torch.zeros(1, model.width, dtype=dtype))
    return streams


def backbone_names(reader: CheckpointReader) -> list[str]:
    return [name.removeprefix(BACKBONE) for name in reader.weight_shapes() if name.startswith(BACKBONE)]


def _parameter(reader: CheckpointReader, name: str, dtype: torch.dtype) -> TensorStream:
    shape = tuple(reader.entry(BACKBONE + name).shape)
    # Small vectors stay in fp32.
    exported_dtype = dtype if len(shape) > 1 and ".sites." not in name else torch.float32
    return TensorStream(shape, exported_dtype, lambda: iter([reader.tensor(BACKBONE + name)]))


def _trained_rows(reader: CheckpointReader, tables: list[str], start: int, stop: int) -> Tensor:
    """Rows of these tables side by side, times their gates."""
    rows, columns = np.arange(start, stop), []
    for name in tables:
        values = reader.table_rows(f"tables.{name}.rows", rows).float()
        if f"tables.{name}.gates" in reader.manifest.tensors:
            values = values * torch.sigmoid(reader.table_rows(f"tables.{name}.gates", rows).float())[:, None]
        columns.append(values)
    return torch.cat(columns, 1)


def _computed_rows(tables: ComputedTables, start: int, stop: int) -> Tensor:
    vectors = tables.vectors(torch.arange(start, stop))
    return torch.cat([vectors[name].cpu().float() for name in tables.shapes], 1)


def rows_stream(read: ReadRows, shape: tuple[int, ...], dtype: torch.dtype) -> TensorStream:
    """A stream of `read(start, stop)` rows."""
    step = max(1, BLOCK_ELEMENTS // math.prod(shape[1:]))

    def blocks() -> Iterator[Tensor]:
        for start in range(0, shape[0], step):
            yield read(start, min(start + step, shape[0]))

    return TensorStream(shape, dtype, blocks)


def _whole(tensor: Tensor) -> TensorStream:
    return TensorStream(tuple(tensor.shape), tensor.dtype, lambda: iter([tensor]))


def export_hf(
    checkpoint: Checkpoint, target: Path, precision: str, row_format: str | None = None, stock: bool = True
) -> dict[str, Any]:
    """Write the folder; returns what was written, in figures. `row_format`: of tables (`decoder_tables.ROW_FORMATS`;
    None: `precision`). `stock`: use an architecture of transformers where one computes the model."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"'{target}' is not empty; choose a folder that is empty or does not exist")
    unfinished = target.with_name(f".{target.name}.part")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        figures = _write(checkpoint, unfinished, precision, row_format or precision, stock)
        if target.exists():
            target.rmdir()
        unfinished.rename(target)
    except OSError as error:
        raise UserError(f"cannot write '{target}': {error.strerror}; choose another folder") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return {"folder": str(target), **figures}


def stock_reason(checkpoint: Checkpoint) -> str | None:
    """Why no stock architecture of transformers computes this model; None: one does."""
    if not method_of(checkpoint.config).backbone_only:
        return "its tables are in no architecture of transformers"
    model = checkpoint.config.model
    if model.document_masking:
        return "no architecture of transformers masks documents within a sequence"
    if (model.norms, model.qk_norm, model.head_width, model.rope_scaling.factor) != ("before", "width", None, 1):
        return "its norms, heads or rotary frequencies are not those of OLMoE"
    return None


def _write(checkpoint: Checkpoint, folder: Path, precision: str, row_format: str, stock: bool) -> dict[str, Any]:
    dtype, reason = DTYPES[precision], stock_reason(checkpoint) if stock else "none of transformers is wanted"
    common = {
        "torch_dtype": str(dtype).removeprefix("torch."),
        "eos_token_id": checkpoint.tokenizer.end_of_text,
        "bos_token_id": None,
        "pad_token_id": checkpoint.tokenizer.end_of_text,
        "tie_word_embeddings": False,
    }
    if reason is None:
        streams, config = stock_weights(checkpoint, dtype), _stock_config(checkpoint) | common
    else:
        weights = xgram_weights(checkpoint, dtype, row_format)
        streams = weights.streams
        config = common | {
            "architectures": ["XgramForCausalLM"],
            "model_type": "xgram",
            "auto_map": {
                "AutoConfig": "configuration_xgram.XgramConfig",
                "AutoModelForCausalLM": "modeling_xgram.XgramForCausalLM",
            },
            "spec": dataclasses.asdict(checkpoint.spec()),
            "tables": weights.tables,
            "accesses": weights.accesses,
            "row_format": row_format,
            "keys": weights.keys,
        }
        for module in CODE:
            shutil.copyfile(str(module.__file__), folder / Path(str(module.__file__)).name)
    with Progress(sum(stream.nbytes for stream in streams.values()) / 1e6, "MB", "writing weights") as progress:
        size = write_shards(folder, streams, lambda done: progress.update(done / 1e6))
    _json(config, folder / "config.json")
    ends = {key: common[key] for key in ("eos_token_id", "pad_token_id")}
    _json({**ends, "do_sample": False}, folder / "generation_config.json")
    with_tokenizer = _write_tokenizer(checkpoint, folder)
    (folder / "README.md").write_text(_card(checkpoint, config, reason, with_tokenizer), encoding="utf-8")
    return {
        "bytes": size,
        "tensors": len(streams),
        "dtype": precision,
        "tables": config.get("row_format"),
        "table_bytes": sum(stream.nbytes for name, stream in streams.items() if name.startswith(TABLES)),
        "architecture": config["architectures"][0],
        "remote_code": reason,
        "tokenizer": with_tokenizer,
    }


def _stock_config(checkpoint: Checkpoint) -> dict[str, Any]:
    model = checkpoint.config.model
    return {
        "architectures": ["OlmoeForCausalLM"],
        "model_type": "olmoe",
        "vocab_size": model.vocabulary,
        "hidden_size": model.width,
        "intermediate_size": model.ffn_width,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "max_position_embeddings": model.sequence_length,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "hidden_act": "silu",
        "attention_bias": False,
        "clip_qkv": None,
        "num_experts": 1,
        "num_experts_per_tok": 1,
        "norm_topk_prob": False,
        "router_aux_loss_coef": 0.0,
    }


def _write_tokenizer(checkpoint: Checkpoint, folder: Path) -> bool:
    """Copy the tokenizer; returns whether Hugging Face can load it. A sentencepiece model is copied as it is."""
    tokenizer = checkpoint.tokenizer
    shutil.copyfile(tokenizer.path, folder / tokenizer.file_name)
    if tokenizer.file_name != "tokenizer.json":
        return False
    end = tokenizer.end_of_text_name
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end,
        "pad_token": end,
        "model_max_length": checkpoint.config.model.sequence_length,
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",
    }
    _json(settings, folder / "tokenizer_config.json")
    return True


def _publishable(recipe: Config) -> Config:
    """Without the paths and addresses of the machine it was trained on."""
    nowhere: dict[str, Any] = {"path": None, "remote": None}
    stages = tuple(stage.model_copy(update=nowhere) for stage in recipe.data.stages)
    data = recipe.data.model_copy(update={**nowhere, "cache": None, "stages": stages})
    memory = recipe.memory.model_copy(
        update={"folder": None, "routing": recipe.memory.routing.model_copy(update={"file": None, "frequencies": None})}
    )
    return recipe.model_copy(
        update={"data": data, "memory": memory, "eval": recipe.eval.model_copy(update={"data": None})}
    )


def _card(checkpoint: Checkpoint, config: dict[str, Any], reason: str | None, with_tokenizer: bool) -> str:
    budget, run, recipe = plan_budget(checkpoint.config), checkpoint.reader.facts, checkpoint.config
    tokens = run["loader"]["position"] * recipe.model.sequence_length
    tables = f"{budget.table_parameters / 1e6:,.1f} M in {len(config.get('tables', ()))} tables"
    trust = "" if reason is None else ", trust_remote_code=True"
    code = (
        f"The folder has its own modelling code, since {reason}."
        if reason
        else "No code of its own is needed: it is OLMoE with one expert (pre-norm, QK-norm over the whole width)."
    )
    load_tokenizer = (
        "tokenizer = AutoTokenizer.from_pretrained(FOLDER)"
        if with_tokenizer
        else "tokenizer = sentencepiece.SentencePieceProcessor(model_file=FOLDER + '/tokenizer.model')"
    )
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [x-gram]
---
# {recipe.name}

| | |
|---|---|
| trained for | {run["step"]:,} of {recipe.train.steps:,} steps, {tokens:,} tokens |
| backbone | {budget.backbone_parameters / 1e6:,.1f} M: {recipe.model.layers} layers, width {recipe.model.width} |
| tables | {tables if budget.table_parameters else "none"} |
| method | {recipe.memory.method} |
| context | {recipe.model.sequence_length:,} tokens |
| weights | {config["torch_dtype"]}; tables {config.get("row_format", "none")} |
| data | fingerprint `{run["loader"]["fingerprint"][:16]}` |
| tokenizer | sha256 `{checkpoint.tokenizer.sha256[:16]}` |
| written by | xgram-dist {__version__} |

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

{load_tokenizer}
model = AutoModelForCausalLM.from_pretrained(FOLDER{trust})
```

{code}

<details><summary>The recipe</summary>

```yaml
{dump_config(_publishable(recipe))}```

</details>
"""


def _json(tree: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")
