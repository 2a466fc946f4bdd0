"""Sharded tables against FSDP2 around backbone and tables.

The paper's recipe (1x or 4x at 50 %) scaled down, 8 micro-batches per step. Our step (DeepSpeed stage 1, rows sharded
over ranks, one working set per step) against FSDP2 around everything with one dense AdamW, in two variants:

paper       FSDP2's default: parameters are gathered for each pass; gradients are reduced at the last micro-batch only.
paper_kept  Gathered parameters are kept for the whole step, which takes the memory that sharding saves.
"""

import statistics
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from xgram_dist.bench.engine import (
    CPU,
    ENGINES,
    WARM,
    Ours,
    RoundResults,
    Side,
    alternate_steps,
    shard_backbone,
    tiny_backbone,
)
from xgram_dist.config import Config, build_config
from xgram_dist.errors import UserError
from xgram_dist.model.build import build_model
from xgram_dist.model.methods.base import table_layout
from xgram_dist.optim.backbone_adamw import build_adamw
from xgram_dist.optim.schedule import learning_rate, warmup_factor
from xgram_dist.parallel.process_group import ProcessGroup
from xgram_dist.tables.frequencies import expected_touched_share, load_frequencies
from xgram_dist.tables.initial_rows import initial_rows
from xgram_dist.tables.layout import routing_settings
from xgram_dist.tables.optimizers.build import table_multipliers
from xgram_dist.tables.routing import Routing, View
from xgram_dist.tables.routing_build import build_routing

ACCUMULATION = 8
SITES: dict[int, dict[str, Any]] = {1: {"v": {"views": 2, "kernels": [3, 5]}}}
SITES[4] = {**SITES[1], "h": {"views": 3, "kernels": [3, 5, 7]}}
"""Sites of the paper's recipes at 1x and 4x."""


def layout_config(vocabulary: int, ranks: int, scale: int) -> Config:
    """`scale` x at 50 %: tables with half as many rows as the vocabulary. At 1x they have 1.7 times the parameters of
    the backbone; in the paper's small model 1.6 times."""
    return build_config(
        {
            "name": "bench-layout",
            "model": {**tiny_backbone(vocabulary, layers=8), "sequence_length": 128},
            "memory": {"method": "xgram", "compression": 0.5, "sites": SITES[scale]},
            "optimizer": {"learning_rate": 2e-3},
            "parallel": ENGINES["deepspeed_stage_1"],
            "train": {"global_batch": 2 * ACCUMULATION * ranks, "micro_batch": 2, "precision": "fp32"},
        }
    )


class LayerTables(nn.Module):
    """The tables of one layer as dense parameters, read by the routing's access lists."""

    def __init__(self, config: Config, layer: int):
        super().__init__()
        self.tables = [table for table in table_layout(config).tables if table.layer == layer]
        every, std, seed = torch.arange(table_layout(config).num_rows), config.model.init_std, config.train.seed
        self.rows = nn.ParameterList(initial_rows(every, t.width, std, seed, t.name) for t in self.tables)
        self.gates = nn.ParameterList(torch.full((len(every), 1), config.memory.row_gate_init) for _ in self.tables)

    def forward(self, accesses: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        """For each view, rows and coefficients [N, K] of N tokens -> one vector [N, width] a token and table."""
        vectors = {}
        for table, rows_RW, gates_R1 in zip(self.tables, self.rows, self.gates, strict=True):
            rows_NK, coefficients_NK = accesses[table.view]
            weights_NK1 = coefficients_NK[..., None] * torch.sigmoid(nn.functional.embedding(rows_NK, gates_R1))
            vectors[table.name] = (nn.functional.embedding(rows_NK, rows_RW) * weights_NK1).sum(1)
        return vectors


class PaperModel(nn.Module):
    def __init__(self, config: Config, routing: Routing):
        super().__init__()
        self.backbone = build_model(config, CPU)
        self.tables = nn.ModuleList(LayerTables(config, layer) for layer in range(config.model.layers))
        self.accesses_VK = [padded_accesses(view) for view in routing.views]

    def forward(self, tokens_BT: Tensor, warmup: Tensor) -> Tensor:
        flat_N = tokens_BT.flatten()
        accesses = [(rows_VK[flat_N], coefficients_VK[flat_N]) for rows_VK, coefficients_VK in self.accesses_VK]
        values: dict[str, Tensor] = {}
        for tables in self.tables:
            values |= tables(accesses)
        slots_BT = torch.arange(len(flat_N)).view_as(tokens_BT)
        loss, _ = self.backbone(tokens_BT, slots_BT, values, warmup, with_loss=True)
        return loss


def padded_accesses(view: View) -> tuple[Tensor, Tensor]:
    """Rows and coefficients [V, K] of every token; shorter lists are padded with row 0 and coefficient 0."""
    counts = np.diff(view.offsets)
    tokens, columns = view.tokens(), np.arange(len(view.rows)) - np.repeat(view.offsets[:-1], counts)
    rows = np.zeros((view.vocabulary, counts.max()), dtype=np.int64)
    coefficients = np.zeros(rows.shape, dtype=np.float32)
    rows[tokens, columns], coefficients[tokens, columns] = view.rows, view.coefficients
    return torch.from_numpy(rows), torch.from_numpy(coefficients)


class PaperLayout:
    """FSDP2 around backbone and tables: each block, the tables of each layer, the head, and the rest are units."""

    def __init__(self, config: Config, routing: Routing, *, keep: bool):
        """`keep`: gathered parameters are not resharded until the last backward pass of a step."""
        self.config, self.keep = config, keep
        self.model = PaperModel(config, routing)
        for tables in self.model.tables:
            fully_shard(tables, reshard_after_forward=not keep)
        shard_backbone(self.model.backbone, reshard=not keep)
        fully_shard(self.model, reshard_after_forward=False)
        of_tables = {"rows": list[Tensor](), "gates": list[Tensor]()}
        for tables in self.model.tables:
            assert isinstance(tables, LayerTables)
            of_tables["rows"] += tables.rows
            of_tables["gates"] += tables.gates
        self.table_bytes = 4 * sum(p.numel() for held in of_tables.values() for p in held)
        self.adamw = build_adamw(config, self.model.backbone.named_parameters())
        self.adamw.add_param_group({"params": of_tables["rows"], "weight_decay": config.optimizer.weight_decay})
        self.adamw.add_param_group({"params": of_tables["gates"], "weight_decay": 0.0})
        self.multiplier = table_multipliers(config, table_layout(config).num_rows)[1]

    def step(self, number: int, tokens_ABT: Tensor, next_ABT: Tensor) -> Tensor:
        warm, rate = warmup_factor(self.config, number), learning_rate(self.config, number)
        for group, factor in zip(self.adamw.param_groups, (1.0, 1.0, self.multiplier * warm, 1.0), strict=True):
            group["lr"] = rate * factor
        root, total = self.model, torch.zeros(())
        assert isinstance(root, FSDPModule)
        for count, tokens_BT in enumerate(tokens_ABT, 1):
            last = count == len(tokens_ABT)
            root.set_requires_gradient_sync(last)
            root.set_is_last_backward(last)
            if self.keep:
                root.set_reshard_after_backward(last)
            loss = self.model(tokens_BT, torch.tensor(warm, dtype=torch.float64)) / len(tokens_ABT)
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optimizer.clip_norm)
        self.adamw.step()
        self.adamw.zero_grad()
        return total

    def close(self) -> None:
        return


def layout_round(ranks: ProcessGroup, frequencies: list[float], scale: int, steps: int) -> dict[str, Any]:
    probabilities = np.asarray(frequencies)
    config = layout_config(len(probabilities), ranks.size, scale)
    routing = build_routing(probabilities, routing_settings(config), table_layout(config).num_views)
    step_tokens = config.train.global_batch * config.model.sequence_length
    share = expected_touched_share(probabilities, routing, table_layout(config).num_rows, step_tokens)
    shape = (WARM + steps, ACCUMULATION, config.train.micro_batch, config.model.sequence_length)
    tokens = np.random.default_rng(ranks.rank).choice(len(probabilities), size=shape, p=probabilities)
    ours = Ours(config, ranks, routing, share)
    paper = PaperLayout(config, routing, keep=False)
    sides: dict[str, Side] = {"ours": ours, "paper": paper, "paper_kept": PaperLayout(config, routing, keep=True)}
    results = alternate_steps(ranks, sides, torch.from_numpy(tokens))
    chosen = ours.optimizer.shards
    return results | {
        "exchanged": ours.exchanged(),
        "distinct": sum(window.num_distinct for window in ours.windows),
        "table_bytes": paper.table_bytes,
        "touched_share": share,
        "optimizer": None if chosen is None else chosen.settings.kind,
    }


def layout_frequencies(path: Path | None, vocabulary: int) -> NDArray[np.float64]:
    """Frequencies of the most frequent tokens of a file, in the order of their ids; Zipf without a file."""
    if path is None:
        probabilities = 1.0 / np.arange(1, vocabulary + 1)
    else:
        probabilities = np.asarray(load_frequencies(path), dtype=np.float64)
        if len(probabilities) < vocabulary:
            raise UserError(
                f"{path} holds {len(probabilities):,} tokens, but --vocabulary is {vocabulary:,}; lower --vocabulary"
            )
        probabilities = probabilities[np.sort(np.argsort(-probabilities, kind="stable")[:vocabulary])]
    return probabilities / probabilities.sum()


def layout_figures(results: RoundResults, size: int) -> dict[str, Any]:
    """Ratios are the paper's layout over ours. The bytes of the tables alone are computed: FSDP2 gathers them for both
    passes of each micro-batch (once if they are kept), and reduces their gradients once."""
    figures: dict[str, Any] = {"ours_ms": results.ms("ours"), "ours_bytes": results.sent["ours"]}
    for side, prefix in (("paper", ""), ("paper_kept", "kept_")):
        ratios = results.ratios(side, "ours")
        figures |= {
            f"{side}_ms": results.ms(side),
            f"{prefix}time_ratio": round(statistics.median(ratios), 2),
            f"{prefix}time_ratio_range": [round(min(ratios), 2), round(max(ratios), 2)],
            f"{prefix}time_ratio_of_fastest": round(results.fastest[side] / results.fastest["ours"], 2),
            f"{side}_bytes": results.sent[side],
            f"{prefix}bytes_ratio": round(results.sent[side] / results.sent["ours"], 2),
        }
    last, once = results.last, results.last["table_bytes"] * (size - 1)
    return figures | {
        "ours_tables_bytes": results.exchanged,
        "paper_tables_bytes": once * (2 * ACCUMULATION + 1),
        "paper_kept_tables_bytes": once * 2,
        "table_bytes": last["table_bytes"],
        "touched_share": round(last["touched_share"], 4),
        "optimizer": last["optimizer"],
        "loss_difference": results.loss_difference,
    }
