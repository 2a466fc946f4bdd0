"""`xgram-dist inspect`: what it says is what is in the files; what is damaged is named."""

import json
import shutil
import subprocess
import sys

import pytest
from safetensors.numpy import load_file
from train_helpers import LAYERS, ROWS, read_metrics

from xgram_dist import __version__
from xgram_dist.cli.main import main


@pytest.fixture
def copy(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


def shown(capsys, *words):
    assert main(["inspect", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_run_shows_all_of_its_checkpoints_with_what_they_are(finished, capsys):
    found = shown(capsys, finished)
    assert [one["step"] for one in found] == [6, 8]
    losses = {record["step"]: record["loss"] for record in read_metrics(finished, "train")}
    for one in found:
        assert one["loss"] == losses[one["step"]]
        assert one["position"] == one["step"] * 4
        assert (one["name"], one["ranks"], one["engine"], one["tensor"]) == ("small-xgram", 1, "replicated", 1)
        assert one["written_by"]["xgram-dist"] == __version__
        assert one["damaged"] == []


def test_parts_add_up_to_what_safetensors_reads(finished, capsys):
    folder = finished / "checkpoints" / "step-00000008"
    one = shown(capsys, folder)
    tensors = load_file(folder / "rank-00000.safetensors")
    assert sum(part["bytes"] for part in one["parts"]) == sum(tensor.nbytes for tensor in tensors.values())
    assert sum(part["tensors"] for part in one["parts"]) == len(tensors)
    parts = {part["name"]: part for part in one["parts"]}
    assert parts["tables v.1 rows"]["shape"] == [ROWS, 16]
    assert parts["tables v.1 rows"]["tensors"] == LAYERS
    weights = [t for name, t in tensors.items() if name.startswith("backbone.") and "_moment" not in name]
    assert parts["backbone weights"]["numbers"] == sum(tensor.size for tensor in weights)


def test_it_needs_no_torch(finished):
    program = (
        "import sys; from xgram_dist.cli.main import main; assert main(sys.argv[1:]) == 0; "
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "inspect", str(finished), "--verify"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "every checksum matches" in done.stdout
    assert "step-00000006" in done.stdout


@pytest.mark.parametrize("damage", ["tensor", "routing", "cut", "header", "manifest"])
def test_what_is_damaged_is_named_and_the_end_is_not_zero(copy, capsys, damage):
    folder = copy / "checkpoints" / "step-00000006"
    file = folder / {"routing": "routing.npz", "manifest": "manifest.json"}.get(damage, "rank-00000.safetensors")
    content = bytearray(file.read_bytes())
    if damage == "tensor":
        content[-1] ^= 1  # the last tensor of the file
    elif damage == "manifest":
        content = content.replace(b'"skipped": 0', b'"skipped": 1')
    elif damage == "header":
        content = content.replace(b'"dtype": "F32"', b'"dtype": "I32"', 1)
    elif damage == "routing":
        content[len(content) // 2] ^= 1
    file.write_bytes(content[:-1] if damage == "cut" else content)
    assert main(["inspect", str(copy), "--verify"]) == 1
    captured = capsys.readouterr()
    assert str(file) in captured.err
    assert len(captured.err.splitlines()) == 1
    rows = {line.split()[0]: line.split()[-1] for line in captured.out.splitlines() if line.startswith("step-")}
    assert rows == {"step-00000006": "damaged", "step-00000008": "whole"}


@pytest.mark.parametrize("path", ["", "missing"])
def test_what_is_no_checkpoint_is_one_sentence(tmp_path, capsys, path):
    assert main(["inspect", str(tmp_path / path)]) == 2
    error = capsys.readouterr().err
    assert ("does not exist" if path else "neither a checkpoint nor the folder of a run") in error
    assert len(error.splitlines()) == 1
