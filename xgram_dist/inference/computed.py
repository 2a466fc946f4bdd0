"""Tables that are made, not trained: what MoLE's experts and SCONE's side network give for every token or f-gram.

In: the checkpoint of a run. Out: the rows that are asked for, computed in fp32. `export` asks for all of them.
Shapes: U keys, D width.
"""

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from xgram_dist.checkpoint.storage import FolderReader
from xgram_dist.config import Config
from xgram_dist.inference.methods import NAME
from xgram_dist.inference.weights import read_whole
from xgram_dist.memory.layout import resolved_layers
from xgram_dist.memory.methods.mole import Mole
from xgram_dist.memory.methods.scone import Scone
from xgram_dist.memory.ngrams.frequent import Grams

Loaded = TypeVar("Loaded", bound=nn.Module)
SIDE = ("side.", ".sites.experts.experts.", ".sites.experts.norm.")
"""In the names of parameters that the tables stand for."""


@dataclass(frozen=True)
class MadeTable:
    name: str
    rows: int
    width: int


class ComputedTables:
    def __init__(self, config: Config, keys: Grams | None, reader: FolderReader, device: torch.device):
        model = config.model
        self._device = device
        self._embedding = torch.empty(model.vocabulary, model.width, device=device)
        read_whole(reader, "backbone.embedding", self._embedding)
        self._grams: Tensor | None = None
        self._experts: dict[int, Mole] = {}
        if keys is not None:
            self._side = _loaded(Scone(config), "side", reader, device)
            self._grams = torch.from_numpy(keys.tokens).long()
            self.tables = [MadeTable(NAME["input"], len(keys.tokens), model.width)]
            return
        for layer in resolved_layers(config, config.memory.mole.layers):
            self._experts[layer] = _loaded(Mole(config, layer), f"blocks.{layer}.sites.experts", reader, device)
        self.tables = [
            MadeTable(f"layers.{layer}.experts.{expert}", model.vocabulary, model.width)
            for layer in self._experts
            for expert in range(config.memory.mole.experts)
        ]

    @torch.no_grad()
    def vectors(self, keys_U: Tensor) -> dict[str, Tensor]:
        """One vector a key and table [U, D], for keys in host memory."""
        if self._grams is not None:
            grams = self._grams[keys_U].to(self._device)
            return {NAME["input"]: self._side.embeddings(grams, self._embedding, torch.float32)}
        embeddings = self._embedding[keys_U.to(self._device)]
        found = {}
        for layer, experts in self._experts.items():
            for number, answer_UD in enumerate(experts.answers(embeddings)):
                found[f"layers.{layer}.experts.{number}"] = answer_UD
        return found

    def rows(self, table: str, start: int, stop: int) -> Tensor:
        return self.vectors(torch.arange(start, stop))[table].cpu()


def _loaded(module: Loaded, prefix: str, reader: FolderReader, device: torch.device) -> Loaded:
    module.to(device).requires_grad_(False)
    for name, parameter in module.named_parameters():
        read_whole(reader, f"backbone.{prefix}.{name}", parameter.data)
    return module
