"""From a recipe to the things that are trained: tables, network, optimizer.

The order of application a reader can follow: tensor parallel -> initialise -> activation checkpointing (in the model)
-> compile -> engine (engine/build.py).
"""

import torch

from xgram_dist.config import Config
from xgram_dist.memory.layout import has_tables
from xgram_dist.memory.ngrams.folding import Folding
from xgram_dist.memory.ngrams.frequent import Grams
from xgram_dist.memory.ngrams.hashing import NgramKeys, plan_ngram_hash
from xgram_dist.memory.ngrams.lookup import GramLookup
from xgram_dist.memory.routing.routing import Routing
from xgram_dist.memory.tables import Tables
from xgram_dist.memory.working_set import Lookup, NoTables
from xgram_dist.model.initial import initialise
from xgram_dist.model.transformer import Transformer
from xgram_dist.parallel.device import DTYPES
from xgram_dist.parallel.mesh import Mesh
from xgram_dist.parallel.ranks import Ranks

Keys = Folding | Grams
"""What a method that looks up n-grams must know of the data."""


def build_model(
    config: Config, device: torch.device, end_of_text: int | None = None, tensor: Ranks | None = None
) -> Transformer:
    model = Transformer(config, DTYPES[config.train.precision], end_of_text, tensor)
    initialise(model, config)
    model.to(device)
    if config.train.compile:
        for block in model.blocks:
            block.compile(dynamic=None)
    return model


def build_lookup(
    config: Config,
    routing: Routing | None,
    device: torch.device,
    mesh: Mesh | None = None,
    keys: Keys | None = None,
    end_of_text: int | None = None,
) -> Lookup:
    """`keys`: of the methods that look up n-grams. `end_of_text`: the token that ends a document."""
    if isinstance(keys, Grams):
        return GramLookup(keys, device)
    if not has_tables(config):
        return NoTables(device)
    keys_of = None
    if isinstance(keys, Folding):
        apart = end_of_text if config.model.document_masking else None
        keys_of = NgramKeys(plan_ngram_hash(config), keys.ids, apart)
    return Tables(config, routing, device, mesh, keys_of)
