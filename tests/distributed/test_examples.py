"""The examples of docs/library.md on two ranks: what they print equals a plain loop with whole tables in one process.

Each rank runs the example's own `main`. A plain loop then trains the example's model on the batches that the ranks have
read, with tables that are ordinary parameters of one process.
"""

import os
import runpy
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks_helper import run_ranks
from torch import nn

from xgram_dist.library import TokenTables

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def recorded(ranks, name, *runs):
    """[what `main` returned, for each (arguments, keywords) of `runs`], and the batches of each run."""
    # Without a GPU, the Trainer loads its checkpoints to "cpu:0", which torch.load does not know.
    torch.serialization.register_package(
        0, lambda storage: None, lambda storage, at: storage if at == "cpu:0" else None
    )
    example = runpy.run_path(str(EXAMPLES / name))
    results, batches, plan = [], [], TokenTables.plan

    def recording(tables, *keys):
        if len(keys) > 1:  # evaluation has one batch at a time
            batches[-1].extend(one.tolist() for one in keys)
        return plan(tables, *keys)

    TokenTables.plan = recording
    for arguments, keywords in runs:
        batches.append([])
        results.append(example["main"](*arguments, **keywords))
    return results, batches


def whole_tables_loop(example, batches, loss_of, rate, table_rate):
    """Losses of a plain loop: AdamW as torch's over model and whole tables, clipped together at 1."""
    model, sites = example["build_model"]()
    with TokenTables(sites.widths, example["VOCABULARY"]) as tables:
        rows = tables.fetch(tables.plan(torch.arange(example["VOCABULARY"])), training=False)
        assert torch.equal(rows.slots[0], torch.arange(example["VOCABULARY"]))
        whole = {name: nn.Parameter(rows.values[name].detach().clone()) for name in sites.widths}
    groups = [
        {"params": list(model.parameters()), "lr": rate, "weight_decay": 0.0, "betas": (0.9, 0.999)},
        {"params": list(whole.values()), "lr": table_rate, "weight_decay": 0.1, "betas": (0.9, 0.95)},
    ]
    optimizer, losses = torch.optim.AdamW(groups, eps=1e-8), []
    for tokens in batches:
        optimizer.zero_grad()
        sites.use(whole, tokens)
        loss = loss_of(model, tokens)
        loss.backward()
        nn.utils.clip_grad_norm_([*model.parameters(), *whole.values()], 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def steps_of(batches_of_ranks, micro_batches):
    """[the sequences of all ranks and micro-batches, for each step]"""
    ranks = [torch.tensor(batches) for batches in batches_of_ranks]
    count = len(ranks[0]) // micro_batches
    return [
        torch.cat([rank[n * micro_batches : (n + 1) * micro_batches].flatten(0, 1) for rank in ranks])
        for n in range(count)
    ]


def test_hugging_face_trainer_with_tables_by_a_callback_and_its_resume(tmp_path):
    every = {"logging_steps": 1, "eval_steps": 3}
    runs = (
        ((), {"max_steps": 8, **every}),
        ((str(tmp_path),), {"max_steps": 5, "save_steps": 5, **every}),
        ((str(tmp_path),), {"max_steps": 8, "save_steps": 9, "logging_steps": 1, "eval_strategy": "no"}),
    )
    results = run_ranks(recorded, 2, "hf_trainer.py", *runs)
    whole, _, resumed = results[0][0]
    example = runpy.run_path(str(EXAMPLES / "hf_trainer.py"))
    steps = steps_of([batches[0] for _, batches in results], micro_batches=2)
    assert len(steps) == 8
    assert not torch.equal(steps[0][:4], steps[0][8:12]), "the ranks read different text"
    expected = whole_tables_loop(
        example, steps, lambda model, tokens: model(tokens, labels=tokens).loss, rate=2e-3, table_rate=1e-2
    )
    np.testing.assert_allclose(whole, expected, atol=1e-4)  # the Trainer rounds to four digits
    np.testing.assert_allclose(resumed[-3:], whole[-3:], atol=1e-4)


def test_accelerate_loop():
    results = run_ranks(recorded, 2, "accelerate_loop.py", ((6,), {}))
    example = runpy.run_path(str(EXAMPLES / "accelerate_loop.py"))
    steps = steps_of([batches[0] for _, batches in results], micro_batches=2)
    expected = whole_tables_loop(
        example, steps, lambda model, tokens: model(tokens, labels=tokens).loss, rate=2e-3, table_rate=1e-2
    )
    np.testing.assert_allclose(results[0][0][0], expected, rtol=2e-5)


TITAN = EXAMPLES.parents[1] / "tools" / "titan" / ".venv" / "bin" / "python"


@pytest.mark.skipif(not TITAN.exists(), reason="needs the environment of `make titan`")
def test_torchtitans_model_and_its_fsdp2_train_as_one_process():
    example = str(EXAMPLES / "torchtitan_loop.py")
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parents[1]), "OMP_NUM_THREADS": "1"}
    for name in ("RANK", "WORLD_SIZE"):
        environment.pop(name, None)
    printed = []
    for how in ([], ranks):
        command = [str(TITAN), *how, example]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
        assert done.returncode == 0, done.stderr[-2000:]
        printed.append([float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("step")])
    assert len(printed[0]) == 3
    np.testing.assert_allclose(printed[1], printed[0], atol=2e-3)
    assert printed[0][-1] < 3.0


@pytest.mark.parametrize("how", ["compiled", "recomputing"])
def test_sites_of_a_model_that_is_compiled_or_recomputes_its_layers(how):
    example = runpy.run_path(str(EXAMPLES / "hf_trainer.py"))
    tokens = torch.stack([row["input_ids"] for row in example["build_data"]()[:4]])

    def gradients(how):
        model, sites = example["build_model"]()
        model.train()
        if how == "compiled":
            model.compile(backend="aot_eager")
        elif how == "recomputing":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        with TokenTables(sites.widths, example["VOCABULARY"]) as tables:
            for batch in (tokens[:2], tokens[2:]):  # with another number of distinct tokens
                rows = tables.fetch(tables.plan(batch), training=False)
                values = {name: value.detach().requires_grad_() for name, value in rows.values.items()}
                sites.use(values, rows.slots[0])
                loss = model(batch, labels=batch).loss
                loss.backward()
            return loss.item(), values["layers.1.v.0"].grad, model.model.layers[0].self_attn.v_proj.memory.gain.grad

    expected = gradients("plain")
    for found, wanted in zip(gradients(how), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)
