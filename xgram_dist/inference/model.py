"""From a checkpoint to a model that computes: used by eval, export, generate and perplexity.

`Checkpoint.find` reads and checks manifest, recipe and tokenizer, and nothing large. `Checkpoint.load` builds the
decoder in one process, whatever ranks, engine and tensor degree saved the checkpoint, and maps the tables.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from xgram_dist.checkpoint.folder import checkpoints_at
from xgram_dist.checkpoint.reader import CheckpointReader
from xgram_dist.config import Config
from xgram_dist.data.tokenizer import Tokenizer, load_tokenizer
from xgram_dist.errors import UserError
from xgram_dist.inference.hf.decoder import Cache, Decoder, Spec
from xgram_dist.inference.hf.decoder_methods import KeyMap
from xgram_dist.inference.hf.decoder_tables import RowFormat
from xgram_dist.inference.mapped_tables import MappedTables, StoredTables
from xgram_dist.model.methods.base import ComputedTables, method_of, table_layout
from xgram_dist.optim.schedule import warmup_factor
from xgram_dist.parallel.device import DTYPES, to_device

HOST = torch.device("cpu")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint and its tokenizer."""

    reader: CheckpointReader
    tokenizer: Tokenizer

    @property
    def folder(self) -> Path:
        return self.reader.folder

    @property
    def config(self) -> Config:
        return self.reader.config

    @property
    def step(self) -> int:
        return int(self.reader.facts["step"])

    @property
    def name(self) -> str:
        return f"{self.config.name} at step {self.step}"

    @staticmethod
    def find(path: str | Path, tokenizer: str | Path | None = None) -> "Checkpoint":
        """The checkpoint at a path, or a run's newest. `tokenizer`: a file to use instead of the saved one."""
        reader = CheckpointReader(checkpoints_at(Path(path))[-1])
        _ = reader.config  # an invalid recipe is refused here
        return Checkpoint(reader, _load_tokenizer(reader, tokenizer))

    def spec(self) -> Spec:
        return spec_of(self.config, self.step, self.tokenizer.end_of_text)

    def key_map(self) -> KeyMap | None:
        """From tokens to n-gram keys; None where keys are tokens."""
        keys, spec = self.reader.ngram_keys, self.spec()
        if keys is None or spec.method_site is None:
            return None
        arrays = [torch.from_numpy(array).long() for array in keys.arrays]
        key_map = KeyMap(spec.method_site, spec.document_end, [len(array) for array in arrays])
        key_map.load(arrays)
        return key_map

    def tables(self, device: torch.device = HOST, row_format: str = "fp32") -> MappedTables | ComputedTables | None:
        """`device`: where computed tables are computed. `row_format`: rows are as `export --tables` stores them."""
        method = method_of(self.config)
        if method.trains_tables:
            return MappedTables(self.reader, row_format)

        def read(name: str, target: Tensor) -> None:
            self.reader.read_tensor(f"backbone.{name}", target)

        computed = method.computed_tables(read, self.reader.ngram_keys, device)
        return computed if computed is None or row_format == "fp32" else StoredTables(computed, row_format)

    def table_bytes(self, row_format: str) -> int:
        """Of exported rows."""
        tables = self.tables()
        if tables is None:
            return 0
        if isinstance(tables, MappedTables):
            layout = table_layout(self.config)
            views = [(slab.rows, tuple(table.width for table in slab.tables)) for slab in layout.slabs]
        else:
            rows = max(rows for rows, _ in tables.shapes.values())
            views = [(rows, tuple(width for _, width in tables.shapes.values()))]
        return sum(rows * RowFormat(row_format, widths).nbytes for rows, widths in views)

    def load(self, device: torch.device, precision: str | None = None, row_format: str = "fp32") -> "Model":
        """`precision`: fp32 or bf16; None: the run's. `row_format`: see `tables`."""
        with torch.device("meta"):
            decoder = Decoder(self.spec())
        decoder.to_empty(device=device)
        dtype = DTYPES[precision or self.config.train.precision]
        for name, parameter in decoder.named_parameters():
            # Matrices in the dtype of the computation; small vectors stay in fp32, as they were trained.
            if parameter.dim() > 1 and ".sites." not in name:
                parameter.data = parameter.data.to(dtype)
            self.reader.read_tensor(f"backbone.{name}", parameter.data)
        decoder.requires_grad_(False)
        return Model(self, decoder.eval(), self.tables(device, row_format), device)


class Model:
    """Tokens in, hidden states and logits out."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        decoder: Decoder,
        tables: MappedTables | ComputedTables | None,
        device: torch.device,
    ):
        self.checkpoint, self.decoder, self.tables, self.device = checkpoint, decoder, tables, device
        self.key_map = checkpoint.key_map()

    @property
    def context(self) -> int:
        return self.decoder.spec.context

    @torch.inference_mode()
    def hidden(self, tokens_BT: Tensor, cache: Cache | None = None, real: Tensor | None = None) -> Tensor:
        """For tokens in host memory: [B, T, D] on the device."""
        values: dict[str, Tensor] = {}
        if self.tables is None:
            slots_BT = tokens_BT
        else:
            keys = tokens_BT
            if self.key_map is not None:
                keys = self.key_map(tokens_BT, None if real is None else real[:, -tokens_BT.shape[1] :], cache)
            if keys.numel() == 1:  # a step of generation, where `unique` takes one part in a hundred
                distinct_U, slots_BT = keys.view(1), torch.zeros_like(keys)
            else:
                distinct_U, slots_BT = keys.unique(return_inverse=True)
            values = {name: to_device(v, self.device) for name, v in self.tables.vectors(distinct_U).items()}
        on_device = [None if x is None else to_device(x, self.device) for x in (tokens_BT, slots_BT, real)]
        tokens, slots, counted = on_device
        assert tokens is not None
        assert slots is not None
        return self.decoder(tokens, slots, values, cache, counted)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        return self.decoder.logits(hidden)


def _load_tokenizer(reader: CheckpointReader, path: str | Path | None) -> Tokenizer:
    facts = reader.facts["tokenizer"]
    if not facts:
        raise UserError(f"'{reader.folder}' does not record its tokenizer: it was saved by an older release")
    if path is None and facts["file"] not in reader.manifest.files:
        raise UserError(
            f"'{reader.folder}' has no tokenizer, because its data was remote; give the tokenizer file of its data set "
            "with --tokenizer FILE"
        )
    tokenizer = load_tokenizer(reader.folder / facts["file"] if path is None else Path(path), facts["end_of_text_name"])
    if tokenizer.sha256 != facts["sha256"]:
        raise UserError(
            f"tokenizer '{tokenizer.path}' (sha256 {tokenizer.sha256[:12]}) is not the one the checkpoint was trained "
            f"with ({facts['sha256'][:12]}); give the tokenizer file of its data set"
        )
    return tokenizer


def spec_of(config: Config, step: int, end_of_text: int) -> Spec:
    """`step`: of the weights; it decides the injection's warm-up factor."""
    model = config.model
    return Spec.of(
        {
            "vocabulary": model.vocabulary,
            "layers": model.layers,
            "width": model.width,
            "ffn_width": model.ffn_width,
            "heads": model.heads,
            "kv_heads": model.kv_heads,
            "context": model.sequence_length,
            "rope_theta": model.rope_theta,
            "norm_eps": model.norm_eps,
            "document_end": end_of_text if model.document_masking else None,
            "head_width": model.head_width,
            "norms_after": model.norms == "after",
            "qk_norm": model.qk_norm,
            "rope_scaling": None if model.rope_scaling.factor == 1 else model.rope_scaling.model_dump(),
            **method_of(config).decoder_spec(warmup_factor(config, step)),
        }
    )
