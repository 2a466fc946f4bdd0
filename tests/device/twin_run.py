"""Five training steps on the CPU and on a device of twins, side by side, on real ranks over gloo."""

import contextlib
import os
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import method_models as methods
import tiny_models as tiny
import torch
import torch.distributed as dist
from stub_cuda import Ledger
from torch import Tensor
from twin_device import TwinDevice, host_of

from xgram_dist.config import Config
from xgram_dist.engine import build_engine
from xgram_dist.model.build import build_lookup
from xgram_dist.parallel.mesh import build_mesh
from xgram_dist.parallel.process_group import ProcessGroup
from xgram_dist.tables import layout
from xgram_dist.tables.exchange import shards_of
from xgram_dist.tables.working_set import WorkingSet
from xgram_dist.train.step import JointOptimizer, StepResult, train_step

STEPS = 5
CPU, DEVICE = torch.device("cpu"), torch.device("cuda", 0)


@dataclass
class Case:
    """A configuration to train twice."""

    memory: dict[str, Any] = field(default_factory=dict)
    method: str = "xgram"
    tensor: int = 1
    defect: str | None = None

    def config(self, ranks: int) -> Config:
        data = ranks // self.tensor
        sections: dict[str, Any] = {
            "model": {"layers": 2},
            "train": {"micro_batch": 2, "global_batch": 4 * data, "activation_checkpointing": True},
            "optimizer": {"clip_norm": 0.3},
            "parallel": {"engine": "replicated", "tensor": self.tensor},
        }
        memory = {"overlap": True, **self.memory}
        if self.method == "xgram":
            return tiny.config(memory=memory, **sections)
        return methods.config(self.method, memory=memory, **sections)


class Run:
    """One rank of a small training run."""

    def __init__(self, case: Case, device: torch.device, world: ProcessGroup):
        self.config = case.config(world.size)
        self.mesh = build_mesh(self.config, world)
        self.model = tiny.model(self.config, tensor=self.mesh.tensor).to(device)
        self.engine = build_engine(self.config, self.model, self.mesh, device)
        keys = methods.grams(self.config) if case.method == "scone" else None
        routing = tiny.routing(self.config) if case.method == "xgram" else None
        self.lookup = build_lookup(self.config, routing, device, self.mesh, keys)
        self.optimizer = JointOptimizer(self.config, self.engine, self.lookup, self.mesh)
        self.count = 0
        self.planned = self.lookup.plan(self.tokens(1))
        self.working: WorkingSet | None = None

    def tokens(self, step: int) -> Tensor:
        data, length = self.mesh.data, self.config.model.sequence_length
        return tiny.tokens(self.config, data.size, 2, 2, length, seed=step)[data.rank]

    def step(self) -> StepResult:
        """As the trainer does: the next step is planned, and its vectors are fetched early."""
        self.count += 1
        windows, self.planned = self.planned.result(), self.lookup.plan(self.tokens(self.count + 1))
        upcoming = self.planned if self.lookup.overlap else None
        arguments = self.config, self.lookup, self.optimizer, self.tokens(self.count), windows, self.count
        result = train_step(*arguments, working=self.working, upcoming=upcoming)
        self.working = result.next_working
        return result

    def state(self) -> Tensor:
        """All rows and weights."""
        rows = [shard.rows for shard in shards_of(self.lookup) or ()]
        weights = [parameter.detach() for parameter in self.model.parameters()]
        return torch.cat([host_of(tensor).flatten().cpu() for tensor in (*rows, *weights)])

    def close(self) -> None:
        self.planned.result()
        if self.working is not None:
            self.working.wait()
        self.lookup.close()
        self.engine.close()


def train(case: Case, device: torch.device, world: ProcessGroup) -> dict[str, Tensor]:
    """Losses, gradient norms and the final state of some steps."""
    run = Run(case, device, world)
    results = [run.step() for _ in range(STEPS)]
    losses = torch.stack([host_of(result.loss).cpu() for result in results])
    norms = torch.stack([host_of(result.gradient_norm).cpu() for result in results])
    state = run.state()
    run.close()
    return {"losses": losses, "norms": norms, "state": state}


def run_twins(rank: int, size: int, port: int, cases: list[Case]) -> list[dict[str, Any]]:
    """For each case the largest relative difference from the CPU, and the ledger of the steps."""
    layout.MESSAGE_BYTES = 1  # a message for each layer, as in a model of full size
    ledger = Ledger(phase="step")
    twin = TwinDevice(ledger)
    world = ProcessGroup()
    if size > 1:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        dist.init_process_group("gloo")
        world = ProcessGroup(rank, size, dist.group.WORLD, ProcessGroup(rank, size, dist.new_group(backend="gloo")))
    found = []
    for case in cases:
        expected = train(case, CPU, world)
        ledger.clear()
        with DEFECTS[case.defect](), twin.entered():
            values = train(case, DEVICE, world)
        found.append({"differs": largest_difference(values, expected), **ledger.of("step")})
    return found


def largest_difference(values: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Relative to the largest element; infinite where there is a NaN."""
    worst = 0.0
    for name, tensor in expected.items():
        gap = (values[name].double() - tensor.double()).abs().max() / tensor.double().abs().max()
        worst = max(worst, float(gap) if bool(gap.isfinite()) else float("inf"))
    return worst


# Defects, to show that the comparison finds them


def _read_before_wait() -> Any:
    start = ProcessGroup._all_to_all_single

    def never_waited(group: ProcessGroup, *args: Any) -> Any:
        work = start(group, *args)
        return mock.Mock(wait=lambda: None) if torch.is_tensor(args[0]) and args[0].is_cuda else work

    return mock.patch.object(ProcessGroup, "_all_to_all_single", never_waited)


DEFECTS: dict[str | None, Any] = {None: contextlib.nullcontext, "read before wait": _read_before_wait}
