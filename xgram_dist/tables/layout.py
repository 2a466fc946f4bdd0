"""Tables, and how they are stored side by side.

A table belongs to one layer, site and view (model/methods says which ones a method has). Tables whose tokens map to the
same rows (all layers and sites of one view; without hashing, all of them) are the columns of one *slab*, so that one
gather of a row serves every layer, and one exchange moves one vector for each token. A table is a range of a slab's
columns. Whatever outlives a run (checkpoints, exports) names tables, never slabs.
"""

import itertools
from dataclasses import dataclass, replace

from xgram_dist.config.schema import Config
from xgram_dist.tables.routing import RoutingSettings

ALL_LAYERS = -1
"""Layer of a table that serves all of them."""
RESIDUAL_SITES = ("h", "o", "ffn", "block", "ngram")
"""Sites whose vectors every rank of the tensor axis uses whole, because the residual stream is whole on every rank."""


@dataclass(frozen=True)
class Table:
    layer: int
    site: str
    view: int
    width: int
    """Columns that are held here."""
    label: str | None = None
    """A name given by the user of the tables; by default it follows from layer, site and view."""

    @property
    def name(self) -> str:
        if self.label is not None:
            return self.label
        return f"layers.{'all' if self.layer == ALL_LAYERS else self.layer}.{self.site}.{self.view}"


@dataclass(frozen=True)
class Slab:
    """Tables side by side. `view` selects the token -> row map."""

    view: int
    rows: int
    tables: tuple[Table, ...]

    @property
    def width(self) -> int:
        return sum(table.width for table in self.tables)

    def columns(self) -> dict[str, slice]:
        """The range of each table, by name."""
        ranges, start = {}, 0
        for table in self.tables:
            ranges[table.name] = slice(start, start + table.width)
            start += table.width
        return ranges


@dataclass(frozen=True)
class TableSite:
    """A site that reads tables: one for each of its layers and views."""

    layers: tuple[int, ...]
    width: int
    """Columns of a table, over all ranks of the tensor axis."""
    views: int = 1


@dataclass(frozen=True)
class TableLayout:
    """The tables of a model, by layer, site and view."""

    tables: tuple[Table, ...]
    num_rows: int
    """Rows of each table."""
    hashed: bool
    """Whether tokens share rows by a routing, which has one map for each view; otherwise row = key for all tables."""

    @property
    def slabs(self) -> tuple[Slab, ...]:
        if not self.tables:
            return ()
        if not self.hashed:
            return (Slab(0, self.num_rows, self.tables),)
        views = sorted({table.view for table in self.tables})
        return tuple(Slab(v, self.num_rows, tuple(t for t in self.tables if t.view == v)) for v in views)

    @property
    def num_views(self) -> int:
        """Token -> row maps that are needed."""
        if not self.hashed:
            return 1 if self.tables else 0
        return max((table.view + 1 for table in self.tables), default=0)

    @property
    def width(self) -> int:
        """Columns of all tables."""
        return sum(table.width for table in self.tables)

    def layer_groups(self, most: int) -> list[list[int]]:
        """The layers that have tables, ascending, in at most `most` groups of consecutive ones."""
        layers = sorted({table.layer for table in self.tables})
        count = min(most, len(layers))
        ends = [len(layers) * number // count for number in range(count + 1)] if count else [0]
        return [layers[start:end] for start, end in itertools.pairwise(ends)]

    def divide(self, tensor: int) -> "TableLayout":
        """The columns that each of `tensor` ranks holds."""
        return replace(self, tables=tuple(replace(table, width=table.width // tensor) for table in self.tables))


LAYER_GROUPS = 8
"""Most messages a slab is cut into. What cannot be hidden is the last group of the return, an eighth of it."""
MESSAGE_BYTES = 1 << 20
"""Least size of a message, as if all tokens of a window were distinct. Smaller ones cost more than they hide."""


def plan_layer_groups(config: Config, layout: TableLayout, ranks: int) -> list[list[int]]:
    """The layers of each message of the exchange, on `ranks` ranks of the data axis. Without overlap all are one."""
    if not config.memory.overlap or ranks == 1:
        return layout.layer_groups(1)
    micro_batches, window = config.train.global_batch // ranks // config.train.micro_batch, config.memory.window
    if isinstance(window, int):
        micro_batches = min(window, micro_batches)
    tokens = micro_batches * config.train.micro_batch * config.model.sequence_length
    vectors = min(tokens, config.model.vocabulary) * (ranks - 1) // ranks
    slab_bytes = vectors * (2 if config.memory.wire == "bf16" else 4) * layout.width // max(1, len(layout.slabs))
    return layout.layer_groups(max(1, min(LAYER_GROUPS, slab_bytes // MESSAGE_BYTES)))


def site_width(config: Config, site: str) -> int:
    """Columns of a table: the residual stream's at residual sites, otherwise those of all key/value heads."""
    model = config.model
    return model.width if site in RESIDUAL_SITES else model.width_of_head * model.kv_heads


def routing_settings(config: Config) -> RoutingSettings:
    routing = config.memory.routing
    return RoutingSettings(
        vip=routing.vip,
        buckets=routing.buckets,
        compression=config.memory.compression,
        paths=routing.paths,
        alpha=routing.alpha,
        copies=routing.copies,
        decay=routing.decay,
    )


def residual_gradients_are_partial(config: Config) -> bool:
    """Whether a rank's gradient at a residual site is one term of a sum over the tensor axis.

    With sequence parallelism it is: each rank sees its part of the sequence. Gradients of other sites are complete.
    """
    return config.parallel.sequence_parallel and config.parallel.tensor > 1


def reads_in_place(config: Config, same_device: bool, replicas: int = 1) -> bool:
    """Whether local rows are read without a copy: a vector is a single row, of the working set's type and device.

    The working set then also holds the rows that other ranks read here, so a window of limited size copies instead.
    So do `replicas`: gradients have the rows of all of them."""
    memory = config.memory
    plain = memory.compression == 1 and memory.wire == "fp32" and memory.window == "step"
    return plain and same_device and replicas == 1
