"""A training step of a recipe at its full size, as rank 0 of many, on fake tensors."""

import contextlib
import inspect
import io
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from fake_device import FakeDevice
from simulated_ranks import EqualReplicas, ReplayedGroup, draw_tokens, routing_of, simulate_plan
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
from xgram_dist.model import gather, injection, layers
from xgram_dist.model.build import build_lookup, build_model
from xgram_dist.model.loss import EagerPasses
from xgram_dist.model.methods.base import load_recipe
from xgram_dist.parallel.device import make_deterministic
from xgram_dist.parallel.mesh import Mesh, build_mesh, new_host_group
from xgram_dist.parallel.process_group import ProcessGroup
from xgram_dist.tables.exchange import ShardedTables
from xgram_dist.tables.exchange_messages import Wire
from xgram_dist.tables.ngrams import Folding
from xgram_dist.tables.optimizers.catchup_math import fit
from xgram_dist.train.checkpointing import RunCheckpoints, TrainState
from xgram_dist.train.due_work import DueWork
from xgram_dist.train.finite import FiniteWatch
from xgram_dist.train.prefetch import StepPrefetcher
from xgram_dist.train.profiling import ProfilerTrace, Throughput, Utilization
from xgram_dist.train.signals import StopRequest
from xgram_dist.train.spikes import Spikes
from xgram_dist.train.starts import StartClock, StartRecord
from xgram_dist.train.step import JointOptimizer, StepResult
from xgram_dist.train.trainer import Trainer

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
        context = self._arguments.arguments["context"]
        context = replace(context, rank=group.rank % context.size)
        self._arguments.arguments |= {"group": group, "devices": (CPU, CPU), "replicas": None, "context": context}
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
            model = build_model(config, DEVICE, None, self.mesh)
            engine = build_engine(config, model, self.mesh, DEVICE)
            self.lookup = build_lookup(config, routing, DEVICE, self.mesh, keys)
            optimizer = JointOptimizer(config, engine, self.lookup, self.mesh)
        data, rows, sharers = self.mesh.data.size, self.mesh.rows.size, self.mesh.context.size
        tokens = [draw_tokens(config, data // sharers, rank // sharers) for rank in range(data)]
        if isinstance(self.lookup, ShardedTables):
            received = simulate_plan(planners.build, tokens[:rows]) if rows > 1 else []
            self.lookup.planner.group = ReplayedGroup(0, rows, received)
            self.lookup.planner.replicas = EqualReplicas(0, self.mesh.replicas.size)
        self.trainer = FakeTrainer(config, self.mesh, optimizer, self.lookup, SameBatch(tokens[0]))

    def _mesh(self, size: int) -> Mesh:
        host = ProcessGroup(0, size, dist.new_group(backend="gloo"))
        world = ProcessGroup(0, size, dist.group.WORLD, host)
        world.phases.device = DEVICE
        return build_mesh(self.config, world)

    def step(self, *, logged: bool = False) -> None:
        """One pass of the trainer's loop, noted in the ledger as "step", or, with a status line, as "logged"."""
        every = self.config.train.log_every
        step = self.trainer.state.step + 1
        step += (every - step) % every if logged else step % every in (0, 1)
        self.ledger.phase = "logged" if logged else "step"
        with self.device.entered(), contextlib.redirect_stdout(io.StringIO()):
            assert not self.trainer._run_step(step, StopRequest())


class SameBatch:
    """A loader whose batches are all the same."""

    def __init__(self, tokens: torch.Tensor):
        self.tokens, self.position = tokens, 0

    def __next__(self) -> "SameBatch":
        return self


class PlannedSteps(StepPrefetcher):
    """The next step is planned before this one trains, not beside it: all threads share the fake device."""

    def _request(self) -> Any:
        requested = super()._request()
        requested[1].exception()
        return requested


class FakeTrainer(Trainer):
    """The trainer's loop without what it reads and writes: data, run folder, metrics."""

    def __init__(self, config: Config, mesh: Mesh, optimizer: JointOptimizer, lookup: Any, loader: Any):
        self.config, self.mesh, self.ranks, self.device = config, mesh, mesh.world, DEVICE
        self.agreement = new_host_group(mesh.world)
        self.engine, self.lookup, self.optimizer = optimizer.engine, lookup, optimizer
        folder = Path(tempfile.mkdtemp())
        unused: Any = None
        self.checkpoints = RunCheckpoints(
            config, folder, mesh, optimizer, unused, unused, None, None, None, say=lambda _: None
        )
        self.state, self.start, self.metrics, self.resumed = TrainState(), 0, None, False
        self.due_work = DueWork([], self.agreement, self._report_callback)
        self.clock = StartClock()
        self.start_record = StartRecord(None, self.clock, ["node"], 0)
        self.throughput = Throughput(config.train.steps)
        self.utilization = Utilization(config, mesh.world.size, DEVICE)
        self.trace = ProfilerTrace(0, 0, "")
        self.next_working = None
        self.finite = FiniteWatch(self.engine.model, DEVICE) if config.train.check_finite == "layers" else None
        self.suspect, self.done_again = None, None
        self.spikes = Spikes(folder, unused, unused, self.agreement)
        self.batches = PlannedSteps(loader, lookup, steps=config.train.steps, ahead=True)


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


def run_fake(recipe: str, size: int, overrides: list[str]) -> dict[str, dict[str, Any]]:
    """What the ledger has of a step, and, of small models, of a step with a status line."""
    ledger = Ledger()
    config = load_recipe(RECIPES / recipe, ["train.compile=false", "memory.overlap=true", *overrides])
    run = FakeRun(config, size, ledger)
    run.step()
    if config.model.layers < FULL_SIZE_LAYERS:  # libraries may do more in their first step
        ledger.clear()
        run.step()
        run.step(logged=True)
    return {phase: ledger.of(phase) for phase in ("step", "logged")}


def run_traffic(recipe: str, size: int, overrides: list[str], mutated: bool = False) -> dict[str, Any]:
    """Bytes by part and file of a step, and its ledger. `mutated`: also of a step that copies something in each
    part."""
    ledger = Ledger()
    run = FakeRun(load_recipe(RECIPES / recipe, ["train.compile=false", *overrides]), size, ledger)
    traffic = run.device.traffic
    fetch = run.lookup.fetch

    def fetch_and_register(*args: Any, **kwargs: Any) -> Any:
        working = fetch(*args, **kwargs)
        traffic.working_set |= {id(leaf) for leaf in working.values.values()}
        return working

    run.lookup.fetch = fetch_and_register  # type: ignore[method-assign]
    traffic.enabled = True
    run.step()
    found = {"by_place": dict(traffic.by_place), "products": dict(traffic.products), "ledger": ledger.of("step")}
    if mutated:
        traffic.clear()
        with contextlib.ExitStack() as stack:
            for patch in one_more_copy():
                stack.enter_context(patch)
            run.step()
        found["mutated"] = dict(traffic.by_place)
    return found


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


def _read_loss_in_loop() -> Any:
    check = Trainer._check_skipped

    def reading(trainer: Trainer, step: int, position: int, result: StepResult) -> None:
        float(result.loss)
        check(trainer, step, position, result)

    return mock.patch.object(Trainer, "_check_skipped", reading)


def _agree_on_device(self: ProcessGroup, first: int, second: int) -> tuple[int, int]:
    total = torch.full((2,), first + second, device=DEVICE)
    dist.all_reduce(total)
    stop, save = total.tolist()
    return stop, save


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
    "the loop reads the loss": _read_loss_in_loop,
    "ranks agree on the device": lambda: mock.patch.object(ProcessGroup, "all_reduce_integers", _agree_on_device),
    "gaps": lambda: mock.patch.object(ProcessGroup, "all_reduce_sum", _sent_with_gaps),
}


def run_mutated(recipe: str, size: int, overrides: list[str]) -> dict[str, dict[str, Any]]:
    """The ledger of a step without a defect ("none"), and of one with each."""
    ledger = Ledger()
    run = FakeRun(load_recipe(RECIPES / recipe, ["train.compile=false", *overrides]), size, ledger)
    run.step()
    found: dict[str, dict[str, Any]] = {}
    for name, mutate in {"none": contextlib.nullcontext, **MUTATIONS}.items():
        ledger.clear()
        with mutate():
            run.step()
        found[name] = ledger.of("step")
    return found


def one_more_copy() -> list[Any]:
    """A defect in each part of a step: something is copied once more."""

    def copying(owner: Any, name: str) -> Any:
        function = getattr(owner, name)
        return mock.patch.object(owner, name, lambda *args: function(*args).clone())

    update = JointOptimizer.update_backbone

    def copying_update(self: JointOptimizer, *args: Any) -> Any:
        _ = [parameter.detach().clone() for parameter in self.engine.model.parameters()]
        return update(self, *args)

    return [
        copying(EagerPasses, "gradient"),
        copying(layers, "at_least_fp32"),
        copying(injection, "shifted"),
        copying(gather, "_segment_sum"),
        copying(Wire, "convert"),
        mock.patch.object(JointOptimizer, "update_backbone", copying_update),
    ]
