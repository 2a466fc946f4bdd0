"""Backbone engines against bare loops, and sharded tables against FSDP around everything (`paper_layout`).

A round is a set of fresh processes. The sides start from the same weights, see the same tokens and alternate steps.

overhead      Our training step against a bare loop around the same tiny vanilla model with the same library, for
              DeepSpeed ZeRO stage 1 and for FSDP2, on random tokens.
paper_layout  Our sharded tables against the tables as dense FSDP2 parameters.

A step lasts from a barrier to the end of the slowest rank. The ratio of a round is a ratio of medians over its steps;
the result is the median over rounds. `loss_difference` is the largest difference between the sides' losses.

Bytes are sent in one step by all ranks together. Collectives are counted when they are called, at the bytes of a ring
algorithm; the bytes of the table exchange are known from its exchange plan.
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
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from xgram_dist.bench.common import run_on_ranks
from xgram_dist.config import Config, build_config
from xgram_dist.console import Progress
from xgram_dist.engine import build_engine
from xgram_dist.engine.deepspeed import deepspeed_config
from xgram_dist.engine.deepspeed_internals import import_deepspeed
from xgram_dist.model.build import build_lookup, build_model
from xgram_dist.model.transformer import Transformer
from xgram_dist.optim.backbone_adamw import build_adamw
from xgram_dist.optim.schedule import learning_rate
from xgram_dist.parallel.mesh import single_mesh
from xgram_dist.parallel.process_group import ProcessGroup
from xgram_dist.tables.exchange_plan import Window
from xgram_dist.tables.optimizers.build import choose_optimizer
from xgram_dist.tables.routing import Routing
from xgram_dist.train.profiling import exchange_figures
from xgram_dist.train.step import JointOptimizer, train_step

WARM = 3
CPU = torch.device("cpu")
ENGINES: dict[str, dict[str, Any]] = {
    "deepspeed_stage_1": {"engine": "deepspeed", "zero_stage": 1},
    "hsdp": {"engine": "hsdp"},
}


def tiny_backbone(vocabulary: int, layers: int = 4) -> dict[str, int]:
    return {"vocabulary": vocabulary, "layers": layers, "width": 128, "ffn_width": 352, "heads": 4, "kv_heads": 2}


class Side(Protocol):
    def step(self, number: int, tokens_ABT: Tensor, next_ABT: Tensor) -> Tensor:
        """One optimizer step; `number` counts from 1. Returns the loss of this rank, or the mean over all ranks."""
        ...

    def close(self) -> None: ...


class Ours:
    def __init__(self, config: Config, ranks: ProcessGroup, routing: Routing | None = None, share: float | None = None):
        mesh = single_mesh(ranks)
        self.config, self.rank = config, ranks.rank
        self.engine = build_engine(config, build_model(config, CPU), mesh, CPU)
        self.lookup = build_lookup(config, routing, CPU, mesh, optimizer=choose_optimizer(config, share))
        self.optimizer = JointOptimizer(config, self.engine, self.lookup, mesh)
        self.ahead: Future[list[Window]] | None = None
        self.windows: list[Window] = []

    def step(self, number: int, tokens_ABT: Tensor, next_ABT: Tensor) -> Tensor:
        self.windows = (self.ahead or self.lookup.plan(tokens_ABT)).result()
        self.ahead = self.lookup.plan(next_ABT)
        loss = train_step(self.config, self.lookup, self.optimizer, tokens_ABT, self.windows, number).loss
        self.ahead.result()  # nothing of ours runs during the other side's step
        return loss

    def exchanged(self) -> int:
        """Bytes this rank sent for the tables in the last step."""
        return int(exchange_figures(self.config, self.windows, self.rank).get("bytes_sent", 0))

    def close(self) -> None:
        self.lookup.close()
        self.engine.close()


def shard_backbone(model: Transformer, reshard: bool = True) -> None:
    """Shard each block and the head; the caller shards the module around them."""
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=reshard)
    assert model.head is not None
    fully_shard(model.head, reshard_after_forward=False)


class SentBytes(TorchDispatchMode):
    """Counts the bytes this rank sends in the collectives of this thread, as rings. All-to-alls are not counted: their
    bytes are known from the exchange plan."""

    def __init__(self, size: int):
        super().__init__()
        self.total = 0.0
        ring = (size - 1) / size
        # Operation -> index of the argument that is sent, and how many times its bytes are sent.
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
            return NotImplemented  # dispatched again as operations on the local shards
        if func.namespace in ("c10d", "_c10d_functional"):
            index, times = self.rules[func._schema.name.partition("::")[2]]
            tensors = [leaf for leaf in tree_leaves(args[index]) if isinstance(leaf, Tensor)]
            self.total += times * sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return func(*args, **(kwargs or {}))


def alternate_steps(ranks: ProcessGroup, sides: dict[str, Side], tokens_SABT: Tensor) -> dict[str, Any]:
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
                with SentBytes(ranks.size) as sent_bytes:
                    loss = side.step(number + 1, tokens_ABT, following)
                sent[name] = sent_bytes.total + (side.exchanged() if isinstance(side, Ours) else 0)
            else:
                loss = side.step(number + 1, tokens_ABT, following)
            milliseconds[name].append(1000 * (time.perf_counter() - start))
            mean = loss.clone()
            ranks.all_reduce_mean([mean])
            losses[name].append(float(mean))
    dist.barrier()
    for side in sides.values():
        side.close()
    return {"ms": {name: times[WARM:] for name, times in milliseconds.items()}, "losses": losses, "sent": sent}


class RoundResults:
    """Results of the sides over the rounds so far."""

    def __init__(self) -> None:
        self.medians: dict[str, list[float]] = {}
        self.fastest: dict[str, float] = {}
        self.sent: dict[str, int] = {}
        self.loss_difference = 0.0
        self.exchanged = 0
        self.last: dict[str, Any] = {}

    def add(self, results: list[dict[str, Any]]) -> None:
        """Add a round: the results of each rank."""
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


def vanilla_config(parallel: dict[str, Any], ranks: int) -> Config:
    """The tiny recipe's model; on two ranks its global batch of 16."""
    return build_config(
        {
            "name": "bench-engine",
            "model": {**tiny_backbone(4096), "sequence_length": 256},
            "memory": {"method": "vanilla"},
            "optimizer": {"learning_rate": 2e-3},
            "parallel": parallel,
            "train": {"global_batch": 8 * ranks, "micro_batch": 8, "precision": "fp32"},
        }
    )


class BareDeepSpeed:
    """DeepSpeed as in its documentation, with our settings, but its own clipping and averaging."""

    def __init__(self, config: Config, ranks: ProcessGroup):
        settings = deepspeed_config(config, ranks.size)
        settings |= {"gradient_clipping": config.optimizer.clip_norm, "gradient_allreduce_op": "mean"}
        model = build_model(config, CPU)
        self.config, self.arguments = config, _no_tables(config)
        self.adamw = build_adamw(config, model.named_parameters())
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
    """FSDP2 as in its documentation: the same units as ours, one AdamW."""

    def __init__(self, config: Config, ranks: ProcessGroup):
        self.config, self.arguments = config, _no_tables(config)
        self.model = build_model(config, CPU)
        shard_backbone(self.model)
        fully_shard(self.model, reshard_after_forward=False)
        self.adamw = build_adamw(config, self.model.named_parameters())

    def step(self, number: int, tokens_ABT: Tensor, next_ABT: Tensor) -> Tensor:
        for group in self.adamw.param_groups:
            group["lr"] = learning_rate(self.config, number)
        for tokens_BT in tokens_ABT:  # a single micro-batch, so that no gradients accumulate
            loss, _ = self.model(tokens_BT, *self.arguments, with_loss=True)
            (loss / len(tokens_ABT)).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optimizer.clip_norm)
        self.adamw.step()
        self.adamw.zero_grad()
        return loss.detach()

    def close(self) -> None:
        return


BARE: dict[str, Callable[[Config, ProcessGroup], Side]] = {"deepspeed_stage_1": BareDeepSpeed, "hsdp": BareFsdp}


def _no_tables(config: Config) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Arguments of a model without tables, beside tokens: slots, values, warm-up."""
    slots = torch.zeros(config.train.micro_batch, config.model.sequence_length, dtype=torch.int64)
    return slots, {}, torch.ones((), dtype=torch.float64)


def overhead_round(ranks: ProcessGroup, engine: str, steps: int) -> dict[str, Any]:
    config = vanilla_config(ENGINES[engine], ranks.size)
    random = torch.Generator().manual_seed(ranks.rank)
    shape = (WARM + steps, 1, config.train.micro_batch, config.model.sequence_length)
    tokens = torch.randint(config.model.vocabulary, shape, generator=random)
    return alternate_steps(ranks, {"ours": Ours(config, ranks), "bare": BARE[engine](config, ranks)}, tokens)


def overhead_figures(results: RoundResults) -> dict[str, Any]:
    ratios = results.ratios("ours", "bare")
    return {
        "ours_ms": results.ms("ours"),
        "bare_ms": results.ms("bare"),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_range": [round(min(ratios), 3), round(max(ratios), 3)],
        "ratio_of_fastest": round(results.fastest["ours"] / results.fastest["bare"], 3),
        "loss_difference": results.loss_difference,
    }


def run_engine_benchmark(
    size: int, rounds: int, steps: int, vocabulary: int, scale: int, frequencies: Path | None
) -> dict[str, Any]:
    from xgram_dist.bench.paper_layout import layout_figures, layout_frequencies, layout_round

    probabilities = layout_frequencies(frequencies, vocabulary).tolist()
    measured = {name: RoundResults() for name in (*ENGINES, "layout")}
    with Progress(rounds * len(measured), "rounds", "bench engine") as progress:
        for _ in range(rounds):
            for name in ENGINES:
                measured[name].add(run_on_ranks(overhead_round, size, name, steps))
                progress.update()
            measured["layout"].add(run_on_ranks(layout_round, size, probabilities, scale, steps))
            progress.update()
    return {
        "ranks": size,
        "rounds": rounds,
        "steps": steps,
        "overhead": {name: overhead_figures(measured[name]) for name in ENGINES},
        "paper_layout": {
            "vocabulary": vocabulary,
            "scale": scale,
            "frequencies": "Zipf" if frequencies is None else frequencies.name,
            **layout_figures(measured["layout"], size),
        },
    }
