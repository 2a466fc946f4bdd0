"""Whole training steps against a reference that shares no code with the trainer.

The reference keeps every table as a plain tensor under autograd, retrieves by the literal formula, adds the
gradients of all micro-batches, clips by the joint norm and applies AdamW as it stands in the textbook.
"""

import method_models as methods
import numpy as np
import pytest
import tiny_models as tiny
import torch
from slow_plan import slow_keys

from xgram_dist.engine import build_engine
from xgram_dist.model.methods.base import method_of
from xgram_dist.optim.schedule import learning_rate, warmup_factor
from xgram_dist.parallel.mesh import single_mesh
from xgram_dist.train.step import JointOptimizer, train_step

F64 = torch.float64
STEPS = 12
CASES = {
    "50 %": {},
    "100 %": {"compression": 1.0},
    "ple": {},
    "retoken": {},
    "mort": {},
    "stem": {},
    "engram": {},
    "everything decays": {},
    "sites h and v, VIP rows slower": {
        "sites": {"h": {"views": 1, "kernels": [3]}, "v": {"views": 2, "kernels": [3, 5]}},
        "learning_rate": {"multiplier": 4.0, "vip_multiplier": 1.5},
        "weight_decay": 0.3,
    },
}


class TextbookAdamW:
    def __init__(self, settings, value, decay):
        self.settings, self.value, self.decay = settings.optimizer, value, decay
        self.m, self.v, self.t = torch.zeros_like(value), torch.zeros_like(value), 0

    def step(self, gradient, rate):
        """`rate` may differ from row to row."""
        b1, b2 = self.settings.betas
        self.t += 1
        self.value -= rate * self.decay * self.value
        self.m = b1 * self.m + (1 - b1) * gradient
        self.v = b2 * self.v + (1 - b2) * gradient**2
        m_hat, v_hat = self.m / (1 - b1**self.t), self.v / (1 - b2**self.t)
        self.value -= rate * m_hat / (torch.sqrt(v_hat) + self.settings.eps)


def reference_gradients(settings, made, tables, batch, warmup):
    """Gradients by autograd through the literal retrieval of every position."""
    for state in tables.shards:
        state.rows.requires_grad_()
        if state.gates is not None:
            state.gates.requires_grad_()
    names = [table.name for state in tables.shards for table in state.slab.tables]
    vocabulary, method = settings.model.vocabulary, method_of(settings)
    hashing = method.ngram_hash() if method.looks_up_ngrams else None
    count = vocabulary if hashing is None else tables.shards[0].slab.rows
    for tokens in batch:
        values = {n: torch.stack([tiny.literal_retrieval(tables, n, t) for t in range(count)]) for n in names}
        slots = tokens
        if hashing is not None:
            slots = torch.from_numpy(slow_keys(hashing, np.arange(vocabulary), tokens.numpy()))
        loss, _ = made.loss(tokens, slots, values, torch.tensor(warmup, dtype=F64))
        (loss / len(batch)).backward()


@pytest.mark.parametrize("case", CASES)
def test_weights_after_many_steps_equal_textbook_adamw_on_dense_tables(case):
    if case in methods.MEMORY:
        settings = methods.config(case, train={"steps": 60})
    else:
        optimizer = {"decay_vectors": case == "everything decays"}
        settings = tiny.config(memory=CASES[case], optimizer=optimizer, train={"steps": 60})
    made, tables = tiny.model(settings, F64), tiny.tables(settings, F64)
    twin, twin_tables = tiny.model(settings, F64), tiny.tables(settings, F64)
    optimizer = JointOptimizer(settings, build_engine(settings, made, single_mesh(), tiny.CPU), tables, single_mesh())
    decay = settings.optimizer.weight_decay
    table_decay = decay if settings.memory.weight_decay is None else settings.memory.weight_decay
    vector_decay = decay if settings.optimizer.decay_vectors else 0.0
    adams = {
        n: TextbookAdamW(settings, p.data, decay if p.dim() >= 2 else vector_decay) for n, p in twin.named_parameters()
    }
    row_adams = [TextbookAdamW(settings, s.rows.data, table_decay) for s in twin_tables.shards]
    gate_adams = [
        s.gates is not None and TextbookAdamW(settings, s.gates.data, vector_decay) for s in twin_tables.shards
    ]

    rule = settings.memory.learning_rate
    body = rule.multiplier if isinstance(rule.multiplier, float) else (120 / 16) ** 0.5
    vip = rule.vip_multiplier or body
    multiplier = torch.full((twin_tables.shards[0].slab.rows, 1), body, dtype=F64)
    multiplier[: twin_tables.shards.num_vip] = vip

    for step in range(1, STEPS + 1):
        batch = tiny.tokens(settings, 2, 2, 10, seed=step)
        result = train_step(settings, tables, optimizer, batch, tables.plan(batch).result(), step)

        reference_gradients(settings, twin, twin_tables, batch, warmup_factor(settings, step))
        gradients = [p.grad for p in twin.parameters()]
        gradients += [s.rows.grad for s in twin_tables.shards]
        gradients += [s.gates.grad for s in twin_tables.shards if s.gates is not None]
        norm = torch.sqrt(sum((g**2).sum() for g in gradients))
        torch.testing.assert_close(result.gradient_norm, norm, rtol=1e-9, atol=0)
        factor = min(1.0, settings.optimizer.clip_norm / (float(norm) + 1e-6))
        rate = learning_rate(settings, step)
        with torch.no_grad():
            for name, parameter in twin.named_parameters():
                opens = rule.scales == "tables" and ".scale" in name
                adams[name].step(parameter.grad * factor, rate * (body if opens else 1.0))
                parameter.grad = None
            for state, rows, gates in zip(twin_tables.shards, row_adams, gate_adams, strict=True):
                rows.step(state.rows.grad * factor, rate * multiplier * warmup_factor(settings, step))
                state.rows.grad = None
                if gates:
                    gates.step(state.gates.grad * factor, rate)
                    state.gates.grad = None

    for (name, ours), theirs in zip(made.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")
    for ours, theirs in zip(tables.shards, twin_tables.shards, strict=True):
        torch.testing.assert_close(ours.rows, theirs.rows.detach(), rtol=1e-7, atol=1e-9)
        if ours.gates is not None:
            torch.testing.assert_close(ours.gates, theirs.gates.detach(), rtol=1e-7, atol=1e-9)


def test_clipping_was_active_in_the_reference_runs():
    """Guards the comparison above: with a joint norm below the limit it would not test clipping."""
    settings = tiny.config()
    made, tables = tiny.model(settings, F64), tiny.tables(settings, F64)
    optimizer = JointOptimizer(settings, build_engine(settings, made, single_mesh(), tiny.CPU), tables, single_mesh())
    batch = tiny.tokens(settings, 2, 2, 10, seed=1)
    result = train_step(settings, tables, optimizer, batch, tables.plan(batch).result(), 1)
    assert result.gradient_norm > settings.optimizer.clip_norm
