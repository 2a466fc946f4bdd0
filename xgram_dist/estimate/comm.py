"""Bytes that a rank sends in a step, by collective and mesh axis.

    world = data x tensor        tensor is the inner axis
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
from xgram_dist.config.validate import check_degrees
from xgram_dist.errors import UserError
from xgram_dist.model.methods.base import method_of
from xgram_dist.parallel.device import DTYPES
from xgram_dist.tables.layout import RESIDUAL_SITES, site_width

Axis = Literal["world", "data", "tensor", "replicate", "shard", "replicas", "rows", "context"]
Collective = Literal["all-reduce", "reduce-scatter", "all-gather", "all-to-all"]

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
    """Sizes of the mesh axes."""

    data: int
    tensor: int = 1
    replicate: int = 1
    replicas: int = 1
    context: int = 1

    @staticmethod
    def of(config: Config, ranks: int) -> "Axes":
        check_degrees(config, ranks)
        tensor, shard = config.parallel.tensor, config.memory.shard
        data = ranks // tensor
        rows = (
            {"world": data, "node": max(1, min(ranks, NODE_RANKS) // tensor)}[shard]
            if isinstance(shard, str)
            else shard
        )
        if data % rows:
            raise UserError(f"memory.shard = node: {ranks} ranks are not whole nodes of {NODE_RANKS}; change --ranks")
        return Axes(data, tensor, config.parallel.replicate, data // rows, config.parallel.context)

    @property
    def rows(self) -> int:
        """Ranks that hold the tables once."""
        return self.data // self.replicas

    @property
    def shard(self) -> int:
        return self.data // self.replicate

    @property
    def world(self) -> int:
        return self.data * self.tensor

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
    assert collective != "all-to-all"
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
    hidden, layers = compute_bytes(config) * tokens * model.width, model.layers
    passes = 3 if recomputed else 2
    messages = [
        ring_message("norms of q and k", "all-reduce", "tensor", axes, FP32 * 2 * tokens * layers * passes),
        ring_message("loss", "all-reduce", "tensor", axes, FP32 * 3 * tokens),
    ]
    # Embedding, two layers a block, head; forward and backward.
    reductions = 2 + 4 * layers + (layers if recomputed else 0)
    if config.parallel.sequence_parallel:
        gathers = 2 + 4 * layers + (2 * layers if recomputed else 0)
        replicated = _replicated_gradient_bytes(config, micro_batches)
        messages += [
            ring_message("activations", "all-gather", "tensor", axes, hidden * gathers),
            ring_message("activations", "reduce-scatter", "tensor", axes, hidden * reductions),
            ring_message("gradients of whole parameters", "all-reduce", "tensor", axes, replicated),
        ]
    else:
        messages.append(ring_message("activations", "all-reduce", "tensor", axes, hidden * reductions))
    method = method_of(config)
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
    model, train, method = config.model, config.train, method_of(config)
    size, layers, forwards = compute_bytes(config), range(model.layers), 2 if train.activation_checkpointing else 1
    sequences = train.micro_batch * micro_batches
    both = sequences * model.sequence_length * 2 * size * site_width(config, "v") / axes.tensor * model.layers
    states = sequences * 2 * axes.context * size * model.width * sum(map(method.exchanged_positions, layers))
    counts = FP32 * micro_batches * sum(map(method.summed_numbers, layers))
    return [
        ring_message("keys and values", "all-gather", "context", axes, both * forwards),
        ring_message("keys and values", "reduce-scatter", "context", axes, both),
        ring_message("states before chunks", "all-gather", "context", axes, states * forwards),
        ring_message("states before chunks", "reduce-scatter", "context", axes, states),
        ring_message("balance of views", "all-reduce", "context", axes, counts * forwards),
    ]


def _replicated_gradient_bytes(config: Config, micro_batches: int) -> float:
    """Gradients of parameters that every rank holds whole and applies to its part of the sequence."""
    method = method_of(config)
    elements = (1 + 2 * config.model.layers) * config.model.width
    for table in method.layout().tables:
        taps = method.extractor_taps(table.site)
        if table.site in RESIDUAL_SITES and taps:
            length = taps[table.view % len(taps)]
            elements += table.width * ((2 * length + 1) if method.extraction.gate else length)
    return FP32 * elements * micro_batches
