"""What several keys of a recipe must agree on, whatever its memory method. Each failure is one sentence: keys, values,
and the way out. What a method asks of its own keys is checked by `model.methods.base.check_method`.
"""

import math

from xgram_dist.config.schema import Config
from xgram_dist.errors import UserError
from xgram_dist.untrusted import check_address


def check(config: Config) -> None:
    """Without touching the file system."""
    _check_model(config)
    _check_parallel(config)
    _check_pipeline(config)
    _check_placement(config)
    _check_stored_types(config)
    stages = [stage.remote for stage in config.data.stages]
    for address in (config.data.remote, config.checkpoint.remote, *stages):
        if address is not None:
            check_address(address)
    accumulation(config, ranks=config.parallel.context)


def accumulation(config: Config, ranks: int) -> int:
    """Micro-batches of a rank in one optimizer step. `ranks`: of the data axis; those that share a sequence
    (`parallel.context`) have the same micro-batches."""
    train, context = config.train, config.parallel.context
    batch, uneven = divmod(ranks, context)
    if uneven or not batch:
        raise UserError(
            f"parallel.context = {context} does not divide the {ranks} rank(s) of the data axis; change the number of "
            f"ranks or the degree"
        )
    whole, rest = divmod(train.global_batch, train.micro_batch * batch)
    if rest or not whole:
        shared = f" (of {ranks}, parallel.context = {context} share a sequence)" if context > 1 else ""
        raise UserError(
            f"train.global_batch = {train.global_batch} is not a whole multiple of train.micro_batch = "
            f"{train.micro_batch} x {batch} rank{'s' if batch > 1 else ''}{shared}, so accumulation would not be "
            f"whole; change one of the two"
        )
    _check_pipeline_batches(config, whole)
    return whole


def _check_pipeline_batches(config: Config, micro_batches: int) -> None:
    """A pipeline is full with a micro-batch for each of its ranks; interleaved, they come in rounds of that many."""
    parallel = config.parallel
    if parallel.pipeline == 1:
        return
    rounds = max(1, micro_batches // parallel.pipeline)
    in_rounds = parallel.virtual_stages > 1 or parallel.pipeline_schedule == "zero_bubble"
    if micro_batches < parallel.pipeline or (in_rounds and micro_batches % rounds):
        needed = "a multiple of" if micro_batches > parallel.pipeline else "at least"
        raise UserError(
            f"train.global_batch = {config.train.global_batch} and train.micro_batch = {config.train.micro_batch} give "
            f"a rank {micro_batches} micro-batch{'es' if micro_batches > 1 else ''} a step, but parallel.pipeline = "
            f"{parallel.pipeline} needs {needed} {parallel.pipeline}; raise train.global_batch or lower one of the "
            f"others"
        )


def _check_model(config: Config) -> None:
    model = config.model
    if model.head_width is None and model.width % model.heads:
        raise UserError(f"model.width = {model.width} is not divisible by model.heads = {model.heads}")
    if model.width_of_head % 2:
        source = f"model.width = {model.width} over model.heads = {model.heads} gives heads of width "
        raise UserError(
            f"{'model.head_width = ' if model.head_width else source}{model.width_of_head}, which is odd; rotary "
            f"embedding needs an even one"
        )
    scaling = model.rope_scaling
    if scaling.low_frequency >= scaling.high_frequency:
        raise UserError(
            f"model.rope_scaling.low_frequency = {scaling.low_frequency:g} must be below high_frequency = "
            f"{scaling.high_frequency:g}"
        )
    if model.heads % model.kv_heads:
        raise UserError(f"model.heads = {model.heads} is not divisible by model.kv_heads = {model.kv_heads}")


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
    if config.optimizer.matrices == "muon" and (parallel.engine == "deepspeed" or parallel.tensor > 1):
        key = (
            "parallel.engine = deepspeed" if parallel.engine == "deepspeed" else f"parallel.tensor = {parallel.tensor}"
        )
        raise UserError(
            f"optimizer.matrices = muon needs whole matrices, which {key} cuts; set parallel.engine=hsdp or "
            f"parallel.engine=replicated, with parallel.tensor=1"
        )
    if config.train.freeze_backbone and parallel.engine == "deepspeed":
        raise UserError(
            "train.freeze_backbone = true is not offered with parallel.engine = deepspeed; set parallel.engine=hsdp "
            "or parallel.engine=replicated"
        )
    if parallel.sequence_parallel and parallel.tensor == 1:
        raise UserError("parallel.sequence_parallel needs parallel.tensor of at least 2")
    if parallel.context > 1:
        _check_context(config)


def _check_context(config: Config) -> None:
    """Every sequence length of the run must cut into two chunks a rank, and these over the tensor axis."""
    parallel, divisor = config.parallel, 2 * config.parallel.context
    parts = f"2 x parallel.context = {divisor}"
    if parallel.sequence_parallel:
        divisor = math.lcm(divisor, parallel.context * parallel.tensor)
        parts = f"{parts} chunks and parallel.context x parallel.tensor = {parallel.context * parallel.tensor}"
    lengths = {"model.sequence_length": config.model.sequence_length}
    lengths |= {
        f"data.stages[{n}].sequence_length": stage.sequence_length
        for n, stage in enumerate(config.data.stages)
        if stage.sequence_length is not None
    }
    for key, length in lengths.items():
        if length % divisor:
            raise UserError(
                f"{key} = {length} is not divisible by {parts}; set a multiple of {divisor}, or a smaller degree"
            )


def _check_pipeline(config: Config) -> None:
    """What a pipeline does not combine with is refused by name."""
    parallel, train, memory = config.parallel, config.train, config.memory
    degree, schedule = f"parallel.pipeline = {parallel.pipeline}", parallel.pipeline_schedule
    if parallel.pipeline == 1:
        key, value = ("virtual_stages", str(parallel.virtual_stages))
        if parallel.virtual_stages == 1:
            key, value = "pipeline_schedule", schedule
        if value not in ("1", "1f1b"):
            raise UserError(
                f"parallel.{key} = {value} is of a pipeline, but the recipe has {degree}; take it out or set "
                f"parallel.pipeline"
            )
        return
    if config.model.layers < parallel.pipeline * parallel.virtual_stages:
        raise UserError(
            f"model.layers = {config.model.layers} cannot be cut into parallel.pipeline = {parallel.pipeline} x "
            f"parallel.virtual_stages = {parallel.virtual_stages} stages; lower one of the two"
        )
    refused = [
        ("parallel.zero_stage", parallel.zero_stage, parallel.zero_stage > 1, "parallel.zero_stage=1"),
        ("parallel.offload", "true", parallel.offload, "parallel.offload=false"),
        ("memory.window", memory.window, memory.window != "step", "memory.window=step"),
        ("train.check_finite", train.check_finite, train.check_finite != "step", "train.check_finite=step"),
        ("train.diagnose_every", train.diagnose_every, train.diagnose_every > 0, "it to 0 and diagnose checkpoints"),
    ]
    if schedule == "zero_bubble":
        degree = "parallel.pipeline_schedule = zero_bubble"
        refused += [
            ("parallel.engine", parallel.engine, parallel.engine != "replicated", "parallel.engine=replicated"),
            ("train.compile", "true", train.compile, "train.compile=false"),
            ("train.activation_checkpointing", "true", train.activation_checkpointing, "it to false"),
        ]
    for name, setting, is_refused, way_out in refused:
        if is_refused:
            raise UserError(f"{name} = {setting} is not offered with {degree}; set {way_out}")


def _check_placement(config: Config) -> None:
    memory = config.memory
    if memory.placement == "disk" and memory.folder is None:
        raise UserError(
            "memory.placement = disk needs memory.folder; set it to a scratch folder on a local disk of every node"
        )
    if memory.placement != "disk" and memory.folder is not None:
        raise UserError(
            f"memory.folder = '{memory.folder}' is of memory.placement = disk, but the recipe has {memory.placement}; "
            "take it out or change the placement"
        )
    if memory.placement == "disk" and memory.optimizer == "dense":
        raise UserError(
            "memory.optimizer = dense sweeps over all rows every step, which memory.placement = disk cannot; set "
            "memory.optimizer=catch_up, which is the same exact AdamW on the rows of a step"
        )
    if memory.placement == "disk" and memory.rows == "all":
        raise UserError(
            "memory.rows = all keeps every row from the start, which memory.placement = disk does not; set "
            "memory.rows=touched: results are the same bit for bit"
        )
    if memory.placement == "device" and memory.update != "auto":
        raise UserError(
            f"memory.update = {memory.update} is of memory.placement = host and disk, but the recipe has device; take "
            "it out or change the placement"
        )
    if memory.update == "device" and (memory.rows == "all" or memory.optimizer == "dense"):
        key, value = ("rows", "all") if memory.rows == "all" else ("optimizer", "dense")
        raise UserError(
            f"memory.update = device copies the records of touched rows, which memory.{key} = {value} does not keep; "
            "set memory.rows=touched with memory.optimizer=catch_up, or memory.update=host"
        )


def _check_stored_types(config: Config) -> None:
    memory = config.memory
    for key, value in (("rows_dtype", memory.rows_dtype), ("moments", memory.moments)):
        if value == "bf16" and memory.optimizer in ("dense", "adagrad"):
            raise UserError(
                f"memory.{key} = bf16 is of memory.optimizer = catch_up and lazy, but the recipe has "
                f"{memory.optimizer}; set memory.optimizer=catch_up, or memory.{key}=fp32"
            )


def data_ranks(config: Config, ranks: int) -> int:
    """Ranks of the data axis, of so many ranks."""
    return ranks // (config.parallel.tensor * config.parallel.pipeline)


def check_degrees(config: Config, ranks: int) -> None:
    """The parallel degrees must divide the ranks, and what is sharded over them."""
    parallel, model = config.parallel, config.model
    tensor, data_degrees = parallel.tensor, math.lcm(parallel.replicate, parallel.context)
    if ranks % (tensor * parallel.pipeline * data_degrees):
        degrees = [("tensor", tensor)]
        degrees += [(key, n) for key in ("pipeline", "context") if (n := getattr(parallel, key)) > 1]
        degrees += [("replicate", parallel.replicate)]
        product = " x ".join(f"parallel.{key} = {degree}" for key, degree in degrees)
        raise UserError(
            f"{ranks} rank(s) are not a multiple of {product}; change the number of ranks or one of the "
            f"{'two' if len(degrees) == 2 else 'degrees'}"
        )
    shard, data = config.memory.shard, ranks // (tensor * parallel.pipeline)
    if isinstance(shard, int) and data % shard:
        raise UserError(
            f"memory.shard = {shard} does not divide the {data} rank(s) of the data axis; choose a number that "
            f"does, or memory.shard=world"
        )
    divided = {
        "model.heads": model.heads,
        "model.kv_heads": model.kv_heads,
        "model.ffn_width": model.ffn_width,
        "model.vocabulary": model.vocabulary,
        "model.width": model.width,
    }
    if parallel.sequence_parallel:
        divided["model.sequence_length (parallel.sequence_parallel)"] = model.sequence_length
    for key, value in divided.items():
        if value % tensor:
            raise UserError(
                f"{key} = {value} is not divisible by parallel.tensor = {tensor}; choose a degree that divides it"
            )
