"""Sides that train the same model and take turns, step by step, in one set of processes.

A step lasts from a barrier to the end of the slowest rank; a round's ratio is of medians, and the median over rounds is
the result. `loss_difference` is the largest between the sides.

Bytes are of one step, sent by all ranks together. Collectives are counted as they are called, at what a ring sends;
what the tables exchange is known from its plan.
"""

import math
import statistics
import time
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from xgram_dist.config import Config
from xgram_dist.engine import build_engine
from xgram_dist.memory.plan import Window
from xgram_dist.memory.routing.routing import Routing
from xgram_dist.model.build import build_lookup, build_model
from xgram_dist.model.transformer import Transformer
from xgram_dist.optim.update import Optimizer
from xgram_dist.parallel.mesh import single_mesh
from xgram_dist.parallel.ranks import Ranks
from xgram_dist.train.exchange import exchange_figures
from xgram_dist.train.step import train_step

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


def shard_backbone(model: Transformer, reshard: bool = True) -> None:
    """Each block and the head; what holds them is the caller's."""
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=reshard)
    fully_shard(model.head, reshard_after_forward=False)


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
