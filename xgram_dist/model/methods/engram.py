"""Engram: rows of the n-grams that end at a position, gated by the hidden state.

    retrieve   e = rows of all orders and hash heads of this layer, side by side        keys: tables/ngrams.py
    extract    gate = sigmoid(signed root of <RMSNorm(W_k e), RMSNorm(h)> / sqrt(D)),  y = gate * W_v e
    inject     h <- h + y + SiLU(conv(RMSNorm(y))), before the block; conv causal and depthwise

The rows of all layers, orders and heads lie one after the other in a single table, so that a key is a row and one
exchange moves them all. Every rank of a tensor axis holds the hidden state, the rows and the matrices whole, and
computes the same. Where sequences are cut over a context axis, the convolution reads y of other ranks' positions: the
hidden states of the last k - 1 positions of each chunk are exchanged, and y is computed there, too.
Shapes: B batch, T sequence, D width, E width of e, K keys of a position in this layer, U distinct keys, W width of a
row.
"""

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from xgram_dist.data.dataset import PreparedData
from xgram_dist.data.tokenizer import load_tokenizer
from xgram_dist.errors import UserError
from xgram_dist.model.gather import Slots, gather_rows
from xgram_dist.model.injection import shifted
from xgram_dist.model.layers import RMSNorm, at_least_fp32
from xgram_dist.model.methods.base import Keys, MemoryMethod, check_layers
from xgram_dist.parallel.context_parallel import WHOLE_SEQUENCES, ContextAxis, exchange_before
from xgram_dist.parallel.mesh import Mesh
from xgram_dist.parallel.tensor_parallel import TensorAxis
from xgram_dist.tables.exchange import ShardedTables
from xgram_dist.tables.frequencies import chance_seen, expected_ngrams
from xgram_dist.tables.layout import ALL_LAYERS, TableSite
from xgram_dist.tables.ngrams import Folding, NgramHash, NgramKeys, plan_ngram_hash, primes_from
from xgram_dist.tables.routing import Routing
from xgram_dist.tables.working_set import Lookup

MIN_SCORE = 1e-6
"""Of a score before its root, whose slope is unbounded at zero."""
MAX_ROWS = 2**62
"""Keys are int64; some room is left for the padding of primes, and for their arithmetic."""


class Engram(MemoryMethod):
    name = "engram"
    reads = ("engram",)
    looks_up_ngrams = True
    reduced_settings = {"engram": {"rows": 64, "width": None}}  # noqa: RUF012

    @property
    def layers(self) -> tuple[int, ...]:
        return self.resolve_layers(self.memory.engram.layers)

    @property
    def width(self) -> int:
        """Of the rows of all heads and orders of a position, side by side."""
        return self.memory.engram.width or self.model.width

    @property
    def gate_eps(self) -> float:
        return self.memory.engram.gate_eps or self.model.norm_eps

    @property
    def output_eps(self) -> float:
        return self.memory.engram.output_eps or self.model.norm_eps

    @property
    def num_heads(self) -> int:
        """Hash heads of a layer, over all orders."""
        return len(self.memory.engram.orders) * self.memory.engram.heads

    @property
    def head_rows(self) -> list[tuple[int, ...]]:
        """Rows of each hash head of each layer, order by order."""
        layers, heads = len(self.layers), self.num_heads
        minimum = self.memory.engram.rows or self.model.vocabulary
        if not self.memory.engram.layer_primes:
            return [primes_from(minimum, heads)] * layers
        primes = primes_from(minimum, layers * heads)
        return [primes[layer * heads : (layer + 1) * heads] for layer in range(layers)]

    def check(self) -> None:
        settings, tensor = self.memory.engram, self.config.parallel.tensor
        check_layers(self.config, "engram", settings.layers)
        if len(set(settings.orders)) != len(settings.orders):
            raise UserError(f"memory.engram.orders = {list(settings.orders)} must name each order once")
        rows = len(self.layers) * self.num_heads * (settings.rows or self.model.vocabulary)
        if rows >= MAX_ROWS:
            raise UserError(
                f"memory.engram.rows = {settings.rows} gives {rows:,} rows over all layers and heads; keys have 62 "
                f"bits, so lower it, or memory.engram.heads"
            )
        if settings.pad_token is not None and settings.pad_token >= self.model.vocabulary:
            raise UserError(
                f"memory.engram.pad_token = {settings.pad_token} is not a token: model.vocabulary = "
                f"{self.model.vocabulary}"
            )
        if self.width % (self.num_heads * tensor):
            raise UserError(
                f"memory.engram.width = {self.width} is not divisible by {len(settings.orders)} orders x "
                f"memory.engram.heads = {settings.heads} x parallel.tensor = {tensor}; choose a width that is"
            )

    # Tables

    def table_layers(self) -> set[int]:
        return set(self.layers)

    def sites(self) -> dict[str, TableSite]:
        return {"ngram": TableSite((ALL_LAYERS,), self.width // self.num_heads)}

    @property
    def num_rows(self) -> int:
        return sum(map(sum, self.head_rows))

    # Keys

    def ngram_hash(self) -> NgramHash:
        settings = self.memory.engram
        vocabulary, rows = self.model.vocabulary, self.head_rows
        return plan_ngram_hash(vocabulary, settings.orders, self.layers, rows, settings.pad_token)

    @property
    def num_ngram_keys(self) -> int:
        return self.num_heads * len(self.layers)

    def layer_keys(self, layer: int) -> slice | None:
        if layer not in self.layers:
            return None
        held = [one for one in self.layers if one in self.held]
        first = held.index(layer) * self.num_heads
        return slice(first, first + self.num_heads)

    def resolve_keys(self, data: PreparedData) -> tuple[Keys, str]:
        vocabulary, files = self.model.vocabulary, data.tokenizer_files()
        if not self.memory.engram.fold:
            return Folding.identity(vocabulary), "n-grams over token ids (memory.engram.fold is off)"
        if not files:
            sentence = f"n-grams over token ids: '{data.folder}' has no tokenizer to fold them by"
            return Folding.identity(vocabulary), sentence
        tokenizer = load_tokenizer(files[0], data.manifest.end_of_text_name)
        known = min(tokenizer.vocabulary, vocabulary)
        folding = Folding.build(lambda token: tokenizer.decode([token]), known, vocabulary)
        return folding, str(folding)

    def load_keys(self, path: Path) -> Keys:
        return Folding.load(path, self.model.vocabulary)

    def check_same_keys(self, saved: MemoryMethod, folder: Path) -> bool:
        if not isinstance(saved, Engram):
            return False
        if saved.ngram_hash() != self.ngram_hash():
            raise UserError(
                f"'{folder}' hashes n-grams in another way: set memory.engram (orders, heads, rows, layers) as it was, "
                f"{saved.memory.engram}"
            )
        return True

    def touched_share(self, tokens: int, frequencies: NDArray[Any] | None, routing: Routing | None) -> float | None:
        """As if no n-gram came twice."""
        return float(chance_seen(np.array([1 / self.head_rows[0][0]]), tokens)[0])

    def run_share(self, tokens: int, frequencies: NDArray[Any]) -> float:
        """Each distinct n-gram hits a row of every head of its order; tokens count as independent draws."""
        heads, touched = self.memory.engram.heads, 0.0
        for number, order in enumerate(self.memory.engram.orders):
            distinct = max(1, round(expected_ngrams(frequencies, order, tokens)))
            for rows in self.head_rows:
                of_order = np.array(rows[number * heads : (number + 1) * heads], dtype=np.float64)
                touched += float(of_order @ chance_seen(1 / of_order, distinct))
        return touched / self.num_rows

    def build_lookup(
        self,
        routing: Routing | None,
        device: torch.device,
        mesh: Mesh | None = None,
        keys: Keys | None = None,
        end_of_text: int | None = None,
        optimizer: str | None = None,
    ) -> Lookup:
        """Without `keys`, tokens are not folded."""
        folding = keys if isinstance(keys, Folding) else Folding.identity(self.model.vocabulary)
        document_end = end_of_text if self.model.document_masking else None
        held = [number for number, layer in enumerate(self.layers) if layer in self.held]
        keys_of = NgramKeys(self.ngram_hash(), folding.ids, document_end, held)
        context = self.context_of(mesh)
        if mesh is not None and mesh.pipeline.size > 1:
            # The table serves all layers, so that all stages share its rows.
            mesh = replace(mesh, rows=mesh.stages, exchange=mesh.stages)
        return ShardedTables(self.config, self.layout(), routing, device, mesh, keys_of, optimizer, context)

    # Network

    @property
    def reach(self) -> int:
        return self.memory.engram.taps - 1

    def build_sites(self, layer: int, axis: TensorAxis, context: ContextAxis) -> dict[str, nn.Module]:
        return {"ngram": EngramSite(self, context)} if layer in self.layers else {}

    def initialise(self, name: str, value: Tensor, generator: torch.Generator) -> bool:
        if not name.endswith(".kernel"):
            return False
        value.zero_()  # the convolution's branch starts as the identity: h + y
        if self.memory.engram.kernel_init == "identity":
            value[0] = 1.0  # the convolution passes its input on
        return True

    # Estimates

    def retrieved_width(self) -> int:
        return len(self.layers) * self.width

    def extra_flops_per_token(self) -> int:
        """Two matrices, the score, the gate, the taps."""
        width, taps = self.model.width, self.memory.engram.taps
        return 2 * (2 * self.width * width + (taps + 2) * width) * len(self.layers)

    def activation_numbers(self, layer: int, tensor: int) -> float:
        kept = 2 * self.width + (self.memory.engram.taps + 8) * self.model.width
        return kept if layer in self.layers else 0

    def exchanged_positions(self, layer: int) -> int:
        return self.reach if layer in self.layers else 0

    # Inference

    def decoder_spec(self, warmup: float) -> dict[str, Any]:
        orders, taps = self.memory.engram.orders, self.memory.engram.taps
        return {
            "method_site": {
                "method": self.name,
                "site": "ngram",
                "layers": self.layers,
                "width": self.width,
                "taps": taps,
                "reach": max(orders) - 1,
                "hashing": asdict(self.ngram_hash()),
                "gate_eps": self.gate_eps,
                "output_eps": self.output_eps,
            }
        }


class EngramSite(nn.Module):
    def __init__(self, method: Engram, context: ContextAxis = WHOLE_SEQUENCES):
        super().__init__()
        self.context = context
        model = method.model
        self.tables = [table.name for table in method.layout().tables]
        self.value = nn.Parameter(torch.zeros(model.width, method.width))
        self.key = nn.Parameter(torch.zeros(model.width, method.width))
        self.key_norm = RMSNorm(model.width, method.gate_eps)
        self.query_norm = RMSNorm(model.width, method.gate_eps)
        self.output_norm = RMSNorm(model.width, method.output_eps)
        self.kernel = nn.Parameter(torch.zeros(method.memory.engram.taps, model.width))

    def forward(self, x_BTD: Tensor, values: list[Tensor], slots_BTK: Slots, documents_BT: Tensor | None) -> Tensor:
        """`values`: the rows of the distinct keys [U, W]; `slots_BTK`: those of this layer's keys."""
        (value_UW,) = values
        x_BTD = exchange_before(x_BTD, self.context)
        e_BTE = gather_rows(value_UW, slots_BTK).flatten(2).to(x_BTD.dtype)
        key = at_least_fp32(self.key_norm(F.linear(e_BTE, self.key.to(e_BTE.dtype))))
        score = (key * at_least_fp32(self.query_norm(x_BTD))).sum(-1, keepdim=True) / math.sqrt(x_BTD.shape[-1])
        gate = torch.sigmoid(score.sign() * score.abs().clamp_min(MIN_SCORE).sqrt())
        y = gate * at_least_fp32(F.linear(e_BTE, self.value.to(e_BTE.dtype)))
        normed, kernel = self.output_norm(y), self.kernel.to(y.dtype)
        taps = [shifted(normed, step, documents_BT) * kernel[step] for step in range(len(kernel))]
        return self.context.without_before(x_BTD + (y + F.silu(sum(taps[1:], taps[0]))).to(x_BTD.dtype))
