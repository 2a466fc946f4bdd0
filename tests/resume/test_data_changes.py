"""Runs of documents that are kept whole, and runs whose data changes on the way: stages, skipped positions, and a
change that is asked for by name."""

import json

import numpy as np
import pytest
from test_resume import outcome, run_until, small_train
from train_helpers import LENGTH, make_documents, read_metrics, small_config

from xgram_dist.cli.main import main
from xgram_dist.config import dump_config
from xgram_dist.data.manifest import read_manifest
from xgram_dist.errors import UserError
from xgram_dist.train.trainer import Trainer

STEP = 4 * LENGTH
STAGES = [
    {"from_tokens": 0, "sequence_length": LENGTH // 2},
    {"from_tokens": 4 * STEP, "sequence_length": LENGTH},
]


def settings(data, **keys):
    train = {**small_train(), "steps": 8, "micro_batch": 1, "validation_sequences": 4}
    return small_config(data, data={"path": str(data), **keys}, train=train, checkpoint={"every": 3})


@pytest.mark.parametrize("keys", [{"stages": STAGES}, {"skip": [[6, 11], [20, 24]]}], ids=["stages", "skip"])
def test_a_lost_run_with_stages_or_skips_resumes_to_the_last_bit(data, tmp_path, monkeypatch, keys):
    assert_resumes(settings(data, **keys), tmp_path, monkeypatch)


def test_a_lost_run_on_whole_documents_resumes_to_the_last_bit(data, tmp_path, monkeypatch):
    """With sequences that end in padding, and micro-batches of different numbers of labels."""
    texts = [text[: 30 + 7 * number % 60] for number, text in enumerate(make_documents(300))]
    (tmp_path / "raw.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    source = ["--source", f"web={tmp_path / 'raw.jsonl'}", "--tokenizer", str(data / "tokenizer.json")]
    words = ["--chunk-tokens", str(4 * LENGTH), "--whole-documents", str(LENGTH), "--validation", "0.1"]
    whole = tmp_path / "data"
    assert main(["prepare", *source, *words, "--workers", "1", "--out", str(whole)]) == 0
    assert read_manifest(whole).sources[0].train.padding > 0
    config = settings(whole, packing="whole_documents")
    config = config.model_copy(update={"model": config.model.model_copy(update={"label_masking": True})})
    assert_resumes(config, tmp_path, monkeypatch)


def assert_resumes(config, tmp_path, monkeypatch):
    assert Trainer(config, tmp_path / "whole", fresh=False).run() == 0
    expected, expected_weights = outcome(tmp_path / "whole")
    assert read_metrics(tmp_path / "whole", "end")[0]["tokens"] == 8 * STEP
    for lost_at in (4, 5, 8):
        folder = tmp_path / f"lost-{lost_at}"
        run_until(config, folder, lost_at, monkeypatch)
        assert Trainer(config, folder, fresh=False).run() == 0
        losses, weights = outcome(folder)
        assert losses == expected
        assert all(np.array_equal(weights[name], expected_weights[name]) for name in expected_weights)


def test_another_sequence_length_needs_the_flag_and_is_recorded(data, tmp_path, monkeypatch, capsys):
    run_until(settings(data), tmp_path / "run", 5, monkeypatch)
    changed = settings(data, stages=[{"from_tokens": 0, "sequence_length": LENGTH // 2}])
    with pytest.raises(UserError, match="--accept-data-change"):
        Trainer(changed, tmp_path / "run", fresh=False)
    (tmp_path / "changed.yaml").write_text(dump_config(changed))
    words = ["train", str(tmp_path / "changed.yaml"), "--folder", str(tmp_path / "run"), "--accept-data-change"]
    assert main(words) == 0
    assert "the data changes after step 3, at position 12" in capsys.readouterr().out
    change = read_metrics(tmp_path / "run", "data_change")
    assert [(record["step"], record["position"]) for record in change] == [(3, 12)]
    assert change[0]["before"][0]["sequence_length"] == LENGTH
    assert change[0]["after"][0]["sequence_length"] == LENGTH // 2
    assert read_metrics(tmp_path / "run", "end")[-1]["complete"]
