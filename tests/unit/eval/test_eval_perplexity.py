"""Perplexity by source and band adds up to that of the training model."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from inference_helpers import recipe, trained, training_logits

from xgram_dist.cli.main import main
from xgram_dist.data.dataset import PreparedData
from xgram_dist.eval.perplexity import bands_of
from xgram_dist.inference.model import Checkpoint


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor, torch.Tensor]:
    """(run folder, all training sequences, the loss of each of their next tokens by the training model)."""
    folder = tmp_path_factory.mktemp("perplexity") / "run"
    trainer = trained(recipe(data), folder)
    split = PreparedData.open(data, "train")
    chunks = [split.chunk(0, number).astype(np.int64) for number in range(sum(split.shard_chunks[0]))]
    tokens = torch.from_numpy(np.concatenate(chunks)).view(-1, trainer.config.model.sequence_length)
    logits = training_logits(trainer, tokens)[:, :-1]
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    return folder, tokens, losses.view(len(tokens), -1)


def figures(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    capsys.readouterr()
    assert main(["perplexity", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_bands_are_the_training_models_losses_grouped(run, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, tokens, losses = run
    found = figures(capsys, str(folder), str(data), "--split", "train", "--sequences", "100000", "--batch", "5")
    assert found["all"]["tokens"] == losses.numel()
    assert found["all"]["loss"] == pytest.approx(float(losses.mean()), rel=1e-5)
    assert found["sources"]["web"] == found["all"]
    routing = Checkpoint.find(folder).reader.routing
    assert routing is not None
    sparse = set()
    for token in range(routing.vocabulary):  # a token is sparse or VIP where its first row serves it alone
        first = routing.views[0].of_token(token)[0][0]
        if first < routing.vip_rows:
            continue
        bucket = int(np.searchsorted(routing.bucket_start, first, side="right")) - 1
        if routing.bucket_sparse[bucket]:
            sparse.add(token)
    for of, part in (("of", tokens[:, 1:]), ("after", tokens[:, :-1])):
        wanted = torch.tensor([[int(token) in sparse for token in row] for row in part])
        assert found["bands"]["sparse"][of]["tokens"] == int(wanted.sum())
        assert found["bands"]["sparse"][of]["loss"] == pytest.approx(float(losses[wanted].mean()), rel=1e-5)
        total = sum(one[of]["tokens"] * (one[of]["loss"] or 0) for one in found["buckets"])
        assert math.isclose(total, found["all"]["loss"] * found["all"]["tokens"], rel_tol=1e-9)


def test_the_most_frequent_tokens_are_vip(run) -> None:
    routing = Checkpoint.find(run[0]).reader.routing
    assert routing is not None
    bands = bands_of(routing)
    counts = np.bincount(run[1].flatten(), minlength=routing.vocabulary)
    vip = bands.of_token == 0
    assert vip.sum() == 10
    assert counts[vip].min() >= np.sort(counts)[-15]


def test_a_vanilla_run_goes_by_the_bands_of_another(
    run, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(recipe(data, memory={"method": "vanilla", "sites": {}}), tmp_path / "vanilla")
    theirs = figures(capsys, str(tmp_path / "vanilla"), str(data), "--routing", str(run[0] / "routing.npz"))
    ours = figures(capsys, str(run[0]), str(data))
    assert [one["of"]["tokens"] for one in theirs["buckets"]] == [one["of"]["tokens"] for one in ours["buckets"]]
    assert main(["perplexity", str(run[0]), str(data)]) == 0
    assert "perplexity after" in capsys.readouterr().out


def test_data_of_another_tokenizer_is_refused(run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = "".join(json.dumps({"text": "other words " * 50}) + "\n" for _ in range(40))
    (tmp_path / "raw.jsonl").write_text(lines)
    words = ["--train-bpe", "270", "--chunk-tokens", "64", "--validation", "0.2", "--workers", "1"]
    out = ["--out", str(tmp_path / "other")]
    assert main(["prepare", "--source", f"web={tmp_path / 'raw.jsonl'}", *words, *out]) == 0
    assert main(["perplexity", str(run[0]), str(tmp_path / "other")]) == 2
    assert "was made with another tokenizer" in capsys.readouterr().err


def test_row_formats_are_compared_with_the_first(run, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = str(run[0]), str(data), "--tables"
    formats = figures(capsys, *words, "fp32", "int4")["tables"]
    for row_format, found in formats.items():
        alone = figures(capsys, *words, row_format)
        assert found["all"] == alone["all"]
        assert found["bands"] == alone["bands"]
    assert 4 < formats["fp32"]["table_bytes"] / formats["int4"]["table_bytes"] < 8
    assert main(["perplexity", *words, "fp32", "int4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    change = 100 * (formats["int4"]["all"]["perplexity"] / formats["fp32"]["all"]["perplexity"] - 1)
    assert f"{formats['fp32']['all']['perplexity']:.2f}" in lines[2]
    assert f"{change:+.3f} %" in lines[3]
