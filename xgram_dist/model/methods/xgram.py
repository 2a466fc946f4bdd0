"""X-gram: hashed, gated rows of the token, turned into local n-gram features and added at several sites of a block.

    retrieve   e_m = sum of weighted, gated rows of the token, for each view m     tables/routing.py, tables/lookup.py
    extract    out_m = e_m + content * SiLU(gate), by short convolutions           model/injection.py
    inject     1/sqrt(M) * sum over the M views of lambda_m * out_m, at h, q, k, v, o, qk

Below compression 1 tokens share rows by a routing; at compression 1 row = token id, without gates.
This file imports no torch at its head: `xgram-dist plan` reads it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar

from xgram_dist.config.schema import Config, ExtractionConfig, InjectionConfig
from xgram_dist.errors import UserError
from xgram_dist.model.methods.base import MemoryMethod, check_layers
from xgram_dist.tables.layout import RESIDUAL_SITES, TableSite, routing_settings, site_width

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from xgram_dist.parallel.context_parallel import ContextAxis
    from xgram_dist.parallel.tensor_parallel import TensorAxis


class XGram(MemoryMethod):
    name = "xgram"
    reads: ClassVar[tuple[str, ...]] = ("sites", "routing", "extraction", "injection", "row_gates", "row_gate_init")
    hashes_tokens = True
    elementwise = True
    sequence_parallel = True
    reduced_settings = {"routing": {"vip": 4, "buckets": 4, "file": None}}  # noqa: RUF012

    @property
    def extraction(self) -> ExtractionConfig:
        return self.memory.extraction

    @property
    def injection(self) -> InjectionConfig:
        return self.memory.injection

    # Config

    def check(self) -> None:
        memory = self.memory
        for name, site in memory.sites.items():
            check_layers(self.config, f"sites.{name}", site.layers)
        if not memory.sites:
            raise UserError(
                f"memory.method = {self.name} needs at least one of memory.sites (h, q, k, v, o, qk), for example "
                f"memory.sites.v.views=2"
            )
        if "qk" in memory.sites and {"q", "k"} & set(memory.sites):
            raise UserError(
                "memory.sites.qk is one table for both q and k; it cannot stand beside memory.sites.q or .k"
            )
        for name, site in memory.sites.items():
            if memory.extraction.shared and len(set(site.kernels)) > 1:
                raise UserError(
                    f"memory.extraction.shared needs one kernel size, but memory.sites.{name}.kernels = "
                    f"{list(site.kernels)}; give one, or set memory.extraction.shared=false"
                )
        if self.hashed:
            _check_num_rows(self.config)

    def input_files(self) -> dict[str, tuple[str | None, str]]:
        if not self.hashed:
            return {}
        routing = self.memory.routing
        return {
            "memory.routing.file": (routing.file, "xgram-dist route"),
            "memory.routing.frequencies": (routing.frequencies, "xgram-dist frequencies"),
        }

    # Tables

    def sites(self) -> dict[str, TableSite]:
        return {
            str(name): TableSite(self.resolve_layers(site.layers), site_width(self.config, name), site.views)
            for name, site in self.memory.sites.items()
        }

    @property
    def num_rows(self) -> int:
        return routing_settings(self.config).num_rows(self.model.vocabulary)

    # Network

    @property
    def reach(self) -> int:
        return max((taps for site in self.sites() for taps in self.extractor_taps(site)), default=1) - 1

    def build_sites(self, layer: int, axis: TensorAxis, context: ContextAxis) -> dict[str, nn.Module]:
        from xgram_dist.model.injection import SiteInjection

        return {
            name: SiteInjection(self.config, self.extraction, self.injection, layer, name, axis, context)
            for name, site in self.sites().items()
            if layer in site.layers
        }

    def initialise(self, name: str, value: Tensor, generator: torch.Generator) -> bool:
        if ".extractors." not in name:
            return False
        leaf = name.rsplit(".", 1)[-1]
        if leaf == "content":
            value.zero_()[0] = 1.0  # identity: tap 0 is the current position
        elif leaf == "gate":
            value.normal_(0.0, self.model.init_std, generator=generator)
        else:
            assert leaf == "gate_bias", name
            value.fill_(1.0)
        return True

    # Estimates

    def extractor_taps(self, site: str) -> list[int]:
        if not self.extraction.enabled:
            return []
        kernels, views = self.memory.sites[site].kernels, self.memory.sites[site].views  # type: ignore[index]
        return [kernels[view % len(kernels)] for view in range(1 if self.extraction.shared else views)]

    def extra_flops_per_token(self) -> int:
        """As the paper counts: for each view (K + 2k + 1) * width multiply-adds, K rows retrieved, k taps."""
        retrieved = 1 + self.memory.routing.copies if self.hashed else 1
        total = 0
        for table in self.layout().tables:
            taps = self.extractor_taps(table.site)
            total += 2 * (retrieved + 2 * (taps[table.view % len(taps)] if taps else 0) + 1) * table.width
        return total

    def activation_numbers(self, layer: int, tensor: int) -> float:
        """The retrieved vector, its normalised copies (one for each tap), content, gate, SiLU and result."""
        sequence = tensor if self.config.parallel.sequence_parallel else 1
        extraction, total = self.extraction, 0.0
        copies = 3 if self.config.train.compile else 2 + (1 if extraction.norm else 0) + (3 if extraction.gate else 0)
        for name, site in self.sites().items():
            if layer not in site.layers:
                continue
            width, taps = site.width / (sequence if name in RESIDUAL_SITES else tensor), self.extractor_taps(name)
            if taps:
                total += sum(taps[view % len(taps)] - 1 + copies for view in range(site.views)) * width
            else:
                total += site.views * width
        return total

    # Inference

    def decoder_spec(self, warmup: float) -> dict[str, Any]:
        injections = []
        for name, site in self.sites().items():
            for layer in site.layers:
                scale = math.sqrt(layer + 1) if self.injection.depth_scaling else 1.0
                scale *= 1 / math.sqrt(site.views) if self.injection.view_norm else 1.0
                scale *= warmup if self.injection.warmup else 1.0
                injections.append(
                    {
                        "layer": layer,
                        "site": name,
                        "width": site.width,
                        "views": site.views,
                        "taps": tuple(self.extractor_taps(name)),
                        "scale": scale,
                    }
                )
        return {"injections": injections, "normalised": self.extraction.norm, "gated": self.extraction.gate}


def _check_num_rows(config: Config) -> None:
    """The rows must hold the VIP region and at least one row for each bucket."""
    memory, routing = config.memory, config.memory.routing
    rows = routing_settings(config).num_rows(config.model.vocabulary)
    vip_rows = routing.vip * (1 + routing.copies)
    if routing.vip > config.model.vocabulary or vip_rows + routing.buckets > rows:
        raise UserError(
            f"memory.compression = {memory.compression} gives {rows} rows, too few for memory.routing.vip = "
            f"{routing.vip} x (1 + copies {routing.copies}) rows and one for each of {routing.buckets} buckets; "
            f"raise the compression or lower vip, copies or buckets"
        )
