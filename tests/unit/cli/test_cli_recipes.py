"""The recipes that come with the package, their schema, and what a shell completes."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from xgram_dist.cli.completion import SCRIPTS, candidates, recipe_keys
from xgram_dist.cli.main import COMMANDS, main
from xgram_dist.config import load_config
from xgram_dist.config.json_schema import recipe_schema
from xgram_dist.errors import UserError

ROOT = Path(__file__).resolve().parents[3] / "recipes"
RECIPES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.yaml"))
SCHEMA = json.loads((ROOT / "schema.json").read_text(encoding="utf-8"))


def test_every_recipe_is_listed_once_with_a_line_on_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    runs = [recipe for recipe in RECIPES if yaml.safe_load((ROOT / recipe).read_text()).get("name")]
    assert [line.split(maxsplit=1)[0] for line in lines] == runs
    assert all(len(line.split(maxsplit=1)) == 2 for line in lines)
    assert main(["recipes", "tiny", "text/engram.yaml"]) == 0
    shown = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert shown == [run for run in runs if run.startswith("tiny/") or run == "text/engram.yaml"]


def test_copies_give_the_configs_of_the_originals(tmp_path: Path) -> None:
    chosen = ["ablations/layers", "1.15b/mort-4x-matched.yaml"]
    assert main(["recipes", *chosen, "--copy", str(tmp_path)]) == 0
    copied = [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.yaml")]
    assert "paper.yaml" in copied
    assert "text/base.yaml" not in copied
    for recipe in copied:
        if yaml.safe_load((ROOT / recipe).read_text()).get("name"):
            assert load_config(tmp_path / recipe) == load_config(ROOT / recipe)
    assert (tmp_path / "schema.json").read_text() == (ROOT / "schema.json").read_text()


def test_a_copy_never_changes_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "tiny", "--copy", str(tmp_path)]) == 0
    (tmp_path / "tiny" / "base.yaml").write_text("mine: 1\n")
    (tmp_path / "tiny" / "xgram.yaml").unlink()
    assert main(["recipes", "tiny", "--copy", str(tmp_path)]) == 2
    assert f"'{tmp_path}/tiny/base.yaml' exists and differs" in capsys.readouterr().err
    assert not (tmp_path / "tiny" / "xgram.yaml").exists()
    (tmp_path / "tiny" / "base.yaml").unlink()
    assert main(["recipes", "tiny", "--copy", str(tmp_path)]) == 0
    assert "2 file(s) written" in capsys.readouterr().out


def test_a_recipe_that_is_not_there_comes_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "tiny/xgrm.yaml"]) == 2
    assert "did you mean 'tiny/xgram.yaml'?" in capsys.readouterr().err


def test_the_schema_in_the_folder_is_that_of_the_config() -> None:
    assert recipe_schema() == SCHEMA, "run: xgram-dist schema > recipes/schema.json"


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_points_to_the_schema_and_follows_it(recipe: str) -> None:
    first, _, _ = (ROOT / recipe).read_text(encoding="utf-8").partition("\n")
    kind, _, path = first.partition("$schema=")
    assert kind == "# yaml-language-server: "
    assert (ROOT / recipe).parent.joinpath(path).resolve() == ROOT / "schema.json"
    # Editors read YAML 1.2, for which 1e-3 is a number.
    text = re.sub(r"(?<![.\w])(\d+)e-", r"\1.0e-", (ROOT / recipe).read_text(encoding="utf-8"))
    jsonschema.validate(yaml.safe_load(text), SCHEMA)


@pytest.mark.parametrize(
    "tree",
    [
        {"train": {"stesp": 3}},
        {"train": {"steps": 0}},
        {"train": {"steps": "3"}},
        {"train": {"loggers": ["wandb", "other"]}},
        {"memory": {"method": "xgramm"}},
        {"memory": {"sites": {"w": {}}}},
        {"memory": {"sites": {"v": {"views": 0}}}},
        {"optimizer": {"betas": [0.9]}},
        {"name": "a b"},
        {"extends": 3},
    ],
)
def test_the_schema_refuses_what_the_config_refuses(tree: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(tree, SCHEMA)


def test_every_key_of_the_schema_has_a_meaning() -> None:
    for name, group in [("", SCHEMA), *SCHEMA["$defs"].items()]:
        for key, value in group["properties"].items():
            assert "$ref" in value or value["description"], f"{name}.{key}"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", list(COMMANDS)),
        ("rep", ["report"]),
        ("train --rest", ["--restarts"]),
        ("bench pl", ["planning"]),
        ("prepare --tokenizer-engine gi", ["gigatoken"]),
        ("plan recipes/tiny/xgram.yaml memory.optimizer=ca", ["memory.optimizer=catch_up"]),
        ("plan recipes/tiny/xgram.yaml train.comp", ["train.compile="]),
        ("plan recipes/tiny/xgram.yaml train.compile=", ["train.compile=true", "train.compile=false"]),
        ("train rec", []),
        ("nothing ", []),
    ],
)
def test_what_may_stand_at_the_end_of_a_line(line: str, expected: list[str]) -> None:
    words = line.split(" ")
    assert [one for one in candidates(words) if one.startswith(words[-1])] == expected


def test_every_key_that_is_offered_is_one_of_the_config() -> None:
    keys = recipe_keys()
    assert {"memory.routing.vip", "model.width", "train.loggers"} <= set(keys)
    tiny = str(ROOT / "tiny" / "xgram.yaml")
    for key, values in keys.items():
        for value in values:
            text = ""
            try:
                load_config(tiny, [f"{key}={value}"])
            except UserError as error:  # of what several keys must agree on
                text = str(error)
            assert "unknown key" not in text
            assert ": must " not in text


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("xgram-dist stat", ["status"]),
        ("xgram-dist plan a.yaml memory.placement=d", ["device", "disk"]),
        ("xgram-dist plan a.yaml memory.place", ["memory.placement="]),
        ("xgram-dist train 'my rec", []),
    ],
)
def test_bash_completes(line: str, expected: list[str], tmp_path: Path) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash here")
    command = tmp_path / "xgram-dist"
    command.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT.parent} exec {sys.executable} -m xgram_dist "$@"\n')
    command.chmod(0o755)
    script = f'compopt() {{ :; }}\n{SCRIPTS["bash"]}\n_xgram_dist\nprintf "%s\\n" "${{COMPREPLY[@]}}"'
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "COMP_LINE": line, "COMP_POINT": str(len(line))}
    done = subprocess.run([bash, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == expected
    assert done.stderr == ""
