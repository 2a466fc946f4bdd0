"""What the engines cost, and what tables of their own gain over FSDP around everything.

overhead      the tiny vanilla model, random tokens: our training step against a bare loop around the same model with
              the same library and settings, for DeepSpeed's ZeRO stage 1 and for FSDP2
paper_layout  the paper's recipe (1x or 4x at 50 %) scaled down, 8 micro-batches a step: our step (DeepSpeed stage 1,
              rows spread over ranks, one working set a step) against FSDP2 around backbone and tables with one dense
              AdamW. Two ways of the latter: as FSDP2 comes (parameters gathered for each pass; gradients reduced at the
              last micro-batch alone, as a careful user sets it), and with parameters kept whole for the step, which
              takes the memory that sharding would save

A round is a set of fresh processes in which the sides take turns, step by step, from the same weights on the same
tokens. A step lasts from a barrier to the end of the slowest rank; a round's ratio is of medians, and the median over
rounds is the result. `loss_difference` is the largest between the sides: they train the same model.

Bytes are of one step, sent by all ranks together. Collectives are counted as they are called, at what a ring sends;
what the tables exchange is known from its plan.
"""

import math
import statistics
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from xgram_dist.bench.ranks import run_on_ranks
from xgram_dist.config import Config, build_config
from xgram_dist.engine import build_engine
from xgram_dist.engine.adamw import build_adamw
from xgram_dist.engine.deepspeed import import_deepspeed
from xgram_dist.engine.deepspeed_config import deepspeed_config
from xgram_dist.errors import UserError
from xgram_dist.memory.initial import initial_rows
from xgram_dist.memory.layout import num_rows, num_views, plan_tables, routing_settings
from xgram_dist.memory.plan import Window
from xgram_dist.memory.routing.build import build_routing
from xgram_dist.memory.routing.frequencies import load_frequencies
from xgram_dist.memory.routing.routing import Routing
from xgram_dist.memory.routing.views import View
from xgram_dist.memory.touched import expected_touched_share
from xgram_dist.model.transformer import Transformer
from xgram_dist.optim.schedule import learning_rate, table_multipliers, warmup_factor
from xgram_dist.optim.update import Optimizer
from xgram_dist.parallel.mesh import single_mesh
from xgram_dist.parallel.ranks import Ranks
from xgram_dist.progress import Progress
from xgram_dist.train.build import build_lookup, build_model
from xgram_dist.train.exchange import exchange_figures
from xgram_dist.train.step import train_step

WARM = 3
CPU = torch.device("cpu")
ACCUMULATION = 8
ENGINES: dict[str, dict[str, Any]] = {
    "deepspeed_stage_1": {"engine": "deepspeed", "zero_stage": 1},
    "hsdp": {"engine": "hsdp"},
}
SITES: dict[int, dict[str, Any]] = {1: {"v": {"views": 2, "kernels": [3, 5]}}}
SITES[4] = {**SITES[1], "h": {"views": 3, "kernels": [3, 5, 7]}}
"""Of the paper's recipes at 1x and 4x."""


def vanilla_config(parallel: dict[str, Any], ranks: int) -> Config:
    """The tiny recipe's; its global batch of 16 is that of two ranks."""
    return build_config(
        {
            "name": "bench-engine",
            "model": {**_backbone(4096), "sequence_length": 256},
            "memory": {"method": "vanilla"},
            "optimizer": {"learning_rate": 2e-3},
            "parallel": parallel,
            "train": {"global_batch": 8 * ranks, "micro_batch": 8, "precision": "fp32"},
        }
    )


def layout_config(vocabulary: int, ranks: int, scale: int) -> Config:
    """`scale` x at 50 %: tables of half the vocabulary."""
    return build_config(
        {
            "name": "bench-layout",
            "model": {**_backbone(vocabulary), "sequence_length": 128},
            "memory": {"method": "xgram", "compression": 0.5, "sites": SITES[scale]},
            "optimizer": {"learning_rate": 2e-3},
            "parallel": ENGINES["deepspeed_stage_1"],
            "train": {"global_batch": 2 * ACCUMULATION * ranks, "micro_batch": 2, "precision": "fp32"},
        }
    )


def _backbone(vocabulary: int) -> dict[str, int]:
    return {"vocabulary": vocabulary, "layers": 4, "width": 128, "ffn_width": 352, "heads": 4, "kv_heads": 2}


class Side(Protocol):
    def step(self, number: int, tokens_ABT: Tensor, next_ABT: Tensor) -> Tensor:
        """One optimizer step; `number` counts from 1. The loss of this rank, or the mean over all."""
        ...

    def close(self) -> None: ...


class Ours:
    def __init__(self, config: Config, ranks: Ranks, routing: Routing | None = None, share: float | None = None):
        mesh = single_mesh(ranks)
        self.config, self.rank = config, ranks.rank
        self.engine = build_engine(config, build_model(config, CPU), mesh, CPU)
        self.lookup = build_lookup(config, routing, CPU, mesh)
        self.optimizer = Optimizer(config, self.engine, self.lookup, mesh, share)
        self.ahead: Future[list[Window]] | None = None
        self.windows: list[Window] = []

    def step(self, number: int, tokens_ABT: Tensor, next_ABT: Tensor) -> Tensor:
        self.windows = (self.ahead or self.lookup.plan(tokens_ABT)).result()
        self.ahead = self.lookup.plan(next_ABT)
        loss = train_step(self.config, self.lookup, self.optimizer, tokens_ABT, self.windows, number).loss
        self.ahead.result()  # none of our work is left for the other side's turn
        return loss

    def exchanged(self) -> int:
        """Bytes this rank sent for the tables in the last step."""
        return int(exchange_figures(self.config, self.windows, self.rank).get("bytes_sent", 0))

    def close(self) -> None:
        self.lookup.close()
        self.engine.close()


class BareDeepSpeed:
    """DeepSpeed as its documentation has it, with our settings but for clipping and averaging, which are its own."""

    def __init__(self, config: Config, ranks: Ranks):
        settings = deepspeed_config(config, ranks.size)
        settings |= {"gradient_clipping": config.optimizer.clip_norm, "gradient_allreduce_op": "mean"}
        model = build_model(config, CPU)
        self.config, self.arguments = config, _no_tables(config)
        self.adamw = build_adamw(config, model.parameters())
        self.engine, *_ = import_deepspeed(CPU).initialize(
            model=model, optimizer=self.adamw, config=settings, dist_init_required=False
        )

    def step(self, number: int, tokens_ABT: Tensor, next_ABT: Tensor) -> Tensor:
        for group in self.adamw.param_groups:
            group["lr"] = learning_rate(self.config, number)
        for tokens_BT in tokens_ABT:
            loss, _ = self.engine(tokens_BT, *self.arguments, with_loss=True)
            self.engine.backward(loss)
            self.engine.step()
        return loss.detach()

    def close(self) -> None:
        self.engine.destroy()


class BareFsdp:
    """FSDP2 as its documentation has it: units like ours, one AdamW."""

    def __init__(self, config: Config, ranks: Ranks):
        self.config, self.arguments = config, _no_tables(config)
        self.model = build_model(config, CPU)
        shard_backbone(self.model)
        fully_shard(self.model, reshard_after_forward=False)
        self.adamw = build_adamw(config, self.model.parameters())

    def step(self, number: int, tokens_ABT: Tensor, next_ABT: Tensor) -> Tensor:
        for group in self.adamw.param_groups:
            group["lr"] = learning_rate(self.config, number)
        for tokens_BT in tokens_ABT:  # one, so that gradients are always those of the step
            loss, _ = self.model(tokens_BT, *self.arguments, with_loss=True)
            (loss / len(tokens_ABT)).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optimizer.clip_norm)
        self.adamw.step()
        self.adamw.zero_grad()
        return loss.detach()

    def close(self) -> None:
        return


BARE: dict[str, Callable[[Config, Ranks], Side]] = {"deepspeed_stage_1": BareDeepSpeed, "hsdp": BareFsdp}


def _no_tables(config: Config) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """What the model wants beside tokens: slots, values, warm-up."""
    slots = torch.zeros(config.train.micro_batch, config.model.sequence_length, dtype=torch.int64)
    return slots, {}, torch.ones((), dtype=torch.float64)


def shard_backbone(model: Transformer, reshard: bool = True) -> None:
    """Each block and the head; what holds them is the caller's."""
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=reshard)
    fully_shard(model.head, reshard_after_forward=False)


class LayerTables(nn.Module):
    """The tables of one layer as dense parameters, read by the routing's access lists."""

    def __init__(self, config: Config, layer: int):
        super().__init__()
        self.tables = [table for table in plan_tables(config) if table.layer == layer]
        every, std, seed = torch.arange(num_rows(config)), config.model.init_std, config.train.seed
        self.rows = nn.ParameterList(initial_rows(every, t.width, std, seed, t.name) for t in self.tables)
        self.gates = nn.ParameterList(torch.full((len(every), 1), config.memory.row_gate_init) for _ in self.tables)

    def forward(self, accesses: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        """For each view, rows and coefficients [N, K] of N tokens -> one vector [N, width] a token and table."""
        found = {}
        for table, rows_RW, gates_R1 in zip(self.tables, self.rows, self.gates, strict=True):
            rows_NK, coefficients_NK = accesses[table.view]
            weights_NK1 = coefficients_NK[..., None] * torch.sigmoid(nn.functional.embedding(rows_NK, gates_R1))
            found[table.name] = (nn.functional.embedding(rows_NK, rows_RW) * weights_NK1).sum(1)
        return found


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
    """Rows and coefficients [V, K] of every token; shorter lists end in row 0 with coefficient 0."""
    counts = np.diff(view.offsets)
    tokens, places = view.tokens(), np.arange(len(view.rows)) - np.repeat(view.offsets[:-1], counts)
    rows = np.zeros((view.vocabulary, counts.max()), dtype=np.int64)
    coefficients = np.zeros(rows.shape, dtype=np.float32)
    rows[tokens, places], coefficients[tokens, places] = view.rows, view.coefficients
    return torch.from_numpy(rows), torch.from_numpy(coefficients)


class PaperLayout:
    """FSDP2 around backbone and tables: each block, the tables of each layer, the head, and the rest are units."""

    def __init__(self, config: Config, routing: Routing, *, keep: bool):
        """`keep`: gathered parameters stay until the last backward pass of a step."""
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
        self.adamw = build_adamw(config, self.model.backbone.parameters())
        self.adamw.add_param_group({"params": of_tables["rows"], "weight_decay": config.optimizer.weight_decay})
        self.adamw.add_param_group({"params": of_tables["gates"], "weight_decay": 0.0})
        self.multiplier = table_multipliers(config, num_rows(config))[1]

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


class SentBytes(TorchDispatchMode):
    """What this rank sends in the collectives of this thread, as rings: all-to-alls, which have plans, excepted."""

    def __init__(self, size: int):
        super().__init__()
        self.total = 0.0
        ring = (size - 1) / size
        # Operation -> the argument that counts, and how many times its bytes are sent.
        self.rules: dict[str, tuple[int, float]] = {
            "_allgather_base_": (1, size - 1),
            "allgather_": (1, size - 1),
            "allgather_into_tensor_coalesced_": (1, size - 1),
            "_reduce_scatter_base_": (0, size - 1),
            "reduce_scatter_tensor_coalesced_": (0, size - 1),
            "allreduce_": (0, 2 * ring),
            "allreduce_coalesced_": (0, 2 * ring),
            "broadcast_": (0, ring),
            "reduce_": (0, ring),
            "all_reduce": (0, 2 * ring),
            "all_reduce_": (0, 2 * ring),
            "all_gather_into_tensor": (0, size - 1),
            "alltoall_base_": (0, 0.0),
            "barrier": (0, 0.0),
            "wait_tensor": (0, 0.0),
            "_wrap_tensor_autograd": (0, 0.0),
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # comes again, as operations on what this rank holds
        if func.namespace in ("c10d", "_c10d_functional"):
            place, times = self.rules[func._schema.name.partition("::")[2]]
            tensors = [leaf for leaf in tree_leaves(args[place]) if isinstance(leaf, Tensor)]
            self.total += times * sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return func(*args, **(kwargs or {}))


def take_turns(ranks: Ranks, sides: dict[str, Side], tokens_SABT: Tensor) -> dict[str, Any]:
    """Milliseconds of each side's steps on this rank, its losses, and the bytes it sent in one step."""
    names = list(sides)
    milliseconds: dict[str, list[float]] = {name: [] for name in names}
    losses: dict[str, list[float]] = {name: [] for name in names}
    sent: dict[str, float] = {}
    for number, tokens_ABT in enumerate(tokens_SABT):
        following = tokens_SABT[(number + 1) % len(tokens_SABT)]
        for name in names if number % 2 else reversed(names):
            side = sides[name]
            dist.barrier()
            start = time.perf_counter()
            if number == WARM - 1:
                with SentBytes(ranks.size) as counted:
                    loss = side.step(number + 1, tokens_ABT, following)
                sent[name] = counted.total + (side.exchanged() if isinstance(side, Ours) else 0)
            else:
                loss = side.step(number + 1, tokens_ABT, following)
            milliseconds[name].append(1000 * (time.perf_counter() - start))
            mean = loss.clone()
            ranks.all_reduce_mean([mean])
            losses[name].append(float(mean))
    dist.barrier()
    for side in sides.values():
        side.close()
    return {"ms": {name: found[WARM:] for name, found in milliseconds.items()}, "losses": losses, "sent": sent}


def overhead_round(ranks: Ranks, engine: str, steps: int) -> dict[str, Any]:
    config = vanilla_config(ENGINES[engine], ranks.size)
    random = torch.Generator().manual_seed(ranks.rank)
    shape = (WARM + steps, 1, config.train.micro_batch, config.model.sequence_length)
    tokens = torch.randint(config.model.vocabulary, shape, generator=random)
    return take_turns(ranks, {"ours": Ours(config, ranks), "bare": BARE[engine](config, ranks)}, tokens)


def layout_round(ranks: Ranks, frequencies: list[float], scale: int, steps: int) -> dict[str, Any]:
    chances = np.asarray(frequencies)
    config = layout_config(len(chances), ranks.size, scale)
    routing = build_routing(chances, routing_settings(config), num_views(config))
    step_tokens = config.train.global_batch * config.model.sequence_length
    share = expected_touched_share(chances, routing, num_rows(config), step_tokens)
    shape = (WARM + steps, ACCUMULATION, config.train.micro_batch, config.model.sequence_length)
    tokens = np.random.default_rng(ranks.rank).choice(len(chances), size=shape, p=chances)
    ours = Ours(config, ranks, routing, share)
    paper = PaperLayout(config, routing, keep=False)
    sides: dict[str, Side] = {"ours": ours, "paper": paper, "paper_kept": PaperLayout(config, routing, keep=True)}
    found = take_turns(ranks, sides, torch.from_numpy(tokens))
    chosen = ours.optimizer.table_optimizer
    return found | {
        "exchanged": ours.exchanged(),
        "distinct": sum(window.distinct for window in ours.windows),
        "table_bytes": paper.table_bytes,
        "touched_share": share,
        "optimizer": None if chosen is None else chosen.kind,
    }


def layout_frequencies(path: Path | None, vocabulary: int) -> NDArray[np.float64]:
    """Of the most frequent tokens, in the order of their ids; Zipf without a file."""
    if path is None:
        chances = 1.0 / np.arange(1, vocabulary + 1)
    else:
        chances = np.asarray(load_frequencies(path), dtype=np.float64)
        if len(chances) < vocabulary:
            raise UserError(
                f"{path} holds {len(chances):,} tokens, but --vocabulary is {vocabulary:,}; lower --vocabulary"
            )
        chances = chances[np.sort(np.argsort(-chances, kind="stable")[:vocabulary])]
    return chances / chances.sum()


class Measured:
    """Rounds of sides that took turns."""

    def __init__(self) -> None:
        self.medians: dict[str, list[float]] = {}
        self.fastest: dict[str, float] = {}
        self.sent: dict[str, int] = {}
        self.loss_difference = 0.0
        self.exchanged = 0
        self.last: dict[str, Any] = {}

    def add(self, results: list[dict[str, Any]]) -> None:
        """What each rank found in a round."""
        self.last = results[0]
        for name in self.last["ms"]:
            slowest = [max(step) for step in zip(*(result["ms"][name] for result in results), strict=True)]
            self.medians.setdefault(name, []).append(statistics.median(slowest))
            self.fastest[name] = min(*slowest, self.fastest.get(name, math.inf))
            self.sent[name] = round(sum(result["sent"][name] for result in results))
        self.exchanged = sum(result.get("exchanged", 0) for result in results)
        losses = np.array(list(self.last["losses"].values()))
        self.loss_difference = max(self.loss_difference, float(np.ptp(losses, axis=0).max()))

    def ms(self, name: str) -> float:
        return round(statistics.median(self.medians[name]), 1)

    def ratios(self, above: str, below: str) -> list[float]:
        return [a / b for a, b in zip(self.medians[above], self.medians[below], strict=True)]


def run_engine_benchmark(
    size: int, rounds: int, steps: int, vocabulary: int, scale: int, frequencies: Path | None
) -> dict[str, Any]:
    chances = layout_frequencies(frequencies, vocabulary).tolist()
    measured = {name: Measured() for name in (*ENGINES, "layout")}
    with Progress(rounds * len(measured), "rounds", "sides in turn") as progress:
        for _ in range(rounds):
            for name in ENGINES:
                measured[name].add(run_on_ranks(overhead_round, size, name, steps))
                progress.update()
            measured["layout"].add(run_on_ranks(layout_round, size, chances, scale, steps))
            progress.update()
    return {
        "ranks": size,
        "rounds": rounds,
        "steps": steps,
        "overhead": {name: _overhead(measured[name]) for name in ENGINES},
        "paper_layout": {
            "vocabulary": vocabulary,
            "scale": scale,
            "frequencies": "Zipf" if frequencies is None else frequencies.name,
            **_layout(measured["layout"], size),
        },
    }


def _overhead(found: Measured) -> dict[str, Any]:
    ratios = found.ratios("ours", "bare")
    return {
        "ours_ms": found.ms("ours"),
        "bare_ms": found.ms("bare"),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_range": [round(min(ratios), 3), round(max(ratios), 3)],
        "ratio_of_fastest": round(found.fastest["ours"] / found.fastest["bare"], 3),
        "loss_difference": found.loss_difference,
    }


def _layout(found: Measured, size: int) -> dict[str, Any]:
    """Ratios say how many times more the paper's layout takes than ours. Bytes of the tables alone are computed: FSDP2
    gathers them for both passes of each micro-batch (kept whole: once), and reduces their gradients once."""
    figures: dict[str, Any] = {"ours_ms": found.ms("ours"), "ours_bytes": found.sent["ours"]}
    for side, prefix in (("paper", ""), ("paper_kept", "kept_")):
        ratios = found.ratios(side, "ours")
        figures |= {
            f"{side}_ms": found.ms(side),
            f"{prefix}time_ratio": round(statistics.median(ratios), 2),
            f"{prefix}time_ratio_range": [round(min(ratios), 2), round(max(ratios), 2)],
            f"{prefix}time_ratio_of_fastest": round(found.fastest[side] / found.fastest["ours"], 2),
            f"{side}_bytes": found.sent[side],
            f"{prefix}bytes_ratio": round(found.sent[side] / found.sent["ours"], 2),
        }
    last, once = found.last, found.last["table_bytes"] * (size - 1)
    return figures | {
        "ours_tables_bytes": found.exchanged,
        "paper_tables_bytes": once * (2 * ACCUMULATION + 1),
        "paper_kept_tables_bytes": once * 2,
        "table_bytes": last["table_bytes"],
        "touched_share": round(last["touched_share"], 4),
        "optimizer": last["optimizer"],
        "loss_difference": found.loss_difference,
    }
