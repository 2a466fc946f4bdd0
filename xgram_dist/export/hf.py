"""A checkpoint as a Hugging Face folder: weights, configuration, tokenizer, code, generation settings, model card.

A model with tables goes with its own modelling code (torch and transformers alone). A vanilla backbone needs none:
pre-norm with QK-norm over the whole width is what the stock OLMoE computes when it has one expert. Only document
masking has no stock form. The folder is written aside and renamed when it is complete.
"""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

from xgram_dist import __version__
from xgram_dist.config import dump_config
from xgram_dist.errors import UserError
from xgram_dist.export.shards import write_shards
from xgram_dist.export.weights import stock_weights, xgram_weights
from xgram_dist.inference import configuration_xgram, decoder, methods, modeling_xgram, parts, together
from xgram_dist.inference.open import Checkpoint
from xgram_dist.parallel.device import DTYPES
from xgram_dist.plan.budget import plan_budget
from xgram_dist.progress import Progress

CODE = (configuration_xgram, parts, together, methods, decoder, modeling_xgram)


def export_hf(checkpoint: Checkpoint, target: Path, precision: str) -> dict[str, Any]:
    """What was written, in figures."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"'{target}' already holds something; choose a folder that is empty or not there")
    aside = target.with_name(f".{target.name}.part")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        figures = _write(checkpoint, aside, precision)
        if target.exists():
            target.rmdir()
        aside.rename(target)
    except OSError as error:
        raise UserError(f"cannot write '{target}': {error.strerror}; choose another folder") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return {"folder": str(target), **figures}


def stock_reason(checkpoint: Checkpoint) -> str | None:
    """Why no architecture of transformers computes this model; None: one does."""
    if checkpoint.config.memory.method != "vanilla":
        return "its tables are in no architecture of transformers"
    if checkpoint.config.model.document_masking:
        return "no architecture of transformers keeps documents of a sequence apart"
    return None


def _write(checkpoint: Checkpoint, folder: Path, precision: str) -> dict[str, Any]:
    dtype, reason = DTYPES[precision], stock_reason(checkpoint)
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
        weights = xgram_weights(checkpoint, dtype)
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
            "gated": weights.gated,
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
    """Whether Hugging Face can load it: a sentencepiece model is handed on as it is."""
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


def _card(checkpoint: Checkpoint, config: dict[str, Any], reason: str | None, with_tokenizer: bool) -> str:
    budget, run, recipe = plan_budget(checkpoint.config), checkpoint.manifest.run, checkpoint.config
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
| weights | {config["torch_dtype"]} |
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
{dump_config(recipe)}```

</details>
"""


def _json(tree: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")
