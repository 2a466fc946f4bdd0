"""Perplexity of a checkpoint on prepared data, by source and by frequency band.

Bands are those of the routing: VIP tokens, then its buckets, which are sparse (each token has rows of its own) or dense
(tokens share rows by hashing). Each prediction is grouped twice: by the band of the predicted token (perplexity `of` a
band), and by the band of the token read last (`after` a band), whose table vector enters the prediction.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from xgram_dist.console import Progress
from xgram_dist.data.dataset import PreparedData
from xgram_dist.data.loader import sequences_per_chunk
from xgram_dist.errors import UserError
from xgram_dist.inference.model import Model
from xgram_dist.tables.routing import VIP, Routing, region_of_rows

LOGIT_ELEMENTS = 1 << 26
"""Logits that exist at one time; bounds the memory of the head."""


@dataclass(frozen=True)
class Bands:
    """Frequency bands of the vocabulary."""

    names: list[str]
    """VIP, then the buckets in order of frequency."""
    kinds: list[str]
    """Of each band: vip, sparse or dense."""
    of_token: NDArray[Any]
    """The band of every token."""


def bands_of(routing: Routing) -> Bands:
    first = routing.views[0].rows[routing.views[0].offsets[:-1]]
    region = region_of_rows(routing, first)
    kinds = ["vip", *("sparse" if sparse else "dense" for sparse in routing.bucket_sparse)]
    names = ["VIP", *(f"bucket {number}" for number in range(len(routing.bucket_sparse)))]
    return Bands(names, kinds, region - VIP)


class GroupedLoss:
    """Sum of negative log-likelihoods and number of tokens, by group."""

    def __init__(self, groups: int):
        self.loss = np.zeros(groups)
        self.count = np.zeros(groups, dtype=np.int64)

    def add(self, groups_N: NDArray[Any], losses_N: NDArray[Any]) -> None:
        self.loss += np.bincount(groups_N, losses_N, minlength=len(self.loss))
        self.count += np.bincount(groups_N, minlength=len(self.count))

    def figures(self, which: list[int] | slice = slice(None)) -> dict[str, Any]:
        """Of some groups together; of all by default."""
        loss, count = float(self.loss[which].sum()), int(self.count[which].sum())
        mean = loss / count if count else None
        return {"tokens": count, "loss": mean, "perplexity": None if mean is None else math.exp(min(mean, 700.0))}


def measure(model: Model, data: PreparedData, bands: Bands | None, sequences: int, batch: int) -> dict[str, Any]:
    """`sequences`: the limit for each source, spread evenly over it. `batch`: sequences of a forward pass."""
    length = model.context
    per_chunk = sequences_per_chunk(data, length)
    available = [sum(chunks) * per_chunk for chunks in data.shard_chunks]
    if not any(available):
        raise UserError(f"'{data.folder}' has no {data.split} sequence of {length} tokens; choose another --split")
    chosen = [min(count, sequences) for count in available]
    by_source = GroupedLoss(len(available))
    groups = len(bands.names) if bands else 1
    of_band, after_band = GroupedLoss(groups), GroupedLoss(groups)
    with Progress(sum(chosen), "sequences", "perplexity") as progress:
        for source, count in enumerate(chosen):
            indices = [number * available[source] // count for number in range(count)]
            for start in range(0, count, batch):
                batch_indices = indices[start : start + batch]
                tokens = np.stack([_sequence(data, source, index, per_chunk, length) for index in batch_indices])
                if tokens.max() >= model.decoder.spec.vocabulary:
                    raise UserError(f"token {tokens.max()} of '{data.folder}' is outside the model's vocabulary")
                losses = _losses(model, torch.from_numpy(tokens)).reshape(-1)
                read, predicted = tokens[:, :-1].reshape(-1), tokens[:, 1:].reshape(-1)
                if data.manifest.sequence_length is not None:  # nothing predicts, or is, padding
                    real = read != data.manifest.end_of_text
                    losses, read, predicted = losses[real], read[real], predicted[real]
                by_source.add(np.full(len(losses), source), losses)
                for sums, grouped_by in ((of_band, predicted), (after_band, read)):
                    groups_N = bands.of_token[grouped_by] if bands else np.zeros(len(grouped_by), dtype=np.int64)
                    sums.add(groups_N, losses)
                progress.update(len(batch_indices))
    figures: dict[str, Any] = {
        "all": by_source.figures(),
        "sources": {name: by_source.figures([n]) for n, name in enumerate(data.source_names) if chosen[n]},
    }
    if bands is not None:
        figures["bands"] = {
            kind: {
                "of": of_band.figures([n for n, one in enumerate(bands.kinds) if one == kind]),
                "after": after_band.figures([n for n, one in enumerate(bands.kinds) if one == kind]),
            }
            for kind in dict.fromkeys(bands.kinds)
        }
        figures["buckets"] = [
            {"name": name, "kind": kind, "of": of_band.figures([n]), "after": after_band.figures([n])}
            for n, (name, kind) in enumerate(zip(bands.names, bands.kinds, strict=True))
        ]
    return figures


def _sequence(data: PreparedData, source: int, index: int, per_chunk: int, length: int) -> NDArray[Any]:
    chunk, number = divmod(index, per_chunk)
    return data.tokens(source, chunk, number * length, length).astype(np.int64)


@torch.inference_mode()
def _losses(model: Model, tokens_BT: torch.Tensor) -> NDArray[Any]:
    """Cross-entropy of each next token [B * (T-1)]."""
    hidden = model.hidden(tokens_BT)[:, :-1].flatten(0, 1)
    labels = tokens_BT[:, 1:].flatten().to(hidden.device)
    step = max(1, LOGIT_ELEMENTS // model.decoder.spec.vocabulary)
    parts = [
        torch.nn.functional.cross_entropy(model.logits(h), label, reduction="none")
        for h, label in zip(hidden.split(step), labels.split(step), strict=True)
    ]
    return torch.cat(parts).double().cpu().numpy()
