"""X-gram, and PLE, which is X-gram without hashing, extraction, depth scaling and warm-up.

retrieve   e_m = weighted, gated rows of the token                     memory/retrieval.py
extract    out_m = e_m + content * SiLU(gate), short convolutions      memory/extraction/shortconv.py; PLE: e_m
inject     1/sqrt(M) * sum of lambda_m * out_m, at h, q, k, v, o       memory/injection/sites.py
"""

from torch import nn

from xgram_dist.config import Config
from xgram_dist.memory.injection.sites import SiteInjection
from xgram_dist.memory.layout import site_layers
from xgram_dist.parallel.tensor import ALONE, TensorAxis


def xgram_sites(config: Config, layer: int, axis: TensorAxis = ALONE) -> nn.ModuleDict:
    """The sites of one block: what is added at each."""
    return nn.ModuleDict(
        {
            site: SiteInjection(config, layer, site, axis)
            for site in config.memory.sites
            if layer in site_layers(config, site)
        }
    )
