"""Every key of a recipe: its type, its limit, its meaning and unit.

A recipe is a tree of these frozen classes. Limits of a single key stand at the key; what several keys must agree
on is in `check.py`. The texts below the keys are the reference in docs/configuration.md.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from xgram_dist.config.units import BYTES

Positive = Annotated[int, Field(gt=0)]
NotNegative = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Bytes = Annotated[str, Field(pattern=BYTES)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
Layers = Literal["all"] | tuple[NotNegative, ...]


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


class ModelConfig(Section):
    """The dense backbone: decoder-only, pre-norm, grouped-query attention, SwiGLU, untied head."""

    vocabulary: Positive
    """Rows of the input embedding and of the head: the tokenizer's ids, padded as one likes."""
    layers: Positive
    """Transformer blocks."""
    width: Positive
    """Width of the residual stream."""
    ffn_width: Positive
    """Inner width of the SwiGLU feed-forward."""
    heads: Positive
    """Query heads."""
    kv_heads: Positive
    """Key/value heads; heads must be a multiple."""
    sequence_length: Annotated[int, Field(ge=2)]
    """Tokens in a training sequence."""
    rope_theta: Annotated[float, Field(gt=0)] = 500_000.0
    """Base of the rotary position embedding."""
    norm_eps: Annotated[float, Field(gt=0)] = 1e-8
    """Epsilon of the backbone's RMSNorms."""
    init_std: Annotated[float, Field(gt=0)] = 0.02
    """Standard deviation of the initial weights (normal, cut at 3 standard deviations)."""
    z_loss: Annotated[float, Field(ge=0)] = 1e-5
    """Weight of the mean squared log-normaliser in the loss; 0 turns it off."""
    document_masking: bool = False
    """Keep attention and convolutions from looking across an end-of-text token."""
    loss_chunk: Positive = 2048
    """Tokens whose logits exist at one time; bounds the loss's memory at loss_chunk x vocabulary."""


class SiteConfig(Section):
    """One injection site."""

    views: Positive = 1
    """Parallel retrieval-and-extraction branches, each with its own tables."""
    kernels: Annotated[tuple[Positive, ...], Field(min_length=1)] = (3,)
    """Convolution lengths; view m uses kernels[m mod number of kernels]."""
    layers: Layers = "all"
    """Blocks that have this site: all, or a list of indices from 0."""


class RoutingConfig(Section):
    """How tokens map to table rows. Not used at compression 1, where row = token id."""

    file: str | None = None
    """A routing file of `xgram-dist route`. Without it the routing is built from `frequencies`."""
    frequencies: str | None = None
    """A frequency file; without it the token counts of the prepared data are used."""
    vip: NotNegative = 200
    """Most frequent tokens, with rows of their own."""
    buckets: Positive = 32
    """Frequency-balanced regions for the other tokens."""
    paths: Annotated[int, Field(ge=1, le=8)] = 2
    """Hash paths of a token in a bucket that is too full for a row each."""
    alpha: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Smoothing exponent of the frequencies when buckets are balanced."""
    copies: Annotated[int, Field(ge=0, le=16)] = 3
    """Additional rows a token may have."""
    decay: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Weight of the c-th additional row is decay ** c."""


class ExtractionConfig(Section):
    """The gated short convolution that turns retrieved rows into local n-gram features."""

    enabled: bool = True
    """Off: retrieved vectors are injected as they are."""
    gate: bool = True
    """Off: the content convolution alone."""
    norm: bool = True
    """Off: convolutions read retrieved vectors that are not normalised."""
    shared: bool = False
    """On: the views of a site share one convolution (needs a single kernel size)."""


class InjectionConfig(Section):
    """How extracted features enter the network."""

    depth_scaling: bool = True
    """Multiply by sqrt(layer + 1)."""
    warmup: bool = True
    """Ramp from 0 to 1 over the learning rate's warm-up steps."""
    view_norm: bool = True
    """Divide the sum over views by sqrt(views)."""


class RetokenConfig(Section):
    """memory.method = retoken: the feed-forward's output times factors that the token looks up."""

    views: Positive = 1
    """Factors, each with its own tables."""
    layers: Layers = "all"
    """Blocks that have them: all, or a list of indices from 0."""


class MortConfig(Section):
    """memory.method = mort: a router mixes rows of the token; the mix is added to the block's output."""

    views: Positive = 2
    """Tables a block, among which the router chooses."""
    top: Positive = 2
    """Tables that a position reads."""
    balance: Annotated[float, Field(ge=0)] = 1e-4
    """Weight of the load-balancing loss, summed over blocks."""
    layers: Layers = "all"
    """Blocks that have it: all, or a list of indices from 0."""


class StemConfig(Section):
    """memory.method = stem: a row of the token stands in place of the feed-forward's up projection."""

    layers: Layers = "all"
    """Blocks whose up projection is replaced: all, or a list of indices from 0."""


class EngramConfig(Section):
    """memory.method = engram: rows of hashed n-grams, gated by the hidden state, added before a block."""

    orders: Annotated[tuple[Annotated[int, Field(ge=1, le=8)], ...], Field(min_length=1)] = (2, 3)
    """Lengths of the n-grams that end at a position."""
    heads: Positive = 8
    """Hash heads of each order, each with its own rows."""
    rows: Positive | None = None
    """Rows of a head: the next primes, each head another; without it, the vocabulary."""
    width: Positive | None = None
    """Of the rows of all heads and orders side by side; without it, the model's."""
    taps: Positive = 4
    """Length of the convolution over what is added."""
    fold: bool = True
    """Count tokens as one whose text is the same after normalisation (NFKC, no accents, lower case, white space)."""
    layers: Layers = "all"
    """Blocks that have it: all, or a list of indices from 0."""


class MoleConfig(Section):
    """memory.method = mole: routed experts that see the token's embedding alone, so that they can become tables."""

    experts: Positive = 4
    """Experts a block; all of them answer, the router weighs them."""
    width: Positive | None = None
    """Inner width of an expert; without it, model.ffn_width."""
    layers: Layers = "all"
    """Blocks that have them: all, or a list of indices from 0."""


class SconeConfig(Section):
    """memory.method = scone: frequent n-grams get an embedding from a small side network, added at the input."""

    grams: Positive = 100_000
    """Most frequent n-grams of the data that get one."""
    longest: Annotated[int, Field(ge=2, le=8)] = 3
    """Longest of these n-grams; the shortest is 2. A position takes the longest that ends there."""
    layers: Positive = 2
    """Blocks of the side network, each as wide as the model's."""
    sequences: Positive = 16_384
    """Sequences of the data over which n-grams are counted."""


class TableLearningRate(Section):
    """The tables' learning rate: the backbone's, times a multiplier that is itself warmed up."""

    multiplier: Literal["sqrt_vocabulary", "sqrt_rows"] | Annotated[float, Field(gt=0)] = "sqrt_vocabulary"
    """sqrt(vocabulary / width), sqrt(rows / width), or a number. 1 turns scaling off."""
    vip_multiplier: Annotated[float, Field(gt=0)] | None = None
    """Multiplier of the VIP rows; without it, theirs is `multiplier` too."""
    cap: Annotated[float, Field(gt=0)] | None = None
    """Largest multiplier of hashed and aliased rows."""
    vip_cap: Annotated[float, Field(gt=0)] | None = None
    """Largest multiplier of VIP rows."""
    warmup: bool = True
    """Ramp the multiplier over the warm-up steps."""
    scales: Literal["backbone", "tables"] = "backbone"
    """Whose rate those vectors have that start at 0 and let a method's tables in: Retoken's a_m, MoRT's s."""


class MemoryConfig(Section):
    """The token-indexed tables."""

    method: Literal["vanilla", "xgram", "ple", "retoken", "mort", "engram", "stem", "mole", "scone"] = "vanilla"
    """What is computed (docs/methods.md). vanilla has no tables."""
    compression: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Rows of a table as a share of the vocabulary; at 1, row = token id without hashing, gates and copies."""
    sites: dict[Literal["h", "q", "k", "v", "o", "qk"], SiteConfig] = Field(default_factory=dict)
    """xgram, ple: where to inject: h residual before a block, q, k, v after their projection, o after the output
    projection, qk one table for both q and k."""
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
    """One learnable scalar a row and table, through a sigmoid."""
    row_gate_init: float = 4.0
    """Initial value of a row gate, before the sigmoid."""
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """Weight decay of the tables; without it, the optimizer's."""
    optimizer: Literal["auto", "dense", "catch_up", "lazy", "adagrad"] = "auto"
    """dense and catch_up are AdamW exactly: a sweep over all rows, or the same by touching only the rows that were hit
    and catching up what they missed. lazy is AdamW that leaves other rows alone, adagrad is row-wise Adagrad. auto:
    dense or catch_up, by the share of rows a step is expected to hit."""
    placement: Literal["device", "host"] = "device"
    """Where rows and optimizer state live; the working set is on the device in both cases."""
    window: Literal["step"] | Positive | Bytes = "step"
    """What shares a working set: all micro-batches of a step, a number of them, or as many as fit a size such as
    4GiB (vectors and their gradients)."""
    wire: Literal["fp32", "bf16"] = "fp32"
    """Type of vectors and gradients in the exchange between ranks; sums are fp32 in both cases."""
    plan_ahead: bool = True
    """Plan the exchange of the next step while this one computes."""


class OptimizerConfig(Section):
    """AdamW with a cosine schedule."""

    learning_rate: Annotated[float, Field(gt=0)] = 1e-3
    """Peak learning rate of the backbone."""
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.95)
    """Decay of the running mean of the gradient and of its square."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the root of the mean square, against division by zero."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """On matrices; vectors and scalars (norms, biases, gates) do not decay."""
    clip_norm: Annotated[float, Field(ge=0)] = 1.0
    """Largest joint gradient norm of backbone and tables; 0 turns clipping off."""
    warmup_share: Share = 0.05
    """Share of the steps in which the learning rate rises linearly to its peak."""
    final_share: Share = 0.1
    """Learning rate at the last step, as a share of the peak."""


class DataConfig(Section):
    """What is read."""

    path: str | None = None
    """Folder of `xgram-dist prepare` on this machine."""
    remote: str | None = None
    """Instead of `path`: where shards are fetched from, any address `streaming` reads."""
    cache: str | None = None
    """Folder for fetched and decompressed shards; without it they lie beside the data, or in the temporary folder."""
    cache_limit: Positive | None = None
    """Bytes of decompressed shards to keep; without it, all."""
    weights: dict[str, Annotated[float, Field(ge=0)]] | None = None
    """Share of each source in a batch; without it, the weights the data set was prepared with."""
    prefetch: Positive = 16
    """Steps whose tokens are read ahead."""


class ParallelConfig(Section):
    """How the backbone is spread over ranks. Table rows are spread over the data axis in any case."""

    engine: Literal["deepspeed", "hsdp", "replicated"] = "deepspeed"
    """deepspeed: ZeRO; hsdp: PyTorch's FSDP2 over replicate x shard; replicated: whole on every rank."""
    tensor: Positive = 1
    """Ranks that share each layer (Megatron's tensor parallelism); the others are the data axis."""
    sequence_parallel: bool = False
    """Between layers, each rank of the tensor axis keeps its part of the sequence."""
    zero_stage: Literal[1, 2, 3] = 1
    """deepspeed: 1 shards the optimizer state, 2 the gradients too, 3 the parameters too."""
    offload: bool = False
    """deepspeed: optimizer state and its update in host memory."""
    deepspeed: dict[str, Any] = Field(default_factory=dict)
    """deepspeed: more keys for its configuration. One that contradicts this recipe is refused."""
    replicate: Positive = 1
    """hsdp: copies of the sharded backbone; 1 is plain FSDP over the whole data axis."""
    reshard: bool = True
    """hsdp: let go of a block's gathered parameters after its forward pass, and gather them again for backward."""


class CheckpointConfig(Section):
    """When the state of a run is saved. It is also saved at the end, and when the run is asked to stop."""

    every: NotNegative = 0
    """Steps between checkpoints; 0: none in between."""
    minutes: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Minutes between checkpoints, beside those of `every`; 0: none by the clock."""
    keep: Positive = 2
    """Newest checkpoints that stay."""
    keep_every: NotNegative = 0
    """Checkpoints of multiples of this step stay too; 0: none."""
    asynchronous: bool = True
    """Go on training while files are written, from a copy of the state."""


class EvalConfig(Section):
    """Benchmarks of lm-evaluation-harness in the course of training, on the run's own ranks and tables."""

    every: NotNegative = 0
    """Steps between evaluations; there is one at the end too. 0: none."""
    tasks: Annotated[tuple[str, ...], Field(min_length=1)] = ("paper",)
    """Names of tasks; paper is the paper's suite with its shots."""
    limit: Positive | None = 100
    """Documents of each task; without it, all."""
    data: str | None = None
    """Folder of <task>/<split>.parquet; without it, tasks are fetched from the Hugging Face hub."""


class TrainConfig(Section):
    """The run."""

    steps: Positive = 1000
    """Optimizer steps."""
    global_batch: Positive = 1024
    """Sequences an optimizer step, over all ranks and micro-batches."""
    micro_batch: Positive = 8
    """Sequences a rank's forward pass."""
    precision: Literal["fp32", "bf16"] = "bf16"
    """Of parameters and activations in forward and backward; master weights, sums, norms, loss stay fp32."""
    compile: bool = False
    """torch.compile for each block."""
    activation_checkpointing: bool = False
    """Recompute each block in backward instead of keeping its activations."""
    seed: NotNegative = 0
    """Of the initial weights and of the data order."""
    log_every: Positive = 10
    """Steps between status lines and metrics."""
    validate_every: NotNegative = 0
    """Steps between validations; 0: only at the end."""
    validation_sequences: Positive = 64
    """Sequences of a validation."""
    diagnose_every: NotNegative = 0
    """Steps between records of a few of the paper's measurements (`xgram-dist diagnose` makes all of them); 0: none."""
    max_skipped: NotNegative = 10
    """Steps in a row that may be skipped for a loss or gradient that is not finite."""
    collective_timeout: Annotated[float, Field(gt=0)] = 600.0
    """Seconds after which a rank that waits for the others gives up and says where."""
    profile_from: NotNegative = 0
    """Step from which torch's profiler looks on, and writes trace.json into the run folder; 0: never."""
    profile_steps: Positive = 3
    """Steps it looks at."""
    peak_tflops: Annotated[float, Field(gt=0)] | None = None
    """What a rank's device could do, in 10^12 operations a second, for the utilisation in the log; without it, what is
    known of the device."""
    deterministic: bool = True
    """Ask torch for algorithms that repeat bitwise."""


class Config(Section):
    """A recipe."""

    name: Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Names the run and its default folder, runs/NAME."""
    model: ModelConfig
    memory: MemoryConfig = MemoryConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    data: DataConfig = DataConfig()
    parallel: ParallelConfig = ParallelConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig = EvalConfig()
    train: TrainConfig = TrainConfig()
