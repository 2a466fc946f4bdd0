"""The modules that a method puts into a block, by site; the block (model/transformer.py) knows what each is for."""

from torch import nn

from xgram_dist.config import Config
from xgram_dist.memory.layout import resolved_layers, site_layers, table_sites
from xgram_dist.memory.methods.engram import Engram
from xgram_dist.memory.methods.mole import Mole
from xgram_dist.memory.methods.mort import Mort
from xgram_dist.memory.methods.retoken import Retoken
from xgram_dist.memory.methods.stem import Stem
from xgram_dist.memory.methods.xgram import xgram_sites
from xgram_dist.parallel.tensor import ALONE, TensorAxis

OWN_SITE: dict[str, type[nn.Module]] = {"ffn": Retoken, "block": Mort, "up": Stem, "ngram": Engram}


def build_sites(config: Config, layer: int, axis: TensorAxis = ALONE) -> nn.ModuleDict:
    memory = config.memory
    if memory.method in ("xgram", "ple"):
        return xgram_sites(config, layer, axis)
    if memory.method == "mole":
        chosen = layer in resolved_layers(config, memory.mole.layers)
        return nn.ModuleDict({"experts": Mole(config, layer, axis)} if chosen else {})
    sites = [site for site in table_sites(config) if layer in site_layers(config, site)]
    return nn.ModuleDict({site: OWN_SITE[site](config, layer) for site in sites})
