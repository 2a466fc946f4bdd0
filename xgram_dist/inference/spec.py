"""From a recipe to what the decoder is built by."""

import math

from xgram_dist.config import Config
from xgram_dist.inference.decoder import Injection, Spec
from xgram_dist.memory.layout import site_layers, site_width
from xgram_dist.optim.schedule import warmup_factor


def spec_of(config: Config, step: int, end_of_text: int) -> Spec:
    """`step`: whose weights these are; the injection's warm-up stands where it stood then."""
    model, extraction = config.model, config.memory.extraction
    return Spec(
        vocabulary=model.vocabulary,
        layers=model.layers,
        width=model.width,
        ffn_width=model.ffn_width,
        heads=model.heads,
        kv_heads=model.kv_heads,
        context=model.sequence_length,
        rope_theta=model.rope_theta,
        norm_eps=model.norm_eps,
        injections=_injections(config, warmup_factor(config, step)),
        normalised=extraction.norm,
        gated=extraction.gate,
        document_end=end_of_text if model.document_masking else None,
    )


def _injections(config: Config, warmup: float) -> tuple[Injection, ...]:
    memory, found = config.memory, []
    for site, settings in memory.sites.items() if memory.method != "vanilla" else ():
        convolutions = (1 if memory.extraction.shared else settings.views) if memory.extraction.enabled else 0
        taps = tuple(settings.kernels[view % len(settings.kernels)] for view in range(convolutions))
        for layer in site_layers(config, site):
            scale = math.sqrt(layer + 1) if memory.injection.depth_scaling else 1.0
            scale *= 1 / math.sqrt(settings.views) if memory.injection.view_norm else 1.0
            scale *= warmup if memory.injection.warmup else 1.0
            found.append(Injection(layer, site, site_width(config, site), settings.views, taps, scale))
    return tuple(found)
