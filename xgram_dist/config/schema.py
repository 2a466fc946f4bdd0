"""Every key of a recipe: its type, limits, meaning and unit.

A recipe is a tree of these frozen classes. The limits of a single key are in its annotation; what several keys must
agree on is in `validate.py`. The text below each key is its entry in docs/configuration.md (`make reference`).
"""

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

BYTES = r"^\d{1,12}(\.\d{1,6})? ?[kKMGT]i?B$"
_POWERS = {"K": 1, "M": 2, "G": 3, "T": 4}


def parse_bytes(text: str) -> int:
    """1.5GiB -> 1610612736, 80GB -> 80000000000; the text must match BYTES."""
    assert re.match(BYTES, text), text
    number, letter, binary = re.findall(r"^([\d.]+) ?(\w)(i?)B$", text)[0]
    return int(float(number) * (1024 if binary else 1000) ** _POWERS[letter.upper()])


Positive = Annotated[int, Field(gt=0)]
NotNegative = Annotated[int, Field(ge=0)]
Dimension = Annotated[int, Field(gt=0, le=1 << 24)]
Count = Annotated[int, Field(gt=0, le=10_000)]
Seconds = Annotated[float, Field(gt=0, le=1e8)]
Share = Annotated[float, Field(ge=0, le=1)]
Bytes = Annotated[str, Field(pattern=BYTES)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
Layers = Literal["all"] | tuple[NotNegative, ...]


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


class RopeScalingConfig(Section):
    """Rotary frequencies of Llama 3.1 and later: slow ones are divided by `factor`, fast ones kept."""

    factor: Annotated[float, Field(ge=1)] = 1.0
    """Divisor of the frequencies whose wavelength is above original_length / low_frequency; 1: no scaling."""
    low_frequency: Annotated[float, Field(gt=0)] = 1.0
    """Turns within `original_length` tokens up to which a frequency is divided."""
    high_frequency: Annotated[float, Field(gt=0)] = 4.0
    """Turns within `original_length` tokens from which a frequency is kept; between the two, it is interpolated."""
    original_length: Positive = 8192
    """Tokens in a sequence before the scaling."""


class ModelConfig(Section):
    """The dense backbone: decoder-only, grouped-query attention, SwiGLU, untied head."""

    vocabulary: Annotated[int, Field(gt=0, le=1 << 27)]
    """Rows of the input embedding and of the output head: the tokenizer's vocabulary, or more to pad it."""
    layers: Count
    """Number of transformer blocks."""
    width: Dimension
    """Width of the residual stream."""
    ffn_width: Dimension
    """Inner width of the SwiGLU feed-forward."""
    heads: Dimension
    """Number of query heads."""
    kv_heads: Dimension
    """Number of key/value heads; must divide `heads`."""
    head_width: Dimension | None = None
    """Width of a head; by default width / heads."""
    sequence_length: Annotated[int, Field(ge=2, le=1 << 24)]
    """Tokens in a training sequence."""
    rope_theta: Annotated[float, Field(gt=0)] = 500_000.0
    """Base of the rotary position embedding."""
    rope_scaling: RopeScalingConfig = RopeScalingConfig()
    norms: Literal["before", "after"] = "before"
    """Where the RMSNorms of a block stand: before attention and feed-forward, or after each (OLMo-2)."""
    qk_norm: Literal["width", "head", "none"] = "width"
    """RMSNorm of queries and keys: over all heads together, over each head (Qwen3), or none (Llama)."""
    norm_eps: Annotated[float, Field(gt=0)] = 1e-8
    """Epsilon of the backbone's RMSNorms."""
    init_std: Annotated[float, Field(gt=0)] = 0.02
    """Standard deviation of the initial weights and rows (normal, truncated at 3 standard deviations), and of the gate
    kernel of short convolutions (normal)."""
    z_loss: Annotated[float, Field(ge=0)] = 1e-5
    """Weight of the z-loss, the mean squared log of the softmax normaliser; 0 turns it off."""
    document_masking: bool = False
    """Mask attention, convolutions and n-grams across document boundaries (end-of-text tokens)."""
    label_masking: bool = False
    """No label across document boundaries: an end-of-text token predicts nothing. Losses are means over the labels."""
    loss_chunk: Positive = 2048
    """Tokens whose logits are computed at a time; bounds the memory of the loss to loss_chunk x vocabulary numbers: in
    the compute type with `train.compile` on GPUs, else also in fp32. Larger chunks read the head's weights less."""

    @property
    def width_of_head(self) -> int:
        return self.head_width or self.width // self.heads

    @property
    def attention_width(self) -> int:
        """Of all query heads."""
        return self.heads * self.width_of_head


class SiteConfig(Section):
    """One injection site."""

    views: Count = 1
    """Number of views: parallel retrieval and extraction branches, each with its own tables."""
    kernels: Annotated[tuple[Positive, ...], Field(min_length=1)] = (3,)
    """Kernel sizes of the short convolutions; view m uses kernels[m mod number of kernels]."""
    layers: Layers = "all"
    """Blocks with this site: all, or a list of indices from 0."""


class RoutingConfig(Section):
    """How tokens map to table rows. Not used at compression 1, where row = token id."""

    file: str | None = None
    """Routing file written by `xgram-dist route`; by default the routing is built from `frequencies`."""
    frequencies: str | None = None
    """Frequency file written by `xgram-dist frequencies`; by default the token counts of the prepared data are used."""
    vip: NotNegative = 200
    """Number of VIP tokens: the most frequent ones, each with a row of its own."""
    buckets: Annotated[int, Field(gt=0, le=1 << 20)] = 32
    """Number of frequency-balanced buckets of rows for the other tokens."""
    paths: Annotated[int, Field(ge=1, le=8)] = 2
    """Rows that a token is hashed to in a bucket with more tokens than rows."""
    alpha: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Exponent that smooths the frequencies when buckets are balanced."""
    copies: Annotated[int, Field(ge=0, le=16)] = 3
    """Most additional rows of a token."""
    decay: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Weight of the c-th additional row is decay ** c."""


class ExtractionConfig(Section):
    """The gated short convolution that turns retrieved rows into local n-gram features."""

    enabled: bool = True
    """false: inject the retrieved vectors unchanged."""
    gate: bool = True
    """false: use the content convolution without its gate."""
    norm: bool = True
    """false: do not normalise the retrieved vectors before the convolutions."""
    shared: bool = False
    """true: the views of a site share one convolution; needs a single kernel size."""


class InjectionConfig(Section):
    """How extracted features enter the network."""

    depth_scaling: bool = True
    """Multiply the injected features by sqrt(layer + 1)."""
    warmup: bool = True
    """Ramp the injected features from 0 to 1 over the learning rate's warm-up."""
    view_norm: bool = True
    """Divide the sum over views by sqrt(views)."""


class RetokenConfig(Section):
    """memory.method = retoken: the feed-forward output is multiplied by factors looked up by token."""

    views: Count = 1
    """Number of factors, each with its own tables."""
    layers: Layers = "all"
    """Blocks with this method: all, or a list of indices from 0."""


class MortConfig(Section):
    """memory.method = mort: a router mixes rows looked up by token; the mixture is added to the block output."""

    views: Count = 2
    """Tables per block that the router chooses from."""
    top: Positive = 2
    """Tables read at each position."""
    balance: Annotated[float, Field(ge=0)] = 1e-4
    """Weight of the load-balancing loss, which is summed over blocks."""
    layers: Layers = "all"
    """Blocks with this method: all, or a list of indices from 0."""


class StemConfig(Section):
    """memory.method = stem: a row looked up by token replaces the output of the feed-forward up projection."""

    layers: Layers = "all"
    """Blocks whose up projection is replaced: all, or a list of indices from 0."""


class EngramConfig(Section):
    """memory.method = engram: rows of hashed n-grams, gated by the hidden state, are added before a block."""

    orders: Annotated[tuple[Annotated[int, Field(ge=1, le=8)], ...], Field(min_length=1)] = (2, 3)
    """Lengths of the n-grams looked up at each position, which is their last token."""
    heads: Positive = 8
    """Hash heads per order, each with its own rows."""
    rows: Positive | None = None
    """Rows of a head, rounded up to a prime that differs between heads; by default model.vocabulary."""
    width: Positive | None = None
    """Width of the rows of all heads and orders concatenated; by default model.width."""
    taps: Positive = 4
    """Kernel size of the convolution over the retrieved features."""
    kernel_init: Literal["zero", "identity"] = "zero"
    """Initial kernel. zero: the branch of the convolution starts as the identity; identity: the convolution passes its
    input on."""
    layer_primes: bool = False
    """Primes of the heads differ between layers, too; otherwise all layers have the same."""
    pad_token: NotNegative | None = None
    """Token whose id stands for what lies before the sequence; by default an id that no token has."""
    gate_eps: Annotated[float, Field(gt=0)] | None = None
    """Epsilon of the norms of key and query; by default model.norm_eps."""
    output_eps: Annotated[float, Field(gt=0)] | None = None
    """Epsilon of the norm before the convolution; by default model.norm_eps."""
    fold: bool = True
    """Treat tokens as equal if their text is equal after normalisation (NFKC, accents, case, white space)."""
    layers: Layers = "all"
    """Blocks with this method: all, or a list of indices from 0."""


class MoleConfig(Section):
    """memory.method = mole: routed experts that read only the token embedding, so that export can turn them into
    tables."""

    experts: Count = 4
    """Experts per block; all are evaluated and the router weights them."""
    width: Positive | None = None
    """Inner width of an expert; by default model.ffn_width."""
    layers: Layers = "all"
    """Blocks with this method: all, or a list of indices from 0."""


class SconeConfig(Section):
    """memory.method = scone: a side network computes embeddings of frequent n-grams, which are added to the input."""

    grams: Positive = 100_000
    """Number of n-grams with an embedding: the most frequent ones of the data."""
    longest: Annotated[int, Field(ge=2, le=8)] = 3
    """Length of the longest n-grams; the shortest is 2. A position uses the longest n-gram that ends there."""
    layers: Count = 2
    """Blocks of the side network, of the same width as the model's."""
    sequences: Positive = 16_384
    """Sequences of the data in which n-grams are counted."""


class TableLearningRate(Section):
    """The tables' learning rate: the backbone's times a multiplier."""

    multiplier: Literal["sqrt_vocabulary", "sqrt_rows"] | Annotated[float, Field(gt=0)] = "sqrt_vocabulary"
    """sqrt(vocabulary / width), sqrt(rows / width), or a number; 1 is the backbone's rate."""
    vip_multiplier: Annotated[float, Field(gt=0)] | None = None
    """Multiplier of the VIP rows; by default `multiplier`."""
    warmup: bool = True
    """Ramp the multiplier up over the warm-up steps."""
    scales: Literal["backbone", "tables"] = "backbone"
    """Learning rate of the zero-initialised scales through which tables enter the network (a_m of Retoken, s of MoRT):
    the backbone's or the tables'."""


class MemoryConfig(Section):
    """The token-indexed tables."""

    method: Literal["vanilla", "xgram", "ple", "retoken", "mort", "engram", "stem", "mole", "scone"] = "vanilla"
    """The method (docs/methods.md); vanilla has no tables."""
    compression: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Rows of a table divided by the vocabulary. At 1, row = token id, without hashing, row gates and additional
    rows."""
    sites: dict[Literal["h", "q", "k", "v", "o", "qk"], SiteConfig] = Field(default_factory=dict)
    """xgram, ple: injection sites. h: residual stream before a block; q, k, v: after their projections; o: after the
    output projection; qk: one table for both q and k."""
    routing: RoutingConfig = RoutingConfig()
    extraction: ExtractionConfig = ExtractionConfig()
    injection: InjectionConfig = InjectionConfig()
    retoken: RetokenConfig = RetokenConfig()
    mort: MortConfig = MortConfig()
    stem: StemConfig = StemConfig()
    engram: EngramConfig = EngramConfig()
    mole: MoleConfig = MoleConfig()
    scone: SconeConfig = SconeConfig()
    learning_rate: TableLearningRate = TableLearningRate()
    row_gates: bool = True
    """A learnable scalar gate for every row of every table, through a sigmoid."""
    row_gate_init: float = 4.0
    """Initial value of a row gate, before the sigmoid."""
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """Weight decay of the tables; by default optimizer.weight_decay."""
    optimizer: Literal["auto", "dense", "catch_up", "lazy", "adagrad"] = "auto"
    """Optimizer of the tables. dense and catch_up are both exact AdamW: dense sweeps over all rows, catch_up updates
    the rows hit in a step and applies the steps they missed. lazy is AdamW that skips rows without a hit. adagrad is
    row-wise Adagrad. auto is dense or catch_up, by the share of rows a step is expected to hit."""
    count_updates: bool = False
    """Count the updates of every row, for `diagnose`; without it, their number is estimated from token frequencies."""
    rows: Literal["auto", "all", "touched"] = "auto"
    """Rows that a rank keeps of those it owns. all: every row from the start. touched: rows that were read at least
    once; the others are a formula of the seed, so that memory and checkpoints grow with what the text touches. Results
    are the same bit for bit. auto: touched on disk, and for tables of more than 2^24 rows,
    unless the optimizer is dense."""
    placement: Literal["device", "host", "disk"] = "device"
    """Memory tier of rows and optimizer state: the device, host memory, or files on the node's local disk, of which the
    system keeps in memory what fits. The working set is always on the device. Results are the same."""
    rows_dtype: Literal["fp32", "bf16"] = "fp32"
    """Data type in which rows are stored. A row in bf16 is read, caught up and updated in fp32, and rounded at random
    when it is written, by bits that are a function of the seed, the step, the row and the column, so that runs repeat
    ([tiers.md](tiers.md#smaller-numbers)). Not with optimizer = dense or adagrad."""
    moments: Literal["fp32", "bf16"] = "fp32"
    """Data type in which both moments of the rows are stored; bf16 as for `rows_dtype`."""
    update: Literal["auto", "host", "device"] = "auto"
    """placement=host, disk: where touched rows are read and updated. device: records of a step are copied there while
    the step before computes, and back. host: where they lie, by the CPU's threads. auto: on the device if it is a GPU.
    `plan` compares the two. Results are the same bit for bit. With `rows` = all, rows are updated where they lie."""
    folder: str | None = None
    """placement=disk: scratch folder on a local disk of every node. Its files are removed at the end of the run, and
    those of a killed run by the next one."""
    window: Literal["step"] | Positive | Bytes = "step"
    """Micro-batches that share a working set: all of a step, a number of them, or as many as fit in a size such as 4GiB
    (vectors and their gradients)."""
    wire: Literal["fp32", "bf16"] = "fp32"
    """Data type of vectors and gradients in the exchange between ranks; sums are always fp32."""
    shard: Literal["world", "node"] | Positive = "world"
    """Ranks of the data axis that together hold the tables once, their rows sharded over them. world: all. node: those
    of a node. A number: so many consecutive ones. Where there are several such groups, each holds a replica of the
    tables: vectors are exchanged within a group, and the gradients of the rows of a step are summed over the groups, so
    that replicas stay equal bit for bit. `xgram-dist plan --shards` compares the choices."""
    plan_ahead: bool = True
    """Plan the exchange of the next step during this one."""
    overlap: bool = False
    """Exchange vectors and gradients while the backbone computes, in messages by groups of layers. With `plan_ahead`,
    the vectors of the next step are sent before the backbone is updated. Results are the same bit for bit. Off by
    default: over NCCL its messages have a communicator of their own, which has not met a GPU yet."""


class OptimizerConfig(Section):
    """AdamW and its learning rate."""

    learning_rate: Annotated[float, Field(gt=0)] = 1e-3
    """Peak learning rate of the backbone."""
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.95)
    """Decay rates of the running averages of the gradient and of its square."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the denominator of the update."""
    matrices: Literal["adamw", "muon"] = "adamw"
    """Optimizer of the matrices of attention and feed-forward. muon: torch's Muon with momentum 0.95, scaled to the
    size of AdamW's updates, so that learning rate and weight decay carry over; all else is AdamW's. Not with
    parallel.engine = deepspeed, nor with tensor parallelism."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Weight decay of matrices; of tables unless memory.weight_decay is set."""
    decay_vectors: bool = False
    """Weight decay of vectors and scalars, too: norms, biases, injection gains, row gates, the scales of Retoken and
    MoRT."""
    clip_norm: Annotated[float, Field(ge=0)] = 1.0
    """Largest joint gradient norm of backbone and tables; 0 turns clipping off."""
    warmup_share: Share = 0.05
    """Share of the steps over which the learning rate rises linearly to its peak."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """Learning rate after the warm-up. cosine, linear: from the peak to `final_share` of it at the last step; wsd: at
    the peak, then linear over the last `decay_share` of the steps; constant: at the peak."""
    decay_share: Annotated[float, Field(gt=0, le=1)] = 0.2
    """wsd: share of the steps over which the learning rate falls."""
    final_share: Share = 0.1
    """Learning rate at the last step, as a share of the peak; not of a constant one."""


class StageConfig(Section):
    """A stage of the training data. What is not set is as in `data` and `model`."""

    from_tokens: NotNegative
    """Tokens of the run, skipped ones included, at which the stage begins: a multiple of `model.sequence_length`, and
    of a step's tokens where the sequence length changes."""
    weights: dict[str, Annotated[float, Field(ge=0)]] | None = None
    """Share of each source in a batch; a source that is not named has none."""
    sequence_length: Annotated[int, Field(ge=2, le=1 << 24)] | None = None
    """Tokens in a sequence; divides `model.sequence_length`. A step keeps its number of tokens."""
    path: str | None = None
    """Folder of another data set of the same tokenizer."""
    remote: str | None = None
    """Instead of `path`: its address."""


class DataConfig(Section):
    """The training data."""

    path: str | None = None
    """Folder written by `xgram-dist prepare`."""
    remote: str | None = None
    """Instead of `path`: address to fetch shards from: `s3://`, `gs://`, `az://` and others. Credentials are taken from
    the environment alone ([data.md](data.md#read-from-object-storage))."""
    cache: str | None = None
    """Folder for fetched and decompressed shards; by default the data folder itself, or the temporary folder."""
    cache_limit: Positive | None = None
    """Bytes of decompressed shards to keep, for all ranks of a node together; by default all are kept."""
    packing: Literal["join", "whole_documents"] | None = None
    """How the data must have been packed by `prepare`; data packed otherwise is refused. join: documents joined and cut
    anywhere; whole_documents: `--whole-documents`, padded; null: either."""
    weights: dict[str, Annotated[float, Field(ge=0)]] | None = None
    """Share of each source in a batch; by default the weights the data set was prepared with."""
    stages: tuple[StageConfig, ...] = ()
    """Other weights, data or sequence lengths from some token on
    ([data.md](data.md#change-the-mix-during-a-run))."""
    skip: tuple[tuple[NotNegative, NotNegative], ...] = ()
    """Ranges [A, B) of positions that are passed over, for example the batches of a loss spike; a position counts
    sequences of `model.sequence_length` tokens from the start of the run."""
    prefetch: Positive = 16
    """Steps whose tokens are prefetched."""


class ParallelConfig(Section):
    """How the backbone is distributed over ranks. Table rows are always sharded over the data axis."""

    engine: Literal["deepspeed", "hsdp", "replicated"] = "deepspeed"
    """Backbone engine. deepspeed: ZeRO; hsdp: PyTorch's FSDP2 over replicate x shard; replicated: a full copy on every
    rank."""
    tensor: Count = 1
    """Degree of tensor parallelism (as in Megatron); the data axis has ranks / (tensor x pipeline) ranks."""
    context: Count = 1
    """Degree of context parallelism: ranks of the data axis that share each sequence. A rank computes two of
    2 x context chunks, which must divide the sequence length ([training.md](training.md#long-sequences))."""
    pipeline: Count = 1
    """Degree of pipeline parallelism: ranks over which the layers, with their tables, are cut into stages."""
    pipeline_schedule: Literal["1f1b", "zero_bubble"] = "1f1b"
    """Order of the micro-batches in a pipeline. 1f1b: forward and backward in turn, so that a rank holds activations of
    at most `pipeline` micro-batches; with several virtual stages, interleaved. zero_bubble: gradients of weights are
    computed where a rank would wait. Only with engine = replicated, without compiled or recomputed blocks."""
    virtual_stages: Count = 1
    """Stages of each rank of a pipeline. More of them shorten the wait at the start and end of a step, and send more
    activations."""
    sequence_parallel: bool = False
    """Shard activations between layers over the tensor axis, by sequence (as in Megatron)."""
    zero_stage: Literal[1, 2, 3] = 1
    """deepspeed: ZeRO stage. 1 shards the optimizer state, 2 also the gradients, 3 also the parameters."""
    offload: bool = False
    """deepspeed: keep the optimizer state, and update it, in host memory."""
    deepspeed: dict[str, Any] = Field(default_factory=dict)
    """deepspeed: additional keys of its configuration; one that contradicts this recipe is refused."""
    replicate: Positive = 1
    """hsdp: number of replicas of the sharded backbone; 1 shards over the whole data axis."""
    reshard: bool = True
    """hsdp: free a block's gathered parameters after its forward pass and gather them again for backward."""


class CheckpointConfig(Section):
    """When checkpoints are saved, in addition to one at the end and one when the run is stopped by a signal."""

    every: NotNegative = 0
    """Steps between checkpoints; 0: none by steps."""
    minutes: float = Field(default=0.0, ge=0, le=1e8, allow_inf_nan=False)
    """Minutes between checkpoints, in addition to `every`; 0: none by time."""
    keep: Positive = 2
    """Number of newest checkpoints to keep."""
    keep_every: NotNegative = 0
    """Also keep checkpoints whose step is a multiple of this; 0: none."""
    asynchronous: bool = True
    """Copy the state and write it in the background while training continues."""
    remote: str | None = None
    """Address (`s3://BUCKET/PREFIX`) or folder to which checkpoints are also uploaded, below the name of the run
    folder, and from which a run on an empty disk resumes. Credentials are taken from the environment alone
    ([checkpoints.md](checkpoints.md#checkpoints-on-object-storage))."""


class EvalConfig(Section):
    """Benchmarks of lm-evaluation-harness during training, on the run's own ranks and tables."""

    every: NotNegative = 0
    """Steps between evaluations, in addition to one at the end; 0: no evaluation."""
    tasks: Annotated[tuple[str, ...], Field(min_length=1)] = ("paper",)
    """Names of lm-eval tasks; paper is the paper's suite as its authors score it, paper-lm-eval the same benchmarks
    with lm-eval's splits and metrics."""
    limit: Positive | None = 100
    """Documents of each task; null: all."""
    data: str | None = None
    """Folder with <task>/<split>.parquet; by default tasks are fetched from the Hugging Face hub."""


class TrainConfig(Section):
    """The training run."""

    steps: Positive = 1000
    """Number of optimizer steps."""
    global_batch: Positive = 1024
    """Sequences per optimizer step, over all ranks and micro-batches."""
    micro_batch: Positive = 8
    """Sequences per forward pass of a rank."""
    accumulation: Literal["batches", "tokens"] = "batches"
    """What a step's loss is the mean of. batches: the means of the micro-batches, over all ranks; tokens: all labels of
    the step. They differ where micro-batches have different numbers of labels (`model.label_masking`)."""
    precision: Literal["fp32", "bf16"] = "bf16"
    """Data type of parameters and activations in forward and backward; master weights, sums, norms and loss are
    fp32."""
    compile: bool = False
    """Compile each block with torch.compile, and on GPUs the passes over the logits."""
    freeze_backbone: bool = False
    """Train the tables, and the modules that read them, alone. Not with parallel.engine = deepspeed."""
    activation_checkpointing: bool = False
    """Recompute each block in backward instead of storing its activations."""
    seed: NotNegative = 0
    """Seed of the initial weights and of the data order."""
    log_every: Positive = 10
    """Steps between log lines and metrics."""
    loggers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ("tensorboard",)
    """Where records go beside `metrics.jsonl`. Keys and servers are taken from the environment alone; without them,
    records go to files in the run folder ([training.md](training.md#loggers))."""
    validate_every: NotNegative = 0
    """Steps between validations; 0: only at the end."""
    validation_sequences: Positive = 64
    """Sequences per validation."""
    diagnose_every: NotNegative = 0
    """Steps between records of some of the paper's diagnostics (`xgram-dist diagnose` computes all); 0: none."""
    max_skipped: NotNegative = 10
    """Largest number of consecutive steps skipped because the loss or a gradient is not finite, or a spike."""
    spike_sigmas: Annotated[float, Field(gt=0)] | None = None
    """Skip a step whose loss or gradient norm exceeds the mean of the last 128 steps by so many standard deviations; by
    default only steps that are not finite are skipped."""
    check_finite: Literal["step", "layers"] = "step"
    """What is checked for values that are not finite. step: the loss and the joint gradient norm, which costs nothing.
    layers: in addition the output of every module and its gradient, to name the first that is not finite; the step is
    then done again from the newest checkpoint, to tell a faulty device from data. Slower, and without compiled
    blocks."""
    collective_timeout: Seconds = 600.0
    """Seconds after which a rank that waits for the others fails and reports where."""
    profile_from: NotNegative = 0
    """First step recorded by torch's profiler, which writes trace.json to the run folder; 0: no profile."""
    profile_steps: Positive = 3
    """Number of profiled steps."""
    peak_tflops: Annotated[float, Field(gt=0)] | None = None
    """Peak of a rank's device in TFLOP/s (10^12 operations per second), the base of the utilisation in the log; by
    default the known peak of the device."""
    deterministic: bool = True
    """Use deterministic algorithms only, so that runs repeat bitwise. Slower on GPUs."""


class Config(Section):
    """A recipe."""

    name: Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Name of the run and of its default folder, runs/NAME."""
    model: ModelConfig
    memory: MemoryConfig = MemoryConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    data: DataConfig = DataConfig()
    parallel: ParallelConfig = ParallelConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig = EvalConfig()
    train: TrainConfig = TrainConfig()
