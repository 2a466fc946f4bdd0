"""The tables as a library in loops that are not ours: equal to whole tables under torch's AdamW in one process."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks_helper import run_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from xgram_dist.engine.deepspeed_internals import import_deepspeed
from xgram_dist.errors import UserError
from xgram_dist.library import Routing, ShortConv, TableSites, TokenTables, XgramInjection, gather
from xgram_dist.parallel.mesh import wrap_group

KEYS, WIDTH, BATCH, LENGTH, STEPS = 60, 8, 4, 6, 12
NAMES = ("first", "second")
ADAMW = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


class Network(nn.Module):
    """Next-token prediction from an embedding, plus what the tables add."""

    def __init__(self, recompute=False):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(KEYS, WIDTH), nn.Linear(WIDTH, KEYS)
        self.injection = XgramInjection(NAMES, WIDTH, kernels=(2, 3))
        self.recompute = recompute

    def hidden(self, tokens, slots, values):
        return self.embedding(tokens) + self.injection(values, slots)

    def forward(self, tokens, slots, values):
        arguments = (tokens, slots, values)
        h = checkpoint(self.hidden, *arguments, use_reentrant=False) if self.recompute else self.hidden(*arguments)
        return nn.functional.cross_entropy(self.head(h)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def batch(step):
    return torch.randint(0, KEYS, (BATCH, LENGTH), generator=torch.Generator().manual_seed(step)) ** 2 % KEYS


def rate(step):
    return 1e-2 / (1 + step)


def reference(start, steps=STEPS):
    """Losses of whole tables with torch's AdamW; `start`: initial tables by name."""
    model = Network()
    tables = nn.ParameterDict({name: nn.Parameter(torch.tensor(value)) for name, value in start.items()})
    parameters = [*model.parameters(), *tables.parameters()]
    optimizer = torch.optim.AdamW(parameters, **ADAMW)
    losses, norms = [], []
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate(step)
        loss = model(batch(step), batch(step), tables)
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(parameters, 0.5)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, norms, {name: value.detach().numpy() for name, value in tables.items()}


def whole_tables(tables):
    rows = tables.fetch(tables.plan(torch.arange(KEYS)), training=False)
    return {name: rows.values[name].detach()[rows.slots[0]].numpy().copy() for name in NAMES}


def train(ranks, wrap, first=0, last=STEPS, states=None, **settings):
    """(initial tables, losses, norms, last tables, state) of a plain loop of torch's."""
    model = Network(recompute=wrap == "fsdp2")
    if wrap == "ddp":
        model = DistributedDataParallel(model, process_group=settings.get("group"))
    elif wrap == "fsdp2":
        fully_shard(model)
    elif wrap.startswith("ZeRO"):
        return train_under_deepspeed(ranks, model, int(wrap[-1]), **settings)
    elif wrap == "compile":
        model.compile(backend="aot_eager")
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    losses, norms = [], []
    with TokenTables(dict.fromkeys(NAMES, WIDTH), KEYS, **ADAMW, **settings) as tables:
        if states is not None:
            model.load_state_dict(states[0]["model"])
            optimizer.load_state_dict(states[0]["optimizer"])
            tables.load_state_dict([state["tables"] for state in states])
        start = whole_tables(tables)
        share = slice(ranks.rank * BATCH // ranks.size, (ranks.rank + 1) * BATCH // ranks.size)
        plan = tables.plan(batch(first)[share])
        for step in range(first, last):
            tokens, rows = batch(step)[share], tables.fetch(plan)
            plan = tables.plan(batch(step + 1)[share])  # while this step computes
            loss = model(tokens, rows.slots[0], dict(rows.values))
            loss.backward()
            tables.give_back(rows)
            norms.append(float(tables.clip(model.parameters(), 0.5)))
            optimizer.param_groups[0]["lr"] = rate(step)
            assert tables.step(rate(step))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(ranks.all_reduce_sum(loss.detach())) / ranks.size)
        plan.result()
        inner = model.module if wrap == "ddp" else model
        state = None
        if wrap != "fsdp2":
            state = {"model": inner.state_dict(), "optimizer": optimizer.state_dict(), "tables": tables.state_dict()}
            state = {key: _copied(value) for key, value in state.items()}
        return start, losses, norms, whole_tables(tables), state


def train_under_deepspeed(ranks, model, stage, **settings):
    """As `train`, with DeepSpeed's engine as its users write it."""
    config = {
        "train_micro_batch_size_per_gpu": BATCH // ranks.size,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    deepspeed = import_deepspeed(torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    losses, norms = [], []
    with TokenTables(dict.fromkeys(NAMES, WIDTH), KEYS, **ADAMW, **settings) as tables:
        start = whole_tables(tables)
        share = slice(ranks.rank * BATCH // ranks.size, (ranks.rank + 1) * BATCH // ranks.size)
        for step in range(STEPS):
            tokens = batch(step)[share]
            rows = tables.fetch(tables.plan(tokens))
            loss = engine(tokens, rows.slots[0], dict(rows.values))
            engine.backward(loss * float("nan") if step == STEPS - 1 else loss)
            tables.give_back(rows)
            norm = tables.clip_deepspeed(engine, 0.5)
            engine.optimizer.param_groups[0]["lr"] = rate(step)
            applied = tables.step(rate(step))
            engine.step()
            assert applied == engine.was_step_applied() == (step < STEPS - 1)
            losses.append(float(ranks.all_reduce_sum(loss.detach())) / ranks.size)
            norms.append(float(norm))
        return start, losses, norms[:-1], whole_tables(tables), None


def _copied(value):
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return {key: _copied(one) for key, one in value.items()} if isinstance(value, dict) else value


@pytest.mark.parametrize(
    ("size", "wrap", "settings"),
    [
        (1, "plain", {}),
        (1, "compile", {"placement": "host"}),
        (2, "ddp", {}),
        (2, "ddp", {"optimizer": "dense"}),
        (2, "fsdp2", {}),
        (2, "ZeRO-1", {}),
        (2, "ZeRO-2", {}),
        (2, "ZeRO-3", {}),
    ],
    ids=[
        "one process",
        "compiled, rows on the host",
        "DDP",
        "DDP, dense sweep",
        "FSDP2, recomputing",
        "DeepSpeed, ZeRO-1",
        "DeepSpeed, ZeRO-2",
        "DeepSpeed, ZeRO-3",
    ],
)
def test_a_loop_of_torchs_own_trains_as_on_whole_tables(size, wrap, settings):
    results = [found[:4] for found in run_ranks(train_without_state, size, wrap, settings)]
    start, losses, norms, tables = results[0]
    # The last step under DeepSpeed is not finite and changes nothing.
    expected_losses, expected_norms, expected_tables = reference(start, len(norms))
    np.testing.assert_allclose(losses[: len(norms)], expected_losses, rtol=1e-5)
    np.testing.assert_allclose(norms, expected_norms, rtol=1e-4)
    for name in NAMES:
        np.testing.assert_allclose(tables[name], expected_tables[name], rtol=0, atol=2e-5)


def train_without_state(ranks, wrap, settings):
    return train(ranks, wrap, **settings)[:4]


def _in_groups(ranks):
    groups = [dist.new_group([0, 2]), dist.new_group([1])]
    group, other = groups[ranks.rank % 2], groups[1 - ranks.rank % 2]
    with pytest.raises(UserError, match="not in the group"):
        TokenTables(dict.fromkeys(NAMES, WIDTH), KEYS, group=other)
    return train(wrap_group(group), "ddp", group=group)[:4]


def test_groups_of_the_callers_have_tables_of_their_own():
    for start, losses, norms, tables in run_ranks(_in_groups, 3):
        expected_losses, expected_norms, expected_tables = reference(start)
        np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
        np.testing.assert_allclose(norms, expected_norms, rtol=1e-4)
        for name in NAMES:
            np.testing.assert_allclose(tables[name], expected_tables[name], rtol=0, atol=2e-5)


def _resumed(ranks, states, last):
    return train(ranks, "plain", 5, last, states=states)[1]


def _saved(ranks, last, path):
    torch.save(train(ranks, "ddp", 0, last)[4], f"{path}/rank-{ranks.rank}.pt")


def test_state_of_two_ranks_is_loaded_by_one(tmp_path):
    run_ranks(_saved, 2, 5, str(tmp_path))
    states = [torch.load(tmp_path / f"rank-{rank}.pt", weights_only=True, mmap=True) for rank in (1, 0)]
    (whole,) = run_ranks(train_without_state, 1, "plain", {})
    resumed = run_ranks(_resumed, 1, states, STEPS)[0]
    np.testing.assert_allclose(resumed, whole[1][5:], rtol=1e-5)


def test_hashed_tables_train_and_touched_rows_alone_are_kept(tmp_path):
    counts = np.arange(KEYS, 0, -1)
    routing = Routing.from_frequencies(counts, 0.5, views=2, vip=2, buckets=3)
    routing.save(str(tmp_path / "routing.npz"))
    with TokenTables(
        dict.fromkeys(NAMES, WIDTH), KEYS, routing=Routing.load(str(tmp_path / "routing.npz")), views={"second": 1}
    ) as hashed:
        rows = hashed.fetch(hashed.plan(batch(0), batch(1)))
        loss = sum((gather(rows.values[name], rows.slots[i]) ** 2).mean() for name in NAMES for i in range(2))
        loss.backward()
        hashed.give_back(rows)
        assert hashed.step(1e-2)
        assert "first.gates" in hashed.state_dict()
    with TokenTables({"grams": 4}, 10**11) as huge:
        keys = torch.tensor([[5, 99_999_999_999, 5]])
        rows = huge.fetch(huge.plan(keys))
        gather(rows.values["grams"], rows.slots[0]).sum().backward()
        huge.give_back(rows)
        assert huge.step(1e-2)
        assert len(huge.state_dict()["view-0.row_ids"]) == 2


def test_a_step_with_a_norm_that_is_not_finite_changes_nothing():
    with TokenTables(dict.fromkeys(NAMES, WIDTH), KEYS) as tables:
        before = whole_tables(tables)
        rows = tables.fetch(tables.plan(batch(0)))
        (gather(rows.values["first"], rows.slots[0]).sum() * float("inf")).backward()
        tables.give_back(rows)
        tables.clip([], 1.0)
        assert not tables.step(1e-2)
        np.testing.assert_array_equal(whole_tables(tables)["first"], before["first"])


def test_a_second_working_set_within_a_step_is_refused():
    """Its gradients would take the place of the first one's."""
    with TokenTables(dict.fromkeys(NAMES, WIDTH), KEYS) as tables:
        rows = tables.fetch(tables.plan(batch(0)))
        tables.fetch(tables.plan(batch(1)), training=False)
        with pytest.raises(UserError, match="one working set"):
            tables.fetch(tables.plan(batch(1)))
        tables.give_back(rows)
        assert tables.step(1e-2)
        tables.fetch(tables.plan(batch(1)))


def test_sites_are_linear_layers_and_need_rows():
    layer = nn.Linear(4, 6, bias=False)
    sites = TableSites({"v": layer}, views=3)
    assert sites.widths == {"v.0": 6, "v.1": 6, "v.2": 6}
    with pytest.raises(UserError, match="no rows were given"):
        layer(torch.zeros(1, 2, 4))
    for wrong, sentence in (
        ({}, "name at least one"),
        ({"v": layer}, "has tables already"),
        ({"n": nn.LayerNorm(4)}, "is a LayerNorm"),
    ):
        with pytest.raises(UserError, match=sentence):
            TableSites(wrong)


def test_short_conv_is_the_formula_position_by_position():
    torch.manual_seed(0)
    conv, values, slots = ShortConv(WIDTH, 3), torch.randn(5, WIDTH), torch.tensor([[0, 3, 1, 1, 4]])
    with torch.no_grad():
        for parameter in conv.parameters():
            parameter.normal_()
        e = values[slots[0]]
        n = e / torch.sqrt(e.square().mean(-1, keepdim=True) + 1e-5)
        for t in range(5):
            taps = [(j, n[t - j]) for j in range(3) if t >= j]
            content = sum(conv.conv.content[j] * x for j, x in taps)
            gate = sum(conv.conv.gate[j] * x for j, x in taps) + conv.conv.gate_bias
            expected = e[t] + content * gate * torch.sigmoid(gate)
            torch.testing.assert_close(conv(values, slots)[0, t], expected)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"widths": {}}, "name at least one table"),
        ({"num_keys": 0}, "num_keys = 0 is not from 1"),
        ({"views": {"third": 1}}, "'third', which is not a table"),
        ({"views": {"first": 1}}, "need a routing"),
        ({"placement": "disk"}, "memory.folder"),
    ],
)
def test_bad_descriptions_are_named(change, sentence):
    arguments = {"widths": dict.fromkeys(NAMES, WIDTH), "num_keys": KEYS, **change}
    with pytest.raises(UserError, match=sentence):
        TokenTables(**arguments)


def test_keys_must_be_integers_in_host_memory_and_states_of_the_same_tables():
    with TokenTables(dict.fromkeys(NAMES, WIDTH), KEYS) as tables:
        with pytest.raises(UserError, match="integer keys"):
            tables.plan(torch.rand(2, 3))
        with pytest.raises(UserError, match=r"holds no 'view-0\.row_ids'"):
            tables.load_state_dict({})


def test_the_example_of_the_docs_learns():
    """As its reader starts it."""
    example = Path(__file__).parents[2] / "docs" / "examples" / "gpt_ddp.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(example)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("step")]
    assert len(losses) == 3
    assert losses[-1] < 3.2  # ln 256 = 5.5 before training
