"""Token by token with a cache is the full forward; any batch, padded at the left; text streams whole characters."""

from pathlib import Path

import pytest
import torch
from inference_helpers import recipe, some_tokens, trained

from xgram_dist.cli.main import main
from xgram_dist.data.tokenizer import load_tokenizer
from xgram_dist.inference.generate import Sampling, TextStream, generate, sample
from xgram_dist.inference.hf.decoder import Cache
from xgram_dist.inference.model import Checkpoint, Model

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=["all", "qk", "documents"])
def model(request: pytest.FixtureRequest, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Model:
    config = recipe(data, request.param if request.param != "documents" else "v")
    if request.param == "documents":
        masked = config.model.model_copy(update={"document_masking": True})
        config = config.model_copy(update={"model": masked})
    folder = tmp_path_factory.mktemp("runs") / request.param
    trained(config, folder)
    return Checkpoint.find(folder).load(CPU)


def sequence(model: Model, length: int, seed: int) -> list[int]:
    tokens = some_tokens(model.checkpoint.config, length, seed=seed).tolist()
    tokens[length // 2] = model.checkpoint.tokenizer.end_of_text
    return tokens


def full(model: Model, tokens: list[int]) -> torch.Tensor:
    return model.logits(model.hidden(torch.tensor([tokens])))[0]


def test_token_by_token_is_the_full_forward(model: Model) -> None:
    tokens = sequence(model, 24, 1)
    cache = Cache()
    # A first piece, a piece of several tokens onto a cache, then single tokens.
    pieces = [tokens[:5], tokens[5:9], *([token] for token in tokens[9:])]
    found = torch.cat([model.logits(model.hidden(torch.tensor([piece]), cache))[0] for piece in pieces])
    torch.testing.assert_close(found, full(model, tokens), rtol=1e-5, atol=1e-5)


def test_a_padded_batch_is_each_sequence_alone(model: Model) -> None:
    rows = [sequence(model, length, length) for length in (20, 13, 17)]
    prompt = 9
    padded = [[0] * (len(rows[0]) - len(row)) + row for row in rows]
    real = torch.tensor([[position >= len(rows[0]) - len(row) for position in range(len(rows[0]))] for row in rows])
    tokens, cache = torch.tensor(padded), Cache()
    found = [model.logits(model.hidden(tokens[:, :prompt], cache, real[:, :prompt]))]
    for end in range(prompt + 1, len(rows[0]) + 1):
        found.append(model.logits(model.hidden(tokens[:, end - 1 : end], cache, real[:, :end])))
    together = torch.cat(found, 1)
    for number, row in enumerate(rows):
        torch.testing.assert_close(together[number, -len(row) :], full(model, row), rtol=1e-5, atol=1e-5)


def test_greedy_generation_is_the_repeated_full_forward(model: Model) -> None:
    prompts = [sequence(model, 6, 3), sequence(model, 11, 4)]
    found = list(zip(*generate(model, prompts, 8), strict=True))
    for prompt, tokens in zip(prompts, found, strict=True):
        expected = list(prompt)
        for _ in range(8):
            expected.append(int(full(model, expected)[-1].argmax()))
        assert list(tokens) == expected[len(prompt) :]


def test_generation_ends_where_the_context_does(model: Model) -> None:
    assert len(list(generate(model, [sequence(model, 30, 5)], 100))) == model.context - 30


def test_top_p_keeps_the_likeliest_and_no_others() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]])).repeat(4000, 1)
    generator = torch.Generator().manual_seed(0)
    counts = torch.bincount(sample(logits, Sampling(1.0, 0.7), generator), minlength=4) / 4000
    torch.testing.assert_close(counts, torch.tensor([0.625, 0.375, 0, 0]), atol=0.03, rtol=0)
    assert set(sample(logits, Sampling(1.0, 0.01), generator).tolist()) == {0}


def test_characters_of_several_tokens_are_shown_whole(data: Path) -> None:
    tokenizer = load_tokenizer(data)
    text = "état 数据 ∑ the table"
    stream = TextStream(tokenizer)
    pieces = [stream.add(int(token)) for token in tokenizer.encode_batch([text])[0]]
    assert "".join(pieces) == text
    assert "" in pieces  # some token was only a part of a character


def test_the_command_says_what_is_wrong_before_it_loads(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(recipe(data), tmp_path / "run")
    run = str(tmp_path / "run")
    capsys.readouterr()
    assert main(["generate", run, "--prompt", "the table", "--max-tokens", "5"]) == 0
    output = capsys.readouterr()
    assert output.out
    assert "5 tokens" in output.err
    monkeypatch.setattr(Checkpoint, "load", None)
    assert main(["generate", run, "--prompt", "row " * 100]) == 2
    assert "but the model's context is 32" in capsys.readouterr().err
    assert main(["generate", run, "--prompt", "a", "--top-p", "0"]) == 2
    assert "--top-p 0.0 above 0" in capsys.readouterr().err
