"""`train --from`: a new run that starts from another's state, or from its weights alone."""

import json
import shutil

import numpy as np
import pytest
import torch
from engine_helper import full_parameters
from load_helpers import edit_manifest
from ranks_helper import run_ranks
from test_resume import outcome, settings
from tiny_models import table_tensors
from train_helpers import LENGTH, VOCABULARY, make_documents, read_metrics, saved_weights, small_config

from xgram_dist.checkpoint.manifest import Manifest
from xgram_dist.cli.main import main
from xgram_dist.config import build_config, dump_config
from xgram_dist.errors import UserError
from xgram_dist.tables.routing_io import load_routing
from xgram_dist.train.checkpointing import StartCheckpoint
from xgram_dist.train.trainer import Trainer


def started(config, folder, source, *, weights_only=True, ranks=None):
    found = StartCheckpoint.find(source, folder, weights_only=weights_only, fresh=False)
    trainer = Trainer(config, folder, fresh=False, ranks=ranks, start_from=found)
    return trainer


def weights_of(trainer):
    """Of a run in one process."""
    weights = {f"backbone.{name}": value for name, value in full_parameters(trainer.engine).items()}
    store = getattr(trainer.lookup, "shards", None)
    return weights | ({f"tables.{n}": t for n, t in table_tensors(store).items()} if store is not None else {})


@pytest.fixture(scope="module")
def fresh(data, tmp_path_factory):
    """The initial weights of a recipe."""

    def make(config):
        return weights_of(Trainer(config, tmp_path_factory.mktemp("fresh") / "run", fresh=False))

    return make


def test_the_state_goes_on_to_the_last_bit_in_another_folder(data, finished, tmp_path):
    config = settings(data, optimizer="catch_up")
    source = finished / "checkpoints" / "step-00000006"
    trainer = started(config, tmp_path / "run", source, weights_only=False)
    assert (trainer.start, trainer.state.position) == (6, 24)
    assert trainer.run() == 0
    losses, weights = outcome(tmp_path / "run")
    expected, expected_weights = outcome(finished)
    assert losses == {step: expected[step] for step in (7, 8)}
    assert all(torch.equal(weights[name], expected_weights[name]) for name in expected_weights)
    facts = Manifest.read(tmp_path / "run" / "checkpoints" / "step-00000008").run
    assert facts["started_from"] == {
        "checkpoint": str(source), "name": "small-xgram", "step": 6, "weights_only": False
    }  # fmt: skip


def test_a_constant_run_branches_into_a_decay_as_if_it_had_been_planned(data, tmp_path):
    def config(**optimizer):
        base = settings(data, optimizer="catch_up").model_dump()
        base["optimizer"] |= {"warmup_share": 0.0, **optimizer}
        return build_config(base)

    decaying = config(schedule="wsd", decay_share=0.25)
    assert Trainer(decaying, tmp_path / "planned", fresh=False).run() == 0
    assert Trainer(config(schedule="constant"), tmp_path / "constant", fresh=False).run() == 0
    source = tmp_path / "constant" / "checkpoints" / "step-00000006"
    assert started(decaying, tmp_path / "branch", source, weights_only=False).run() == 0
    losses, weights = outcome(tmp_path / "branch")
    expected, expected_weights = outcome(tmp_path / "planned")
    assert losses == {step: expected[step] for step in (7, 8)}
    assert all(torch.equal(weights[name], expected_weights[name]) for name in expected_weights)


def test_given_again_the_command_goes_on_with_the_runs_own_checkpoint(data, finished, tmp_path, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(dump_config(settings(data, optimizer="catch_up")))
    words = ["train", str(recipe), "--folder", str(tmp_path / "run"), "--from", str(finished), "--weights-only"]
    assert main([*words, "train.steps=3"]) == 0
    assert "weights of" in capsys.readouterr().out
    assert main([*words, "train.steps=4"]) == 0
    said = capsys.readouterr().out
    assert "resuming after step 3" in said
    assert "weights of" not in said
    assert [record["step"] for record in read_metrics(tmp_path / "run", "train")] == [1, 2, 3, 4]


def test_weights_alone_start_everything_else_anew(data, finished, tmp_path, capsys):
    trainer = started(settings(data, optimizer="dense"), tmp_path / "run", finished)
    expected = saved_weights(finished)
    found = weights_of(trainer)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert (trainer.start, trainer.state.position, trainer.engine.step_count) == (0, 0, 0)
    moments = [piece for piece in trainer.engine.parameter_shards() if piece.kind != "weight"]
    assert not any(bool(tensor.any()) for piece in moments for _, tensor in piece.chunks)
    for one in (one for shard in trainer.optimizer.shards for one in shard.optimizers):
        assert not bool(one.moments.first.any() | one.moments.second.any())
    lines = {line[:28].strip(): line[28:].split()[:2] for line in capsys.readouterr().out.splitlines()}
    assert lines["backbone"] == ["25", "25"]
    assert lines["tables v.0"] == lines["tables v.1"] == ["2", "2"]


def test_vanilla_gives_its_backbone_to_xgram_and_back(data, tmp_path, fresh, capsys):
    vanilla, xgram = small_config(data, "vanilla", train={"steps": 2}), small_config(data, train={"steps": 2})
    for name, config in (("vanilla", vanilla), ("xgram", xgram)):
        assert Trainer(config, tmp_path / name, fresh=False).run() == 0
    capsys.readouterr()
    found, backbone = (
        weights_of(started(xgram, tmp_path / "one", tmp_path / "vanilla")),
        saved_weights(tmp_path / "vanilla"),
    )
    said = capsys.readouterr().out
    assert "not in the checkpoint: initial values" in next(
        line for line in said.splitlines() if line.startswith("tables v.0")
    )
    initial = fresh(xgram)
    for name, value in found.items():
        assert torch.equal(value, backbone[name] if name in backbone else initial[name]), name
    found = weights_of(started(vanilla, tmp_path / "two", tmp_path / "xgram"))
    given = saved_weights(tmp_path / "xgram")
    assert all(torch.equal(value, given[name]) for name, value in found.items())
    assert "not in this model" in capsys.readouterr().out


def test_views_in_both_are_taken(data, finished, tmp_path, fresh):
    config = settings(data, sites={"v": {"views": 3, "kernels": [3, 5]}})
    found, given, initial = (
        weights_of(started(config, tmp_path / "run", finished)),
        saved_weights(finished),
        fresh(config),
    )
    for name, value in found.items():
        if name.endswith(".gain"):
            assert torch.equal(value, torch.cat((given[name], torch.ones(1))))
        else:
            assert torch.equal(value, given[name] if name in given else initial[name]), name
    assert "tables.layers.0.v.2.rows" not in given


def read_by(weights, table, routing, view, token):
    """What a token reads, by the definition."""
    rows = weights[f"tables.{table}.rows"].double()
    if routing is None:
        return rows[token]
    gates = weights.get(f"tables.{table}.gates")
    total = torch.zeros(rows.shape[1], dtype=torch.float64)
    for row, coefficient in zip(*routing.views[view].of_token(token), strict=True):
        gate = 1.0 if gates is None else float(torch.sigmoid(gates[row].double()))
        total += float(coefficient) * gate * rows[row]
    return total


@pytest.mark.parametrize(("before", "after"), [(1.0, 0.5), (0.5, 1.0), (0.5, 0.25)])
def test_with_another_compression_tokens_with_rows_of_their_own_read_what_they_read(
    data, tmp_path, fresh, before, after
):
    source = tmp_path / "source"
    assert Trainer(settings(data, compression=before, optimizer="catch_up"), source, fresh=False).run() == 0
    config = settings(data, compression=after)
    trainer = started(config, tmp_path / "run", source)
    found, given, initial = weights_of(trainer), saved_weights(source), fresh(config)
    old = load_routing(source / "routing.npz") if before < 1 else None
    new = trainer.routing
    for view in range(2):
        table = f"layers.1.v.{view}"
        readers = np.zeros(len(found[f"tables.{table}.rows"]), dtype=int)
        for token in range(VOCABULARY):
            readers[[token] if new is None else new.views[view].of_token(token)[0]] += 1
        lone = 0
        for token in range(VOCABULARY):
            rows = np.array([token]) if new is None else new.views[view].of_token(token)[0]
            if (readers[rows] == 1).all():
                lone += 1
                vector = read_by(found, table, new, view, token)
                torch.testing.assert_close(vector, read_by(given, table, old, view, token), rtol=1e-5, atol=1e-7)
        assert lone == VOCABULARY if new is None else 20 < lone < VOCABULARY
        shared = readers > 1
        assert torch.equal(found[f"tables.{table}.rows"][shared], initial[f"tables.{table}.rows"][shared])


@pytest.mark.parametrize("gates", [True, False])
def test_row_gates_that_only_one_run_has_are_made_up_for(data, finished, tmp_path, gates):
    source = finished
    if gates:
        source = tmp_path / "source"
        assert Trainer(settings(data, row_gates=False), source, fresh=False).run() == 0
    trainer = started(settings(data, row_gates=gates), tmp_path / "run", source)
    found, given = weights_of(trainer), saved_weights(source)
    for token in (0, 5, 77, 300):
        vectors = [read_by(weights, "layers.0.v.1", trainer.routing, 1, token) for weights in (found, given)]
        torch.testing.assert_close(*vectors, rtol=1e-5, atol=1e-8)


def test_ranks_take_their_rows_and_columns(data, finished, tmp_path):
    given = saved_weights(finished)
    config = settings(data)
    config = config.model_copy(update={"parallel": config.parallel.model_copy(update={"tensor": 2, "engine": "hsdp"})})
    for rank, (rows, tables, backbone) in enumerate(run_ranks(taken_on_ranks, 4, config, tmp_path / "run", finished)):
        for name, values in tables.items():
            expected = given[f"tables.{name}"][rows].numpy()
            width = expected.shape[-1] // 2
            if name.endswith(".rows"):
                expected = expected[:, rank % 2 * width : (rank % 2 + 1) * width]
            assert np.array_equal(values, expected), name
        vocabulary = VOCABULARY // 2
        part = given["backbone.embedding"][rank % 2 * vocabulary : (rank % 2 + 1) * vocabulary]
        assert np.array_equal(backbone, part.numpy())


def taken_on_ranks(ranks, config, folder, source):
    trainer = started(config, folder, source, ranks=ranks)
    store = trainer.lookup.shards
    tables = {name: value.numpy().copy() for name, value in table_tensors(store).items()}
    embedding = full_parameters(trainer.engine)["embedding"].numpy().copy()
    return store[0].row_ids.numpy(), tables, embedding


@pytest.fixture(scope="module")
def other_data(data, tmp_path_factory):
    """Other documents, the same tokenizer."""
    folder = tmp_path_factory.mktemp("other")
    lines = "".join(json.dumps({"text": text + " more"}) + "\n" for text in make_documents(60))
    (folder / "raw.jsonl").write_text(lines, encoding="utf-8")
    words = ["--tokenizer", str(data / "tokenizer.json"), "--chunk-tokens", str(4 * LENGTH), "--validation", "0.2"]
    assert main(["prepare", "--source", f"web={folder / 'raw.jsonl'}", *words, "--out", str(folder / "out")]) == 0
    return folder / "out"


def test_other_data_is_for_a_new_run_with_the_weights(data, other_data, finished, tmp_path):
    routing = {"file": str(finished / "routing.npz"), "vip": 10, "buckets": 4}
    config = settings(other_data, optimizer="catch_up", routing=routing)
    with pytest.raises(UserError, match=r"belongs to another data set .*--from PATH --weights-only"):
        started(config, tmp_path / "run", finished, weights_only=False)
    shutil.copytree(finished, tmp_path / "own")
    with pytest.raises(UserError, match=r"belongs to another data set .*--from PATH --weights-only"):
        Trainer(config, tmp_path / "own", fresh=False)
    trainer = started(config, tmp_path / "run", finished)
    assert torch.equal(weights_of(trainer)["backbone.embedding"], saved_weights(finished)["backbone.embedding"])


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize(
    ("section", "changes", "sentence"),
    [
        ("model", {"vocabulary": 352}, r"model\.vocabulary = 320, but this recipe has 352"),
        ("model", {"width": 64}, r"model\.width = 32, but this recipe has 64"),
        ("model", {"layers": 3}, r"model\.layers = 2, but this recipe has 3"),
    ],
)
def test_another_model_is_one_sentence(data, finished, tmp_path, section, changes, sentence, weights_only):
    config = settings(data, optimizer="catch_up")
    config = config.model_copy(update={section: getattr(config, section).model_copy(update=changes)})
    with pytest.raises(UserError, match=sentence):
        started(config, tmp_path / "run", finished, weights_only=weights_only)


@pytest.mark.parametrize(
    ("memory", "sentence"),
    [
        ({"optimizer": "dense"}, "table optimizer 'catch_up', this run has 'dense'; set memory.optimizer=catch_up"),
        ({"compression": 0.25}, r"another routing; set memory\.routing\.file=.*routing\.npz, or .*--weights-only"),
        ({"compression": 1.0}, r"another routing; set memory\.compression as it was, or .*--weights-only"),
        ({"method": "vanilla", "sites": {}}, r"saved with tables, this run is without.*--weights-only"),
        (
            {"sites": {"v": {"views": 2, "kernels": [7, 5]}}},
            r"extractors\.0\.content' is \[3, 16\] there and \[7, 16\]",
        ),
        ({"row_gates": False}, r"gates' is not in this run"),
    ],
)
def test_a_state_that_does_not_fit_says_what_would(data, finished, tmp_path, memory, sentence):
    config = settings(data, **{"optimizer": "catch_up", **memory})
    with pytest.raises(UserError, match=sentence):
        started(config, tmp_path / "run", finished, weights_only=False)


def test_another_tokenizer_is_refused(data, finished, tmp_path):
    shutil.copytree(finished, tmp_path / "source")
    for folder in (tmp_path / "source" / "checkpoints").iterdir():
        edit_manifest(folder, lambda tree: tree["run"].update(tokenizer={"sha256": "f" * 64}))
    with pytest.raises(UserError, match="trained with another tokenizer"):
        started(settings(data), tmp_path / "run", tmp_path / "source")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--weights-only"], "name the checkpoint or run with --from"),
        (["--from", "missing"], "'missing' does not exist"),
        (["--from", "."], "neither a checkpoint nor the folder of a run"),
        (["--fresh", "--from", "RUN/checkpoints"], "which --fresh clears; choose another --folder"),
    ],
)
def test_a_mistake_is_one_sentence(data, finished, tmp_path, capsys, monkeypatch, words, sentence):
    monkeypatch.chdir(tmp_path)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(dump_config(settings(data)))
    shutil.copytree(finished, tmp_path / "RUN")
    assert main(["train", str(recipe), "--folder", "RUN", *words]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert len(error.splitlines()) == 1
    assert (tmp_path / "RUN" / "checkpoints" / "step-00000008").exists()
