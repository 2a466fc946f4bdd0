"""From a checkpoint folder to a model that computes: the one way in for eval, export, generate and perplexity.

`Checkpoint.find` reads the manifest and the tokenizer and checks them; nothing large is touched. `load` makes the
network in one process from parts saved by any number of ranks, engine and tensor degree, and maps the tables.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from xgram_dist.checkpoint.folder import FOLDER, found_steps, name_of
from xgram_dist.checkpoint.manifest import FILE, Manifest
from xgram_dist.checkpoint.raw import DamagedFileError
from xgram_dist.checkpoint.storage import FolderReader
from xgram_dist.config import Config, build_config
from xgram_dist.data.tokenizer import Tokenizer, load_tokenizer
from xgram_dist.errors import UserError
from xgram_dist.inference.computed import ComputedTables
from xgram_dist.inference.decoder import Cache, Decoder, Spec
from xgram_dist.inference.methods import KeyMap
from xgram_dist.inference.rows import MappedTables
from xgram_dist.inference.spec import spec_of
from xgram_dist.inference.weights import read_whole
from xgram_dist.memory.layout import has_tables
from xgram_dist.memory.ngrams.folding import Folding
from xgram_dist.memory.ngrams.frequent import Grams
from xgram_dist.memory.routing.routing import Routing
from xgram_dist.parallel.device import DTYPES, to_device

HOST = torch.device("cpu")
ROUTING, KEYS = "routing.npz", "keys.npz"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was found whole, by its manifest."""

    folder: Path
    manifest: Manifest
    config: Config
    tokenizer: Tokenizer

    @property
    def step(self) -> int:
        return int(self.manifest.run["step"])

    @property
    def name(self) -> str:
        return f"{self.config.name} at step {self.step}"

    @staticmethod
    def find(path: str | Path, tokenizer: str | Path | None = None) -> "Checkpoint":
        """A checkpoint's folder, or a run's: then its newest. `tokenizer`: instead of the one saved with it."""
        folder = _folder(Path(path))
        manifest = Manifest.read(folder)
        try:
            tree = yaml.safe_load(manifest.run["config"])
        except (KeyError, yaml.YAMLError):
            raise DamagedFileError(f"'{folder / FILE}' holds no recipe") from None
        return Checkpoint(folder, manifest, build_config(tree), _tokenizer(folder, manifest, tokenizer))

    def routing(self) -> Routing | None:
        if self.manifest.run.get("routing") is None:
            return None
        found = Routing.load(self.folder / ROUTING)
        if found.sha256() != self.manifest.run["routing"]:
            raise DamagedFileError(f"'{self.folder / ROUTING}' is not the routing the checkpoint was saved with")
        return found

    def spec(self) -> Spec:
        return spec_of(self.config, self.step, self.tokenizer.end_of_text)

    def keys(self) -> Folding | Grams | None:
        """Of a method that looks up n-grams."""
        if self.manifest.run.get("keys") is None:
            return None
        kind = Folding if self.config.memory.method == "engram" else Grams
        found: Folding | Grams = kind.load(self.folder / KEYS, self.config.model.vocabulary)
        if found.sha256() != self.manifest.run["keys"]:
            raise DamagedFileError(f"'{self.folder / KEYS}' is not what the checkpoint was saved with")
        return found

    def key_map(self) -> KeyMap | None:
        """None where keys are tokens."""
        keys, spec = self.keys(), self.spec()
        if keys is None or spec.own is None:
            return None
        arrays = [torch.from_numpy(array).long() for array in keys.arrays]
        made = KeyMap(spec.own, spec.document_end, [len(array) for array in arrays])
        made.load(arrays)
        return made

    def tables(
        self, reader: FolderReader, device: torch.device = HOST, *, verify: bool = False
    ) -> MappedTables | ComputedTables | None:
        """`device`: where tables are computed that were not trained."""
        if has_tables(self.config):
            return MappedTables(self.config, self.routing(), reader, verify=verify)
        if self.config.memory.method == "vanilla":
            return None
        keys = self.keys()
        assert not isinstance(keys, Folding)
        return ComputedTables(self.config, keys, reader, device)

    def load(self, device: torch.device, precision: str | None = None) -> "Model":
        """`precision`: fp32 or bf16; without it, the run's."""
        reader = FolderReader(self.folder, self.manifest)
        with torch.device("meta"):
            decoder = Decoder(self.spec())
        decoder.to_empty(device=device)
        dtype = DTYPES[precision or self.config.train.precision]
        for name, parameter in decoder.named_parameters():
            # Matrices in the type of the computation; the small vectors stay as they were trained.
            if parameter.dim() > 1 and ".sites." not in name:
                parameter.data = parameter.data.to(dtype)
            read_whole(reader, f"backbone.{name}", parameter.data)
        decoder.requires_grad_(False)
        return Model(self, decoder.eval(), self.tables(reader, device), device)


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


def _folder(path: Path) -> Path:
    if (path / FILE).is_file():
        return path
    steps = found_steps(path)
    if steps:
        return path / FOLDER / name_of(steps[-1])
    if not path.is_dir():
        raise UserError(f"'{path}' does not exist; give a checkpoint (RUN/{FOLDER}/{name_of(100)}) or a run folder")
    if path.name.endswith(".part"):
        raise UserError(f"'{path}' was never completed; give the checkpoint before it, or its run folder")
    raise UserError(f"'{path}' is not a complete checkpoint (no {FILE}) and not a run folder with one in {FOLDER}/")


def _tokenizer(folder: Path, manifest: Manifest, given: str | Path | None) -> Tokenizer:
    facts: dict[str, Any] = manifest.run.get("tokenizer") or {}
    if not facts:
        raise UserError(f"'{folder}' says nothing of its tokenizer: it was saved by an older release")
    path = folder / facts["file"] if given is None else Path(given)
    if given is None and facts["file"] not in manifest.files:
        raise UserError(
            f"'{folder}' holds no tokenizer: the data was read from afar; give the data set's with --tokenizer FILE"
        )
    found = load_tokenizer(path, facts["end_of_text_name"])
    if found.sha256 != facts["sha256"]:
        raise UserError(
            f"tokenizer '{found.path}' (sha256 {found.sha256[:12]}) is not the one the checkpoint was trained with "
            f"({facts['sha256'][:12]}); give the tokenizer file of its data set"
        )
    return found
