"""Parameters and FLOPs of a recipe (pure arithmetic).

FLOPs are of the forward pass for one token, a multiply and an add counting two. The backbone: two per weight of each
matrix (the embedding is a lookup), and causal attention over half the sequence on average. What a method adds is in
`flops.py`.
"""

from dataclasses import asdict, dataclass
from typing import Any

from xgram_dist.config.schema import Config, ModelConfig
from xgram_dist.memory.layout import num_rows, plan_tables, site_layers
from xgram_dist.plan.flops import extra_flops_per_token, retrieved_width
from xgram_dist.plan.shapes import method_shapes, numel, side_network


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
    gates = rows * len(tables) if memory.compression < 1 and memory.row_gates else 0
    matrices = _block_matrices(model) + model.vocabulary * model.width
    backbone_flops = 2 * matrices + 2 * model.layers * model.width * model.sequence_length
    extra = extra_flops_per_token(config)
    tokens = config.train.global_batch * model.sequence_length
    shapes = [method_shapes(config, layer, 1) for layer in range(model.layers)]
    replaced = len(site_layers(config, "up")) * model.width * model.ffn_width if memory.method == "stem" else 0
    return Budget(
        backbone_parameters=backbone_parameters(model) - replaced,
        table_parameters=rows * sum(table.width for table in tables),
        gate_parameters=gates,
        extractor_parameters=sum(map(numel, shapes)) + numel(side_network(config, 1)),
        tables=len(tables),
        rows_per_table=rows if tables else 0,
        activation_width=retrieved_width(config),
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
