"""Every figure equals the literal, slow computation of it, and says by name where it does not apply."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import slow_figures as slow
import torch
from inference_helpers import recipe, trained
from train_helpers import read_metrics, small_config

from xgram_dist.analysis.diagnose.measure import measure, open_checkpoint
from xgram_dist.analysis.diagnose.row_statistics import exact_percentiles, expected_update_shares, hit_concentration
from xgram_dist.cli.main import main
from xgram_dist.data.dataset import PreparedData
from xgram_dist.data.loader import validation_batches
from xgram_dist.eval.activations import magnitude_by_frequency
from xgram_dist.parallel.process_group import ProcessGroup
from xgram_dist.tables.frequencies import load_frequencies
from xgram_dist.tables.routing_io import load_routing

SEQUENCES, BATCH = 6, 2


def measured(run: Path, data: Path) -> dict[str, Any]:
    prepared = PreparedData.open(data, "validation")
    opened = open_checkpoint(run, ProcessGroup(), torch.device("cpu"), prepared.manifest.end_of_text)
    try:
        return measure(opened, prepared, SEQUENCES, BATCH, [1, 10, 100])
    finally:
        opened.lookup.close()


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All sites, several views; the last step also diagnosed by the run itself."""
    folder = tmp_path_factory.mktemp("diagnose") / "run"
    config = recipe(data, "all", train={"diagnose_every": 4, "micro_batch": 2, "validation_sequences": 8})
    trained(config, folder)
    return folder


@pytest.fixture(scope="module")
def tree(run: Path, data: Path) -> dict[str, Any]:
    return measured(run, data)


@pytest.fixture(scope="module")
def positions(run: Path, data: Path) -> list[dict[str, Any]]:
    prepared = PreparedData.open(data, "validation")
    return slow.forward(run, validation_batches(prepared, 32, BATCH, SEQUENCES))


def test_layer_cosines(tree: dict[str, Any], positions: list[dict[str, Any]]) -> None:
    expected = slow.layer_cosines(positions, 2)
    assert tree["positions"] == len(positions) == SEQUENCES * 32
    for part, values in expected.items():
        assert tree["figures"]["layers"][part] == pytest.approx(values, abs=1e-5), part


def test_activation_by_frequency(tree: dict[str, Any], positions: list[dict[str, Any]], data: Path) -> None:
    frequency = load_frequencies(data / "counts.npz", vocabulary=320)
    magnitude = slow.magnitude_of_tokens(positions)
    bands: dict[int, list[float]] = {}
    for token, value in magnitude.items():
        if frequency[token] > 0:
            bands.setdefault(math.floor(2 * math.log10(frequency[token])), []).append(value)
    found = tree["figures"]["activation"]
    assert [band["tokens"] for band in found["bands"]] == [len(bands[key]) for key in sorted(bands)]
    for band, key in zip(found["bands"], sorted(bands), strict=True):
        assert band["from"] == pytest.approx(10 ** (key / 2))
        assert band["magnitude"] == pytest.approx(np.mean(bands[key]), rel=1e-5)
    assert sum(band["occurrences"] for band in found["bands"]) == len(positions)
    assert set(found["sites"]) == {"h", "q", "k", "v", "o"}


def test_correlation_is_with_the_log_of_the_frequency() -> None:
    frequency = np.array([0.001, 0.01, 0.1, 0.0])
    found = magnitude_by_frequency(np.array([1.0, 2.0, 3.0, 9.0]), frequency, np.ones(4))
    assert found["correlation"] == pytest.approx(1.0)
    assert magnitude_by_frequency(np.array([2.0]), np.array([1.0]), np.ones(1))["correlation"] is None


def test_pairwise_cosines_of_views(tree: dict[str, Any], positions: list[dict[str, Any]]) -> None:
    found = tree["figures"]["views"]
    assert set(found["retrieved"]["sites"]) == {f"layers.{layer}.{site}" for layer in (0, 1) for site in ("h", "v")}
    each = []
    for group, one in found["retrieved"]["sites"].items():
        for pair, value in one["pairs"].items():
            first, second = pair.split("-")
            assert value == pytest.approx(
                slow.view_cosine(positions, f"{group}.{first}", f"{group}.{second}"), abs=1e-5
            )
            each.append(value)
    assert found["retrieved"]["mean"] == pytest.approx(np.mean(each))
    assert set(found["extracted"]["sites"]) == set(found["retrieved"]["sites"])
    assert all(-1 <= one["mean"] <= 1 for one in found["extracted"]["sites"].values())


def test_row_movement_of_every_table_and_its_median(tree: dict[str, Any], run: Path) -> None:
    found = tree["figures"]["movement"]
    assert len(found["tables"]) == 2 * (2 + 1 + 3 + 1) + 1
    for table, one in found["tables"].items():
        expected = slow.movement(run, table)
        for key, value in expected.items():
            assert one[key] == pytest.approx(value, rel=1e-4), (table, key)
    assert found["cv"] == pytest.approx(np.median([one["cv"] for one in found["tables"].values()]))
    assert found["gap"] == pytest.approx(np.median([one["gap"] for one in found["tables"].values()]))


def test_rows_updated_and_hit(tree: dict[str, Any], run: Path, data: Path) -> None:
    routing = load_routing(run / "routing.npz")
    frequency = load_frequencies(data / "counts.npz", vocabulary=320)
    tokens = 4 * 4 * 32
    shares = {1: 0.0, 10: 0.0, 100: 0.0}
    for view in routing.views:
        expected = [0.0] * routing.num_rows
        for token in range(320):
            for row in view.of_token(token)[0]:
                expected[row] += tokens * frequency[token]
        for n in shares:
            shares[n] += sum(one > n for one in expected) / routing.num_rows / routing.num_views
    found = tree["figures"]["updates"]
    assert found["tokens"] == tokens
    assert found["more_than"] == pytest.approx({str(n): share for n, share in shares.items()})
    assert tree["figures"]["row_hits"]["hottest"] == hit_concentration(frequency, routing)["hottest"]


def test_rows_hit_without_hashing_are_the_tokens_themselves() -> None:
    frequency = np.array([0.4, 0.3, 0.1, *[0.2 / 17] * 17])
    assert hit_concentration(frequency, None)["hottest"] == pytest.approx({"0.001": 0.4, "0.01": 0.4, "0.1": 0.7})
    assert expected_update_shares(frequency, None, 20, 100, [1, 25]) == pytest.approx({"1": 1.0, "25": 0.1})


def test_percentiles_are_numpys() -> None:
    chooser = np.random.default_rng(0)
    lists = [chooser.random(1000), np.zeros(7), np.repeat([0.5, 2.0], 3), np.array([3.0]), chooser.random(10) * 1e30]
    values = [torch.tensor(np.sort(one), dtype=torch.float32) for one in lists]
    found = exact_percentiles(values, torch.tensor([len(one) for one in values]), (5, 25, 50, 75, 95), lambda x: x)
    for one, percentiles in zip(values, found, strict=True):
        assert percentiles == pytest.approx(np.percentile(one.double().numpy(), (5, 25, 50, 75, 95)), rel=1e-12)


def test_the_run_itself_logs_the_same_figures(run: Path, data: Path) -> None:
    """train.diagnose_every, at the last step, against the checkpoint of that step on the same sequences."""
    (record,) = read_metrics(run, "diagnose")
    prepared = PreparedData.open(data, "validation")
    opened = open_checkpoint(run, ProcessGroup(), torch.device("cpu"), prepared.manifest.end_of_text)
    try:
        found = measure(opened, prepared, 8, 2, [1])["figures"]
    finally:
        opened.lookup.close()
    for part, values in found["layers"].items():
        assert [record[f"cosine_{part}_{layer}"] for layer in (0, 1)] == pytest.approx(values, abs=1e-5)
    assert record["views_retrieved"] == pytest.approx(found["views"]["retrieved"]["mean"], abs=1e-5)
    assert record["views_extracted"] == pytest.approx(found["views"]["extracted"]["mean"], abs=1e-5)
    assert {"injected_h", "injected_v"} <= record.keys()


@pytest.fixture(scope="module")
def vanilla(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vanilla") / "run"
    trained(small_config(data, "vanilla", train={"steps": 1}), folder)
    return folder


def test_what_does_not_apply_is_said_by_name(vanilla: Path, data: Path) -> None:
    figures = measured(vanilla, data)["figures"]
    for name in ("activation", "views", "row_hits", "updates", "movement"):
        assert "vanilla" in figures[name]["not_applicable"], name
    assert len(figures["layers"]["hidden"]) == 2


def test_rows_of_a_warm_start_have_no_movement(run: Path, data: Path, tmp_path: Path) -> None:
    words = [
        "train",
        str(run / "config.yaml"),
        "--from",
        str(run),
        "--weights-only",
        "--folder",
        str(tmp_path / "warm"),
    ]
    assert main([*words, "train.steps=1"]) == 0
    movement = measured(tmp_path / "warm", data)["figures"]["movement"]
    assert "started from another's checkpoint" in movement["not_applicable"]


def test_the_command_writes_figures_and_pictures(
    run: Path, vanilla: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--sequences", "4", "--batch", "2"]
    assert main(["diagnose", str(vanilla), *words]) == 0
    file = vanilla / "diagnose" / "step-00000001" / "figures.json"
    assert json.loads(file.read_text())["method"] == "vanilla"
    assert "not applicable: vanilla trains no tables" in capsys.readouterr().out
    assert main(["diagnose", str(run), *words, "--out", str(tmp_path / "out"), "--beside", str(vanilla), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "out" / "figures.json").read_text())
    assert {one.name for one in (tmp_path / "out").glob("*.png")} == {
        f"{name}.png"
        for name in ("activation", "layers", "layers-first_state", "views", "row_hits", "updates", "movement")
    }


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--updates", "1,x"], "--updates 1,x is not a list"),
        (["--sequences", "0"], "--sequences 0 is not at least 1"),
        (["--data", "/nowhere"], "the data '/nowhere' does not exist"),
        (["--beside", "/nowhere"], "cannot read '/nowhere'"),
    ],
)
def test_refused(vanilla: Path, words: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", str(vanilla), *words]) == 2
    assert expected in capsys.readouterr().err
