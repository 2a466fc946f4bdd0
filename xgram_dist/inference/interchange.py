"""Published layouts of token-indexed tables, read and written as far as they compute what our methods compute.

Gemma 3n's per-layer embeddings: one tensor [V, L P], of which a token's row holds a vector of P numbers for each of L
layers; times sqrt(P). That is a view of PLE with one site, whose tables stand side by side. `Gemma3nTables` reads it,
`write_gemma3n` writes it. What Gemma does with a vector (a gate by the hidden state, a norm, a projection) PLE does
not.

DeepSeek's Engram (V4.1): hashed n-grams of folded tokens, 2 tokens and longer, gated by the hidden state. With one
residual stream it is our Engram with other multipliers and no convolution. `read_engram` reads it. It cannot be
written: its readers compute the multipliers from the layers' numbers, and a model trained with ours hashes otherwise.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xgram_dist.errors import UserError
from xgram_dist.inference.export import TensorStream, rows_stream, write_shards
from xgram_dist.inference.hf.decoder_methods import NGRAM_TABLE, MethodSite
from xgram_dist.inference.mapped_tables import MappedTables
from xgram_dist.inference.model import Checkpoint
from xgram_dist.model.methods.base import method_of
from xgram_dist.model.methods.ple import PLE
from xgram_dist.parallel.device import DTYPES
from xgram_dist.tables.ngrams import NgramHash, primes_from

PER_LAYER = "embed_tokens_per_layer.weight"
INDEX = "model.safetensors.index.json"
SCALE_COLUMNS = 32
"""Columns of an Engram row that share a scale."""


class Gemma3nTables:
    """Per-layer embeddings of a folder of Gemma 3n, as tables of PLE at one site."""

    def __init__(self, folder: Path, site: str = "h"):
        from safetensors import safe_open

        config = _read_json(folder / "config.json")
        config = config.get("text_config", config)
        self.layers, self.width = (_number(config, key) for key in ("num_hidden_layers", "hidden_size_per_layer_input"))
        file, self._name = _file_with(folder, PER_LAYER)
        self._opened = safe_open(file, framework="pt")
        self._rows = self._opened.get_slice(self._name)
        num_rows, width = self._rows.get_shape()
        if width != self.layers * self.width:
            raise UserError(f"'{file}': '{self._name}' is {width} wide, config.json has {self.layers} x {self.width}")
        self.shapes = {f"layers.{layer}.{site}.0": (num_rows, self.width) for layer in range(self.layers)}

    @torch.no_grad()
    def vectors(self, tokens_U: Tensor) -> dict[str, Tensor]:
        """What each layer is given for a token [U, P]; only these rows are read."""
        rows = [self._rows[token : token + 1] for token in tokens_U.tolist()]
        # The factor has the dtype of the rows, as in Gemma.
        scaled = torch.cat(rows) * torch.tensor(math.sqrt(self.width), dtype=rows[0].dtype)
        return dict(zip(self.shapes, scaled.float().split(self.width, 1), strict=True))


def write_gemma3n(checkpoint: Checkpoint, folder: Path, precision: str) -> dict[str, Any]:
    """Write what a PLE model adds at its site as Gemma's per-layer embeddings; returns figures."""
    spec, tables = checkpoint.spec(), checkpoint.tables()
    sites = {injection.site for injection in spec.injections}
    layers = [injection.layer for injection in spec.injections]
    if (
        not isinstance(tables, MappedTables)
        or not isinstance(method_of(checkpoint.config), PLE)
        or len(sites) != 1
        or layers != list(range(spec.layers))
        or any(injection.views != 1 for injection in spec.injections)
    ):
        raise UserError(
            f"'{checkpoint.folder}' does not have the layout of Gemma 3n: only memory.method = ple with one site of "
            "one view in every layer has; export it with --to hf"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"'{folder}' is not empty; choose a folder that is empty or does not exist")
    folder.mkdir(parents=True, exist_ok=True)
    width, names = spec.injections[0].width, [injection.table(0) for injection in spec.injections]
    gains = [checkpoint.reader.tensor(f"backbone.blocks.{i.layer}.sites.{i.site}.gain") for i in spec.injections]
    factors = [float(gain) * i.scale / math.sqrt(width) for gain, i in zip(gains, spec.injections, strict=True)]

    def read(start: int, stop: int) -> Tensor:
        found = tables.vectors(torch.arange(start, stop))
        return torch.cat([found[name] * factor for name, factor in zip(names, factors, strict=True)], 1)

    shape = (spec.vocabulary, spec.layers * width)
    stream: TensorStream = rows_stream(read, shape, DTYPES[precision])
    size = write_shards(folder, {f"model.language_model.{PER_LAYER}": stream}, lambda _: None)
    config = {
        "num_hidden_layers": spec.layers,
        "hidden_size_per_layer_input": width,
        "vocab_size_per_layer_input": spec.vocabulary,
    }
    (folder / "config.json").write_text(json.dumps({"text_config": config}, indent=1) + "\n", encoding="utf-8")
    return {"folder": str(folder), "bytes": size, "site": sites.pop(), "layers": spec.layers, "width": width}


@dataclass(frozen=True)
class PublishedEngram:
    """One layer of DeepSeek's Engram as ours: a site, its parameters, and its rows."""

    site: MethodSite
    parameters: dict[str, Tensor]
    """By the names of `decoder_methods.Engram`."""
    rows: Tensor
    """The table NGRAM_TABLE, in fp32."""

    def values(self) -> dict[str, Tensor]:
        return {NGRAM_TABLE: self.rows}


def engram_hash(config: Mapping[str, Any], layers: Sequence[int]) -> NgramHash:
    """`config`: the published one, with its keys engram_*. `layers`: some of its engram_layer_ids."""
    ids, longest = config.get("engram_layer_ids") or [], _number(config, "engram_max_ngram_size")
    strange = [layer for layer in layers if layer not in ids]
    if strange:
        raise UserError(f"layer {strange[0]} has no Engram: engram_layer_ids = {ids}")
    heads, orders = _number(config, "engram_n_heads"), tuple(range(2, longest + 1))
    folded = _number(config, "engram_compressed_vocab_size")
    primes = primes_from(_number(config, "engram_vocab_size"), len(ids) * len(orders) * heads)
    bound = max(1, (np.iinfo(np.int64).max // folded) // 2)
    multipliers, rows = [], []
    for layer in layers:
        drawn = np.random.default_rng(10007 * layer).integers(0, bound, longest, dtype=np.int64) * 2 + 1
        multipliers.append(tuple(tuple(drawn[:order].tolist()) for order in orders))
        first = ids.index(layer) * len(orders) * heads
        rows.append(tuple(primes[first + n * heads : first + (n + 1) * heads] for n in range(len(orders))))
    pad = _number(config, "engram_pad_token_id", least=0)
    return NgramHash(orders, tuple(multipliers), tuple(rows), folded, pad)


def read_engram(config: Mapping[str, Any], layer: int, tensors: Mapping[str, Tensor]) -> PublishedEngram:
    """`tensors`: of the layer, by their names within `engram.`: embed.weight, with embed.scale where it is fp8;
    wkv.weight, q_weight and k_weight, in the dtype they are computed in."""
    streams = int(config.get("hc_mult", 1))
    if streams != 1:
        raise UserError(
            f"hc_mult = {streams}: this Engram writes to {streams} residual streams with a key for each, and our "
            "backbone has one; only hc_mult = 1 can be read"
        )
    width, hashing = _number(config, "hidden_size"), engram_hash(config, [layer])
    missing = [name for name in ("embed.weight", "wkv.weight", "q_weight", "k_weight") if name not in tensors]
    if missing:
        raise UserError(f"the layer has no tensor '{missing[0]}'; give all of `layers.{layer}.engram.`")
    rows = tensors["embed.weight"].float()
    if "embed.scale" in tensors:
        exponents = tensors["embed.scale"].view(torch.uint8).float() - 127
        rows = rows * torch.exp2(exponents).repeat_interleave(SCALE_COLUMNS, 1)
    used = sum(map(sum, hashing.rows[0]))
    key, value = tensors["wkv.weight"].float().split([width, width])
    site = MethodSite(
        method="engram",
        site="ngram",
        layers=(layer,),
        width=key.shape[1],
        taps=1,
        reach=_number(config, "engram_max_ngram_size") - 1,
        hashing=hashing,  # type: ignore[arg-type]  # the same fields, in a module that stands alone
        gate_eps=float(config["rms_norm_eps"]),
        output_eps=float(config["rms_norm_eps"]),
    )
    parameters = {
        "key": key,
        "value": value,
        "query_norm.weight": tensors["q_weight"].float()[0],
        "key_norm.weight": tensors["k_weight"].float()[0],
        "output_norm.weight": torch.ones(width),
        "kernel": torch.zeros(1, width),  # there is no convolution
    }
    return PublishedEngram(site, parameters, rows[:used])


def _number(config: Mapping[str, Any], key: str, least: int = 1) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < least:
        raise UserError(f"the configuration has {key} = {value}; it must be a whole number, {least} or more")
    return value


def _file_with(folder: Path, ending: str) -> tuple[Path, str]:
    """The safetensors file with a tensor of this ending, and the tensor's name."""
    from safetensors import safe_open

    files = sorted(folder.glob("*.safetensors"))
    if (folder / INDEX).exists():
        names = _read_json(folder / INDEX).get("weight_map", {})
        files = [folder / Path(str(file)).name for name, file in names.items() if name.endswith(ending)]
    for file in files:
        with safe_open(file, framework="pt") as opened:
            found = [name for name in opened.keys() if name.endswith(ending)]  # noqa: SIM118
        if found:
            return file, found[0]
    raise UserError(f"'{folder}' has no tensor '{ending}' in its safetensors files")


def _read_json(path: Path) -> dict[str, Any]:
    from xgram_dist.untrusted import read_json

    try:
        tree: dict[str, Any] = read_json(path, follow=True)
    except OSError as error:
        raise UserError(f"cannot read '{path}': {error.strerror}") from None
    return tree
