"""Which layers are in which stage of a pipeline (`parallel.pipeline`), cut by cost.

A stage is a range of consecutive blocks. The first has the embedding too, and the last the final norm and the head. A
rank of the pipeline axis has `parallel.virtual_stages` of them: stage s is on rank s mod `parallel.pipeline`. A layer's
tables live with the ranks of its stage.

The cost of a part is its multiply-adds for a token: one for each weight of a matrix, those of causal attention over the
sequence, and, where a block is recomputed for the backward pass, a third more. With a large vocabulary the head is
worth several blocks; the embedding is a lookup and costs nothing.
"""

from dataclasses import dataclass

import torch

from xgram_dist.config import Config
from xgram_dist.errors import UserError
from xgram_dist.model.methods.base import method_of
from xgram_dist.parallel.process_group import ProcessGroup


@dataclass(frozen=True)
class PipelineStage:
    number: int
    layers: range
    is_first: bool
    is_last: bool


def whole_model(config: Config) -> PipelineStage:
    return PipelineStage(0, range(config.model.layers), is_first=True, is_last=True)


def plan_stages(config: Config) -> tuple[PipelineStage, ...]:
    """All stages, in the order in which a token passes them: the cut whose dearest stage is cheapest."""
    layers = config.model.layers
    count = config.parallel.pipeline * config.parallel.virtual_stages
    if count == 1:
        return (whole_model(config),)
    sums = [0.0]
    for cost in block_costs(config):
        sums.append(sums[-1] + cost)
    head = config.model.vocabulary * config.model.width
    # best[stages][layers]: (cost of the dearest stage, where the last one begins), of cuts of the first layers.
    best: list[dict[int, tuple[float, int]]] = [{end: (sums[end], 0) for end in range(1, layers + 1)}]
    for number in range(1, count):
        extra = head if number == count - 1 else 0
        best.append(
            {
                end: min(
                    (max(best[-1][start][0], sums[end] - sums[start] + extra), start) for start in range(number, end)
                )
                for end in range(number + 1, layers + 1)
            }
        )
    ends = [layers]
    for of_cut in reversed(best):
        ends.append(of_cut[ends[-1]][1])
    ends.reverse()
    return tuple(
        PipelineStage(number, range(ends[number], ends[number + 1]), number == 0, number == count - 1)
        for number in range(count)
    )


def block_costs(config: Config) -> list[float]:
    """Multiply-adds of a token in each block."""
    from xgram_dist.model.transformer import Block

    model, method = config.model, method_of(config)
    attention = model.attention_width * model.sequence_length
    with torch.device("meta"):
        blocks = [Block(method, layer) for layer in range(model.layers)]
    matrices = [sum(p.numel() for p in block.parameters() if p.dim() > 1) for block in blocks]
    return [(weights + attention) * (4 / 3 if config.train.activation_checkpointing else 1) for weights in matrices]


def stages_of_rank(config: Config, pipeline: ProcessGroup | None) -> tuple[PipelineStage, ...]:
    """Those of this rank of the pipeline axis; without one, all layers are one stage."""
    if pipeline is None or pipeline.size == 1:
        return (whole_model(config),)
    assert pipeline.size == config.parallel.pipeline
    return plan_stages(config)[pipeline.rank :: pipeline.size]


def layers_of(stages: tuple[PipelineStage, ...]) -> tuple[int, ...]:
    return tuple(layer for stage in stages for layer in stage.layers)


def check_stages(config: Config) -> None:
    """Where tables are trained, every rank of a pipeline must have some."""
    pipeline, stages, readers = config.parallel.pipeline, plan_stages(config), method_of(config).table_layers()
    for rank in range(pipeline if readers else 0):
        layers = layers_of(stages[rank::pipeline])
        if not readers.intersection(layers):
            raise UserError(
                f"memory.method = {config.memory.method} has no tables in layer{'s' if len(layers) > 1 else ''} "
                f"{', '.join(map(str, layers))}, all that rank {rank} of parallel.pipeline = {pipeline} has; give one "
                f"of these layers a table, or lower parallel.pipeline"
            )
