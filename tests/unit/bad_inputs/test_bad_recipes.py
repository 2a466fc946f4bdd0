"""Recipes that nobody meant: refused in a moment, by one sentence."""

import time
from itertools import pairwise
from pathlib import Path

import pytest
from refusals import check_sentence

from xgram_dist.cli.main import main
from xgram_dist.config import load_config
from xgram_dist.errors import UserError

ROOT = Path(__file__).resolve().parents[3]
RECIPE = ROOT / "recipes/tiny/xgram.yaml"
LETTERS = "abcdefghijkl"
BOMB = [f"&{LETTERS[0]} [x, x, x, x, x, x, x, x, x]"]
BOMB += [f"&{one} [{', '.join([f'*{before}'] * 9)}]" for before, one in pairwise(LETTERS)]
MERGE_BOMB = ["&a {x: 1}"]
MERGE_BOMB += [f"&{b} {{<<: [{', '.join([f'*{a}'] * 9)}]}}" for a, b in pairwise(LETTERS)]
HUGE = "1" + "0" * 400


def refusal(recipe: Path, *overrides: str) -> UserError:
    start = time.monotonic()
    with pytest.raises(UserError) as error:
        load_config(recipe, list(overrides))
    assert time.monotonic() - start < 10
    return error.value


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("\n".join(f"{n}: {line}" for n, line in enumerate(BOMB)), ["more than 20,000 values", "alias"]),
        ("\n".join(f"{n}: {line}" for n, line in enumerate(MERGE_BOMB)), ["more than 20,000 values"]),
        ("a: &a [*a]", ["not valid YAML", "Circular"]),
        ("[" * 5000, ["nested too deeply"]),
        ("{a: " * 5000, ["nested too deeply"]),
        ("a: " + "9" * 5000, ["not valid YAML", "4300 digits"]),
        ("name: x\nname: y", ["line 2", "duplicate key 'name'"]),
        ("? [a]\n: b", ["a key must be a word"]),
        ("a: !!python/object/apply:os.system [id]", ["not valid YAML", "python/object"]),
        ("a: 2001-99-99", ["not valid YAML", "month"]),
        ("a: \x00", ["not valid YAML"]),
        ("- 1\n- 2", ["is a list", "a mapping of keys"]),
        ("", ["is empty"]),
        ('extends: "a\\0b"', [r"extends = 'a\x00b'", "the path of another recipe"]),
        ('extends: "a\\nb"', [r"extends = 'a\nb'"]),
        ("extends: [a]", ["extends = ['a']"]),
        ("extends: 7", ["extends = 7"]),
        ("extends: .", ["is not a file"]),
        ("extends: /dev/zero", ["is not a file"]),
        ("extends: recipe.yaml", ["extends itself"]),
        ("extends: " + "x" * 300, ["cannot read recipe", "too long"]),
        ('"a\\e[2J": 1', [r"unknown key 'a\x1b[2J'"]),
        ("k" * 500 + ": 1", ["unknown key 'kkk", "..."]),
        ("x" * (1 << 20) + "x", ["longer than 1 MiB"]),
    ],
    ids=lambda value: repr(value)[:24],
)
def test_of_a_file(content: str, words: list[str], tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(content)
    check_sentence(UserError(str(refusal(recipe)).replace(str(tmp_path), "")), *words)


def test_a_path_of_control_characters_is_one_line_without_them(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "a\x1b[2J\nb"]) == 2
    assert r"cannot read recipe 'a\x1b[2J\nb'" in capfd.readouterr().err


def test_bytes_that_are_not_utf_8(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_bytes(b"name: \xff")
    assert "is not UTF-8 text" in str(refusal(recipe))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (f"data={{{', '.join(f'k{n}: {line}' for n, line in enumerate(BOMB))}}}", ["override", "20,000 values"]),
        (f"model.layers={HUGE}", ["model.layers = 1000", "..."]),
        ("model.layers=1000000000", ["model.layers = 1000000000", "less than or equal to 10000"]),
        ("model.layers=1e9", ["model.layers = 1000000000.0", "whole number"]),
        (f"model.vocabulary={HUGE}", ["model.vocabulary"]),
        ("model.vocabulary=1000000000", ["model.vocabulary = 1000000000", "less than or equal to 134217728"]),
        ("model.width=1000000000000", ["model.width", "less than or equal to 16777216"]),
        ("model.sequence_length=99999999999", ["model.sequence_length"]),
        ("model.rope_theta=1e300", ["model.rope_theta = 1e+300", "at most 1e+30"]),
        ("optimizer.learning_rate=1e300", ["optimizer.learning_rate = 1e+300", "at most 1e+30"]),
        (f"optimizer.learning_rate={HUGE}", ["optimizer.learning_rate"]),
        ("optimizer.learning_rate=.nan", ["optimizer.learning_rate", "finite"]),
        ("memory.row_gate_init=-1e300", ["memory.row_gate_init = -1e+300"]),
        ("train.seed=9223372036854775808", ["train.seed = 9223372036854775808", "below 2^63"]),
        (f"train.seed={HUGE}", ["train.seed"]),
        ("train.seed=-1", ["train.seed = -1", "greater than or equal to 0"]),
        ("train.steps=99999999999999999999", ["train.steps", "below 2^63"]),
        ("train.collective_timeout=1e20", ["train.collective_timeout", "less than or equal to 100000000"]),
        ("checkpoint.minutes=1e20", ["checkpoint.minutes"]),
        ("memory.routing.buckets=99999999999", ["memory.routing.buckets", "less than or equal to 1048576"]),
        (f"memory.window={'9' * 400}GB", ["memory.window"]),
        ('data.path="a\\0b"', [r"data.path = 'a\x00b'", "control characters"]),
        ('memory.routing.file="a\\nb"', [r"memory.routing.file = 'a\nb'", "control characters"]),
        ("parallel.deepspeed=nonsense", ["parallel.deepspeed = 'nonsense'", "a group of keys"]),
        ("model.layers=[", ["override 'model.layers=['", "not valid YAML"]),
        ("model.layers", ["must look like key.subkey=value"]),
        ("=3", ["must look like key.subkey=value"]),
        ("name.x=3", ["'name' is not a group of keys"]),
        ("model.layerz=3", ["unknown key 'model.layerz'", "did you mean 'model.layers'"]),
        ("x" * 1000, ["override 'xxx", "..."]),
    ],
    ids=lambda value: repr(value)[:32],
)
def test_of_the_command_line(override: str, words: list[str]) -> None:
    check_sentence(refusal(RECIPE, override), *words)


def test_a_few_aliases_are_fine(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"extends: {RECIPE}\noptimizer: &a {{betas: &b [0.9, 0.95]}}\n")
    assert load_config(recipe).optimizer.betas == (0.9, 0.95)


def test_the_largest_seed_is_a_seed() -> None:
    assert load_config(RECIPE, [f"train.seed={(1 << 63) - 1}"]).train.seed == (1 << 63) - 1
