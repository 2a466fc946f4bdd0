"""Engines on real ranks beside a plain loop in one process: training, skipped steps, saving and restoring.

Starting processes costs more than training these models, so each test runs many engines in one set of processes.
"""

import gc
import math

import tiny_models as tiny
import torch
from torch.distributed.tensor import DTensor

from xgram_dist.engine import Chunk, build_engine
from xgram_dist.model.build import build_lookup
from xgram_dist.parallel.device import DTYPES
from xgram_dist.parallel.mesh import build_mesh
from xgram_dist.parallel.tensor_parallel import tensor_slice
from xgram_dist.tables.exchange import ShardedTables
from xgram_dist.tables.working_set import NoTables

MICRO_BATCHES, STEPS, RATE = 2, 5, 1e-2
WARMUP = torch.tensor(0.7, dtype=torch.float64)
STAGES = [{"engine": "deepspeed", "zero_stage": stage} for stage in (1, 2, 3)]
ENGINES = [{"engine": "replicated"}, {"engine": "hsdp"}, *STAGES]
CUT_ALL = {"zero_optimization": {"reduce_bucket_size": 3000, "stage3_param_persistence_threshold": 0}}
"""Small enough that a step takes several messages, and that stage 3 cuts vectors too."""


def settings(data, parallel, *, method="xgram", precision="fp32", checkpointing=False):
    """`data`: ranks of the data axis."""
    if parallel["engine"] == "deepspeed":
        parallel = {"deepspeed": CUT_ALL, **parallel}
    return tiny.config(
        model={"layers": 2},
        memory={"method": method},
        # Clipping is at work; a larger eps keeps AdamW from blowing up rounding where a gradient is all but zero.
        optimizer={"clip_norm": 0.3, "eps": 1e-4},
        train={
            "precision": precision,
            "micro_batch": 2,
            "global_batch": 2 * MICRO_BATCHES * data,
            "activation_checkpointing": checkpointing,
        },
        parallel=parallel,
    )


def tokens_of(config, data, step):
    """[ranks, micro-batches, sequences, tokens] of a step."""
    return tiny.tokens(config, data, MICRO_BATCHES, 2, config.model.sequence_length, seed=step)


def lookup_of(config, mesh=None):
    if config.memory.method == "vanilla":
        return NoTables(tiny.CPU)
    return build_lookup(config, tiny.routing(config), tiny.CPU, mesh)


def take_square_sum(lookup):
    if not isinstance(lookup, ShardedTables):
        return torch.zeros(())
    total = lookup.shards.gradient_square_sum()
    tiny.drop_gradients(lookup.shards)
    return total


@torch.no_grad()
def full_parameters(engine):
    """Every parameter by name in fp32, gathered over the data axis; shards of tensor parallelism stay shards."""
    whole = {}
    for shard in engine.parameter_shards():
        if shard.kind == "weight":
            value = torch.zeros(shard.shape, dtype=torch.float32, device=engine.device)
            for chunk in shard.chunks:
                value[chunk.slices].copy_(chunk.tensor)
            whole[shard.name] = engine.shard.all_reduce_sum(value)  # every element is on one rank: a gather
    return whole


class Run:
    """An engine on these ranks, its tables, and its position in the data."""

    def __init__(self, config, world):
        self.config, self.world, self.position = config, world, 0
        self.mesh = build_mesh(config, world)
        model = tiny.model(config, tensor=self.mesh.tensor)
        model.compute_dtype = DTYPES[config.train.precision]
        self.engine = build_engine(config, model, self.mesh, tiny.CPU)
        self.lookup = lookup_of(config, self.mesh)

    def step(self, spoil=None):
        """(loss, joint norm, square sum of the tables, factor, applied) of the next step; `spoil`: what becomes NaN."""
        self.position += 1
        data = self.mesh.data
        tokens = tokens_of(self.config, data.size, self.position)[data.rank]
        losses = []
        for window in self.lookup.plan(tokens).result():
            working = self.lookup.fetch(window)
            for number, slots in zip(range(len(tokens))[window.micro_batches], working.slots, strict=True):
                loss, _ = self.engine.loss(tokens[number], slots, working.values, WARMUP)
                losses.append(loss.detach())
                factor = math.nan if spoil == "gradient" and data.first else 1.0
                self.engine.backward(loss * factor / len(tokens), last=number == len(tokens) - 1)
            assert all(leaf.grad.dtype == torch.float32 for leaf in working.values.values())
            self.lookup.give_back(working)
        mean = torch.stack(losses).mean()
        data.all_reduce_mean([mean])
        squares = self.world.all_reduce_sum(take_square_sum(self.lookup))
        outcome = self.engine.clip(mean * math.nan if spoil == "loss" else mean, squares)
        self.engine.update(RATE, outcome)
        return float(mean), float(outcome.norm), float(squares), outcome.factor, outcome.applied

    @torch.no_grad()
    def evaluate(self):
        tokens = tokens_of(self.config, 1, 99)[0]
        working = self.lookup.fetch(self.lookup.plan(tokens, whole=True).result()[0], training=False)
        return float(self.engine.loss(tokens[0], working.slots[0], working.values, WARMUP)[0])

    def weights(self):
        return full_parameters(self.engine)

    def close(self):
        self.lookup.close()
        self.engine.close()


class Plain:
    """The same steps as one process makes them, with the batches of `data` ranks."""

    def __init__(self, config, data, state=None):
        self.config, self.data = config, data
        self.model = tiny.model(config)
        self.named = dict(self.model.named_parameters())
        decay = config.optimizer.weight_decay
        groups = [
            {"params": [p for p in self.named.values() if p.dim() >= 2], "weight_decay": decay},
            {"params": [p for p in self.named.values() if p.dim() < 2], "weight_decay": 0.0},
        ]
        self.adamw = torch.optim.AdamW(groups, lr=RATE, betas=config.optimizer.betas, eps=config.optimizer.eps)
        self.lookup = lookup_of(config)
        if state is not None:
            with torch.no_grad():
                for name, parameter in self.named.items():
                    parameter.copy_(torch.from_numpy(state[name, "weight"]))
                    self.adamw.state[parameter] = {
                        "step": torch.tensor(float(state["step"])),
                        "exp_avg": torch.from_numpy(state[name, "first_moment"].copy()),
                        "exp_avg_sq": torch.from_numpy(state[name, "second_moment"].copy()),
                    }

    def step(self, number):
        tokens = tokens_of(self.config, self.data, number).flatten(0, 1)
        working = self.lookup.fetch(self.lookup.plan(tokens, whole=True).result()[0])
        mean = torch.zeros(())
        for one, slots in zip(tokens, working.slots, strict=True):
            loss, _ = self.model.loss(one, slots, working.values, WARMUP)
            (loss / len(tokens)).backward()
            mean += loss.detach() / len(tokens)
        self.lookup.give_back(working)
        squares = take_square_sum(self.lookup)
        norm = torch.sqrt(sum(p.grad.square().sum() for p in self.named.values()) + squares)
        factor = min(1.0, self.config.optimizer.clip_norm / (float(norm) + 1e-6))
        for parameter in self.named.values():
            parameter.grad *= factor
        self.adamw.step()
        self.adamw.zero_grad()
        return float(mean), float(norm), float(squares), factor, True

    def weights(self):
        return {name: parameter.detach() for name, parameter in self.named.items()}


def assert_close(found, expected, where):
    """Steps of an engine and of the plain loop."""
    assert all(step[-1] for step in found), where
    assert all(step[3] < 0.9 for step in found), f"{where}: clipping is not at work"
    for column, tolerance in ((0, 1e-5), (1, 1e-5), (2, 1e-4), (3, 1e-5)):
        a, b = torch.tensor([s[column] for s in found]), torch.tensor([s[column] for s in expected])
        torch.testing.assert_close(a, b, rtol=tolerance, atol=1e-7, msg=lambda m: f"{where}, {column}: {m}")  # noqa: B023


def assert_weights(run, expected, where, tolerance=3e-6):
    for name, value in run.weights().items():
        part = tensor_slice(expected[name].detach(), run.engine.tensor_dims.get(name), run.mesh.tensor)
        worst = float((value - part).abs().max())
        assert worst <= tolerance, f"{where}: {name} {worst}"


def snapshot(run):
    state = {(s.name, s.kind): [c.tensor.clone() for c in s.chunks] for s in run.engine.parameter_shards()}
    return state, run.engine.step_count, run.weights()


def assert_same(run, saved, where):
    state, count, weights = saved
    assert run.engine.step_count == count, where
    for shard in run.engine.parameter_shards():
        for chunk, old in zip(shard.chunks, state[shard.name, shard.kind], strict=True):
            assert torch.equal(chunk.tensor, old), f"{where}: {shard.name} {shard.kind}"
    for name, value in run.weights().items():
        assert torch.equal(value, weights[name]), f"{where}: {name}"


@torch.no_grad()
def write(run, value_of, count):
    """Every chunk from `value_of(shard, number of the chunk)`, as a checkpoint is loaded."""
    for shard in run.engine.parameter_shards():
        for number, chunk in enumerate(shard.chunks):
            chunk.tensor.copy_(value_of(shard, number))
    run.engine.step_count = count
    run.engine.after_load()


def whole_state(run, where):
    """The shards of all ranks of the data axis put together: {(name, kind): array}, and the step."""
    mine = [(s.name, s.kind, s.shape, [(o, t.numpy()) for o, t in s.chunks]) for s in run.engine.parameter_shards()]
    whole = {}
    for shards in run.mesh.data.all_gather_object(mine):
        for name, kind, shape, chunks in shards:
            array = whole.setdefault((name, kind), torch.full(shape, math.nan))
            for offsets, values in chunks:
                chunk = Chunk(offsets, torch.from_numpy(values))
                there, values = array[chunk.slices], chunk.tensor
                assert bool((there.isnan() | (there == values)).all()), f"{where}: {name} {kind} differs between ranks"
                there.copy_(values)
    full = run.weights()
    assert set(whole) == {(name, kind) for name in full for kind in ("weight", "first_moment", "second_moment")}
    for (name, kind), array in whole.items():
        assert array.shape == run.engine.shapes[name]
        assert not bool(array.isnan().any()), f"{where}: {name} {kind} is not covered"
        assert kind != "weight" or torch.equal(array, full[name]), f"{where}: {name}"
    return {key: array.numpy() for key, array in whole.items()} | {"step": run.engine.step_count}


def train_skip_and_restore(config, world, where):
    """Train, skip steps, save, overwrite and restore the state, train on. Returns (steps, run)."""
    run = Run(config, world)
    assert_weights(run, dict(tiny.model(config).named_parameters()), f"{where}: at the start", tolerance=0.0)
    steps = [run.step(), run.step()]
    for spoil in ("gradient", "loss"):
        saved = snapshot(run)
        assert not run.step(spoil=spoil)[-1], where
        assert_same(run, saved, f"{where}: skipped, {spoil}")
        run.position -= 1
    saved, count = snapshot(run), run.engine.step_count
    assert count == 2
    steps.append(run.step())
    after = snapshot(run)
    write(run, lambda shard, number: torch.full_like(shard.chunks[number].tensor, 0.5), 77)
    assert run.engine.step_count == 77
    write(run, lambda shard, number: saved[0][shard.name, shard.kind][number], count)
    run.position -= 1
    assert run.step() == steps[-1], f"{where}: restored"
    assert_same(run, after, f"{where}: restored")
    steps += [run.step() for _ in range(STEPS - 3)]
    return steps, run


def live_bytes():
    """Of all tensors in this process."""
    gc.collect()
    held = {}
    for thing in gc.get_objects():
        kind = type(thing)  # not isinstance: some of the things found do something when asked
        if issubclass(kind, torch.Tensor) and not issubclass(kind, DTensor):
            storage = thing.untyped_storage()
            held[storage.data_ptr()] = storage.nbytes()
    return sum(held.values())
