"""PLE, per-layer embeddings: X-gram without hashing, extraction, depth scaling and warm-up.

retrieve   e_m = the token's row of each view m
extract    nothing
inject     1/sqrt(M) * sum over the M views of lambda_m * e_m, at h, q, k, v, o, qk
"""

from typing import ClassVar

from xgram_dist.config.schema import ExtractionConfig, InjectionConfig
from xgram_dist.model.methods.xgram import XGram


class PLE(XGram):
    name = "ple"
    reads: ClassVar[tuple[str, ...]] = ("sites",)
    hashes_tokens = False
    reduced_settings = {}  # noqa: RUF012

    @property
    def extraction(self) -> ExtractionConfig:
        return ExtractionConfig(enabled=False)

    @property
    def injection(self) -> InjectionConfig:
        return InjectionConfig(depth_scaling=False, warmup=False)

    def extra_flops_per_token(self) -> int:
        """A gain and a sum."""
        return 2 * self.retrieved_width()
