"""Five training steps on the CPU and on a device of twins, side by side, on real ranks over gloo."""

import contextlib
import os
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import method_models as methods
import tiny_models as tiny
import torch
import torch.distributed as dist
import torch.nn.functional as F
from staging_run import ThreadLedger, TwinThread
from twin_device import StartedWork, TwinDevice, host_of

import xgram_dist.engine.fsdp2 as fsdp2
from xgram_dist.config import Config
from xgram_dist.engine import Chunk, build_engine
from xgram_dist.model import document_attention
from xgram_dist.model.build import build_lookup
from xgram_dist.parallel.mesh import build_mesh
from xgram_dist.parallel.process_group import ProcessGroup
from xgram_dist.tables import layout
from xgram_dist.tables.exchange import shards_of
from xgram_dist.tables.storage import staging
from xgram_dist.tables.touched_shard import TouchedShard
from xgram_dist.tables.working_set import WorkingSet
from xgram_dist.train.step import JointOptimizer, StepResult, train_step

STEPS = 5
BLOCK = 4
"""Positions of a block of flex_attention."""
State = dict[tuple[str, str], list[Chunk]]
"""Chunks of tensors by name and kind: of what a rank holds."""
CPU, DEVICE = torch.device("cpu"), torch.device("cuda", 0)


@dataclass
class Case:
    """A configuration to train twice."""

    memory: dict[str, Any] = field(default_factory=dict)
    method: str = "xgram"
    tensor: int = 1
    context: int = 1
    engine: dict[str, Any] = field(default_factory=lambda: {"engine": "replicated"})
    """Keys of `parallel`."""
    precision: str = "fp32"
    defect: str | None = None

    def reference(self) -> "Case":
        """To be trained on the CPU: the same with the simplest engine."""
        stages = {key: value for key, value in self.engine.items() if key in ("pipeline", "virtual_stages")}
        return replace(self, engine={"engine": "replicated", **stages})

    def config(self, ranks: int) -> Config:
        data = ranks // (self.tensor * self.context * self.engine.get("pipeline", 1))
        sections: dict[str, Any] = {
            "model": {"layers": 2, **({"sequence_length": 32} if self.context > 1 else {})},
            "train": {
                "micro_batch": 2,
                "global_batch": 4 * data,
                "activation_checkpointing": True,
                "precision": self.precision,
            },
            "optimizer": {"clip_norm": 0.3},
            "parallel": {**self.engine, "tensor": self.tensor, "context": self.context},
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
        axes = {axis: getattr(self.mesh, axis) for axis in ("tensor", "context", "pipeline")}
        self.model = tiny.model(self.config, **axes).to(device)
        self.engine = build_engine(self.config, self.model, self.mesh, device)
        keys = methods.grams(self.config) if case.method == "scone" else None
        routing = tiny.routing(self.config) if case.method == "xgram" else None
        self.lookup = build_lookup(self.config, routing, device, self.mesh, keys)
        self.shards = shards_of(self.lookup) or ()
        self.optimizer = JointOptimizer(self.config, self.engine, self.lookup, self.mesh)
        self.count = 0
        self.planned = self.lookup.plan(self.tokens(1))
        self.working: WorkingSet | None = None

    def tokens(self, step: int) -> torch.Tensor:
        batch, length = self.mesh.batch, self.config.model.sequence_length
        return tiny.tokens(self.config, batch.size, 2, 2, length, seed=step)[batch.rank]

    def step(self) -> StepResult:
        """As the trainer does: the next step is planned, and its vectors are fetched early."""
        self.count += 1
        windows, self.planned = self.planned.result(), self.lookup.plan(self.tokens(self.count + 1))
        upcoming = self.planned if self.lookup.overlap else None
        arguments = self.config, self.lookup, self.optimizer, self.tokens(self.count), windows, self.count
        result = train_step(*arguments, working=self.working, upcoming=upcoming)
        self.working = result.next_working
        return result

    def state(self) -> State:
        """All rows, and what this rank holds of the weights."""
        state = {}
        for number, shard in enumerate(self.shards):
            kept = shard.state_dict()
            order_S = kept.row_ids.argsort()
            if isinstance(shard, TouchedShard):  # staging also has the rows of the step that comes next
                hit_S = host_of(kept.rows[f"view-{shard.slab.view}.hit"]).cpu().bool()
                order_S = host_of(order_S).cpu()
                order_S = order_S[hit_S[order_S]]
            for name, columns in ((name, one) for name, one in kept.columns.items() if name.endswith(".rows")):
                state[name, str(number)] = [Chunk((0, 0), host_of(columns)[host_of(order_S).cpu()])]
        for shard in self.engine.parameter_shards():
            state[shard.name, shard.kind] = shard.chunks
        return {name: [Chunk(at, host_of(part).detach().cpu()) for at, part in parts] for name, parts in state.items()}

    def close(self) -> None:
        self.planned.result()
        if self.working is not None:
            self.working.wait()
        self.lookup.close()
        self.engine.close()


def train(case: Case, device: torch.device, world: ProcessGroup) -> State:
    """Losses, gradient norms and the final state of some steps."""
    run = Run(case, device, world)
    results = [run.step() for _ in range(STEPS)]
    losses = torch.stack([host_of(result.loss).cpu() for result in results])
    norms = torch.stack([host_of(result.gradient_norm).cpu() for result in results])
    state = {name: [Chunk(at, part.clone()) for at, part in parts] for name, parts in run.state().items()}
    run.close()
    return {("losses", ""): [Chunk((0,), losses)], ("norms", ""): [Chunk((0,), norms)], **state}


def run_twins(rank: int, size: int, port: int, cases: list[Case]) -> list[dict[str, Any]]:
    """For each case the largest relative difference from the CPU, and the ledger of the steps."""
    layout.MESSAGE_BYTES = 1  # a message for each layer, as in a model of full size
    ledger = ThreadLedger(phase="step")
    twin = TwinDevice(ledger)
    world = ProcessGroup()
    if size > 1:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        dist.init_process_group("gloo")
        world = ProcessGroup(rank, size, dist.group.WORLD, ProcessGroup(rank, size, dist.new_group(backend="gloo")))
    found = []
    for case in cases:
        expected = train(case.reference(), CPU, world)
        ledger.clear()
        # Operations of the thread that stages records reach the twins.
        thread = mock.patch.object(staging, "ThreadPoolExecutor", side_effect=lambda *_: TwinThread(twin))
        with DEFECTS[case.defect](), thread, _flex_attention(), twin.entered():
            values = train(case, DEVICE, world)
        found.append({"differs": largest_difference(values, expected), **ledger.of("step")})
    return found


def _flex_attention() -> Any:
    """flex_attention as its blocks and its mask say, by matrix products; small blocks, so that there are several."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, block_mask: Any, enable_gqa: bool) -> torch.Tensor:
        batch, queries, keys = len(q), q.shape[2], k.shape[2]
        arange = [torch.arange(size, device=q.device) for size in (batch, queries, keys)]
        visible = block_mask.mask_mod(arange[0][:, None, None], arange[0][0], arange[1][:, None], arange[2])
        chosen = []
        for count, index in (
            (block_mask.full_kv_num_blocks, block_mask.full_kv_indices),
            (block_mask.kv_num_blocks, block_mask.kv_indices),
        ):
            is_used = torch.arange(index.shape[-1], device=q.device) < count[..., None]
            blocks = torch.zeros(index.shape, dtype=torch.bool, device=q.device).scatter(-1, index.long(), is_used)[
                :, 0
            ]
            whole = blocks.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)
            chosen.append(whole[:, :queries, :keys])
        mask = chosen[0] | (chosen[1] & visible)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None], enable_gqa=enable_gqa)

    patched = contextlib.ExitStack()
    patched.enter_context(mock.patch.object(document_attention, "_compiled_flex_attention", return_value=attend))
    patched.enter_context(mock.patch.object(document_attention, "BLOCK", BLOCK))
    return patched


def largest_difference(values: State, expected: State) -> float:
    """Relative to the largest element of a tensor; infinite where there is a NaN. `expected` has whole tensors."""
    assert set(values) == set(expected)
    worst = 0.0
    for name, chunks in values.items():
        whole = expected[name][0].tensor.double()
        for chunk in chunks:
            gap = (chunk.tensor.double() - whole[chunk.slices]).abs().max() / whole.abs().max()
            worst = max(worst, float(gap) if bool(gap.isfinite()) else float("inf"))
    return worst


# Defects, to show that the comparison finds them


def _read_before_wait() -> Any:
    start = ProcessGroup._all_to_all_single

    def never_waited(group: ProcessGroup, *args: Any) -> Any:
        work = start(group, *args)
        return mock.Mock(wait=lambda: None) if torch.is_tensor(args[0]) and args[0].is_cuda else work

    return mock.patch.object(ProcessGroup, "_all_to_all_single", never_waited)


def _engine_reads_before_wait() -> Any:
    def wait(self: StartedWork) -> None:
        pass

    return mock.patch.object(StartedWork, "wait", wait)


def _stale_weights() -> Any:
    """AdamW updates a copy of what the engine gathers."""
    chunk_of = fsdp2._local_chunk

    def copied(*args: Any) -> Chunk:
        chunk = chunk_of(*args)
        return Chunk(chunk.offsets, chunk.tensor.clone())

    return mock.patch.object(fsdp2, "_local_chunk", copied)


DEFECTS: dict[str | None, Any] = {
    None: contextlib.nullcontext,
    "read before wait": _read_before_wait,
    "the engine reads before wait": _engine_reads_before_wait,
    "stale weights": _stale_weights,
}
