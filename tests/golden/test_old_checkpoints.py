"""Checkpoints that an earlier release wrote on 4 ranks are read in full and gone on with, on any number of ranks."""

import json
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
from digest import read_checkpoint, read_safetensors
from golden_runs import GOLDENS, HERE, ROOT, checkpoint_of, command, kind_of_machine, make_workspace, records, train

WRITTEN_ON = GOLDENS / "AVX2-3a9985ab6e49.json"
"""Its header names the machine."""
SAVED, STEPS = 6, 8
KINDS, RANKS = ("dense", "catch_up"), (1, 2, 3)
DECAY = {"first": 0.9, "second": 0.95}
"""Of moments, a step: optimizer.betas."""
NEXT = "next_losses"
"""In expected.npz: losses of the steps after the checkpoint. All else there is a tensor of a table."""


def recipe(kind):
    """Of the run that wrote a checkpoint."""
    return {
        "model": {
            "vocabulary": 312,
            "layers": 2,
            "width": 8,
            "ffn_width": 8,
            "heads": 2,
            "kv_heads": 1,
            "sequence_length": 4,
        },
        "memory": {
            "method": "xgram",
            "compression": 0.5,
            "sites": {"h": {"views": 1, "kernels": [2], "layers": [1]}, "v": {"views": 2, "kernels": [2]}},
            "routing": {"vip": 8, "buckets": 6},
            "learning_rate": {"vip_multiplier": 0.7},
            "optimizer": kind,
        },
        "data": {"path": "data"},
        "parallel": {"engine": "replicated"},
        "checkpoint": {"every": SAVED},
        "train": {
            "steps": STEPS,
            "global_batch": 12,
            "micro_batch": 1,
            "precision": "fp32",
            "log_every": 1,
            "validation_sequences": 8,
        },
    }


def saved(kind):
    return HERE / "checkpoints" / kind / f"step-{SAVED:08d}"


@pytest.fixture(scope="session")
def workspace(tmp_path_factory):
    return make_workspace(tmp_path_factory.mktemp("old-checkpoints"))


def expected_of(kind):
    with np.load(HERE / "checkpoints" / kind / "expected.npz") as file:
        return dict(file)


def is_weight(name):
    return name.endswith((".rows", ".gates"))


def consolidated(checkpoint: Path, workspace: Path, name: str):
    """The tables' weights of a checkpoint, up to date, in the order of global rows."""
    out = workspace / f"{name}.safetensors"
    command([str(ROOT / "tools" / "consolidate.py"), str(checkpoint), str(out)], workspace)
    return {name: value for name, value in read_safetensors(out).items() if name.startswith("tables.")}


def check_equal(found, expected):
    """Bit for bit; weights, which are brought up to date by arithmetic, to rounding on another kind of machine."""
    here = kind_of_machine()
    made = {key: json.loads(WRITTEN_ON.read_text(encoding="utf-8"))["header"][key] for key in here}
    if here != made:
        warnings.warn(f"checkpoints are of {made}, this is {here}: weights are compared to rounding", stacklevel=2)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        if here == made or not is_weight(name):
            np.testing.assert_array_equal(found[name], value, err_msg=name)
        else:
            np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-8, err_msg=name)


def check_state(found, expected):
    """What is kept for each row. A run validates before it saves, which brings the rows that are read up to date: their
    moments have decayed by the steps they were behind. All other rows are as they were, bit for bit."""
    for name, value in expected.items():
        key = name.rsplit(".", 1)[1]
        if key in DECAY and (last := last_of(name, expected)) is not None:
            now = last_of(name, found)
            moved = now != last
            assert (now[moved] == SAVED).all(), name
            assert moved.sum() < (last < SAVED).sum(), "no row is behind any more: nothing is shown"
            np.testing.assert_array_equal(found[name][~moved], value[~moved], err_msg=name)
            factor = DECAY[key] ** (SAVED - last[moved]).astype(float)
            decayed = value[moved] * factor.reshape(-1, *[1] * (value.ndim - 1))
            np.testing.assert_allclose(found[name][moved], decayed, rtol=3e-7, atol=0, err_msg=name)
        elif key != "last":
            np.testing.assert_array_equal(found[name], value, err_msg=name)


def last_of(name, tensors):
    """The step that moments belong to, of each row; None where they always belong to the present one. `name` is of
    moments: tables.layers.LAYER.SITE.VIEW.rows.first"""
    _, _, _, _, view, what, _ = name.split(".")
    return tensors.get(f"tables.view-{view}.{what}.last")


@pytest.mark.parametrize("kind", KINDS)
def test_its_rows_are_read_up_to_date_and_in_order(workspace, kind):
    expected = expected_of(kind)
    weights = {name: value for name, value in expected.items() if is_weight(name)}
    found = consolidated(saved(kind), workspace, f"{kind}-itself")
    assert sorted(found) == sorted(weights)
    check_equal(found, weights)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("kind", KINDS)
def test_loaded_and_saved_by_other_ranks_it_holds_the_same(workspace, kind, ranks):
    name, expected = f"{kind}-again-{ranks}", expected_of(kind)
    run = train(workspace, name, recipe(kind), ranks, "--from", str(saved(kind)), f"train.steps={SAVED}")
    again = checkpoint_of(run, SAVED)
    check_equal(consolidated(again, workspace, name), {key: one for key, one in expected.items() if is_weight(key)})
    state = {key: one for key, one in expected.items() if not is_weight(key) and key != NEXT}
    check_state(read_checkpoint(again), state)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_from_it(workspace, kind, ranks):
    name = f"{kind}-on-{ranks}"
    shutil.copytree(saved(kind), checkpoint_of(workspace / name, SAVED))
    run = train(workspace, name, recipe(kind), ranks)
    steps = records(run, "train")
    assert [record["step"] for record in steps] == list(range(SAVED + 1, STEPS + 1))
    np.testing.assert_allclose([record["loss"] for record in steps], expected_of(kind)[NEXT], rtol=1e-5)
    assert (checkpoint_of(run, STEPS) / "manifest.json").is_file()
