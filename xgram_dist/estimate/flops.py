"""Parameters and FLOPs of a recipe.

FLOPs are those of the forward pass for one token; a multiply-add counts as two. The backbone has two for each weight of
a matrix (the embedding is a lookup), and causal attention over half the sequence on average. What a memory method adds
is a formula of its class in model/methods; `flop_counter.py` checks them against torch's count.
"""

from dataclasses import asdict, dataclass
from typing import Any

from xgram_dist.config.schema import Config, MemoryConfig
from xgram_dist.estimate.shapes import matrices, numel, parameter_shapes
from xgram_dist.model.methods.base import method_of, table_layout


@dataclass(frozen=True)
class Budget:
    backbone_parameters: int
    table_parameters: int
    gate_parameters: int
    extractor_parameters: int
    """What the memory method adds to the network, beside its tables."""
    tables: int
    rows_per_table: int
    activation_width: int
    """Numbers that a token retrieves, over all tables."""
    backbone_flops_per_token: int
    """Of the vanilla backbone."""
    extra_flops_per_token: int
    relative_flops: float
    tokens_per_step: int
    training_tokens: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def plan_budget(config: Config) -> Budget:
    model, method = config.model, method_of(config)
    layout, shapes = method.layout(), parameter_shapes(config)
    method_parameters = numel(shapes.method)
    vanilla = parameter_shapes(config.model_copy(update={"memory": MemoryConfig(method="vanilla")}))
    weights = sum(numel(matrices(unit)) for unit in (*vanilla.blocks, vanilla.head))
    backbone_flops = 2 * weights + 2 * model.layers * model.attention_width * model.sequence_length
    extra_flops = method.extra_flops_per_token()
    tokens = config.train.global_batch * model.sequence_length
    return Budget(
        backbone_parameters=shapes.numel - method_parameters,
        table_parameters=layout.num_rows * layout.width,
        gate_parameters=layout.num_rows * num_row_gates(config),
        extractor_parameters=method_parameters,
        tables=len(layout.tables),
        rows_per_table=layout.num_rows,
        activation_width=method.retrieved_width(),
        backbone_flops_per_token=backbone_flops,
        extra_flops_per_token=extra_flops,
        relative_flops=(backbone_flops + extra_flops) / backbone_flops,
        tokens_per_step=tokens,
        training_tokens=tokens * config.train.steps,
    )


def block_flops_per_token(config: Config) -> int:
    """Forward pass of all blocks with their injections: what activation checkpointing recomputes."""
    budget, model = plan_budget(config), config.model
    head = 2 * model.vocabulary * model.width
    return budget.backbone_flops_per_token - head + budget.extra_flops_per_token


def num_row_gates(config: Config) -> int:
    """Gates of a row, over all tables."""
    layout = table_layout(config)
    return len(layout.tables) if config.memory.row_gates and layout.hashed else 0
