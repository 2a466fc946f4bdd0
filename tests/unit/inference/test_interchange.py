"""Published layouts: Gemma 3n's per-layer embeddings by transformers' implementation; Engram by its definition."""

from pathlib import Path

import numpy as np
import pytest
import torch
from inference_helpers import trained
from train_helpers import small_tree

from xgram_dist.cli.main import main
from xgram_dist.config import build_config
from xgram_dist.errors import UserError
from xgram_dist.inference.hf.decoder import Spec
from xgram_dist.inference.hf.decoder_layers import Positions
from xgram_dist.inference.hf.decoder_methods import Engram, KeyMap
from xgram_dist.inference.interchange import Gemma3nTables, engram_hash, read_engram
from xgram_dist.inference.model import Checkpoint

TOKENS = torch.tensor([5, 0, 319, 5, 77])


def gemma(layers: int, width: int, vocabulary: int) -> torch.nn.Module:
    from transformers import Gemma3nTextConfig
    from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextModel

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = Gemma3nTextConfig(
        vocab_size=vocabulary,
        vocab_size_per_layer_input=vocabulary,
        hidden_size_per_layer_input=width,
        num_hidden_layers=layers,
        head_dim=8,
        num_kv_shared_layers=0,
        layer_types=["full_attention"] * layers,
        activation_sparsity_pattern=[0.0] * layers,
        laurel_rank=4,
        **sizes,
    )
    return Gemma3nTextModel(config)


@pytest.fixture(scope="module")
def ple(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = small_tree(data, "ple")
    tree["memory"] |= {"compression": 1.0, "sites": {"v": {"views": 1}}}
    tree["optimizer"] = {"learning_rate": 0.02, "warmup_share": 0.0}
    folder = tmp_path_factory.mktemp("ple") / "run"
    trained(build_config(tree), folder)
    return folder


@torch.no_grad()
def test_what_ple_adds_is_what_gemma_gives_its_layers(ple: Path, tmp_path: Path) -> None:
    assert main(["export", str(ple), "--to", "gemma3n", str(tmp_path / "out")]) == 0
    model = Checkpoint.find(ple).load(torch.device("cpu"))
    assert model.tables is not None
    values = model.tables.vectors(TOKENS)
    at = Positions(*[torch.zeros(1)] * 2, None, None, torch.arange(len(TOKENS))[None])
    added = [block.sites["v"](values, at, None, torch.float32)[0] for block in model.decoder.blocks]
    read = Gemma3nTables(tmp_path / "out", site="v")
    published = gemma(read.layers, read.width, 320)
    from safetensors.torch import load_file

    (rows,) = load_file(tmp_path / "out" / "model.safetensors").values()
    published.embed_tokens_per_layer.load_state_dict({"weight": rows})
    given = published.get_per_layer_inputs(TOKENS[None])[0]
    assert max(float(vectors.abs().max()) for vectors in added) > 0.01
    for layer, vectors in enumerate(added):
        torch.testing.assert_close(given[:, layer], vectors)
        torch.testing.assert_close(read.vectors(TOKENS)[f"layers.{layer}.v.0"], vectors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_folder_of_gemma_is_read(tmp_path: Path, dtype: torch.dtype) -> None:
    published = gemma(3, 8, 320).to(dtype)
    torch.nn.init.normal_(published.embed_tokens_per_layer.weight)
    published.save_pretrained(tmp_path)
    given = published.get_per_layer_inputs(TOKENS[None])[0].float()
    read = Gemma3nTables(tmp_path).vectors(TOKENS)
    assert torch.equal(torch.stack(list(read.values()), 1), given.detach())


def test_other_layouts_are_refused(ple: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(ple), "--to", "gemma3n", str(tmp_path / "out"), "--tables", "int8"]) == 2
    assert "--tables int8 is for --to hf" in capsys.readouterr().err
    with pytest.raises(UserError, match="cannot read"):
        Gemma3nTables(tmp_path)
    with pytest.raises(UserError, match="only hc_mult = 1"):
        read_engram({**ENGRAM, "hc_mult": 4}, 3, {})
    with pytest.raises(UserError, match="layer 2 has no Engram"):
        read_engram(ENGRAM, 2, {})
    with pytest.raises(UserError, match=r"no tensor 'embed\.weight'"):
        read_engram(ENGRAM, 3, {})
    with pytest.raises(UserError, match="engram_n_heads = None; it must be a whole number"):
        read_engram({key: value for key, value in ENGRAM.items() if key != "engram_n_heads"}, 3, {})
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 2}')
    with pytest.raises(UserError, match="hidden_size_per_layer_input = None"):
        Gemma3nTables(tmp_path)


ENGRAM = {
    "hidden_size": 24,
    "rms_norm_eps": 1e-6,
    "hc_mult": 1,
    "engram_layer_ids": [1, 3],
    "engram_max_ngram_size": 3,
    "engram_n_heads": 2,
    "engram_head_dim": 32,
    "engram_vocab_size": 200,
    "engram_compressed_vocab_size": 300,
    "engram_pad_token_id": 2,
}


def test_engram_reads_the_rows_and_gates_of_its_definition() -> None:
    random = torch.Generator().manual_seed(0)
    width, rows = ENGRAM["hidden_size"], 251 + 241 + 239 + 233 + 5  # some are padding
    tensors = {
        "embed.weight": torch.randn(rows, 32, generator=random).to(torch.float8_e4m3fn),
        "embed.scale": torch.randint(120, 130, (rows, 1), generator=random, dtype=torch.uint8),
        "wkv.weight": torch.randn(2 * width, 4 * 32, generator=random),
        "q_weight": torch.randn(1, width, generator=random),
        "k_weight": torch.randn(1, width, generator=random),
    }
    published = read_engram(ENGRAM, 3, tensors)
    folding = torch.randint(0, 300, (320,), generator=random)
    key_map = KeyMap(published.site, None, [len(folding)])
    key_map.load([folding])
    tokens = torch.randint(0, 320, (1, 9), generator=random)
    hidden = torch.randn(1, 9, width, generator=random)
    spec = Spec(320, 4, width, 1, 1, 1, 9, 1e4, 1e-6, method_site=published.site)
    site = Engram(spec, published.site, 3)
    site.load_state_dict(published.parameters)
    keys = key_map(tokens, None, None)
    at = Positions(torch.zeros(1), torch.zeros(1), None, None, keys)
    with torch.no_grad():
        found = site(hidden, published.values(), at, None)

    # By the definition, position by position.
    multipliers = np.random.default_rng(10007 * 3).integers(0, (2**63 - 1) // 300 // 2, 3) * 2 + 1
    primes, table = [[233, 239], [241, 251]], tensors["embed.weight"].float()
    table = table * torch.exp2(tensors["embed.scale"].float() - 127)
    for position in range(9):
        ids = [int(folding[tokens[0, position - back] if position >= back else 2]) for back in range(3)]
        e, first = [], 0
        for order in (2, 3):
            mixed = 0
            for back in range(order):
                mixed ^= ids[back] * int(multipliers[back])
            for prime in primes[order - 2]:
                e.append(table[first + mixed % prime])
                first += prime
        key, value = (tensors["wkv.weight"] @ torch.cat(e)).split(width)
        h = hidden[0, position]
        norms = [torch.rsqrt(x.square().mean() + 1e-6) for x in (h, key)]
        dot = (h * tensors["q_weight"][0] * tensors["k_weight"][0] * key).sum() * norms[0] * norms[1] / width**0.5
        gate = torch.sigmoid(dot.sign() * dot.abs().clamp_min(1e-6).sqrt())
        torch.testing.assert_close(found[0, position], h + gate * value, rtol=1e-4, atol=1e-4)


def test_the_hash_of_some_layers_is_that_of_all() -> None:
    whole, last = engram_hash(ENGRAM, [1, 3]), engram_hash(ENGRAM, [3])
    assert (whole.multipliers[1], whole.rows[1]) == (last.multipliers[0], last.rows[0])
    assert whole.rows == (((211, 223), (227, 229)), ((233, 239), (241, 251)))
