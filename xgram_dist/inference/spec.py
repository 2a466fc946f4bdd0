"""From a recipe to what the decoder is built by."""

import math

from xgram_dist.config import Config
from xgram_dist.inference.decoder import Injection, Spec
from xgram_dist.inference.methods import Hashing, Own
from xgram_dist.memory.layout import (
    extraction_settings,
    injection_settings,
    ngram_width,
    resolved_layers,
    site_layers,
    site_width,
)
from xgram_dist.memory.ngrams.hashing import plan_ngram_hash
from xgram_dist.optim.schedule import warmup_factor


def spec_of(config: Config, step: int, end_of_text: int) -> Spec:
    """`step`: whose weights these are; the injection's warm-up stands where it stood then."""
    model, extraction = config.model, extraction_settings(config)
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
        own=_own(config),
        normalised=extraction.norm,
        gated=extraction.gate,
        document_end=end_of_text if model.document_masking else None,
    )


def _injections(config: Config, warmup: float) -> tuple[Injection, ...]:
    memory, found = config.memory, []
    extraction, injection = extraction_settings(config), injection_settings(config)
    for site, settings in memory.sites.items() if memory.method in ("xgram", "ple") else ():
        convolutions = (1 if extraction.shared else settings.views) if extraction.enabled else 0
        taps = tuple(settings.kernels[view % len(settings.kernels)] for view in range(convolutions))
        for layer in site_layers(config, site):
            scale = math.sqrt(layer + 1) if injection.depth_scaling else 1.0
            scale *= 1 / math.sqrt(settings.views) if injection.view_norm else 1.0
            scale *= warmup if injection.warmup else 1.0
            found.append(Injection(layer, site, site_width(config, site), settings.views, taps, scale))
    return tuple(found)


def _own(config: Config) -> Own | None:
    memory = config.memory
    if memory.method == "retoken":
        return Own("ffn", site_layers(config, "ffn"), views=memory.retoken.views)
    if memory.method == "mort":
        return Own("block", site_layers(config, "block"), views=memory.mort.views, top=memory.mort.top)
    if memory.method == "stem":
        return Own("up", site_layers(config, "up"))
    if memory.method == "mole":
        return Own("experts", resolved_layers(config, memory.mole.layers), views=memory.mole.experts)
    if memory.method == "scone":
        return Own("input", (), reach=memory.scone.longest - 1)
    if memory.method == "engram":
        plan = plan_ngram_hash(config)
        hashing = Hashing(plan.orders, plan.multipliers, plan.rows, plan.outside)
        reach, taps = max(plan.orders) - 1, memory.engram.taps
        layers = site_layers(config, "ngram")
        return Own("ngram", layers, width=ngram_width(config), taps=taps, reach=reach, hashing=hashing)
    return None
