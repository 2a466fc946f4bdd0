"""Bytes that a rank sends in a step, by collective and mesh axis.

    world = pipeline x data x tensor    tensor is the innermost axis
    data  = replicate x shard    shard is the inner one; without replicas it is the whole data axis
    data  = replicas x rows        of the tables; rows is the inner one; without replicas it is the whole data axis
    data  = batch x context        context is the inner one: ranks that share each sequence

A message's bytes are those that leave a rank in a step; as many enter it. Reductions and gathers count as ring
algorithms: each rank forwards all chunks but one. All-to-alls count what goes to other ranks. `engines.py` has the
messages of the backbone engines, `tables.py` those of the exchange; here are those of the tensor and context axes.
"""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from xgram_dist.config.schema import Config
from xgram_dist.config.validate import check_degrees, data_ranks
from xgram_dist.errors import UserError
from xgram_dist.model.methods.base import MemoryMethod, method_of
from xgram_dist.model.pipeline_stages import PipelineStage, layers_of, plan_stages, whole_model
from xgram_dist.parallel.device import DTYPES
from xgram_dist.tables.layout import ALL_LAYERS, RESIDUAL_SITES, TableLayout, site_width

Axis = Literal["world", "data", "tensor", "replicate", "shard", "replicas", "rows", "context", "pipeline"]
Collective = Literal["all-reduce", "reduce-scatter", "all-gather", "all-to-all", "send"]

FP32 = 4
TABLE_MESSAGES = (
    "token ids",
    "table vectors",
    "table gradients",
    "table parameters",
    "residual-site vectors",
    "residual-site gradients",
    "row-gate gradients",
    "touched rows of replicas",
    "gradients of replicas",
)
NODE_RANKS = 8
"""Ranks of a node, for `memory.shard=node` before a run has nodes."""


def compute_bytes(config: Config) -> int:
    """Bytes of a number in the compute type."""
    return DTYPES[config.train.precision].itemsize


def rank_tokens(config: Config) -> int:
    """Of a micro-batch that a rank computes: its part of each sequence."""
    return config.train.micro_batch * config.model.sequence_length // config.parallel.context


def read_tokens(config: Config) -> int:
    """Of a micro-batch whose vectors a rank reads, mean over the ranks: where sequences are cut, those before each
    chunk, too, but for the first of a sequence."""
    context = config.parallel.context
    before = method_of(config).reach * (2 * context - 1) / context if context > 1 else 0.0
    return rank_tokens(config) + round(config.train.micro_batch * before)


@dataclass(frozen=True)
class Axes:
    """Sizes of the mesh axes, and the rank of the pipeline axis whose figures are asked for."""

    data: int
    tensor: int = 1
    replicate: int = 1
    replicas: int = 1
    context: int = 1
    pipeline: int = 1
    table_stages: int = 1
    """Ranks of the pipeline axis that share the rows of a table: all, where one table serves all layers."""
    at: int = 0
    """Rank of the pipeline axis."""

    @staticmethod
    def of(config: Config, ranks: int) -> "Axes":
        check_degrees(config, ranks)
        tensor, shard, pipeline = config.parallel.tensor, config.memory.shard, config.parallel.pipeline
        data = data_ranks(config, ranks)
        rows = (
            {"world": data, "node": max(1, min(ranks, NODE_RANKS) // tensor)}[shard]
            if isinstance(shard, str)
            else shard
        )
        if data % rows:
            raise UserError(f"memory.shard = node: {ranks} ranks are not whole nodes of {NODE_RANKS}; change --ranks")
        shares = any(table.layer == ALL_LAYERS for table in method_of(config).layout().tables)
        return Axes(
            data,
            tensor,
            config.parallel.replicate,
            data // rows,
            config.parallel.context,
            pipeline,
            pipeline if shares else 1,
        )

    @property
    def rows(self) -> int:
        """Ranks over which the rows of a table are sharded."""
        return self.table_stages * self.data // self.replicas

    def stages(self, config: Config) -> tuple[PipelineStage, ...]:
        """Of this rank of the pipeline axis."""
        if self.pipeline == 1:
            return (whole_model(config),)
        return plan_stages(config)[self.at :: self.pipeline]

    def method(self, config: Config) -> MemoryMethod:
        """With the tables of this rank's layers."""
        return method_of(config, layers_of(self.stages(config)))

    def layout(self, config: Config) -> TableLayout:
        """The tables of this rank's layers, with its columns."""
        return self.method(config).layout(self.tensor)

    def row_gates(self, config: Config) -> int:
        """Gates of a row, over all tables of this rank's layers."""
        layout = self.layout(config)
        return len(layout.tables) if config.memory.row_gates and layout.hashed else 0

    @property
    def shard(self) -> int:
        return self.data // self.replicate

    @property
    def world(self) -> int:
        return self.pipeline * self.data * self.tensor

    def size(self, axis: Axis) -> int:
        sizes = {"world": self.world, "shard": self.shard, "rows": self.rows, **asdict(self)}
        return int(sizes[axis])

    def span(self, axis: Axis) -> int:
        """Consecutive ranks that contain a process group of the axis. A span within a node uses the node's links."""
        spans = {
            "tensor": self.tensor,
            "shard": self.shard * self.tensor,
            "rows": self.rows * self.tensor,
            "context": self.context * self.tensor,
        }
        spans["data"] = spans["replicate"] = spans["replicas"] = self.data * self.tensor
        return spans.get(axis, self.world)


@dataclass(frozen=True)
class Message:
    name: str
    collective: Collective
    axis: Axis
    ranks: int
    bytes: float
    """Sent by a rank in a step, over all calls."""

    @property
    def of_tables(self) -> bool:
        return self.name in TABLE_MESSAGES

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def ring_bytes(collective: Collective, size: float, ranks: int) -> float:
    """Bytes that a rank sends; `size`: bytes of the full tensor that is reduced, gathered or scattered."""
    assert collective not in ("all-to-all", "send")
    rounds = 2 if collective == "all-reduce" else 1
    return rounds * size * (ranks - 1) / ranks


def ring_message(name: str, collective: Collective, axis: Axis, axes: Axes, size: float) -> Message:
    ranks = axes.size(axis)
    return Message(name, collective, axis, ranks, ring_bytes(collective, size, ranks))


def merge_messages(messages: list[Message]) -> list[Message]:
    """Sums the messages that share name, collective and axis, and drops those that move nothing."""
    sums: dict[tuple[str, Collective, Axis, int], float] = {}
    for message in messages:
        key = (message.name, message.collective, message.axis, message.ranks)
        sums[key] = sums.get(key, 0.0) + message.bytes
    return [Message(*key, size) for key, size in sums.items() if size]


def plan_tensor_messages(config: Config, axes: Axes, micro_batches: int, distinct_tokens: float) -> list[Message]:
    """Messages on the tensor axis: Megatron's all-reduces, or gathers and scatters with sequence parallelism.

    Activation checkpointing repeats a block's forward messages, but for its last reduction: nothing that backward needs
    depends on it. `distinct_tokens`: of a window.
    """
    if axes.tensor == 1:
        return []
    model, recomputed = config.model, config.train.activation_checkpointing
    tokens = rank_tokens(config) * micro_batches
    stages = axes.stages(config)
    hidden, layers = compute_bytes(config) * tokens * model.width, len(layers_of(stages))
    passes = 3 if recomputed else 2
    has_head = int(stages[-1].is_last)
    messages = [
        ring_message("norms of q and k", "all-reduce", "tensor", axes, FP32 * 2 * tokens * layers * passes),
        ring_message("loss", "all-reduce", "tensor", axes, FP32 * 3 * tokens * has_head),
    ]
    # Embedding, two layers a block, head; forward and backward.
    ends = int(stages[0].is_first) + has_head
    reductions = ends + 4 * layers + (layers if recomputed else 0)
    if config.parallel.sequence_parallel:
        gathers = ends + 4 * layers + (2 * layers if recomputed else 0)
        replicated = _replicated_gradient_bytes(config, axes, micro_batches)
        messages += [
            ring_message("activations", "all-gather", "tensor", axes, hidden * gathers),
            ring_message("activations", "reduce-scatter", "tensor", axes, hidden * reductions),
            ring_message("gradients of whole parameters", "all-reduce", "tensor", axes, replicated),
        ]
    else:
        messages.append(ring_message("activations", "all-reduce", "tensor", axes, hidden * reductions))
    method = axes.method(config)
    if method.extraction.enabled and method.extraction.norm:
        views = sum(table.site not in RESIDUAL_SITES for table in method.layout().tables)
        size = FP32 * distinct_tokens * views * passes * micro_batches
        messages.append(ring_message("norms of vectors", "all-reduce", "tensor", axes, size))
    return messages


def plan_context_messages(config: Config, axes: Axes, micro_batches: int) -> list[Message]:
    """Messages on the context axis: keys and values of whole sequences, and their gradients. Gathered or passed round a
    ring, they are as many bytes. Activation checkpointing repeats what blocks do forward."""
    if axes.context == 1:
        return []
    model, train, method = config.model, config.train, axes.method(config)
    layers = layers_of(axes.stages(config))
    size, forwards = compute_bytes(config), 2 if train.activation_checkpointing else 1
    sequences = train.micro_batch * micro_batches
    both = sequences * model.sequence_length * 2 * size * site_width(config, "v") / axes.tensor * len(layers)
    states = sequences * 2 * axes.context * size * model.width * sum(map(method.exchanged_positions, layers))
    counts = FP32 * micro_batches * sum(map(method.summed_numbers, layers))
    return [
        ring_message("keys and values", "all-gather", "context", axes, both * forwards),
        ring_message("keys and values", "reduce-scatter", "context", axes, both),
        ring_message("states before chunks", "all-gather", "context", axes, states * forwards),
        ring_message("states before chunks", "reduce-scatter", "context", axes, states),
        ring_message("balance of views", "all-reduce", "context", axes, counts * forwards),
    ]


def plan_pipeline_messages(config: Config, axes: Axes, micro_batches: int) -> list[Message]:
    """The residual stream to the next stage and its gradient to the one before, for each micro-batch. With MoLE also
    the gradient of the embedding, which all stages hold."""
    if axes.pipeline == 1:
        return []
    model = config.model
    sequence = axes.tensor if config.parallel.sequence_parallel else 1
    size = compute_bytes(config) * rank_tokens(config) * model.width / sequence
    stages = axes.stages(config)
    forward, backward = sum(not one.is_last for one in stages), sum(not one.is_first for one in stages)
    messages = [
        Message("activations of a stage", "send", "pipeline", axes.pipeline, size * micro_batches * forward),
        Message("gradients of a stage", "send", "pipeline", axes.pipeline, size * micro_batches * backward),
        ring_message("norm and loss", "all-reduce", "pipeline", axes, 8 + 2 * 8 * micro_batches),
    ]
    if method_of(config).reads_embeddings:
        shard = axes.shard if config.parallel.engine == "hsdp" else 1
        gradient = FP32 * model.vocabulary * model.width / axes.tensor / shard
        messages.append(ring_message("gradient of the embedding", "all-reduce", "pipeline", axes, gradient))
    return messages


def _replicated_gradient_bytes(config: Config, axes: Axes, micro_batches: int) -> float:
    """Gradients of parameters that every rank holds whole and applies to its part of the sequence."""
    method, stages = axes.method(config), axes.stages(config)
    elements = (int(stages[-1].is_last) + 2 * len(layers_of(stages))) * config.model.width
    for table in method.layout().tables:
        taps = method.extractor_taps(table.site)
        if table.site in RESIDUAL_SITES and taps:
            length = taps[table.view % len(taps)]
            elements += table.width * ((2 * length + 1) if method.extraction.gate else length)
    return FP32 * elements * micro_batches
