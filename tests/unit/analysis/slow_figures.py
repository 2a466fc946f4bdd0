"""The figures of a checkpoint, literally: the inference network, one position and one row at a time."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from xgram_dist.checkpoint.folder import checkpoints_at
from xgram_dist.checkpoint.reader import CheckpointReader
from xgram_dist.inference.model import Checkpoint
from xgram_dist.tables.initial_rows import initial_rows


def cosine(one: Any, other: Any) -> float:
    a, b = one.double().tolist(), other.double().tolist()
    product = sum(x * y for x, y in zip(a, b, strict=True))
    return product / math.sqrt(sum(x * x for x in a)) / math.sqrt(sum(y * y for y in b))


def forward(run: Path, batches: list[torch.Tensor]) -> list[dict[str, Any]]:
    """For each position of all batches: its token, embedding, and by layer what the parts give."""
    model = Checkpoint.find(run).load(torch.device("cpu"))
    decoder, found = model.decoder, []
    for tokens in batches:
        distinct, slots = tokens.unique(return_inverse=True)
        values = {} if model.tables is None else model.tables.vectors(distinct)
        at = decoder._positions(tokens, slots, None, None)
        x = embedding = F.embedding(tokens, decoder.embedding)
        layers = []
        for block in decoder.blocks:
            deltas = {site: made(values, at, None, x.dtype) for site, made in block.sites.items()}
            layer = {"deltas": dict(deltas)}
            if "h" in deltas:
                x = x + deltas.pop("h")
            layer["attention"] = block.attention(block.attention_norm(x), deltas, at, None)
            x = x + layer["attention"]
            normed, ffn = block.ffn_norm(x), block.ffn
            layer["ffn"] = ffn.down(F.silu(ffn.gate(normed)) * ffn.up(normed))
            x = x + layer["ffn"]
            layer["hidden"] = x
            layers.append(layer)
        for b in range(tokens.shape[0]):
            for t in range(tokens.shape[1]):
                found.append(
                    {
                        "token": int(tokens[b, t]),
                        "embedding": embedding[b, t],
                        "layers": [
                            {
                                **{part: one[part][b, t] for part in ("attention", "ffn", "hidden")},
                                "deltas": {site: delta[b, t] for site, delta in one["deltas"].items()},
                            }
                            for one in layers
                        ],
                        "retrieved": {name: value[slots[b, t]] for name, value in values.items()},
                    }
                )
    return found


def layer_cosines(positions: list[dict[str, Any]], layers: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {part: [] for part in ("attention", "ffn", "hidden", "first_state")}
    for layer in range(layers):
        for part in ("attention", "ffn", "hidden"):
            each = [cosine(one["layers"][layer][part], one["embedding"]) for one in positions]
            found[part].append(sum(each) / len(each))
        each = [cosine(one["layers"][layer]["hidden"], one["layers"][0]["hidden"]) for one in positions]
        found["first_state"].append(sum(each) / len(each))
    return found


def magnitude_of_tokens(positions: list[dict[str, Any]]) -> dict[int, float]:
    """M of each token that occurs, over all sites of all layers."""
    norms: dict[int, list[float]] = {}
    for one in positions:
        each = [float(d.double().norm()) for layer in one["layers"] for d in layer["deltas"].values()]
        norms.setdefault(one["token"], []).append(sum(each) / len(each))
    return {token: sum(values) / len(values) for token, values in norms.items()}


def view_cosine(positions: list[dict[str, Any]], first: str, second: str) -> float:
    each = [cosine(one["retrieved"][first], one["retrieved"][second]) for one in positions]
    return sum(each) / len(each)


def movement(run: Path, table: str) -> dict[str, float]:
    weights = CheckpointReader(checkpoints_at(run)[-1])
    now = weights.weight(f"tables.{table}.rows").double()
    config = weights.config
    rows = torch.arange(len(now))
    start = initial_rows(rows, now.shape[1], config.model.init_std, config.train.seed, table).double()
    view = weights.view_of_table(table)
    reachable = range(len(now)) if view is None else sorted({int(row) for row in view.rows})
    moved = np.array([float((now[row] - start[row]).norm() / start[row].norm()) for row in reachable])
    low, high = np.percentile(moved, 25), np.percentile(moved, 75)
    return {"rows": len(moved), "mean": moved.mean(), "cv": moved.std() / moved.mean(), "gap": high / low}
