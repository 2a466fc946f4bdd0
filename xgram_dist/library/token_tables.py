"""`TokenTables`: tables whose rows are sharded over the ranks of a process group, around any training loop.

In: names and widths of tables, the number of keys (tokens, or hashed n-grams), a process group. Every rank calls the
same methods in the same order; each has its own tokens.

Collectives: `plan` two small all-to-alls over gloo, in a thread; `fetch` and `give_back` one all-to-all each; `clip`
one scalar all-reduce. None runs inside the caller's forward or backward pass.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.tensor import DTensor

from xgram_dist.config import Config, build_config
from xgram_dist.engine.deepspeed_internals import PARTITIONS, Partitions, find_partitions
from xgram_dist.errors import UserError
from xgram_dist.library.saved_state import StateDict, checked_row_ids, row_ids_name
from xgram_dist.parallel.device import to_device
from xgram_dist.parallel.mesh import single_mesh, wrap_group
from xgram_dist.parallel.watchdog import Phases
from xgram_dist.tables import routing as _routing
from xgram_dist.tables.exchange import ShardedTables
from xgram_dist.tables.exchange_plan import Window
from xgram_dist.tables.frequencies import check_frequencies
from xgram_dist.tables.layout import Table, TableLayout
from xgram_dist.tables.optimizers.build import TableRates
from xgram_dist.tables.routing import RoutingSettings
from xgram_dist.tables.routing_build import build_routing
from xgram_dist.tables.routing_io import load_routing, save_routing
from xgram_dist.tables.shard import Shard
from xgram_dist.tables.touched_shard import TouchedShard
from xgram_dist.tables.working_set import WorkingSet


@dataclass(frozen=True)
class Routing:
    """Which rows a token reads: X-gram's frequency-aware routing. Tables without one have a row for every key."""

    routing: _routing.Routing

    @staticmethod
    def from_frequencies(
        frequencies: Any,
        compression: float = 0.5,
        *,
        views: int = 1,
        vip: int = 200,
        buckets: int = 32,
        paths: int = 2,
        copies: int = 3,
    ) -> "Routing":
        """`frequencies`: a count or probability for each token. `compression`: rows divided by tokens. `views`: maps
        that collide differently, one for each group of tables."""
        settings = RoutingSettings(vip=vip, buckets=buckets, compression=compression, paths=paths, copies=copies)
        return Routing(build_routing(check_frequencies(np.asarray(frequencies), "frequencies"), settings, views))

    @staticmethod
    def load(path: str) -> "Routing":
        """A file of `xgram-dist route`, or of `save`."""
        return Routing(load_routing(path))

    def save(self, path: str) -> None:
        save_routing(self.routing, path)


class TokenTables:
    """Row-sharded tables and their optimizer: exact AdamW on sparse rows, or row-wise Adagrad."""

    def __init__(
        self,
        widths: Mapping[str, int],
        num_keys: int,
        *,
        routing: Routing | None = None,
        views: Mapping[str, int] | None = None,
        group: Any = None,
        device: torch.device | str | None = None,
        optimizer: Literal["catch_up", "dense", "lazy", "adagrad"] = "catch_up",
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        init_std: float = 0.02,
        seed: int = 0,
        placement: Literal["device", "host", "disk"] = "device",
        folder: str | None = None,
        wire: Literal["fp32", "bf16"] = "fp32",
        compile: bool = False,
    ):
        """`widths`: columns of each table, by name. `num_keys`: keys are 0 .. num_keys - 1. `views`: with a routing,
        which of its maps a table uses (default 0). `group`: torch's process group; by default the world or one process.
        `optimizer`: catch_up and dense are AdamW as torch's on whole tables; catch_up updates hit rows and applies the
        steps that a row missed. `placement`: memory of the rows; disk needs a scratch `folder`. Initial rows are a
        function of seed, name and row, whatever the number of ranks."""
        if not 0 < num_keys < 1 << 62:
            raise UserError(f"num_keys = {num_keys} is not from 1 to 2^62 - 1")
        if not widths:
            raise UserError("widths is empty; name at least one table")
        views = views or {}
        unknown = [name for name in views if name not in widths]
        if unknown:
            raise UserError(f"views names '{unknown[0]}', which is not a table; tables are {', '.join(widths)}")
        if routing is None and any(views.values()):
            raise UserError("views of tables need a routing; without one every key has a row of its own")
        routes = None if routing is None else routing.routing
        if routes is not None and routes.vocabulary != num_keys:
            raise UserError(f"num_keys = {num_keys}, but the routing has {routes.vocabulary} tokens")
        if routes is not None and max(views.values(), default=0) >= routes.num_views:
            raise UserError(f"views has {max(views.values())}, but the routing has {routes.num_views} maps, from 0")
        tables = tuple(
            Table(number, "h", views.get(name, 0), width, label=name)
            for number, (name, width) in enumerate(widths.items())
        )
        config = _config(
            num_keys,
            {"betas": list(betas), "eps": eps, "weight_decay": weight_decay},
            {"placement": placement, "folder": folder, "wire": wire, "optimizer": optimizer},
            compression=1.0 if routes is None else routes.settings.compression,
            init_std=init_std,
            seed=seed,
            compile=compile,
        )
        self._ranks = wrap_group(group)
        self._ranks.phases = _Untimed(self._ranks.rank, torch.device("cpu"))
        self._device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        layout = TableLayout(tables, num_keys if routes is None else routes.num_rows, hashed=routes is not None)
        self._tables = ShardedTables(
            config, layout, routes, self._device, single_mesh(self._ranks), optimizer=optimizer
        )
        self._factor: float | None = 1.0
        self._partitions: Partitions | None = None
        """Of the DeepSpeed engine that `clip_deepspeed` was given."""
        self._fetched = False
        """Whether rows were fetched for training since the last step."""

    # A step

    def plan(self, *micro_batches: Tensor) -> "Future[list[Window]]":
        """What a step's keys need, computed in a thread. Each micro-batch: keys in host memory, all of one shape. All
        ranks plan the same steps in the same order; a plan may be made while the step before computes."""
        for number, keys in enumerate(micro_batches):
            if keys.is_floating_point() or keys.device.type != "cpu":
                raise UserError(
                    f"micro-batch {number} is {keys.dtype} on {keys.device}; plan takes integer keys in host memory"
                )
        return self._tables.plan(torch.stack([keys.to(torch.int64) for keys in micro_batches]))

    def fetch(self, plan: "Future[list[Window]]", *, training: bool = True) -> WorkingSet:
        """`.values`: by table, the vectors of the step's distinct keys, leaves of the autograd graph. `.slots[i]`: for
        each key of micro-batch i, its vector. For training, once before each `step`."""
        if training:
            if self._fetched:
                raise UserError(
                    "rows were fetched for training already, and a step has one working set; give all its "
                    "micro-batches to one plan, and call step() before the next fetch"
                )
            self._fetched = True
        (window,) = plan.result()
        return self._tables.fetch(window, training=training)

    def give_back(self, rows: WorkingSet) -> None:
        """After the last backward pass of the step: gradients to the owners of the rows. As DDP does, the mean over
        ranks is taken."""
        self._tables.give_back(rows)

    @torch.no_grad()
    def clip(self, parameters: Iterable[Tensor], max_norm: float) -> Tensor:
        """Clips the caller's gradients, complete on this rank or sharded as DTensors, and the tables' by their joint
        norm, and returns it."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients) if gradients else torch.zeros((), device=self._device)
        joint = self.joint_norm(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        self.set_clip(joint, max_norm)
        if self._factor is not None and self._factor < 1:
            torch._foreach_mul_(gradients, self._factor)
        return joint

    @torch.no_grad()
    def clip_deepspeed(self, engine: Any, max_norm: float) -> Tensor:
        """As `clip`, for an engine of `deepspeed.initialize` with ZeRO 1, 2 or 3: after its last `backward` of a step
        and before its `step`, which skips a step that is not finite, as `step` of the tables does. Its configuration
        has `gradient_clipping: 0`."""
        if self._partitions is None or self._partitions.optimizer is not engine.optimizer:
            kind = type(engine.optimizer).__name__
            if kind not in PARTITIONS:
                raise UserError(f"DeepSpeed's {kind} keeps no partitions; set zero_optimization.stage to 1, 2 or 3")
            self._partitions = find_partitions(
                engine.optimizer, {id(p): n for n, p in engine.module.named_parameters()}
            )
        gradients = [gradient for _, gradient in self._partitions.gradients()]
        squares = torch.zeros((), dtype=torch.float64, device=self._device)
        if gradients:
            squares += torch.stack(torch._foreach_norm(gradients)).double().square().sum().to(self._device)
        joint = self.joint_norm(torch.sqrt(self._ranks.all_reduce_sum(squares)))
        factor = self.set_clip(joint, max_norm)
        if factor < 1 and gradients:
            torch._foreach_mul_(gradients, factor)
        # What DeepSpeed takes for its norm: it skips a step in which that is not finite.
        self._partitions.norm = torch.tensor(0.0 if self._factor is not None else math.inf)
        return joint

    @torch.no_grad()
    def joint_norm(self, norm: Tensor) -> Tensor:
        """Of the caller's gradients, whose norm is `norm`, and of the tables'. For engines that clip by themselves."""
        squares = to_device(self._tables.shards.gradient_square_sum(), self._device)
        squares = self._ranks.all_reduce_sum(squares)
        return torch.sqrt(norm.to(self._device, torch.float64).square() + squares)

    def set_clip(self, joint: Tensor, max_norm: float) -> float:
        """The factor by which the next `step` multiplies the gradient of the tables, and the caller should its own."""
        value = float(joint)
        self._factor = min(1.0, max_norm / (value + 1e-6)) if math.isfinite(value) else None
        return 1.0 if self._factor is None else self._factor

    @torch.no_grad()
    def step(self, learning_rate: float, gate_learning_rate: float | None = None) -> bool:
        """Updates the rows that this rank owns. False: the joint norm was not finite and nothing was updated; the
        caller should skip its own update, too. `gate_learning_rate`: of the row gates that a routing brings."""
        factor, self._factor, self._fetched = self._factor, 1.0, False
        if factor is None:
            self._tables.shards.abandon()
            return False
        gates = learning_rate if gate_learning_rate is None else gate_learning_rate
        self._tables.shards.apply(TableRates(learning_rate, learning_rate, gates), factor)
        return True

    # State

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's rows and optimizer state: live tensors, with the ids of their rows. Save one on every rank."""
        found: dict[str, Tensor] = {}
        for shard in self._tables.shards:
            state = shard.state_dict()
            found |= {row_ids_name(shard): state.row_ids}
            found |= state.columns | state.tables | state.rows | state.replicated
        return found

    @torch.no_grad()
    def load_state_dict(self, states: StateDict | Sequence[StateDict]) -> None:
        """The state dicts of all ranks that saved, in any order; of the same ranks, one's own is enough. Map them from
        files (`torch.load(..., mmap=True, weights_only=True)`): only the rows that this rank owns are read."""
        saved = [states] if isinstance(states, Mapping) else list(states)
        checked = [checked_row_ids(saved, shard) for shard in self._tables.shards]
        for shard, ids in zip(self._tables.shards, checked, strict=True):
            local = self._adopt(shard, np.concatenate(ids))
            start = 0
            with shard.writing(None):
                current = shard.state_dict()
                is_saved = np.zeros(len(shard.row_ids), dtype=bool)
                for state, state_ids in zip(saved, ids, strict=True):
                    local_R = local[start : start + len(state_ids)]
                    start += len(state_ids)
                    owned_R = np.flatnonzero(local_R >= 0)
                    is_saved[local_R[owned_R]] = True
                    for name, tensor in (current.columns | current.tables | current.rows).items():
                        values = state[name][torch.from_numpy(owned_R)].to(tensor.device, tensor.dtype)
                        tensor[torch.from_numpy(local_R[owned_R]).to(tensor.device)] = values
                shard.load_replicated({name: saved[0][name] for name in current.replicated})
                shard.restart_rows(torch.from_numpy(np.flatnonzero(~is_saved)).to(shard.rows.device))

    def _adopt(self, shard: Shard, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """The local row of each id; -1: another rank owns it."""
        owned = self._tables.shards.sharding.owners_of(ids) == self._ranks.rank
        local = np.full(len(ids), -1, dtype=np.int64)
        if isinstance(shard, TouchedShard):
            local[owned] = shard.adopt(ids[owned])
        else:
            local[owned] = np.searchsorted(shard.row_ids.cpu().numpy(), ids[owned])
        return local

    def close(self) -> None:
        """Stops threads and removes scratch files."""
        self._tables.close()

    def __enter__(self) -> "TokenTables":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Untimed(Phases):
    """The library times nothing."""

    def __call__(self, name: str) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()


def _config(
    num_keys: int,
    optimizer: dict[str, Any],
    memory: dict[str, Any],
    *,
    compression: float,
    init_std: float,
    seed: int,
    compile: bool,
) -> Config:
    """The keys of a recipe that tables read; the backbone's are not used."""
    backbone = {"layers": 1, "width": 2, "ffn_width": 1, "heads": 1, "kv_heads": 1, "sequence_length": 2}
    config = build_config(
        {
            "name": "tables",
            "model": {"vocabulary": 2, "init_std": init_std, **backbone},
            "optimizer": {**optimizer, "decay_vectors": True},
            "memory": {"method": "xgram", "compression": compression, "learning_rate": {"multiplier": 1.0}, **memory},
            "parallel": {"engine": "replicated"},
            "train": {"steps": 1, "global_batch": 1, "micro_batch": 1, "seed": seed, "compile": compile},
        }
    )
    # Keys may be more than a recipe's tokens.
    return config.model_copy(update={"model": config.model.model_copy(update={"vocabulary": num_keys})})
