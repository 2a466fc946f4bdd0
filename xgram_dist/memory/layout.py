"""Which tables a recipe has, and how they are stored.

A table belongs to one layer, site and view. Each method has its sites: those of `memory.sites` (xgram, ple), or one of
its own: `ffn` (retoken), `block` (mort), `up` (stem). Engram's rows are those of hashed n-grams, and each layer, order
and head has its own: they lie one after the other in one table of all layers, site `ngram`, so that a key is a row.

Tables whose tokens map to the same rows (all layers and sites of one view; without hashing, all of them) are stored
side by side as the columns of one *slab*, so that one gather of a row serves every layer, and one exchange moves one
vector a token. A table is a range of a slab's columns; everything that outlives a run (checkpoints, exports) speaks of
tables by name, never of slabs.
"""

from dataclasses import dataclass

from xgram_dist.config.schema import Config, ExtractionConfig, InjectionConfig, Layers, SiteConfig
from xgram_dist.memory.ngrams.primes import primes_from
from xgram_dist.memory.routing.settings import RoutingSettings

ALL_LAYERS = -1
"""Layer of a table that serves all of them."""
WITHOUT_TABLES = ("vanilla", "mole", "scone")
"""Methods that train none."""


@dataclass(frozen=True)
class Table:
    layer: int
    site: str
    view: int
    width: int
    """Of the columns held here."""

    @property
    def name(self) -> str:
        return f"layers.{'all' if self.layer == ALL_LAYERS else self.layer}.{self.site}.{self.view}"


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


RESIDUAL_SITES = ("h", "o", "ffn", "block", "ngram")
"""Sites whose vectors every rank of the tensor axis uses whole, as it has the residual stream."""


def residual_gradients_are_partial(config: Config) -> bool:
    """Whether a rank's gradient of a residual site's working-set values is a part of a sum over the tensor axis.

    It is where each rank sees its part of the sequence. Gradients of the other sites are complete in any case.
    """
    return config.parallel.sequence_parallel and config.parallel.tensor > 1


def reads_in_place(config: Config, same_device: bool) -> bool:
    """Whether a rank reads its own rows where they were gathered: a vector is a row as it stands, and the working set
    holds numbers of the same type, on the same device. It then holds rows for other ranks too, which is more than a
    window that was chosen for its size should."""
    memory = config.memory
    return memory.compression == 1 and memory.wire == "fp32" and memory.window == "step" and same_device


def has_tables(config: Config) -> bool:
    return config.memory.method not in WITHOUT_TABLES


def table_sites(config: Config) -> dict[str, SiteConfig]:
    """The sites that read tables."""
    memory = config.memory
    if memory.method in ("xgram", "ple"):
        return {str(site): settings for site, settings in memory.sites.items()}
    if memory.method == "retoken":
        return {"ffn": SiteConfig(views=memory.retoken.views, layers=memory.retoken.layers)}
    if memory.method == "mort":
        return {"block": SiteConfig(views=memory.mort.views, layers=memory.mort.layers)}
    if memory.method == "stem":
        return {"up": SiteConfig(layers=memory.stem.layers)}
    if memory.method == "engram":
        return {"ngram": SiteConfig(layers=memory.engram.layers)}
    return {}


def extraction_settings(config: Config) -> ExtractionConfig:
    """Between retrieval and the sites of `memory.sites`: ple injects rows as they are."""
    return config.memory.extraction if config.memory.method == "xgram" else ExtractionConfig(enabled=False)


def injection_settings(config: Config) -> InjectionConfig:
    """At the sites of `memory.sites`: ple has plain gains."""
    plain = InjectionConfig(depth_scaling=False, warmup=False)
    return config.memory.injection if config.memory.method == "xgram" else plain


def site_width(config: Config, site: str) -> int:
    """Of a table: the residual stream's, the feed-forward's (up), a hash head's (ngram), or that of keys and values."""
    model = config.model
    if site == "up":
        return model.ffn_width
    if site == "ngram":
        return ngram_width(config) // ngram_heads(config)
    return model.width if site in RESIDUAL_SITES else model.width // model.heads * model.kv_heads


def resolved_layers(config: Config, layers: Layers) -> tuple[int, ...]:
    """`all`, or the ones that are listed."""
    return tuple(range(config.model.layers)) if layers == "all" else layers


def site_layers(config: Config, site: str) -> tuple[int, ...]:
    return resolved_layers(config, table_sites(config)[site].layers)


def ngram_width(config: Config) -> int:
    """Of the rows of all heads and orders of a position side by side."""
    return config.memory.engram.width or config.model.width


def ngram_heads(config: Config) -> int:
    """Hash heads of a layer, over all orders."""
    return len(config.memory.engram.orders) * config.memory.engram.heads


def ngram_rows(config: Config) -> tuple[int, ...]:
    """Rows of each hash head of a layer, order by order; the same in every layer."""
    return primes_from(config.memory.engram.rows or config.model.vocabulary, ngram_heads(config))


def num_rows(config: Config) -> int:
    """Of each table."""
    if config.memory.method == "engram":
        return len(site_layers(config, "ngram")) * sum(ngram_rows(config))
    return routing_settings(config).num_rows(config.model.vocabulary)


def plan_tables(config: Config, tensor: int = 1) -> tuple[Table, ...]:
    """All tables of a recipe, by layer, site and view; columns are shared out over `tensor` ranks."""
    if config.memory.method == "engram":
        return (Table(ALL_LAYERS, "ngram", 0, site_width(config, "ngram") // tensor),)
    tables = [
        Table(layer, site, view, site_width(config, site) // tensor)
        for site, settings in table_sites(config).items()
        for layer in site_layers(config, site)
        for view in range(settings.views)
    ]
    return tuple(sorted(tables, key=lambda table: (table.layer, table.site, table.view)))


def num_views(config: Config) -> int:
    """Token -> row maps that are needed: without hashing one serves all views."""
    if not has_tables(config):
        return 0
    return max(site.views for site in table_sites(config).values()) if config.memory.compression < 1 else 1


def plan_slabs(config: Config, tensor: int = 1) -> tuple[Slab, ...]:
    tables = plan_tables(config, tensor)
    if not tables:
        return ()
    if config.memory.compression == 1:
        return (Slab(0, num_rows(config), tables),)
    views = sorted({table.view for table in tables})
    return tuple(Slab(v, num_rows(config), tuple(t for t in tables if t.view == v)) for v in views)
