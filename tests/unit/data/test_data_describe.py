"""`xgram-dist data`: what it shows is what is there, and what is damaged is found."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from data_helpers import read_back

from xgram_dist.cli.main import main
from xgram_dist.data.dataset import PreparedData
from xgram_dist.data.describe import batch_contents
from xgram_dist.data.loader import Loader
from xgram_dist.data.tokenizer import load_tokenizer

PEER = """
import json, sys
import numpy as np
from xgram_dist.data.streaming_import import _empty_packages
with _empty_packages():
    from streaming.base.dataset import StreamingDataset
data = StreamingDataset(local=sys.argv[1], shuffle=False, batch_size=1, predownload=4)
print(json.dumps([sample["tokens"].tolist() for sample in data]))
"""


def show(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = main(["data", *map(str, words)])
    out, err = capsys.readouterr()
    return code, out, err


def test_a_data_set_is_shown_with_its_sizes_lengths_and_samples(
    mixed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = show(capsys, mixed, "--json", "--samples", 2)
    assert code == 0
    figures = json.loads(out)
    tokenizer = load_tokenizer(mixed / "tokenizer.json")
    for source in figures["sources"]:
        written = read_back(mixed, "train", source["name"])
        assert (source["chunks"], source["tokens"]) == (len(written), written.size)
        lengths = np.diff(np.flatnonzero(written.ravel() == tokenizer.end_of_text))
        middle = source["length_quantiles"]["0.5"]
        assert np.quantile(lengths, 0.3) <= middle <= np.quantile(lengths, 0.7)
    samples = [sample for sample in figures["samples"] if sample["source"] == "small"]
    small = read_back(mixed, "train", "small")
    assert [sample["text"] for sample in samples] == [
        tokenizer.decode(small[sample["chunk"], :48].tolist()) for sample in samples
    ]
    code, out, _ = show(capsys, mixed, "--split", "validation", "--samples", 1)
    assert code == 0
    assert "validation split of" in out


def test_a_batch_shows_the_documents_that_the_loader_gives(mixed: Path) -> None:
    data = PreparedData.open(mixed)
    tokenizer = load_tokenizer(mixed / "tokenizer.json")
    with Loader(data, sequence_length=16, global_batch=8, micro_batch=2, seed=5, skip=[[3, 9]]) as loader:
        next(loader)
        rows = next(loader).tokens.reshape(8, 16).tolist()
        assert loader.position_of_step(1) == 0
        assert loader.position_of_step(2) == 14
        contents = batch_contents(loader, 14, tokenizer)
    assert len(contents["sequences"]) == 8
    for row, sequence in zip(rows, contents["sequences"], strict=True):
        assert sum(document["tokens"] for document in sequence["documents"]) <= 16
        for document in sequence["documents"]:
            piece = row[document["first_token"] : document["first_token"] + document["tokens"]]
            assert document["text"] == tokenizer.decode(piece)
        assert Path(sequence["shard"]).is_file()


def test_a_step_of_a_recipe_is_shown(mixed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = "{vocabulary: 320, layers: 1, width: 16, ffn_width: 16, heads: 2, kv_heads: 1, sequence_length: 16}"
    train = "{steps: 4, global_batch: 4, micro_batch: 2}"
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"name: x\nmodel: {model}\nmemory: {{method: vanilla}}\ndata: {{path: {mixed}}}\n"
        f"train: {train}\nparallel: {{engine: replicated}}\n"
    )
    code, out, _ = show(capsys, recipe, "--step", 3)
    assert code == 0
    assert out.startswith("position 8, 4 sequences of 16 tokens")
    code, _, err = show(capsys, mixed, "--step", 3)
    assert code == 2
    assert "need a run or a recipe" in err


def test_verify_finds_every_damaged_and_missing_shard(
    mixed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(mixed, tmp_path / "copy"))
    assert show(capsys, copy, "--verify")[0] == 0
    large, small = min((copy / "train" / "large").glob("*.zstd")), min((copy / "validation" / "small").glob("*.zstd"))
    data = bytearray(large.read_bytes())
    data[len(data) // 2] ^= 1
    large.write_bytes(data)
    small.unlink()
    code, out, err = show(capsys, copy, "--verify", "--json", "--workers", 3)
    assert code == 1
    assert len(json.loads(out)["damaged"]) == 2
    assert f"shard '{large}' is corrupt" in err
    assert f"shard '{small}' is missing" in err


def test_the_streaming_library_reads_our_shards(mixed: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(
        mixed / "train" / "middle", tmp_path / "peer", ignore=shutil.ignore_patterns("*.mds", "*.lock")
    )
    done = subprocess.run([sys.executable, "-c", PEER, str(copy)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == read_back(mixed, "train", "middle").tolist()
