"""An exported folder loads with transformers alone and is the same model."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from inference_helpers import recipe, some_tokens, trained

from xgram_dist.cli.main import main
from xgram_dist.inference import export as shards
from xgram_dist.inference.generate import generate
from xgram_dist.inference.hf.decoder_tables import RowFormat
from xgram_dist.inference.model import Checkpoint

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def runs(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("export")
    trained(recipe(data, "all", memory={"optimizer": "catch_up"}), folder / "hashed")
    trained(recipe(data, "qk", memory={"compression": 1.0}), folder / "own-rows")
    trained(recipe(data, memory={"method": "vanilla", "sites": {}}), folder / "vanilla")
    return {name: folder / name for name in ("hashed", "own-rows", "vanilla")}


def loaded(folder: Path, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(str(folder), trust_remote_code=True, **options).eval()


@pytest.mark.parametrize("name", ["hashed", "own-rows", "vanilla"])
def test_logits_and_generated_tokens_are_the_same(runs: dict[str, Path], name: str, tmp_path: Path) -> None:
    assert main(["export", str(runs[name]), "--to", "hf", str(tmp_path / "hf")]) == 0
    ours = Checkpoint.find(runs[name]).load(CPU)
    theirs = loaded(tmp_path / "hf")
    tokens = some_tokens(ours.checkpoint.config, 3, 24)
    with torch.no_grad():
        found = theirs(tokens).logits
    torch.testing.assert_close(found, ours.logits(ours.hidden(tokens)), rtol=1e-5, atol=1e-5)
    prompts = [tokens[0, :9].tolist(), tokens[1, :5].tolist()]
    expected = list(zip(*generate(ours, prompts, 10), strict=True))
    padded = torch.tensor([prompts[0], [0] * 4 + prompts[1]])
    mask = torch.tensor([[1] * 9, [0] * 4 + [1] * 5])
    made = theirs.generate(padded, attention_mask=mask, max_new_tokens=10, do_sample=False, eos_token_id=None)
    assert made[:, 9:].tolist() == [list(row) for row in expected]
    stock = name == "vanilla"
    assert type(theirs).__name__ == ("OlmoeForCausalLM" if stock else "XgramForCausalLM")
    assert (tmp_path / "hf" / "modeling_xgram.py").exists() != stock


def test_beams_carry_their_own_vectors(runs: dict[str, Path], tmp_path: Path) -> None:
    assert main(["export", str(runs["hashed"]), "--to", "hf", str(tmp_path / "hf")]) == 0
    model = loaded(tmp_path / "hf")
    prompt = some_tokens(Checkpoint.find(runs["hashed"]).config, 1, 8)
    options = {"max_new_tokens": 8, "num_beams": 4, "do_sample": False, "eos_token_id": None}
    cached = model.generate(prompt, **options)
    assert cached.tolist() == model.generate(prompt, use_cache=False, **options).tolist()


def test_the_folder_needs_nothing_of_ours_and_has_its_tokenizer(runs: dict[str, Path], tmp_path: Path) -> None:
    words = ["export", str(runs["hashed"]), "--to", "hf", str(tmp_path / "hf"), "--dtype", "bf16"]
    assert main(words) == 0
    code = (
        "import sys; sys.modules['xgram_dist'] = None\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        f"folder = {str(tmp_path / 'hf')!r}\n"
        "model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype='bfloat16')\n"
        "tokenizer = AutoTokenizer.from_pretrained(folder)\n"
        "ids = tokenizer('the table of état', return_tensors='pt')\n"
        "assert ids['input_ids'].shape[1] > 2\n"
        "out = model.generate(ids['input_ids'], max_new_tokens=4)\n"
        "assert 'the table of état' in tokenizer.decode(out[0])\n"
        "model(ids['input_ids'], labels=ids['input_ids']).loss.backward()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    card = (tmp_path / "hf" / "README.md").read_text()
    assert "4 of 4 steps" in card
    assert "bfloat16" in card
    assert main(words) == 2  # it holds something now


def test_many_shards_are_one_model(runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "SHARD_BYTES", 100_000)
    assert main(["export", str(runs["hashed"]), "--to", "hf", str(tmp_path / "hf")]) == 0
    assert len(list((tmp_path / "hf").glob("backbone-*-of-*.safetensors"))) > 1
    assert len(list((tmp_path / "hf").glob("tables-*-of-*.safetensors"))) > 1
    ours = Checkpoint.find(runs["hashed"]).load(CPU)
    tokens = some_tokens(ours.checkpoint.config, 1, 24)
    with torch.no_grad():
        found = loaded(tmp_path / "hf")(tokens).logits
    torch.testing.assert_close(found, ours.logits(ours.hidden(tokens)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("row_format", "bits", "error"), [("bf16", 16, 2**-8), ("fp8", 8, 2**-4), ("int8", 8, 2**-7)])
def test_stored_rows_are_as_near_as_their_bits_allow(row_format: str, bits: int, error: float) -> None:
    stored = RowFormat(row_format, (40, 24))
    rows = torch.randn(50, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 2, 50)[:, None]
    rows[7] = 0
    encoded = stored.encode(rows)
    assert encoded.shape == (50, stored.stored_width)
    scales = 0 if row_format == "bf16" else 2 * 16
    assert encoded[0].numel() * encoded.element_size() * 8 == 64 * bits + scales
    largest = torch.cat([part.abs().amax(1, keepdim=True).expand_as(part) for part in rows.split((40, 24), 1)], 1)
    assert ((stored.decode(encoded) - rows).abs() <= error * largest).all()


def test_int4_rows_have_a_scale_for_32_values() -> None:
    stored = RowFormat("int4", (40, 25))  # groups of 32, 8 and 25; an odd number of columns
    rows = torch.randn(50, 65, generator=torch.Generator().manual_seed(0))
    rows[:, 32:40] *= 1000
    encoded = stored.encode(rows)
    assert encoded.shape == (50, 33 + 2 * 3)
    for part, found in zip(rows.split((32, 8, 25), 1), stored.decode(encoded).split((32, 8, 25), 1), strict=True):
        assert ((part - found).abs() <= 0.51 / 7 * part.abs().amax(1, keepdim=True) * 1.01).all()


@pytest.mark.parametrize("name", ["hashed", "own-rows"])
@pytest.mark.parametrize(("row_format", "nearer"), [("int8", 0.02), ("fp8", 0.1), ("int4", 0.4)])
def test_a_folder_with_quantised_tables_is_nearly_the_same_model(
    runs: dict[str, Path], name: str, row_format: str, nearer: float, tmp_path: Path
) -> None:
    assert main(["export", str(runs[name]), "--to", "hf", str(tmp_path / "hf"), "--tables", row_format]) == 0
    ours = Checkpoint.find(runs[name]).load(CPU)
    tokens = some_tokens(ours.checkpoint.config, 3, 24)
    exact = ours.logits(ours.hidden(tokens))
    with torch.no_grad():
        found = loaded(tmp_path / "hf")(tokens).logits
        zeroed = loaded(tmp_path / "hf")
        for view in zeroed.tables.views:
            view.rows.zero_()
        without = zeroed(tokens).logits
    assert 0 < (found - exact).norm() < nearer * (without - exact).norm()
    # The checkpoint itself, read as it would be exported.
    read = Checkpoint.find(runs[name]).load(CPU, row_format=row_format)
    torch.testing.assert_close(found, read.logits(read.hidden(tokens)), rtol=1e-4, atol=1e-4)


def test_damaged_rows_are_not_exported(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import json
    import shutil

    shutil.copytree(runs["own-rows"], tmp_path / "run")
    file = Checkpoint.find(tmp_path / "run").folder / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    length = int.from_bytes(content[:8], "little")
    begin = json.loads(content[8 : 8 + length])["tables.layers.0.qk.0.rows@0,0"]["data_offsets"][0]
    content[8 + length + begin + 50] ^= 1
    file.write_bytes(content)
    assert main(["export", str(tmp_path / "run"), "--to", "hf", str(tmp_path / "hf")]) == 2
    assert "checksum does not match" in capsys.readouterr().err
    assert not (tmp_path / "hf").exists()
