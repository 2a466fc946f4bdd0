"""Which tables a recipe has, and how they are stored.

A table belongs to one layer, site and view. Tables whose tokens map to the same rows (all layers and sites of one
view; without hashing, all of them) are stored side by side as the columns of one *slab*, so that one gather of a row
serves every layer, and one exchange moves one vector a token. A table is a range of a slab's columns; everything
that outlives a run (checkpoints, exports) speaks of tables by name, never of slabs.
"""

from dataclasses import dataclass

from xgram_dist.config.schema import Config
from xgram_dist.memory.routing.settings import RoutingSettings


@dataclass(frozen=True)
class Table:
    layer: int
    site: str
    view: int
    width: int
    """Of the columns held here."""

    @property
    def name(self) -> str:
        return f"layers.{self.layer}.{self.site}.{self.view}"


@dataclass(frozen=True)
class Slab:
    """Tables side by side. `view` chooses the token -> row map."""

    view: int
    rows: int
    tables: tuple[Table, ...]

    @property
    def width(self) -> int:
        return sum(table.width for table in self.tables)

    def columns(self) -> dict[str, slice]:
        found, start = {}, 0
        for table in self.tables:
            found[table.name] = slice(start, start + table.width)
            start += table.width
        return found


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


RESIDUAL_SITES = ("h", "o")
"""As wide as the residual stream, which every rank of the tensor axis has whole."""


def residual_gradients_are_partial(config: Config) -> bool:
    """Whether a rank's gradient of a residual site's working-set values is a part of a sum over the tensor axis.

    It is where each rank sees its part of the sequence. Gradients of attention sites are complete in any case.
    """
    return config.parallel.sequence_parallel and config.parallel.tensor > 1


def site_width(config: Config, site: str) -> int:
    """h and o are as wide as the residual stream, the attention sites as wide as keys and values."""
    model = config.model
    return model.width if site in RESIDUAL_SITES else model.width // model.heads * model.kv_heads


def site_layers(config: Config, site: str) -> tuple[int, ...]:
    layers = config.memory.sites[site].layers  # type: ignore[index]
    return tuple(range(config.model.layers)) if layers == "all" else tuple(layers)


def num_rows(config: Config) -> int:
    return routing_settings(config).num_rows(config.model.vocabulary)


def plan_tables(config: Config, tensor: int = 1) -> tuple[Table, ...]:
    """All tables of a recipe, by layer, site and view; columns are shared out over `tensor` ranks."""
    if config.memory.method == "vanilla":
        return ()
    tables = [
        Table(layer, site, view, site_width(config, site) // tensor)
        for site, settings in config.memory.sites.items()
        for layer in site_layers(config, site)
        for view in range(settings.views)
    ]
    return tuple(sorted(tables, key=lambda table: (table.layer, table.site, table.view)))


def num_views(config: Config) -> int:
    """Token -> row maps that are needed: without hashing one serves all views."""
    if config.memory.method == "vanilla":
        return 0
    return max(site.views for site in config.memory.sites.values()) if config.memory.compression < 1 else 1


def plan_slabs(config: Config, tensor: int = 1) -> tuple[Slab, ...]:
    tables = plan_tables(config, tensor)
    if not tables:
        return ()
    if config.memory.compression == 1:
        return (Slab(0, num_rows(config), tables),)
    views = sorted({table.view for table in tables})
    return tuple(Slab(v, num_rows(config), tuple(t for t in tables if t.view == v)) for v in views)
