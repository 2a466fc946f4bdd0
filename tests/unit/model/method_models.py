"""Small models of every memory method."""

import copy

import tiny_models as tiny
import torch

from xgram_dist.config import build_config
from xgram_dist.model.build import build_lookup
from xgram_dist.tables.fgrams import count_grams

MEMORY = {
    "ple": {"method": "ple", "compression": 1.0, "sites": {"h": {"views": 2}, "v": {"views": 1}}},
    "retoken": {
        "method": "retoken",
        "compression": 1.0,
        "retoken": {"views": 2},
        "learning_rate": {"scales": "tables"},
    },
    "mort": {"method": "mort", "compression": 1.0, "mort": {"views": 3, "top": 2, "balance": 0.05}},
    "stem": {"method": "stem", "compression": 1.0, "stem": {"layers": [1]}},
    "engram": {
        "method": "engram",
        "compression": 1.0,
        "engram": {"heads": 2, "rows": 40, "width": 24, "taps": 3, "layers": [0, 1]},
    },
    "mole": {"method": "mole", "mole": {"experts": 3, "width": 8}},
    "scone": {"method": "scone", "scone": {"grams": 30, "longest": 3, "layers": 1}},
}
WITH_TABLES = ("ple", "retoken", "mort", "stem", "engram")


def config(method, **sections):
    tree = copy.deepcopy(tiny.BASE)
    tree["memory"] = {**copy.deepcopy(MEMORY[method]), **sections.pop("memory", {})}
    for section, values in sections.items():
        tree.setdefault(section, {}).update(values)
    return build_config(tree)


def grams(settings):
    """f-grams of tokens that repeat themselves."""
    scone = settings.memory.scone
    return count_grams(repeating(settings, 20, 12, seed=77).numpy(), scone.longest, scone.grams)


def repeating(settings, *shape, seed=0):
    """Of few tokens, so that n-grams come again."""
    return torch.randint(0, 6, shape, generator=torch.Generator().manual_seed(seed))


def lookup(settings, mesh=None, dtype=torch.float32):
    keys = grams(settings) if settings.memory.method == "scone" else None
    made = build_lookup(settings, None, tiny.CPU, mesh, keys)
    if settings.memory.method in WITH_TABLES:
        tiny.convert(made.shards, dtype)
    return made
