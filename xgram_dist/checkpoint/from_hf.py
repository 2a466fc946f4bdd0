"""Warm start of a backbone from a Hugging Face folder (`train --from-hf DIR`): Llama, Qwen3 and OLMo-2.

`model_keys` reads config.json and says which keys of `model` compute what that family does; what this backbone does not
compute (biases, sliding windows, another rotary scaling) is refused. `init_from_hf` fills the backbone from safetensors
files: each rank reads the ranges it holds. Tied embeddings are copied to the head, which then learns apart. Parameters
of the memory method and tables keep their initial values. No collectives.
"""

import os
from pathlib import Path
from typing import Any

import torch

from xgram_dist.checkpoint.init_from import InitSummary, merge_summaries
from xgram_dist.checkpoint.sharded_tensor import MOMENT_SUFFIXES, backbone_state
from xgram_dist.engine.base import Engine
from xgram_dist.errors import BadFileError, UserError, optional_package
from xgram_dist.model.build import of_method
from xgram_dist.parallel.mesh import Mesh
from xgram_dist.untrusted import check_name, open_file, read_json, shown

with optional_package("--from-hf", "eval"):
    from safetensors import SafetensorError, safe_open

# The configuration

FAMILIES = {
    "llama": {"norms": "before", "qk_norm": "none"},
    "qwen3": {"norms": "before", "qk_norm": "head"},
    "olmo2": {"norms": "after", "qk_norm": "width"},
}
"""`model_type` of config.json -> keys of `model` that are the same for the whole family."""
SIZES = {
    "vocabulary": "vocab_size",
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "ffn_width": "intermediate_size",
    "heads": "num_attention_heads",
}
"""Key of `model` -> of config.json."""
REQUIRED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "use_sliding_window": False}
"""Keys of config.json that this backbone has one value for; absent is that value, too."""


def model_keys(folder: Path) -> dict[str, Any]:
    """Keys of `model` by which the backbone computes what the model of the folder does."""
    path = folder / "config.json"
    try:
        config = read_json(path, limit=1 << 20, follow=True)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"'{folder}' has no config.json; give the folder of a Hugging Face model") from None
    if not isinstance(config, dict):
        raise BadFileError(f"'{path}' is not the configuration of a model")
    family = config.get("model_type")
    if family not in FAMILIES:
        raise UserError(f"'{path}': model_type is {shown(family)}; a backbone starts from {', '.join(FAMILIES)}")
    for key, value in REQUIRED.items():
        if config.get(key, value) not in (value, None):
            raise UserError(f"'{path}': {key} = {shown(config[key])}, but this backbone has {value} only")
    keys: dict[str, Any] = {key: _positive(path, config, name) for key, name in SIZES.items()}
    keys["kv_heads"] = _positive(path, config, "num_key_value_heads", keys["heads"])
    head_width = _positive(path, config, "head_dim", max(1, keys["width"] // keys["heads"]))
    keys["head_width"] = None if head_width * keys["heads"] == keys["width"] else head_width
    keys["norm_eps"] = _number(path, config, "rms_norm_eps", 1e-6)
    # transformers 5 has both in rope_parameters.
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise BadFileError(f"'{path}': rope_scaling is {shown(rope)}, not a section")
    keys["rope_theta"] = _number(path, config | rope, "rope_theta", 10_000.0)
    keys["rope_scaling"] = _rope_scaling(path, rope)
    return keys | FAMILIES[family]


def _rope_scaling(path: Path, rope: dict[str, Any]) -> dict[str, Any]:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return {"factor": 1.0}
    if kind != "llama3":
        raise UserError(f"'{path}': rotary scaling {shown(kind)} is not offered; llama3 is")
    return {
        "factor": _number(path, rope, "factor"),
        "low_frequency": _number(path, rope, "low_freq_factor"),
        "high_frequency": _number(path, rope, "high_freq_factor"),
        "original_length": _positive(path, rope, "original_max_position_embeddings"),
    }


def _positive(path: Path, config: dict[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 31:
        raise BadFileError(f"'{path}': {key} is {shown(value)}, not a positive number")
    return value


def _number(path: Path, config: dict[str, Any], key: str, default: float | None = None) -> float:
    value = config.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        raise BadFileError(f"'{path}': {key} is {shown(value)}, not a positive number")
    return float(value)


# The weights

OUTER = {"embedding": "model.embed_tokens", "norm.weight": "model.norm", "head.weight": "lm_head"}
BLOCK = {
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "ffn.gate": "mlp.gate_proj",
    "ffn.up": "mlp.up_proj",
    "ffn.down": "mlp.down_proj",
}
BLOCK_NORMS_AFTER = BLOCK | {
    "attention_norm": "post_attention_layernorm",
    "ffn_norm": "post_feedforward_layernorm",
}


def hf_name(name: str, *, norms_after: bool) -> str:
    """Of a parameter of the backbone."""
    if name in OUTER:
        return f"{OUTER[name]}.weight"
    _, layer, rest = name.split(".", 2)
    block = BLOCK_NORMS_AFTER if norms_after else BLOCK
    return f"model.layers.{layer}.{block[rest.removesuffix('.weight')]}.weight"


class HfWeights:
    """The tensors of a folder's safetensors files, by name."""

    def __init__(self, folder: Path):
        self.folder = folder
        index = folder / "model.safetensors.index.json"
        try:
            tree = read_json(index, limit=64 << 20, follow=True)
            found = tree.get("weight_map") if isinstance(tree, dict) else None
            if not isinstance(found, dict) or not found:
                raise BadFileError(f"'{index}' has no weight_map")
            names = sorted({check_name(index, name) for name in found.values()})
        except FileNotFoundError:
            names = ["model.safetensors"]
        self._files: list[Any] = []
        self._file_of: dict[str, Any] = {}
        for name in names:
            self._open(folder / name)

    def _open(self, path: Path) -> None:
        try:
            os.close(open_file(path, follow=True))
            file = safe_open(path, "pt")
        except FileNotFoundError:
            raise UserError(
                f"'{path}' does not exist; weights must be safetensors files, as save_pretrained writes them"
            ) from None
        except SafetensorError as error:
            raise BadFileError(f"'{path}' is not a whole safetensors file ({shown(str(error))})") from None
        self._file_of |= dict.fromkeys(file.keys(), file)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def shape(self, name: str) -> list[int]:
        return list(self._file_of[name].get_slice(name).get_shape())

    def read(self, name: str, offsets: tuple[int, ...], target: torch.Tensor) -> None:
        """Fill `target` from its place in the tensor."""
        part = tuple(slice(start, start + size) for start, size in zip(offsets, target.shape, strict=True))
        target.copy_(self._file_of[name].get_slice(name)[part])


@torch.no_grad()
def init_from_hf(folder: Path, engine: Engine, mesh: Mesh) -> list[InitSummary]:
    """Overwrite the weights of the backbone; returns what was taken."""
    weights, model = HfWeights(folder), engine.config.model
    backbone, method = InitSummary("backbone"), InitSummary("modules of the memory method")
    wanted = []
    for name, tensor in backbone_state(engine, mesh).items():
        parameter = name.removeprefix("backbone.")
        if name.endswith(MOMENT_SUFFIXES):
            continue
        if of_method(parameter):
            method.add(False, "not in the folder: initial values")
            continue
        source = hf_name(parameter, norms_after=model.norms == "after")
        if parameter == "head.weight" and source not in weights:
            source = hf_name("embedding", norms_after=False)
            backbone.notes.append("the head starts as the embedding")
        if source not in weights:
            raise UserError(f"'{folder}' holds no '{source}'; its configuration and its weights do not fit")
        if weights.shape(source) != list(tensor.shape):
            raise UserError(
                f"'{folder}': '{source}' is {weights.shape(source)}, but this recipe has {list(tensor.shape)}; take "
                f"the keys of model that --from-hf sets out of the command line"
            )
        wanted.append((source, tensor))
        backbone.add(True)
    for source, tensor in wanted:
        for shard in tensor.shards:
            weights.read(source, shard.offsets, shard.tensor)
    engine.after_load()
    return merge_summaries([backbone, method] if method.total else [backbone], mesh)
