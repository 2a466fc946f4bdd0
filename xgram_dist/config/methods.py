"""What applies to which memory method. A key that a method does not read is refused, rather than ignored."""

from xgram_dist.config.schema import Config, MemoryConfig
from xgram_dist.errors import UserError

WITH_TABLES = ("xgram", "ple", "retoken", "mort", "engram", "stem")
READ_BY = {
    "sites": ("xgram", "ple"),
    "routing": ("xgram",),
    "extraction": ("xgram",),
    "injection": ("xgram",),
    "row_gates": ("xgram",),
    "row_gate_init": ("xgram",),
    "retoken": ("retoken",),
    "mort": ("mort",),
    "stem": ("stem",),
    "engram": ("engram",),
    "mole": ("mole",),
    "scone": ("scone",),
    "learning_rate": WITH_TABLES,
    "weight_decay": WITH_TABLES,
    "optimizer": WITH_TABLES,
    "placement": WITH_TABLES,
    "window": WITH_TABLES,
    "wire": WITH_TABLES,
}
"""Keys of `memory`, and the methods that read them; vanilla reads none, and takes a recipe as it stands."""
MOST_ROWS = 2**31 - 2**20
SEQUENCE_PARALLEL = ("vanilla", "xgram", "ple")
OPENED = ("retoken", "mort")
"""Methods whose tables are behind a learned scale that starts at 0."""


def check_method(config: Config) -> None:
    memory, defaults = config.memory, MemoryConfig()
    for key, methods in READ_BY.items():
        if memory.method not in methods and getattr(memory, key) != getattr(defaults, key):
            raise UserError(
                f"memory.{key} is of memory.method = {' or '.join(methods)}, but the recipe has {memory.method}; take "
                f"it out or change the method"
            )
    if memory.method in WITH_TABLES and memory.method != "xgram" and memory.compression != 1:
        raise UserError(
            f"memory.method = {memory.method} does not hash tokens, but memory.compression = {memory.compression}; set "
            f"memory.compression=1"
        )
    if memory.learning_rate.vip_multiplier is not None and memory.method != "xgram":
        raise UserError(f"memory.learning_rate.vip_multiplier: memory.method = {memory.method} has no VIP rows")
    if memory.learning_rate.scales != "backbone" and memory.method not in (*OPENED, "vanilla"):
        raise UserError(
            f"memory.learning_rate.scales is of memory.method = {' or '.join(OPENED)}, but the recipe has "
            f"{memory.method}; take it out or change the method"
        )
    if config.parallel.sequence_parallel and memory.method not in SEQUENCE_PARALLEL:
        raise UserError(
            f"parallel.sequence_parallel is not offered with memory.method = {memory.method}; take it out, "
            f"parallel.tensor alone will do"
        )
    _check_layers(config)
    if memory.method == "mort" and memory.mort.top > memory.mort.views:
        raise UserError(
            f"memory.mort.top = {memory.mort.top} is more than memory.mort.views = {memory.mort.views}; lower it"
        )
    if memory.method == "engram":
        _check_engram(config)


def _check_layers(config: Config) -> None:
    memory, layers = config.memory, config.model.layers
    listed = {f"sites.{name}": site.layers for name, site in memory.sites.items()}
    for name in ("retoken", "mort", "stem", "engram", "mole"):
        listed[name] = getattr(memory, name).layers
    for name, chosen in listed.items():
        if chosen == "all":
            continue
        for layer in chosen:
            if int(layer) >= layers:
                raise UserError(
                    f"memory.{name}.layers: {layer} is out of range; model.layers = {layers}, so "
                    f"0 to {layers - 1} are valid"
                )
        if len(set(chosen)) != len(chosen) or not chosen:
            raise UserError(f"memory.{name}.layers = {list(chosen)} must name at least one layer, each once")


def _check_engram(config: Config) -> None:
    engram, tensor = config.memory.engram, config.parallel.tensor
    heads, width = len(engram.orders) * engram.heads, engram.width or config.model.width
    if len(set(engram.orders)) != len(engram.orders):
        raise UserError(f"memory.engram.orders = {list(engram.orders)} must name each order once")
    layers = config.model.layers if engram.layers == "all" else len(engram.layers)
    rows = layers * heads * (engram.rows or config.model.vocabulary)
    if rows >= MOST_ROWS:
        raise UserError(
            f"memory.engram.rows = {engram.rows} gives {rows:,} rows over all layers and heads; keys have 31 bits, so "
            f"lower it, or memory.engram.heads"
        )
    if width % (heads * tensor):
        raise UserError(
            f"memory.engram.width = {width} is not divisible by {len(engram.orders)} orders x memory.engram.heads = "
            f"{engram.heads} x parallel.tensor = {tensor}; choose a width that is"
        )
