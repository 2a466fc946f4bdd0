"""What several keys must agree on. Each failure is one sentence: keys, values, and the way out."""

import math
from pathlib import Path

from xgram_dist.config.methods import check_method
from xgram_dist.config.schema import Config
from xgram_dist.errors import UserError


def check(config: Config) -> None:
    """Everything that can be said without touching the file system."""
    _check_model(config)
    _check_memory(config)
    _check_parallel(config)
    accumulation(config, ranks=1)


def accumulation(config: Config, ranks: int) -> int:
    """Micro-batches a rank takes in one optimizer step."""
    train = config.train
    whole, rest = divmod(train.global_batch, train.micro_batch * ranks)
    if rest or not whole:
        raise UserError(
            f"train.global_batch = {train.global_batch} is not a whole multiple of train.micro_batch = "
            f"{train.micro_batch} x {ranks} rank{'s' if ranks > 1 else ''}, so accumulation would not be whole; "
            f"change one of the two"
        )
    return whole


def check_files(config: Config) -> None:
    """The files that training reads; apart from `check`, so that a recipe can be planned without them."""
    if (config.data.path is None) == (config.data.remote is None):
        raise UserError("set exactly one of data.path (a folder of 'xgram-dist prepare') and data.remote (its address)")
    named = {
        "data.path": (config.data.path, "xgram-dist prepare"),
        "memory.routing.file": (config.memory.routing.file, "xgram-dist route"),
        "memory.routing.frequencies": (config.memory.routing.frequencies, "xgram-dist frequencies"),
    }
    if config.memory.method != "xgram" or config.memory.compression == 1:  # nothing is routed
        named = {"data.path": named["data.path"]}
    for key, (path, command) in named.items():
        if path is not None and not Path(path).exists():
            raise UserError(f"{key} = '{path}' does not exist; make it with '{command}' or set {key}=PATH")


def _check_model(config: Config) -> None:
    model = config.model
    if model.width % model.heads:
        raise UserError(f"model.width = {model.width} is not divisible by model.heads = {model.heads}")
    if (model.width // model.heads) % 2:
        raise UserError(
            f"model.width = {model.width} over model.heads = {model.heads} gives heads of width "
            f"{model.width // model.heads}, which is odd; rotary embedding needs an even one"
        )
    if model.heads % model.kv_heads:
        raise UserError(f"model.heads = {model.heads} is not divisible by model.kv_heads = {model.kv_heads}")


def _check_memory(config: Config) -> None:
    memory = config.memory
    if memory.method == "vanilla":
        return
    check_method(config)
    if memory.method in ("xgram", "ple"):
        _check_sites(config)
    if memory.method == "xgram" and memory.compression < 1:
        _check_rows(config)


def _check_sites(config: Config) -> None:
    memory = config.memory
    if not memory.sites:
        raise UserError(
            f"memory.method = {memory.method} needs at least one of memory.sites (h, q, k, v, o, qk), for example "
            f"memory.sites.v.views=2"
        )
    if "qk" in memory.sites and {"q", "k"} & set(memory.sites):
        raise UserError("memory.sites.qk is one table for both q and k; it cannot stand beside memory.sites.q or .k")
    for name, site in memory.sites.items():
        if memory.extraction.shared and len(set(site.kernels)) > 1:
            raise UserError(
                f"memory.extraction.shared needs one kernel size, but memory.sites.{name}.kernels = "
                f"{list(site.kernels)}; give one, or set memory.extraction.shared=false"
            )


def _check_parallel(config: Config) -> None:
    """A key of one engine is refused with another, rather than ignored."""
    parallel = config.parallel
    for key, value, default, engine in (
        ("replicate", parallel.replicate, 1, "hsdp"),
        ("reshard", parallel.reshard, True, "hsdp"),
        ("zero_stage", parallel.zero_stage, 1, "deepspeed"),
        ("offload", parallel.offload, False, "deepspeed"),
        ("deepspeed", parallel.deepspeed, {}, "deepspeed"),
    ):
        if value != default and parallel.engine != engine:
            raise UserError(
                f"parallel.{key} = {value} is of parallel.engine = {engine}, but the recipe has {parallel.engine}; "
                f"take it out or change the engine"
            )
    if parallel.sequence_parallel and parallel.tensor == 1:
        raise UserError("parallel.sequence_parallel needs parallel.tensor of at least 2")


def _check_rows(config: Config) -> None:
    """The layout of the physical rows must have room for the VIP region and one row a bucket."""
    memory, routing = config.memory, config.memory.routing
    rows = math.floor(memory.compression * config.model.vocabulary * (1 + 1e-14))
    vip_rows = routing.vip * (1 + routing.copies)
    if routing.vip > config.model.vocabulary or vip_rows + routing.buckets > rows:
        raise UserError(
            f"memory.compression = {memory.compression} gives {rows} rows, too few for memory.routing.vip = "
            f"{routing.vip} x (1 + copies {routing.copies}) rows and one for each of {routing.buckets} buckets; "
            f"raise the compression or lower vip, copies or buckets"
        )
