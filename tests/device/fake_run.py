"""A training step of a recipe at its full size, as rank 0 of many, on fake tensors."""

import contextlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from fake_device import FakeDevice
from simulated_ranks import ReplayedGroup, draw_tokens, routing_of, simulate_plan
from stub_cuda import Ledger, stub_torch_cuda
from torch.utils._python_dispatch import _disable_current_modes

import xgram_dist.engine.fsdp2 as fsdp2
import xgram_dist.parallel.device as device_module
import xgram_dist.tables.exchange as exchange
import xgram_dist.train.step as step_module
from xgram_dist.config import Config
from xgram_dist.engine import build_engine
from xgram_dist.engine.deepspeed_internals import import_deepspeed
from xgram_dist.engine.replicated import ReplicatedEngine
from xgram_dist.model.build import build_lookup, build_model
from xgram_dist.model.methods.base import load_recipe
from xgram_dist.parallel.device import make_deterministic
from xgram_dist.parallel.mesh import Mesh, build_mesh
from xgram_dist.parallel.process_group import ProcessGroup
from xgram_dist.tables.exchange import ShardedTables
from xgram_dist.tables.ngrams import Folding
from xgram_dist.tables.optimizers.catchup_math import fit
from xgram_dist.tables.working_set import WorkingSet
from xgram_dist.train.step import JointOptimizer, train_step

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
FULL_SIZE_LAYERS = 10
DEVICE, CPU = torch.device("cuda", 0), torch.device("cpu")


class PlannerArguments:
    """Stands for `ExchangePlanner` while tables are built: the same planner, and later those of other ranks."""

    def __init__(self) -> None:
        self._planner = exchange.ExchangePlanner
        self._arguments: inspect.BoundArguments | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._arguments = inspect.signature(self._planner).bind(*args, **kwargs)
        return self._planner(*args, **kwargs)

    def build(self, group: ProcessGroup) -> Any:
        assert self._arguments is not None
        self._arguments.arguments |= {"group": group, "devices": (CPU, CPU)}
        return self._planner(*self._arguments.args, **self._arguments.kwargs)


class FakeRun:
    """Rank 0 of `size` ranks. `step()` runs one optimizer step."""

    def __init__(self, config: Config, size: int, ledger: Ledger):
        self.config, self.ledger = config, ledger
        stub_torch_cuda(ledger)
        self.device = FakeDevice(ledger, size)
        if config.memory.optimizer in ("catch_up", "auto"):
            fit(config.optimizer.betas, torch.float32)  # computed from values, and kept
        make_deterministic(config.train.deterministic)
        _patch_engines(config)
        self.mesh = self._mesh(size)
        routing = routing_of(config)
        planners = PlannerArguments()
        exchange.ExchangePlanner = planners  # type: ignore[misc,assignment]
        keys = Folding.identity(config.model.vocabulary) if config.memory.method == "engram" else None
        with self.device.entered():
            model = build_model(config, DEVICE, None, self.mesh.tensor)
            engine = build_engine(config, model, self.mesh, DEVICE)
            self.lookup = build_lookup(config, routing, DEVICE, self.mesh, keys)
            self.optimizer = JointOptimizer(config, engine, self.lookup, self.mesh)
        data = self.mesh.data.size
        tokens = [draw_tokens(config, data, rank) for rank in range(data)]
        self.tokens = tokens[0]
        if isinstance(self.lookup, ShardedTables):
            received = simulate_plan(planners.build, tokens) if data > 1 else []
            self.lookup.planner.group = ReplayedGroup(0, data, received)
        self._step = 0
        self._working: WorkingSet | None = None

    def _mesh(self, size: int) -> Mesh:
        host = ProcessGroup(0, size, dist.new_group(backend="gloo"))
        world = ProcessGroup(0, size, dist.group.WORLD, host)
        world.phases.device = DEVICE
        return build_mesh(self.config, world)

    def step(self) -> None:
        self._step += 1
        self.ledger.phase = "plan"
        windows, upcoming = (self.lookup.plan(self.tokens) for _ in range(2))
        windows.exception(), upcoming.exception()
        self.ledger.phase = "step"
        with self.device.entered():
            tokens = self.device.host_tensor(self.tokens)
            arguments = self.config, self.lookup, self.optimizer, tokens, windows.result(), self._step
            ahead = upcoming if self.lookup.overlap else None
            self._working = train_step(*arguments, working=self._working, upcoming=ahead).next_working


def _patch_engines(config: Config) -> None:
    """What engines compute from values when they are built, or compare between ranks."""
    if config.parallel.engine == "hsdp":
        build_device_mesh = fsdp2.build_device_mesh

        def build_real_mesh(*args: Any) -> Any:
            with _disable_current_modes():
                return build_device_mesh(*args)

        fsdp2.build_device_mesh = build_real_mesh
    elif config.parallel.engine == "deepspeed":
        import_deepspeed(DEVICE)
        from deepspeed.runtime.zero import partitioned_param_coordinator as stage3

        stage3.assert_ints_same_as_other_ranks = lambda ints: None


def run_fake(recipe: str, size: int, overrides: list[str]) -> dict[str, Any]:
    """What the ledger has of a step."""
    ledger = Ledger()
    config = load_recipe(RECIPES / recipe, ["train.compile=false", "memory.overlap=true", *overrides])
    run = FakeRun(config, size, ledger)
    run.step()
    if config.model.layers < FULL_SIZE_LAYERS:  # libraries may do more in their first step
        ledger.clear()
        run.step()
    return ledger.of("step")


# Defects, to show that the checks find them


def _read_loss() -> Any:
    loss = ReplicatedEngine.loss

    def reading(engine: ReplicatedEngine, *args: Any) -> Any:
        found = loss(engine, *args)
        if not hasattr(engine, "was_read"):
            engine.was_read = float(found[0])  # type: ignore[attr-defined]
        return found

    reading.__code__ = reading.__code__.replace(co_filename=inspect.getfile(ReplicatedEngine), co_name="loss")
    return mock.patch.object(ReplicatedEngine, "loss", reading)


def _number_on_device(*_: Any) -> float:
    return float(torch.tensor([0.5], device=DEVICE).shape[0])


def _sent_with_gaps(self: ProcessGroup, tensor: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(tensor.new_zeros(4, 2)[:, 0], group=self.group)
    return tensor


MUTATIONS: dict[str, Callable[[], Any]] = {
    "the host reads a loss": _read_loss,
    "torch.tensor on the device": lambda: mock.patch.object(step_module, "warmup_factor", _number_on_device),
    "pageable copy": lambda: mock.patch.object(device_module, "pin_for", lambda device, tensor: tensor),
    "blocking copy": lambda: mock.patch.object(
        step_module, "to_device", lambda tensor, device: device_module.pin_for(device, tensor).to(device)
    ),
    "host tensor to NCCL": lambda: mock.patch.object(
        ProcessGroup, "all_reduce_sum", lambda self, tensor: dist.all_reduce(tensor, group=dist.group.WORLD) or tensor
    ),
    "gaps": lambda: mock.patch.object(ProcessGroup, "all_reduce_sum", _sent_with_gaps),
}


def run_mutated(recipe: str, size: int, overrides: list[str]) -> dict[str, dict[str, Any]]:
    """The ledger of a step without a defect ("none"), and of one with each."""
    ledger = Ledger()
    run = FakeRun(load_recipe(RECIPES / recipe, ["train.compile=false", *overrides]), size, ledger)
    run.step()
    found = {}
    for name, mutate in {"none": contextlib.nullcontext, **MUTATIONS}.items():
        ledger.clear()
        with mutate():
            run.step()
        found[name] = ledger.of("step")
    return found
