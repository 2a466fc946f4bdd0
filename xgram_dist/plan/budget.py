"""Parameters and FLOPs of a recipe (pure arithmetic).

FLOPs are of the forward pass for one token, a multiply and an add counting two. The backbone: two per weight of each
matrix (the embedding is a lookup), and causal attention over half the sequence on average. What the tables add per
view, as the paper counts it: (K + 2k + 1) * width multiply-adds, with K rows retrieved and k taps.
"""

from dataclasses import asdict, dataclass
from typing import Any

from xgram_dist.config.schema import Config, ModelConfig
from xgram_dist.memory.layout import num_rows, plan_tables


@dataclass(frozen=True)
class Budget:
    backbone_parameters: int
    table_parameters: int
    gate_parameters: int
    extractor_parameters: int
    tables: int
    rows_per_table: int
    activation_width: int
    backbone_flops_per_token: int
    extra_flops_per_token: int
    relative_flops: float
    tokens_per_step: int
    training_tokens: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def backbone_parameters(model: ModelConfig) -> int:
    norms = model.layers * (3 * model.width + _kv_width(model)) + model.width
    return 2 * model.vocabulary * model.width + _block_matrices(model) + norms


def plan_budget(config: Config) -> Budget:
    model, memory = config.model, config.memory
    tables = plan_tables(config)
    rows = num_rows(config)
    hashed = memory.compression < 1
    gates = rows * len(tables) if hashed and memory.row_gates else 0
    matrices = _block_matrices(model) + model.vocabulary * model.width
    backbone_flops = 2 * matrices + 2 * model.layers * model.width * model.sequence_length
    retrieved = 1 + memory.routing.copies if hashed else 1
    extra = 0
    for table in tables:
        kernels = memory.sites[table.site].kernels  # type: ignore[index]
        taps = kernels[table.view % len(kernels)] if memory.extraction.enabled else 0
        extra += 2 * (retrieved + 2 * taps + 1) * table.width
    tokens = config.train.global_batch * model.sequence_length
    return Budget(
        backbone_parameters=backbone_parameters(model),
        table_parameters=rows * sum(table.width for table in tables),
        gate_parameters=gates,
        extractor_parameters=_extractor_parameters(config),
        tables=len(tables),
        rows_per_table=rows if tables else 0,
        activation_width=sum(table.width for table in tables),
        backbone_flops_per_token=backbone_flops,
        extra_flops_per_token=extra,
        relative_flops=(backbone_flops + extra) / backbone_flops,
        tokens_per_step=tokens,
        training_tokens=tokens * config.train.steps,
    )


def block_flops_per_token(config: Config) -> int:
    """Forward of all blocks, with what is injected: what activation checkpointing computes once more."""
    budget, model = plan_budget(config), config.model
    head = 2 * model.vocabulary * model.width
    return budget.backbone_flops_per_token - head + budget.extra_flops_per_token


def _kv_width(model: ModelConfig) -> int:
    return model.width // model.heads * model.kv_heads


def _block_matrices(model: ModelConfig) -> int:
    attention = 2 * model.width * model.width + 2 * model.width * _kv_width(model)
    return model.layers * (attention + 3 * model.width * model.ffn_width)


def _extractor_parameters(config: Config) -> int:
    """Convolutions and injection gains, which live with the backbone."""
    memory, total = config.memory, 0
    for table in plan_tables(config):
        site = memory.sites[table.site]  # type: ignore[index]
        total += 1  # its gain
        if memory.extraction.enabled and not (memory.extraction.shared and table.view > 0):
            taps = site.kernels[table.view % len(site.kernels)]
            total += table.width * ((2 * taps + 1) if memory.extraction.gate else taps)
    return total
