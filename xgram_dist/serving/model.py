"""An exported model in vLLM: its own attention, key-value cache and parallel layers; the sites and tables of ours.

Rows are read on the host before the network runs, those of the batch's distinct tokens at once, and kept for a while
(recent_vectors.py). Which tokens came before a position is found by the slots of the key-value cache (history.py). The
network then is a function of the new tokens and these vectors alone, which vLLM compiles. To the sites, each position
is a sequence of one new token.
Shapes: T new positions of all sequences of the batch, D width, K tokens or other keys of a position, U vectors, W
columns of all tables, J tables.
"""

from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.compilation.decorators import support_torch_compile
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_reduce,
)
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.utils.torch_utils import set_default_torch_dtype

from xgram_dist.inference.hf.decoder import Site, Spec, rotary_rates
from xgram_dist.inference.hf.decoder_layers import Positions, RMSNorm, at_least_fp32
from xgram_dist.inference.hf.decoder_methods import INPUT_TABLE, SITE_MODULES, KeyMap
from xgram_dist.inference.hf.decoder_tables import Tables
from xgram_dist.parallel.device import CopyStream, index_to_device
from xgram_dist.serving.history import NO_TOKEN, Slots, StateTaps, TableTaps, TokenHistory
from xgram_dist.serving.mapped_rows import RowReader, map_rows
from xgram_dist.serving.recent_vectors import RecentVectors

logger = init_logger(__name__)


class GroupedAttention(nn.Module):
    """As `decoder.Attention`; heads are divided among the tensor-parallel ranks."""

    def __init__(self, spec: Spec, vllm_config: Any, prefix: str):
        super().__init__()
        size, rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
        if spec.kv_heads % size:
            raise ValueError(f"tensor_parallel_size {size} does not divide the model's {spec.kv_heads} key/value heads")
        self.head_width, self.qk_norm, self.size, self.rank = spec.width_of_head, spec.qk_norm, size, rank
        self.heads, self.kv_heads = spec.heads // size, spec.kv_heads // size
        self.q_width, self.kv_width = self.heads * self.head_width, self.kv_heads * self.head_width
        quant = vllm_config.quant_config
        self.qkv = QKVParallelLinear(
            spec.width,
            self.head_width,
            spec.heads,
            spec.kv_heads,
            bias=False,
            quant_config=quant,
            prefix=f"{prefix}.qkv",
        )
        self.output = RowParallelLinear(
            spec.heads * self.head_width, spec.width, bias=False, quant_config=quant, prefix=f"{prefix}.output"
        )
        widths = (self.q_width, self.kv_width) if spec.qk_norm == "width" else (self.head_width, self.head_width)
        if spec.qk_norm != "none":
            self.query_norm, self.key_norm = (RMSNorm(width, spec.norm_eps).float() for width in widths)
        self.attn = Attention(
            self.heads,
            self.head_width,
            self.head_width**-0.5,
            num_kv_heads=self.kv_heads,
            cache_config=vllm_config.cache_config,
            quant_config=quant,
            prefix=f"{prefix}.attn",
        )

    def forward(self, x_TD: Tensor, deltas: dict[str, Tensor], cos: Tensor, sin: Tensor) -> Tensor:
        qkv, _ = self.qkv(x_TD)
        q, k, v = qkv.split([self.q_width, self.kv_width, self.kv_width], -1)
        if "q" in deltas:
            per_head = self.own(deltas["q"]).unflatten(-1, (self.kv_heads, self.head_width))
            q = q + per_head.repeat_interleave(self.heads // self.kv_heads, dim=1).flatten(1)
        if "k" in deltas:
            k = k + self.own(deltas["k"])
        if "v" in deltas:
            v = v + self.own(deltas["v"])
        if self.qk_norm == "width":
            q, k = self._normed(q, self.query_norm), self._normed(k, self.key_norm)
        elif self.qk_norm == "head":
            q = self.query_norm(q.unflatten(-1, (self.heads, self.head_width))).flatten(1)
            k = self.key_norm(k.unflatten(-1, (self.kv_heads, self.head_width))).flatten(1)
        q, k = self._rotated(q, self.heads, cos, sin), self._rotated(k, self.kv_heads, cos, sin)
        out, _ = self.output(self.attn(q, k, v))
        return out + deltas["o"] if "o" in deltas else out

    def own(self, delta_TC: Tensor) -> Tensor:
        """The columns of this rank's key/value heads."""
        return delta_TC if self.size == 1 else delta_TC.chunk(self.size, -1)[self.rank]

    def _normed(self, x: Tensor, norm: RMSNorm) -> Tensor:
        """The norm is over the heads of all ranks."""
        if self.size == 1:
            return norm(x)
        x_fp32 = at_least_fp32(x)
        squares = tensor_model_parallel_all_reduce(x_fp32.square().sum(-1, keepdim=True))
        scale = torch.rsqrt(squares / (x.shape[-1] * self.size) + norm.eps)
        return (x_fp32 * scale * at_least_fp32(norm.weight)).to(x.dtype)

    def _rotated(self, x_TC: Tensor, heads: int, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = at_least_fp32(x_TC.unflatten(-1, (heads, self.head_width))).chunk(2, dim=-1)
        turned = (first * cos - second * sin, second * cos + first * sin)
        return torch.cat(turned, dim=-1).to(x_TC.dtype).flatten(1)


class FeedForward(nn.Module):
    """As `decoder.SwiGLU`. STEM has a table in place of the up projection."""

    def __init__(self, spec: Spec, has_up: bool, vllm_config: Any, prefix: str):
        super().__init__()
        options = {"bias": False, "quant_config": vllm_config.quant_config}
        self.has_up = has_up
        self.size, self.rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
        if has_up:
            widths = [spec.ffn_width] * 2
            self.gate_up = MergedColumnParallelLinear(spec.width, widths, prefix=f"{prefix}.gate_up", **options)
        else:
            self.gate = ColumnParallelLinear(spec.width, spec.ffn_width, prefix=f"{prefix}.gate", **options)
        self.down = RowParallelLinear(spec.ffn_width, spec.width, prefix=f"{prefix}.down", **options)

    def forward(self, x_TD: Tensor, up: Tensor | None) -> Tensor:
        if self.has_up:
            both, _ = self.gate_up(x_TD)
            gate, up = both.chunk(2, -1)
        else:
            assert up is not None
            gate, _ = self.gate(x_TD)
            up = up if self.size == 1 else up.chunk(self.size, -1)[self.rank]
        out, _ = self.down(F.silu(gate) * up)
        return out


class Block(nn.Module):
    """As `decoder.Block`."""

    def __init__(self, spec: Spec, layer: int, vllm_config: Any, prefix: str):
        super().__init__()
        own = spec.method_site if spec.method_site is not None and layer in spec.method_site.layers else None
        self.method_site = None if own is None else own.site
        self.norms_after = spec.norms_after
        self.attention = GroupedAttention(spec, vllm_config, f"{prefix}.attention")
        self.ffn = FeedForward(spec, own is None or own.site != "up", vllm_config, f"{prefix}.ffn")
        self.attention_norm = RMSNorm(spec.width, spec.norm_eps)
        self.ffn_norm = RMSNorm(spec.width, spec.norm_eps)
        sites: dict[str, nn.Module] = {i.site: Site(i, spec) for i in spec.injections if i.layer == layer}
        if own is not None and own.method in SITE_MODULES:
            sites[own.site] = SITE_MODULES[own.method](spec, own, layer)
        self.sites = nn.ModuleDict(sites)
        for part in (self.sites, self.attention_norm, self.ffn_norm):
            part.float()  # small vectors stay in fp32, as they were trained

    def forward(
        self, x_TD: Tensor, values: dict[str, Tensor], at: Positions, taps: Any, cos: Tensor, sin: Tensor
    ) -> Tensor:
        deltas = {
            name: site(values, at, taps, x_TD.dtype).squeeze(1)
            for name, site in self.sites.items()
            if name != self.method_site
        }
        if "qk" in deltas:
            deltas["q"] = deltas["k"] = deltas.pop("qk")
        x = x_TD
        if "h" in deltas:
            x = x + deltas.pop("h")
        if self.method_site == "ngram":
            x = self.sites["ngram"](x[:, None], values, at, taps).squeeze(1)
        attended = self.attention(x if self.norms_after else self.attention_norm(x), deltas, cos, sin)
        x = x + (self.attention_norm(attended) if self.norms_after else attended)
        normed = x if self.norms_after else self.ffn_norm(x)
        up = self.sites["up"](values, at, x.dtype).squeeze(1) if self.method_site == "up" else None
        out = self.ffn(normed, up)
        if self.method_site == "ffn":
            out = self.sites["ffn"](out[:, None], values, at).squeeze(1)
        if self.norms_after:
            out = self.ffn_norm(out)
        if self.method_site in ("block", "experts"):
            out = out + self.sites[self.method_site](normed[:, None], values, at).squeeze(1)
        return x + out


def keeps_states(spec: Spec) -> bool:
    """Whether a convolution reads hidden states of earlier positions."""
    return spec.method_site is not None and spec.method_site.site == "ngram"


@support_torch_compile(
    enable_if=lambda vllm_config: not keeps_states(Spec.of(vllm_config.model_config.hf_config.spec)),
    dynamic_arg_dims={"input_ids": 0, "positions": 0, "slots_TK": 0, "vectors_UW": 0, "scales_UJ": 0},
)
class Network(nn.Module):
    """From tokens and vectors to hidden states."""

    def __init__(self, *, vllm_config: Any, prefix: str = ""):
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.spec = spec = Spec.of(config.spec)
        self.widths = {table["name"]: table["width"] for table in config.tables}
        self.embedding = VocabParallelEmbedding(spec.vocabulary, spec.width, prefix=f"{prefix}.embedding")
        self.blocks = nn.ModuleList(
            Block(spec, layer, vllm_config, f"{prefix}.blocks.{layer}") for layer in range(spec.layers)
        )
        self.norm = RMSNorm(spec.width, spec.norm_eps).float()
        self.states = StateTaps() if keeps_states(spec) else None
        # Angles in fp64, as in training: far positions would lose digits.
        order = torch.arange(spec.context, dtype=torch.float64)
        angles = order[:, None] * rotary_rates(spec, order.device)
        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)

    def forward(
        self, input_ids: Tensor, positions: Tensor, slots_TK: Tensor, vectors_UW: Tensor, scales_UJ: Tensor
    ) -> Tensor:
        """`slots_TK`: rows of `vectors_UW` that a position reads: of its token and those before it, or of its keys."""
        x = self.embedding(input_ids)
        values = self._by_table(vectors_UW)
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        if self.states is not None:
            taps: Any = self.states
            read = slots_TK[:, None]
        else:
            scales = dict(zip(self.widths, scales_UJ.unbind(1), strict=True)) if self.spec.normalised else None
            taps = TableTaps(slots_TK, values, scales)
            # One vector for each position; the buffer that they are from may hold many more.
            values = self._by_table(F.embedding(slots_TK[:, 0], vectors_UW))
            read = torch.arange(len(slots_TK), device=slots_TK.device)[:, None]
        site = self.spec.method_site
        if site is not None and site.site == "input":
            x = x + values[INPUT_TABLE].to(x.dtype)
        at = Positions(cos, sin, None, None, read)
        for block in self.blocks:
            x = block(x, values, at, taps, cos, sin)
        return self.norm(x)

    def _by_table(self, vectors: Tensor) -> dict[str, Tensor]:
        columns = vectors.split(list(self.widths.values()), 1) if self.widths else ()
        return dict(zip(self.widths, columns, strict=True))


class XgramForCausalLM(nn.Module):
    """The model that vLLM runs."""

    allow_patterns_overrides = ["backbone*.safetensors", "model*.safetensors"]  # noqa: RUF012
    """What vLLM loads; files of tables are mapped."""
    packed_modules_mapping = {"qkv": ["query", "key", "value"], "gate_up": ["gate", "up"]}  # noqa: RUF012

    def __init__(self, *, vllm_config: Any, prefix: str = ""):
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.config, self.vllm_config = config, vllm_config
        self.spec = spec = Spec.of(config.spec)
        if spec.document_end is not None:
            logger.warning(
                "Trained with document masking: a prompt must not hold token %d, the end of a document, before its "
                "last token, because attention would see the documents before it.",
                spec.document_end,
            )
        self.model = Network(vllm_config=vllm_config, prefix=f"{prefix}model")
        self.lm_head = ParallelLMHead(spec.vocabulary, spec.width, prefix=f"{prefix}lm_head")
        self.logits_processor = LogitsProcessor(spec.vocabulary)
        with torch.device("meta"), set_default_torch_dtype(torch.float32):
            self.tables = Tables(config.tables, config.accesses, spec.vocabulary, config.row_format)
        self.tables.routes.to_empty(device="cpu")
        with torch.device("cpu"), set_default_torch_dtype(torch.float32):
            site = spec.method_site
            self.key_map = KeyMap(site, spec.document_end, config.keys) if config.keys and site else None
        folder = Path(vllm_config.model_config.model)
        self.mapped_rows = map_rows(folder, self.tables) if config.tables else []
        self.history = TokenHistory(spec.document_end)
        self.reader: RowReader | None = None
        self.recent: RecentVectors
        self.reach = _reach(spec)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.model.embedding(input_ids)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        return self.model(input_ids, positions, *self._retrieve(input_ids, positions))

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        return self.logits_processor(self.lm_head, hidden_states)

    def _retrieve(self, input_ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(the rows that each position reads among the vectors [T, K], the vectors, what normalises them)."""
        device = input_ids.device
        if not self.config.tables:
            none = input_ids.new_zeros(len(input_ids), 1)
            return none, torch.zeros(2, 1, device=device), torch.zeros(2, 0, device=device)
        if self.reader is None:
            self.reader = RowReader(self.tables, self.mapped_rows, CopyStream(device))
            self.recent = RecentVectors(self.reader, self.spec.vocabulary, self.spec.normalised)
        copies = self.reader.copies
        copies.follow()
        metadata, num_slots = self._cache() if self.reach else (None, 0)
        if metadata is None:
            (tokens_T,), slots = copies.read_on_host(input_ids), None
        else:
            where = (positions, metadata.query_start_loc, metadata.block_table, metadata.slot_mapping)
            tokens_T, positions_T, starts, blocks_RB, new_T = copies.read_on_host(input_ids, *where)
            block_size = self.vllm_config.cache_config.block_size
            slots = Slots.find(positions_T, starts, blocks_RB, new_T, self.reach, block_size)
        tokens_TK = self.history.extend(tokens_T.astype(np.int64), slots, self.reach, num_slots)
        if self.model.states is not None:
            inside = self.history.within_document(tokens_TK)[:, 1:] != NO_TOKEN
            self.model.states.begin(slots, inside, num_slots, device)
        if self.key_map is None:
            return self.recent.find(self.history.within_document(tokens_TK))
        read = torch.from_numpy(tokens_TK[:, : self.key_map.site.reach + 1])
        keys_U, index = self.key_map.keys(list(read.unbind(1))).flatten().unique(return_inverse=True)
        vectors_UW = torch.empty(len(keys_U), self.tables.width, dtype=torch.float32, device=device)
        self.reader.read(keys_U, vectors_UW)
        scales_UJ = torch.zeros(len(keys_U), len(self.config.tables), device=device)
        return index_to_device(index.view(len(tokens_TK), -1).numpy(), device), vectors_UW, scales_UJ

    def _cache(self) -> tuple[Any, int]:
        """How the batch lies in the key-value cache, and the number of its slots; without a cache, as in vLLM's
        profiling, None."""
        first: Any = self.model.blocks[0]
        layer = first.attention.attn
        metadata = get_forward_context().attn_metadata
        if metadata is None:
            return None, 0
        assert isinstance(metadata, dict), "micro-batches of one step share no history"
        ours, cache = metadata[layer.layer_name], layer.kv_cache
        if not hasattr(ours, "block_table"):
            raise ValueError(
                f"the attention backend of {type(ours).__name__} does not say which blocks a sequence has; choose "
                "another one: --attention-backend FLASH_ATTN or TRITON_ATTN"
            )
        return ours, cache.numel() // (2 * layer.num_kv_heads * layer.head_size)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        parameters: dict[str, Any] = dict(self.named_parameters()) | dict(self.named_buffers())
        loaded = set()
        rank = get_tensor_model_parallel_rank()
        for name, weight in weights:
            target, part = _name_here(name, parameters)
            parameter = parameters[target]
            if part is not None:
                parameter.weight_loader(parameter, weight, part)
            elif ".attention." in target and target.endswith("_norm.weight") and self.spec.qk_norm == "width":
                parameter.data.copy_(weight.chunk(get_tensor_model_parallel_world_size())[rank])
            else:
                getattr(parameter, "weight_loader", default_weight_loader)(parameter, weight)
            loaded.add(target)
        return loaded | {name for name, _ in self.tables.named_parameters(prefix="tables")}


PACKED: dict[str, tuple[str, str | int]] = {
    ".attention.query.weight": (".attention.qkv.weight", "q"),
    ".attention.key.weight": (".attention.qkv.weight", "k"),
    ".attention.value.weight": (".attention.qkv.weight", "v"),
    ".ffn.gate.weight": (".ffn.gate_up.weight", 0),
    ".ffn.up.weight": (".ffn.gate_up.weight", 1),
}
"""Matrices that are parts of one here, by the ends of their names."""
OUTER = {"decoder.embedding": "model.embedding.weight", "decoder.head.weight": "lm_head.weight"}


def _name_here(name: str, known: Container[str]) -> tuple[str, str | int | None]:
    """The parameter that an exported tensor belongs to, and which part of it that is; None: all."""
    here = OUTER.get(name, name.replace("decoder.", "model.", 1))
    for end, (packed, part) in PACKED.items():
        target = here.removesuffix(end) + packed
        if here.endswith(end) and target in known:
            return target, part
    return here, None


def _reach(spec: Spec) -> int:
    """Tokens before a position that decide what it reads."""
    reaches = [taps - 1 for injection in spec.injections for taps in injection.taps]
    if spec.method_site is not None:
        reaches += [spec.method_site.reach, spec.method_site.taps - 1]
    return max(reaches, default=0)
