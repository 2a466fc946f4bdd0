"""SCONE: frequent n-grams (f-grams) have an embedding, computed by a small network and added at the input.

    retrieve   the tokens of each distinct f-gram of the micro-batch: the longest that ends at a position
    extract    a small causal transformer over these tokens' embeddings; its last state is the f-gram's embedding,
               a function of the f-gram, so a table once training is over
    inject     h_0 <- embedding[token] + embedding of the f-gram; nothing where no f-gram ends

The network is sharded over a tensor axis as the backbone is.
Shapes: U distinct f-grams (the first stands for none), N tokens of the longest, B batch, T sequence, D width.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xgram_dist.config import Config
from xgram_dist.data.dataset import PreparedData
from xgram_dist.data.loader import validation_batches
from xgram_dist.errors import UserError
from xgram_dist.model.attention import Attention
from xgram_dist.model.layers import RMSNorm, SwiGLU, rotary_cos_sin, vocab_parallel_embedding
from xgram_dist.model.methods.base import ComputedTables, Keys, MemoryMethod
from xgram_dist.parallel.mesh import Mesh
from xgram_dist.parallel.tensor_parallel import SINGLE_RANK, TensorAxis
from xgram_dist.tables.fgrams import GRAMS, NO_TOKEN, FgramLookup, Fgrams, count_grams
from xgram_dist.tables.routing import Routing
from xgram_dist.tables.working_set import Lookup

INPUT_TABLE = "layers.all.input.0"
"""The f-grams' embeddings, once they are a table."""


class SCONE(MemoryMethod):
    name = "scone"
    reads = ("scone",)
    trains_tables = False
    looks_up_ngrams = True
    computed_parameters = ("side.",)

    # Keys

    def resolve_keys(self, data: PreparedData) -> tuple[Keys, str]:
        settings = self.memory.scone
        sequences = torch.cat(validation_batches(data, self.model.sequence_length, 1, settings.sequences)).numpy()
        grams = count_grams(np.asarray(sequences), settings.longest, settings.grams)
        if len(grams.tokens) == 1:
            raise UserError(
                f"no n-gram of 2 to {settings.longest} tokens occurs twice in '{data.folder}'; give it more data"
            )
        return grams, f"{grams}, of {len(sequences):,} sequences"

    def load_keys(self, path: Path) -> Keys:
        return Fgrams.load(path, self.model.vocabulary)

    def build_lookup(
        self,
        routing: Routing | None,
        device: torch.device,
        mesh: Mesh | None = None,
        keys: Keys | None = None,
        end_of_text: int | None = None,
        optimizer: str | None = None,
    ) -> Lookup:
        assert isinstance(keys, Fgrams), "scone needs its f-grams"
        document_end = end_of_text if self.model.document_masking else None
        return FgramLookup(keys, device, document_end, self.context_of(mesh))

    # Network

    def build_input_network(self, axis: TensorAxis) -> nn.Module:
        return FgramNetwork(self.config, axis)

    # Estimates

    def retrieved_width(self) -> int:
        return self.model.width

    def extra_flops_per_token(self) -> int:
        """A sum."""
        return self.model.width

    # Inference

    def decoder_spec(self, warmup: float) -> dict[str, Any]:
        return {
            "method_site": {"method": self.name, "site": "input", "layers": (), "reach": self.memory.scone.longest - 1}
        }

    def decoder_tables(self) -> dict[str, int]:
        return {INPUT_TABLE: self.model.width}

    def computed_tables(
        self, read: Callable[[str, Tensor], None], keys: Keys | None, device: torch.device
    ) -> ComputedTables:
        assert isinstance(keys, Fgrams)
        return FgramTable(self, read, keys, device)


class FgramBlock(nn.Module):
    def __init__(self, config: Config, axis: TensorAxis):
        super().__init__()
        model = config.model
        self.attention_norm = RMSNorm(model.width, model.norm_eps)
        self.attention = Attention(model, axis)
        self.ffn_norm = RMSNorm(model.width, model.norm_eps)
        self.ffn = SwiGLU(model.width, model.ffn_width, axis)

    def forward(self, x_UND: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        x_UND = x_UND + self.attention(self.attention_norm(x_UND), rotary, {}, mask)
        return x_UND + self.ffn(self.ffn_norm(x_UND))


class FgramNetwork(nn.Module):
    """The tokens of f-grams -> their embeddings."""

    rotary_cos: Tensor
    rotary_sin: Tensor

    def __init__(self, config: Config, axis: TensorAxis = SINGLE_RANK):
        super().__init__()
        self.axis = axis
        self.tables = [GRAMS]
        self.blocks = nn.ModuleList(FgramBlock(config, axis) for _ in range(config.memory.scone.layers))
        model = config.model
        cos, sin = rotary_cos_sin(model, config.memory.scone.longest)
        self.register_buffer("rotary_cos", cos, persistent=False)
        self.register_buffer("rotary_sin", sin, persistent=False)

    def embeddings(self, grams_UN: Tensor, embedding: Tensor, dtype: torch.dtype) -> Tensor:
        """Of each f-gram [U, D]: the rows of its table. `embedding`: the model's, of this rank's vocabulary range."""
        real_UN = grams_UN != NO_TOKEN
        x = vocab_parallel_embedding(grams_UN.clamp_min(0), embedding, dtype, self.axis)
        length = grams_UN.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        # A token attends to the real tokens before it and to itself, so that no row of the mask is empty.
        seen = real_UN[:, None, :] | torch.eye(length, dtype=torch.bool, device=x.device)
        mask = (causal & seen)[:, None]
        for block in self.blocks:
            x = block(x, (self.rotary_cos, self.rotary_sin), mask)
        return x[:, -1] * real_UN[:, -1:]

    def forward(self, grams_UN: Tensor, embedding: Tensor, slots_BT: Tensor, dtype: torch.dtype) -> Tensor:
        """What is added to the input [B, T, D]."""
        return F.embedding(slots_BT, self.embeddings(grams_UN, embedding, dtype))


class FgramTable:
    """The embeddings of f-grams, by number: one table for the model."""

    def __init__(self, method: SCONE, read: Callable[[str, Tensor], None], grams: Fgrams, device: torch.device):
        model = method.model
        self._embedding = torch.empty(model.vocabulary, model.width, device=device)
        read("embedding", self._embedding)
        self._network = FgramNetwork(method.config).to(device).requires_grad_(False)
        for name, parameter in self._network.named_parameters():
            read(f"side.{name}", parameter.data)
        self._grams = torch.from_numpy(grams.tokens).long()
        self.shapes = {INPUT_TABLE: (len(grams.tokens), model.width)}

    @torch.no_grad()
    def vectors(self, keys_U: Tensor) -> dict[str, Tensor]:
        grams_UN = self._grams[keys_U].to(self._embedding.device)
        return {INPUT_TABLE: self._network.embeddings(grams_UN, self._embedding, torch.float32)}
