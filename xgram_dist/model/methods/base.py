"""Memory methods: one class holds all that differs between them.

A recipe's `memory.method` names a class of the registry; `method_of(config)` builds it. Everything outside this package
asks the object and never compares names. A method answers six questions:

    config      which keys of `memory` it reads, and their limits            `reads`, `check`
    tables      which tables it trains, of which sites, rows and widths      `sites`, `num_rows` -> `layout`
    keys        what a position looks up: its token, or n-grams              `resolve_keys`, `build_lookup`
    network     the modules of a block, and one at the input                 `build_sites`, `build_input_network`
    estimates   FLOPs, activations                                           `extra_flops_per_token`, ..
    inference   the decoder's form of it                                     `decoder_spec`, `computed_tables`

Defaults suit a method whose positions look up the row of their token, so that a small method overrides five of them
(docs/methods.md has a complete one). To add a method: write its file, add a line to `REGISTRY` and its name to
`memory.method` in config/schema.py, with a section for its settings if it has any.

A block (model/transformer.py) has six kinds of site. The name of a site is part of its tables' and parameters' names:

    h, q, k, v, o, qk   module(values, slots, warmup, documents, dtype) -> a vector that is added there
    ngram               module(x, values, slots, documents) -> the block's new input
    up                  module(values, slots, dtype) -> stands in for the feed-forward's up projection
    ffn                 module(ffn output, values, slots) -> the new feed-forward output
    experts             module(normed, values, slots) -> added beside the feed-forward's output
    block               module(normed, values, slots) -> (added to the block's output, an auxiliary loss)

`values` are the rows of the distinct keys, one tensor for each name in the module's `tables`; `slots` gives the row of
each position, for `gather_rows` (model/gather.py). This file imports no torch, so that a recipe is checked fast.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from xgram_dist.config import load_config
from xgram_dist.config.schema import Config, ExtractionConfig, Layers, MemoryConfig
from xgram_dist.errors import UserError
from xgram_dist.tables.frequencies import expected_touched_share
from xgram_dist.tables.layout import ALL_LAYERS, Table, TableLayout, TableSite
from xgram_dist.tables.routing import Routing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from numpy.typing import NDArray
    from torch import Tensor, nn

    from xgram_dist.data.dataset import PreparedData
    from xgram_dist.parallel.context_parallel import ContextAxis
    from xgram_dist.parallel.mesh import Mesh
    from xgram_dist.parallel.tensor_parallel import TensorAxis
    from xgram_dist.tables.working_set import Lookup

REGISTRY: dict[str, str] = {
    "vanilla": "xgram_dist.model.methods.base.Vanilla",
    "xgram": "xgram_dist.model.methods.xgram.XGram",
    "ple": "xgram_dist.model.methods.ple.PLE",
    "retoken": "xgram_dist.model.methods.retoken.Retoken",
    "mort": "xgram_dist.model.methods.mort.MoRT",
    "engram": "xgram_dist.model.methods.engram.Engram",
    "stem": "xgram_dist.model.methods.stem.STEM",
    "mole": "xgram_dist.model.methods.mole.MoLE",
    "scone": "xgram_dist.model.methods.scone.SCONE",
}
"""Name in a recipe -> class. By path, so that a recipe imports its own method alone (most import torch)."""

TABLE_KEYS = (
    "learning_rate",
    "weight_decay",
    "optimizer",
    "count_updates",
    "rows",
    "placement",
    "rows_dtype",
    "moments",
    "folder",
    "window",
    "wire",
    "shard",
)
"""Keys of `memory` that every method with tables reads."""
COMMON_KEYS = ("method", "compression", "plan_ahead", "overlap")
"""Keys of `memory` that may be set whatever the method."""
TOKEN_EMBEDDINGS = "embedding"
"""Stands for a table's name: the embeddings of the distinct tokens of a micro-batch."""


class Keys(Protocol):
    """What a method that looks up n-grams must know of the data; saved as keys.npz beside what is trained with it."""

    @property
    def arrays(self) -> list[NDArray[Any]]:
        """What a decoder needs to look up keys."""

    def sha256(self) -> str: ...

    def save(self, path: Path) -> None: ...


class ComputedTables(Protocol):
    """Tables that are computed from a trained network instead of being trained."""

    shapes: dict[str, tuple[int, int]]
    """(rows, width) of each, by name."""

    def vectors(self, keys_U: Tensor) -> dict[str, Tensor]:
        """One vector for each key and table [U, D], in fp32, for keys in host memory."""


class MemoryMethod:
    """What one memory method computes, for one recipe. Subclasses override what differs from the defaults."""

    name: ClassVar[str]
    reads: ClassVar[tuple[str, ...]] = ()
    """Keys of `memory` that it reads, beside TABLE_KEYS and COMMON_KEYS. Any other key that is set is refused."""
    backbone_only: ClassVar[bool] = False
    """Whether it adds nothing to the backbone."""
    trains_tables: ClassVar[bool] = True
    hashes_tokens: ClassVar[bool] = False
    """Whether `memory.compression` may be below 1, so that tokens share rows by a routing."""
    looks_up_ngrams: ClassVar[bool] = False
    """Whether a position's keys depend on the tokens before it."""
    sequence_parallel: ClassVar[bool] = False
    """Whether its modules support `parallel.sequence_parallel`."""
    elementwise: ClassVar[bool] = False
    """Whether the FLOPs it adds are elementwise operations; otherwise most are matrix products."""
    zero_initialised_scales: ClassVar[bool] = False
    """Whether its tables enter through vectors `scale*` that start at 0 (`memory.learning_rate.scales`)."""
    reads_embeddings: ClassVar[bool] = False
    """Whether its sites read TOKEN_EMBEDDINGS; slots then are those of the distinct tokens of the micro-batch."""
    computed_parameters: ClassVar[tuple[str, ...]] = ()
    """Parts of the names of parameters that computed tables replace at inference."""
    reduced_settings: ClassVar[dict[str, dict[str, Any]]] = {}
    """Settings of the small model in which `xgram-dist plan --table` counts FLOPs, by key of `memory`."""

    def __init__(self, config: Config, held: Sequence[int] | None = None):
        """`held`: the layers of this rank of a pipeline, whose tables it trains; None: all."""
        self.config, self.model, self.memory = config, config.model, config.memory
        self.held = range(config.model.layers) if held is None else held

    # Config

    def check(self) -> None:
        """Raise a `UserError` where its keys do not agree with each other or with the model."""

    def input_files(self) -> dict[str, tuple[str | None, str]]:
        """Files that training reads: key of the recipe -> (path, the command that makes one)."""
        return {}

    def resolve_layers(self, layers: Layers) -> tuple[int, ...]:
        """`all`, or the layers that are listed."""
        return tuple(range(self.model.layers)) if layers == "all" else layers

    # Tables

    def sites(self) -> dict[str, TableSite]:
        """The sites that read trained tables."""
        return {}

    @property
    def hashed(self) -> bool:
        """Whether tokens share rows by a routing; otherwise row = key."""
        return self.hashes_tokens and self.memory.compression < 1

    @property
    def num_rows(self) -> int:
        """Rows of each table."""
        return self.model.vocabulary if self.trains_tables else 0

    def table_layers(self) -> set[int]:
        """The layers that read trained tables."""
        return {layer for site in self.sites().values() for layer in site.layers}

    def layout(self, tensor: int = 1) -> TableLayout:
        """The tables of the layers held here, by layer, site and view; columns are divided over `tensor` ranks."""
        tables = [
            Table(layer, name, view, site.width)
            for name, site in self.sites().items()
            for layer in site.layers
            if layer == ALL_LAYERS or layer in self.held
            for view in range(site.views)
        ]
        tables.sort(key=lambda table: (table.layer, table.site, table.view))
        return TableLayout(tuple(tables), self.num_rows, self.hashed).divide(tensor)

    # Keys

    @property
    def num_ngram_keys(self) -> int:
        """Rows of hashed n-grams that a position reads, over all layers; 0 where keys are tokens."""
        return 0

    def layer_keys(self, layer: int) -> slice | None:
        """Which of a position's keys, of the layers held here, a layer reads; None: a position has one key, which all
        layers read."""
        return None

    def resolve_keys(self, data: PreparedData) -> tuple[Keys, str] | None:
        """(keys, a sentence about them), from the data alone; None where keys are tokens."""
        return None

    def load_keys(self, path: Path) -> Keys:
        """The keys that a run saved."""
        raise NotImplementedError(f"{self.name} looks up tokens")

    def check_same_keys(self, saved: MemoryMethod, folder: Path) -> bool:
        """Before rows of the checkpoint `folder` are taken: raise a `UserError` if they are keyed differently.

        True if the saved keys must be equal too."""
        return False

    def touched_share(self, tokens: int, frequencies: NDArray[Any] | None, routing: Routing | None) -> float | None:
        """Share of the rows that so many tokens are expected to hit; None if unknown."""
        if not self.trains_tables or frequencies is None:
            return None
        return expected_touched_share(frequencies, routing, self.num_rows, tokens)

    def run_share(self, tokens: int, frequencies: NDArray[Any]) -> float:
        """Where keys are n-grams: share of the rows that a run of so many tokens is expected to hit."""
        raise NotImplementedError(f"{self.name} looks up tokens")

    def build_lookup(
        self,
        routing: Routing | None,
        device: torch.device,
        mesh: Mesh | None = None,
        keys: Keys | None = None,
        end_of_text: int | None = None,
        optimizer: str | None = None,
    ) -> Lookup:
        """`keys`: of `resolve_keys`. `end_of_text`: the token that ends a document."""
        from xgram_dist.tables.exchange import ShardedTables
        from xgram_dist.tables.working_set import NoTables

        if not self.trains_tables:
            return NoTables(device)
        return ShardedTables(
            self.config, self.layout(), routing, device, mesh, optimizer=optimizer, context=self.context_of(mesh)
        )

    def context_of(self, mesh: Mesh | None) -> ContextAxis:
        """The ranks that share each sequence, and how far this method reads before a chunk."""
        from xgram_dist.parallel.context_parallel import context_axis

        return context_axis(None if mesh is None else mesh.context, self.reach)

    # Network

    @property
    def reach(self) -> int:
        """Most positions before the current one that its sites read. Where a sequence is cut (`parallel.context`), so
        many are read before each chunk."""
        return 0

    def build_sites(self, layer: int, axis: TensorAxis, context: ContextAxis) -> dict[str, nn.Module]:
        """The modules of a block, by site. Each has `tables`, the names of the tables it reads. On a context axis,
        slots and documents are those of the positions that are read; `reach` before each chunk are not computed."""
        return {}

    def build_input_network(self, axis: TensorAxis) -> nn.Module | None:
        """A module whose output is added to the input embeddings: module(*values of its `tables`, embedding, slots,
        dtype)."""
        return None

    def initialise(self, name: str, value: Tensor, generator: torch.Generator) -> bool:
        """Fill the initial value of a parameter; False: as the backbone's (vectors 1, matrices truncated normal)."""
        return False

    def is_table_scale(self, name: str) -> bool:
        """Whether the parameter is a scale that starts at 0 and lets tables in."""
        return self.zero_initialised_scales and name.rsplit(".", 1)[-1].startswith("scale")

    # Estimates

    @property
    def extraction(self) -> ExtractionConfig:
        """The short convolutions between tables and sites."""
        return ExtractionConfig(enabled=False)

    def extractor_taps(self, site: str) -> list[int]:
        """Length of each short convolution that a site has in a layer."""
        return []

    def retrieved_width(self) -> int:
        """Numbers that a token retrieves, over all tables."""
        return sum(table.width for table in self.layout().tables)

    def extra_flops_per_token(self) -> int:
        """Added to the forward pass of a token. A multiply and an add count two, reading a row counts nothing. Computed
        tables count as tables."""
        return 0

    def activation_numbers(self, layer: int, tensor: int) -> float:
        """fp32 numbers that a block's sites keep of a token for the backward pass, on one of `tensor` ranks."""
        return float(sum(site.views * site.width for site in self.sites().values() if layer in site.layers))

    def exchanged_positions(self, layer: int) -> int:
        """Positions before a chunk of a sequence whose hidden states a block gets from another rank of the context
        axis."""
        return 0

    def summed_numbers(self, layer: int) -> int:
        """Numbers of a micro-batch that a block sums over the context axis."""
        return 0

    # Inference

    def decoder_spec(self, warmup: float) -> dict[str, Any]:
        """Its part of `inference.hf.decoder.Spec`, as a tree. `warmup`: the injection's warm-up factor."""
        raise UserError(f"memory.method = {self.name} has no form at inference yet; add one as docs/methods.md says")

    def decoder_tables(self) -> dict[str, int]:
        """Tables that the decoder reads, trained or computed: name -> width."""
        return {table.name: table.width for table in self.layout().tables}

    def computed_tables(
        self, read: Callable[[str, Tensor], None], keys: Keys | None, device: torch.device
    ) -> ComputedTables | None:
        """Tables that stand for its networks at inference. `read`: fills a tensor from the checkpoint, by name."""
        return None


class Vanilla(MemoryMethod):
    """The backbone alone. It takes a recipe as it stands, so that a baseline differs by `memory.method` only."""

    name = "vanilla"
    backbone_only = True
    trains_tables = False
    sequence_parallel = True

    def decoder_spec(self, warmup: float) -> dict[str, Any]:
        return {}


def method_class(name: str) -> type[MemoryMethod]:
    module, _, class_name = REGISTRY[name].rpartition(".")
    found: type[MemoryMethod] = getattr(import_module(module), class_name)
    return found


def method_of(config: Config, held: Sequence[int] | None = None) -> MemoryMethod:
    """`held`: the layers of this rank of a pipeline; None: all."""
    return method_class(config.memory.method)(config, held)


def table_layout(config: Config, tensor: int = 1) -> TableLayout:
    """The tables of a recipe; columns are divided over `tensor` ranks."""
    return method_of(config).layout(tensor)


# Checks. A key that a method does not read is refused, rather than ignored.


def check_method(config: Config) -> None:
    """To be called before a recipe is used: `config.load` knows no methods."""
    method, memory = method_of(config), config.memory
    if method.backbone_only:
        if config.train.freeze_backbone:
            raise UserError(
                f"train.freeze_backbone = true leaves nothing to train with memory.method = {method.name}; set "
                f"a method with tables"
            )
        return
    _check_keys(method)
    if method.trains_tables and not method.hashes_tokens and memory.compression != 1:
        raise UserError(
            f"memory.method = {method.name} does not hash tokens, but memory.compression = {memory.compression}; set "
            f"memory.compression=1"
        )
    if memory.learning_rate.vip_multiplier is not None and not method.hashes_tokens:
        raise UserError(f"memory.learning_rate.vip_multiplier: memory.method = {method.name} has no VIP rows")
    if config.parallel.sequence_parallel and not method.sequence_parallel:
        raise UserError(
            f"parallel.sequence_parallel is not offered with memory.method = {method.name}; take it out, "
            f"parallel.tensor alone will do"
        )
    if config.parallel.context > 1:
        _check_context(method)
    method.check()
    _check_pipeline(method)


def _check_pipeline(method: MemoryMethod) -> None:
    config = method.config
    if config.parallel.pipeline == 1:
        return
    degree = f"parallel.pipeline = {config.parallel.pipeline}"
    if method.reads_embeddings and config.parallel.engine == "deepspeed":
        raise UserError(
            f"memory.method = {method.name} reads the token embedding in every stage of {degree}, whose gradient "
            f"parallel.engine = deepspeed does not sum over the stages; set parallel.engine=hsdp or replicated"
        )
    if any(site.layers == (ALL_LAYERS,) for site in method.sites().values()) and config.memory.shard != "world":
        raise UserError(
            f"memory.shard = {config.memory.shard} is not offered with memory.method = {method.name} and {degree}, "
            f"whose stages share one table; set memory.shard=world"
        )
    from xgram_dist.model.pipeline_stages import check_stages

    check_stages(config)


def load_recipe(path: str | Path, overrides: list[str] | None = None, scale: str | Path | None = None) -> Config:
    """`config.load_config`, and the checks of the recipe's method."""
    config = load_config(path, overrides, scale)
    check_method(config)
    return config


def check_files(config: Config) -> None:
    """The files that training reads; apart from `check_method`, so that a recipe can be planned without them."""
    if (config.data.path is None) == (config.data.remote is None):
        raise UserError("set exactly one of data.path (a folder of 'xgram-dist prepare') and data.remote (its address)")
    stages = {
        f"data.stages[{n}].path": (stage.path, "xgram-dist prepare") for n, stage in enumerate(config.data.stages)
    }
    files = {"data.path": (config.data.path, "xgram-dist prepare"), **stages, **method_of(config).input_files()}
    for key, (path, command) in files.items():
        if path is not None and not Path(path).exists():
            raise UserError(f"{key} = '{path}' does not exist; make it with '{command}' or set {key}=PATH")


def check_layers(config: Config, key: str, layers: Layers) -> None:
    """`key`: of `memory`, whose `layers` are given."""
    if layers == "all":
        return
    for layer in layers:
        if int(layer) >= config.model.layers:
            raise UserError(
                f"memory.{key}.layers: {layer} is out of range; model.layers = {config.model.layers}, so "
                f"0 to {config.model.layers - 1} are valid"
            )
    if len(set(layers)) != len(layers) or not layers:
        raise UserError(f"memory.{key}.layers = {list(layers)} must name at least one layer, each once")


def _check_keys(method: MemoryMethod) -> None:
    memory, defaults = method.memory, MemoryConfig()
    known = {*COMMON_KEYS, *method.reads, *(TABLE_KEYS if method.trains_tables else ())}
    for key in MemoryConfig.model_fields:
        if key not in known and getattr(memory, key) != getattr(defaults, key):
            raise _unread(f"memory.{key}", method, [m for m in _all_methods() if _reads(m, key)])
    if memory.learning_rate.scales != "backbone" and not method.zero_initialised_scales:
        raise _unread("memory.learning_rate.scales", method, [m for m in _all_methods() if m.zero_initialised_scales])


def _check_context(method: MemoryMethod) -> None:
    """A chunk of a sequence must not be shorter than what is read before the next."""
    model, context = method.model, method.config.parallel.context
    lengths = [model.sequence_length, *(stage.sequence_length for stage in method.config.data.stages)]
    shortest = min(length for length in lengths if length is not None)
    if shortest < 2 * context * method.reach:
        raise UserError(
            f"parallel.context = {context} cuts sequences of {shortest} tokens into chunks of "
            f"{shortest // (2 * context)}, but memory.method = {method.name} reads {method.reach} tokens before each; "
            f"set a smaller degree"
        )


def _unread(key: str, method: MemoryMethod, readers: list[type[MemoryMethod]]) -> UserError:
    return UserError(
        f"{key} is of memory.method = {' or '.join(reader.name for reader in readers)}, but the recipe has "
        f"{method.name}; take it out or change the method"
    )


def _reads(method: type[MemoryMethod], key: str) -> bool:
    return key in method.reads or (method.trains_tables and key in TABLE_KEYS)


def _all_methods() -> list[type[MemoryMethod]]:
    return [method_class(name) for name in REGISTRY]
