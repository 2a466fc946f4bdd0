"""A model opened from a checkpoint computes what the training model did, whatever layout saved it."""

import json
from pathlib import Path

import pytest
import torch
from inference_helpers import recipe, some_tokens, trained, training_logits

from xgram_dist.errors import UserError
from xgram_dist.inference.model import Checkpoint
from xgram_dist.train.trainer import Trainer

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("sites", "changes"),
    [
        ("v", {"memory": {"optimizer": "dense"}}),
        ("v", {"memory": {"optimizer": "catch_up", "learning_rate": {"vip_multiplier": 2.0}}}),
        ("all", {"memory": {"compression": 1.0, "optimizer": "catch_up"}}),
        ("all", {"memory": {"row_gates": False}, "optimizer": {"warmup_share": 1.0}, "train": {"steps": 3}}),
        ("qk", {"memory": {"extraction": {"gate": False, "norm": False}}}),
        ("qk", {"memory": {"extraction": {"enabled": False}, "injection": {"depth_scaling": False}}}),
        ("v", {"model": {"document_masking": True}}),
        ("v", {"memory": {"method": "vanilla", "sites": {}}}),
    ],
    ids=["dense", "behind", "own-rows", "warm-up", "content-alone", "plain", "documents", "vanilla"],
)
def test_logits_are_those_of_the_training_model(data: Path, tmp_path: Path, sites: str, changes: dict) -> None:
    config = recipe(data, sites, **changes)
    if "model" in changes:
        base = recipe(data, sites).model
        config = config.model_copy(update={"model": base.model_copy(update=changes["model"])})
    trainer = trained(config, tmp_path / "run")
    tokens = some_tokens(config, 3, config.model.sequence_length)
    tokens[0, 7] = tokens[1, 3] = trainer.data.manifest.end_of_text
    model = Checkpoint.find(tmp_path / "run").load(CPU)
    found = model.logits(model.hidden(tokens))
    expected = training_logits(trainer, tokens) if model.tables else _vanilla_logits(trainer, tokens)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert expected.std() > 0.05


def _vanilla_logits(trainer: Trainer, tokens: torch.Tensor) -> torch.Tensor:
    model = trainer.engine.model
    with torch.no_grad():
        return model(tokens, tokens, {}, torch.tensor(1.0)) @ model.head.weight.T


def test_what_is_no_checkpoint_is_refused_in_one_sentence(data: Path, tmp_path: Path) -> None:
    trained(recipe(data), tmp_path / "run")
    with pytest.raises(UserError, match="does not exist; give a folder such as"):
        Checkpoint.find(tmp_path / "nowhere")
    with pytest.raises(UserError, match="is neither a checkpoint"):
        Checkpoint.find(tmp_path)
    folder = Checkpoint.find(tmp_path / "run").folder
    folder.rename(folder.with_name(".step-00000004.part"))
    (folder.with_name(".step-00000004.part") / "manifest.json").unlink()
    with pytest.raises(UserError, match="was never completed"):
        Checkpoint.find(folder.with_name(".step-00000004.part"))


def test_another_tokenizer_is_refused(data: Path, tmp_path: Path) -> None:
    trained(recipe(data), tmp_path / "run")
    other = tmp_path / "tokenizer.json"
    other.write_text((data / "tokenizer.json").read_text() + " ")
    with pytest.raises(UserError, match="is not the one the checkpoint was trained with"):
        Checkpoint.find(tmp_path / "run", other)
    assert Checkpoint.find(tmp_path / "run", data / "tokenizer.json").tokenizer.vocabulary == 300


def test_a_damaged_weight_is_refused_before_it_is_used(data: Path, tmp_path: Path) -> None:
    trained(recipe(data), tmp_path / "run")
    checkpoint = Checkpoint.find(tmp_path / "run")
    file = checkpoint.folder / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    length = int.from_bytes(content[:8], "little")
    begin = json.loads(content[8 : 8 + length])["backbone.embedding@0,0"]["data_offsets"][0]
    content[8 + length + begin + 100] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match="checksum does not match"):
        Checkpoint.find(tmp_path / "run").load(CPU)
