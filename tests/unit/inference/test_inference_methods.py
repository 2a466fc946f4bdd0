"""Every method at inference: its training model, token by token, exported; and resumed on another number of ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from inference_helpers import trained
from train_helpers import small_tree

from xgram_dist.cli.main import main
from xgram_dist.config import build_config
from xgram_dist.inference.generate import generate
from xgram_dist.inference.hf.decoder import Cache
from xgram_dist.inference.model import Checkpoint, Model
from xgram_dist.train.trainer import Trainer

CPU = torch.device("cpu")
MEMORY: dict[str, dict[str, Any]] = {
    "ple": {"compression": 1.0, "sites": {"h": {"views": 2}, "v": {"views": 1}}},
    "retoken": {"compression": 1.0, "retoken": {"views": 2}},
    "mort": {"compression": 1.0, "mort": {"views": 3, "top": 2}},
    "stem": {"compression": 1.0, "stem": {"layers": [1]}},
    "engram": {"compression": 1.0, "engram": {"heads": 2, "rows": 200, "taps": 3}},
    "mole": {"mole": {"experts": 2, "width": 24}},
    "scone": {"scone": {"grams": 50, "longest": 3, "layers": 1}},
    "engram-authors": {
        "compression": 1.0,
        "engram": {
            "heads": 2,
            "rows": 200,
            "kernel_init": "identity",
            "layer_primes": True,
            "pad_token": 2,
            "gate_eps": 1e-2,
            "output_eps": 1e-2,
        },
    },
    "engram-documents": {"compression": 1.0, "engram": {"heads": 2, "rows": 200, "orders": [1, 3]}},
}


@pytest.fixture(scope="module", params=MEMORY)
def run(request: pytest.FixtureRequest, data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Trainer, Path]:
    method = request.param.split("-")[0]
    tree = small_tree(data, method)
    tree["memory"] |= MEMORY[request.param]
    tree["model"]["document_masking"] = "documents" in request.param
    tree["train"] |= {"global_batch": 4, "micro_batch": 1, "validation_sequences": 4}
    tree["optimizer"] = {"learning_rate": 0.02, "warmup_share": 0.0}
    folder = tmp_path_factory.mktemp("methods") / method
    return trained(build_config(tree), folder), folder


@pytest.fixture(scope="module")
def model(run: tuple[Trainer, Path]) -> Model:
    return Checkpoint.find(run[1]).load(CPU)


def tokens_of(model: Model, *shape: int) -> torch.Tensor:
    """Of the data, so that f-grams occur, with an end of text in the middle."""
    text = model.checkpoint.tokenizer.encode_batch(
        ["the table of the row token the table of état the rank step while"]
    )[0]
    flat = torch.from_numpy(text.astype("int64"))
    tokens = flat.repeat(-(-torch.Size(shape).numel() // len(flat)))[: torch.Size(shape).numel()].reshape(shape)
    tokens[..., shape[-1] // 2] = model.checkpoint.tokenizer.end_of_text
    return tokens


@torch.no_grad()
def training_logits(trainer: Trainer, tokens_BT: torch.Tensor) -> torch.Tensor:
    from xgram_dist.model.build import build_lookup

    network, lookup = trainer.engine.model, trainer.lookup
    if hasattr(lookup, "planner"):
        working = lookup.fetch(lookup.planner.plan(tokens_BT, whole=True)[0], training=False)
    else:
        again = build_lookup(trainer.config, None, CPU, None, trainer.keys)
        working = again.fetch(again.plan(tokens_BT, whole=True).result()[0], training=False)
    one = torch.tensor(1.0, dtype=torch.float64)
    return network(tokens_BT, working.slots, working.values, one) @ network.head.weight.T


def test_the_decoder_is_the_training_model(run: tuple[Trainer, Path], model: Model) -> None:
    tokens = tokens_of(model, 2, 30)
    found = model.logits(model.hidden(tokens))
    torch.testing.assert_close(found, training_logits(run[0], tokens), rtol=1e-5, atol=1e-5)
    if model.checkpoint.config.memory.method == "scone":
        assert model.key_map is not None
        assert (model.key_map(tokens, None, None) > 0).any()


def test_token_by_token_is_the_full_forward(model: Model) -> None:
    tokens, cache = tokens_of(model, 1, 24), Cache()
    pieces = [tokens[:, :5], tokens[:, 5:9], *tokens[:, 9:].split(1, dim=1)]
    found = torch.cat([model.logits(model.hidden(piece, cache)) for piece in pieces], 1)
    torch.testing.assert_close(found, model.logits(model.hidden(tokens)), rtol=1e-5, atol=1e-5)


def test_a_padded_batch_is_each_sequence_alone(model: Model) -> None:
    whole = tokens_of(model, 1, 20)[0]
    rows = [whole, whole[3:16], whole[1:18]]
    padded = torch.stack([torch.nn.functional.pad(row, (20 - len(row), 0)) for row in rows])
    real = torch.stack([torch.arange(20) >= 20 - len(row) for row in rows])
    cache = Cache()
    found = [model.logits(model.hidden(padded[:, :9], cache, real[:, :9]))]
    for end in range(10, 21):
        found.append(model.logits(model.hidden(padded[:, end - 1 : end], cache, real[:, :end])))
    together = torch.cat(found, 1)
    for number, row in enumerate(rows):
        alone = model.logits(model.hidden(row[None]))[0]
        torch.testing.assert_close(together[number, -len(row) :], alone, rtol=1e-5, atol=1e-5)


def test_the_exported_folder_is_the_same_model(run: tuple[Trainer, Path], model: Model, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    assert main(["export", str(run[1]), "--to", "hf", str(tmp_path / "hf")]) == 0
    theirs = AutoModelForCausalLM.from_pretrained(str(tmp_path / "hf"), trust_remote_code=True).eval()
    tokens = tokens_of(model, 2, 24)
    with torch.no_grad():
        found = theirs(tokens).logits
    torch.testing.assert_close(found, model.logits(model.hidden(tokens)), rtol=1e-5, atol=1e-5)
    prompts = [tokens[0, :9].tolist(), tokens[1, 2:7].tolist()]
    expected = list(zip(*generate(model, prompts, 8), strict=True))
    padded = torch.tensor([prompts[0], [0] * 4 + prompts[1]])
    mask = torch.tensor([[1] * 9, [0] * 4 + [1] * 5])
    made = theirs.generate(padded, attention_mask=mask, max_new_tokens=8, do_sample=False, eos_token_id=None)
    assert made[:, 9:].tolist() == [list(row) for row in expected]
    names = {table["name"] for table in theirs.config.tables}
    method = model.checkpoint.config.memory.method
    if method == "mole":
        assert names == {f"layers.{layer}.experts.{expert}" for layer in range(2) for expert in range(2)}
        assert not any("experts.experts" in name for name, _ in theirs.named_parameters())
    if method == "scone":
        assert names == {"layers.all.input.0"}
        assert not any("side" in name for name, _ in theirs.named_parameters())


def test_perplexity_and_inspect_know_the_method(run: tuple[Trainer, Path], data: Path, capsys: Any) -> None:
    capsys.readouterr()
    assert main(["perplexity", str(run[1]), str(data)]) == 0
    assert main(["inspect", str(run[1]), "--verify"]) == 0
    assert run[0].config.memory.method in capsys.readouterr().out
