"""MoLE: routed experts that read the token's embedding alone, beside the feed-forward.

    retrieve   nothing in training: the embedding of each distinct token of the micro-batch
    extract    expert_j(RMSNorm(embedding)), a SwiGLU; a function of the token, so a table once training is over
    inject     h <- h + ffn(n) + sum over j of softmax(W n)_j * expert_j[token], n the normed state after attention

Experts are sharded over a tensor axis as the feed-forward is; the router is whole on every rank.
Shapes: B batch, T sequence, D width, U distinct tokens, E experts.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xgram_dist.config import Config
from xgram_dist.model.gather import Slots, gather_rows
from xgram_dist.model.layers import RMSNorm, SwiGLU, at_least_fp32
from xgram_dist.model.methods.base import TOKEN_EMBEDDINGS, ComputedTables, Keys, MemoryMethod, check_layers
from xgram_dist.parallel.context_parallel import ContextAxis
from xgram_dist.parallel.tensor_parallel import SINGLE_RANK, TensorAxis


class MoLE(MemoryMethod):
    name = "mole"
    reads = ("mole",)
    trains_tables = False
    reads_embeddings = True
    computed_parameters = (".sites.experts.experts.", ".sites.experts.norm.")
    reduced_settings = {"mole": {"width": None}}  # noqa: RUF012

    @property
    def layers(self) -> tuple[int, ...]:
        return self.resolve_layers(self.memory.mole.layers)

    def check(self) -> None:
        check_layers(self.config, "mole", self.memory.mole.layers)

    def table_layers(self) -> set[int]:
        return set(self.layers)

    def build_sites(self, layer: int, axis: TensorAxis, context: ContextAxis) -> dict[str, nn.Module]:
        return {"experts": MoleSite(self.config, axis)} if layer in self.layers else {}

    def retrieved_width(self) -> int:
        return len(self.layers) * self.memory.mole.experts * self.model.width

    def extra_flops_per_token(self) -> int:
        """The router; rows of all experts weighted and summed."""
        return 4 * self.retrieved_width()

    def activation_numbers(self, layer: int, tensor: int) -> float:
        """What the experts keep is of distinct tokens, and counts little."""
        return self.memory.mole.experts * self.model.width if layer in self.layers else 0

    def decoder_spec(self, warmup: float) -> dict[str, Any]:
        return {
            "method_site": {
                "method": self.name,
                "site": "experts",
                "layers": self.layers,
                "views": self.memory.mole.experts,
            }
        }

    def decoder_tables(self) -> dict[str, int]:
        experts = range(self.memory.mole.experts)
        return {f"layers.{layer}.experts.{expert}": self.model.width for layer in self.layers for expert in experts}

    def computed_tables(
        self, read: Callable[[str, Tensor], None], keys: Keys | None, device: torch.device
    ) -> ComputedTables:
        return ExpertTables(self, read, device)


class MoleSite(nn.Module):
    def __init__(self, config: Config, axis: TensorAxis = SINGLE_RANK):
        super().__init__()
        model, settings = config.model, config.memory.mole
        inner = settings.width or model.ffn_width
        self.tables = [TOKEN_EMBEDDINGS]
        self.norm = RMSNorm(model.width, model.norm_eps)
        self.experts = nn.ModuleList(SwiGLU(model.width, inner, axis) for _ in range(settings.experts))
        self.router = nn.Parameter(torch.zeros(settings.experts, model.width))

    def expert_outputs(self, embeddings_UD: Tensor) -> list[Tensor]:
        """Of each expert for each token [U, D], in at least fp32: the rows of its table."""
        normed_UD = self.norm(embeddings_UD)
        return [at_least_fp32(expert(normed_UD)) for expert in self.experts]

    def forward(self, normed_BTD: Tensor, values: list[Tensor], slots_BT: Slots) -> Tensor:
        """What is added beside the feed-forward. `values`: the embeddings of the distinct tokens [U, D]."""
        weights_BTE = torch.softmax(at_least_fp32(F.linear(normed_BTD, self.router.to(normed_BTD.dtype))), -1)
        outputs = [gather_rows(output_UD, slots_BT) for output_UD in self.expert_outputs(values[0])]
        weighted = [weights_BTE[..., j : j + 1] * output for j, output in enumerate(outputs)]
        return sum(weighted[1:], weighted[0]).to(normed_BTD.dtype)


class ExpertTables:
    """The experts' outputs for any token: a table for each layer and expert."""

    def __init__(self, method: MoLE, read: Callable[[str, Tensor], None], device: torch.device):
        model = method.model
        self._embedding = torch.empty(model.vocabulary, model.width, device=device)
        read("embedding", self._embedding)
        self._sites: dict[int, MoleSite] = {}
        for layer in method.layers:
            site = self._sites[layer] = MoleSite(method.config).to(device).requires_grad_(False)
            for name, parameter in site.named_parameters():
                read(f"blocks.{layer}.sites.experts.{name}", parameter.data)
        self.shapes = {name: (model.vocabulary, width) for name, width in method.decoder_tables().items()}

    @torch.no_grad()
    def vectors(self, keys_U: Tensor) -> dict[str, Tensor]:
        embeddings_UD = self._embedding[keys_U.to(self._embedding.device)]
        return {
            f"layers.{layer}.experts.{expert}": output_UD
            for layer, site in self._sites.items()
            for expert, output_UD in enumerate(site.expert_outputs(embeddings_UD))
        }
