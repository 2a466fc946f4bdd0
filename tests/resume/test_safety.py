"""A checkpoint may come from anywhere: nothing in it is executed, nothing in it leads out of its folder."""

import os
import pickle
import shutil
import struct

import numpy as np
import pytest
from load_helpers import edit_manifest
from test_resume import settings

from xgram_dist.cli.main import main
from xgram_dist.config import dump_config


class Planted:
    """Unpickling it creates a file."""

    def __init__(self, mark):
        self.mark = str(mark)

    def __reduce__(self):
        return open, (self.mark, "w")


@pytest.fixture
def newest(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000006")
    return tmp_path / "run" / "checkpoints" / "step-00000008"


def everything(data, newest, tmp_path, **memory):
    """Every command that reads a checkpoint; their exit codes."""
    from tools_helpers import load_tool

    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(dump_config(settings(data, optimizer="catch_up", **memory)))
    train = ["train", str(recipe), "--folder"]
    return [
        main(["inspect", str(newest), "--verify"]),
        main([*train, str(tmp_path / "new"), "--from", str(newest), "--weights-only"]),
        load_tool("consolidate").main([str(newest), str(tmp_path / "out.safetensors")]),
        main([*train, str(newest.parents[1])]),  # the last, as it saves anew
    ]


def put(path, content):
    """In place of a file, as someone would who knows the format."""
    path.write_bytes(content)
    edit_manifest(path.parent, lambda tree: tree["files"].update({path.name: len(content)}))


@pytest.mark.parametrize("kind", ["beside", "pickle", "header and pickle", "routing"])
def test_a_pickle_is_never_executed(data, newest, tmp_path, kind):
    mark = tmp_path / "executed"
    content = pickle.dumps(Planted(mark))
    pickle.loads(content).close()
    assert mark.exists()  # it would, if it were
    mark.unlink()
    if kind == "beside":
        for name in (".metadata", "__0_0.distcp", "model.pt", "data.pkl", "optimizer.bin"):
            (newest / name).write_bytes(content)
    elif kind == "routing":
        np.savez(newest / "other.npz", rows_0=np.array([Planted(mark)], dtype=object))
        put(newest / "routing.npz", (newest / "other.npz").read_bytes())
    else:
        header = struct.pack("<Q", len(content)) if kind == "header and pickle" else b""
        put(newest / "rank-00000.safetensors", header + content)
    codes = everything(data, newest, tmp_path)
    assert not mark.exists()
    assert codes == [0, 0, 0, 0] if kind == "beside" else all(codes[:3])


def outside(newest, tmp_path, how):
    secret = tmp_path / "secret.safetensors"
    shutil.copyfile(newest / "rank-00000.safetensors", secret)
    names = {"up": "../../../secret.safetensors", "absolute": str(secret)}
    if how == "link":
        (newest / "rank-00000.safetensors").unlink()
        (newest / "rank-00000.safetensors").symlink_to(secret)
    elif how == "manifest link":
        (newest / "manifest.json").rename(tmp_path / "manifest.json")
        (newest / "manifest.json").symlink_to(tmp_path / "manifest.json")
    else:

        def rename(tree):
            tree["files"][names[how]] = tree["files"].pop("rank-00000.safetensors")
            for entry in tree["tensors"].values():
                for chunk in entry["chunks"]:
                    chunk["file"] = names[how]

        edit_manifest(newest, rename)
    return {"up": "outside its folder", "absolute": "outside its folder"}.get(how, "is a link")


@pytest.mark.parametrize("how", ["up", "absolute", "link", "manifest link"])
def test_nothing_leads_out_of_the_folder(data, newest, tmp_path, capfd, how):
    sentence = outside(newest, tmp_path, how)
    assert all(everything(data, newest, tmp_path))
    captured = capfd.readouterr()
    assert captured.err.count(sentence) + captured.out.count(sentence) == 4
    assert "Traceback" not in captured.err


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda tree: tree.update(version=5), "has version 5, this release reads versions 1 and 2 and 3 and 4"),
        (lambda tree: tree.update(format="other"), "is not the manifest of a checkpoint"),
        (lambda tree: tree["run"].pop("loader"), "is not a complete manifest"),
        (lambda tree: tree["run"].update(step="six"), "'step' has the invalid value 'six'"),
        (lambda tree: tree["tensors"]["backbone.embedding"].update(dtype="F8"), "has the unknown dtype 'F8'"),
        (
            lambda tree: tree["tensors"]["backbone.embedding"]["chunks"][0].update(offsets=[9, 9]),
            "is outside its shape",
        ),
        (lambda tree: tree.pop("tensors"), "is not a complete manifest"),
    ],
)
def test_a_manifest_that_is_not_ours_is_refused_in_one_sentence(newest, capsys, change, sentence):
    edit_manifest(newest, change)
    assert main(["inspect", str(newest)]) == 1
    error = capsys.readouterr().err
    assert sentence in error
    assert len(error.splitlines()) == 1


def test_a_checkpoint_of_a_new_release_names_it(newest, capsys):
    edit_manifest(newest, lambda tree: tree.update(version=5, written_by={"xgram-dist": "9.9"}))
    assert main(["inspect", str(newest)]) == 1
    assert "'xgram-dist': '9.9'" in capsys.readouterr().err
    assert os.listdir(newest)
