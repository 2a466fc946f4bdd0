"""Reading recipes: `extends`, overrides, YAML as it is meant, and a dump that loads to the same config."""

import copy
import os
import string
from pathlib import Path
from typing import Any

import pytest
import yaml
from config_helpers import RECIPES, small_tree, write_recipe
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from xgram_dist.config import Config, build_config, dump_config, is_saved_as, load, load_config
from xgram_dist.errors import UserError


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return write_recipe(tmp_path / "small.yaml", small_tree())


def refusal(recipe: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as error:
        load_config(recipe, list(overrides))
    sentence = str(error.value)
    assert "\n" not in sentence
    return sentence


def test_a_chain_of_extends_merges_mappings_and_the_nearest_recipe_wins(tmp_path: Path) -> None:
    write_recipe(tmp_path / "shared" / "grand.yaml", small_tree())
    write_recipe(
        tmp_path / "shared" / "parent.yaml",
        {"extends": "grand.yaml", "name": "parent", "train": {"steps": 7, "seed": 3}},
    )
    child = write_recipe(
        tmp_path / "child.yaml",
        {
            "extends": "shared/parent.yaml",
            "train": {"steps": 9},
            "memory": {"sites": {"v": {"kernels": [7]}, "h": {"views": 1}}},
        },
    )
    config = load_config(child)
    assert config.name == "parent"
    assert (config.train.steps, config.train.seed, config.train.global_batch) == (9, 3, 16)
    assert config.memory.sites["v"].kernels == (7,)  # a list is replaced, not joined
    assert config.memory.sites["v"].views == 2  # a mapping is merged
    assert config.memory.sites["h"].views == 1


def test_a_circle_of_extends_is_refused_and_names_a_file_in_it(tmp_path: Path) -> None:
    write_recipe(tmp_path / "a.yaml", {"extends": "b.yaml"})
    write_recipe(tmp_path / "b.yaml", {"extends": "a.yaml"})
    sentence = refusal(tmp_path / "a.yaml")
    assert "extends itself" in sentence
    assert "b.yaml" in sentence


def test_a_missing_base_names_who_asked_for_it_and_the_nearest_file(tmp_path: Path) -> None:
    write_recipe(tmp_path / "base.yaml", small_tree())
    sentence = refusal(write_recipe(tmp_path / "child.yaml", {"extends": "bsae.yaml"}))
    assert f"'{tmp_path / 'bsae.yaml'}'" in sentence
    assert f"extended by {tmp_path / 'child.yaml'}" in sentence
    assert f"did you mean '{tmp_path / 'base.yaml'}'?" in sentence


def test_a_missing_recipe_names_the_nearest_file(recipe: Path) -> None:
    assert f"did you mean '{recipe}'?" in refusal(recipe.with_name("smal.yaml"))


@pytest.mark.parametrize("base", [3, ["a.yaml"], True])
def test_extends_that_is_not_a_path_is_refused(tmp_path: Path, base: Any) -> None:
    sentence = refusal(write_recipe(tmp_path / "r.yaml", {"extends": base}))
    assert f"extends = {base!r}" in sentence


@pytest.mark.parametrize(
    ("override", "read", "value"),
    [
        ("train.steps=12", lambda c: c.train.steps, 12),
        ("optimizer.learning_rate=1e-3", lambda c: c.optimizer.learning_rate, 0.001),
        ("optimizer.eps=2E-9", lambda c: c.optimizer.eps, 2e-9),
        ("optimizer.betas=[0.8, 0.9]", lambda c: c.optimizer.betas, (0.8, 0.9)),
        ("memory.sites.v.layers=[0, 2]", lambda c: c.memory.sites["v"].layers, (0, 2)),
        ("memory.sites={o: {views: 3}}", lambda c: {k: s.views for k, s in c.memory.sites.items()}, {"o": 3}),
        ("memory.sites.k.views=1", lambda c: sorted(c.memory.sites), ["k", "v"]),
        ("memory.compression=1", lambda c: c.memory.compression, 1.0),
        ("data.path=a=b", lambda c: c.data.path, "a=b"),
        ("data.path=null", lambda c: c.data.path, None),
        ("data.weights={web: 1, code: 0.5}", lambda c: c.data.weights, {"web": 1.0, "code": 0.5}),
        ("train.compile=true", lambda c: c.train.compile, True),
        ("memory.learning_rate.multiplier=sqrt_rows", lambda c: c.memory.learning_rate.multiplier, "sqrt_rows"),
        ("memory.learning_rate.multiplier=2.5", lambda c: c.memory.learning_rate.multiplier, 2.5),
    ],
)
def test_an_override_is_yaml_under_a_dotted_key(recipe: Path, override: str, read: Any, value: Any) -> None:
    assert read(load_config(recipe, [override])) == value


def test_the_last_override_of_a_key_wins(recipe: Path) -> None:
    assert load_config(recipe, ["train.steps=1", "train.steps=2"]).train.steps == 2


@pytest.mark.parametrize("override", ["train.steps", "=3", "", "--steps"])
def test_an_override_of_another_form_shows_the_form(recipe: Path, override: str) -> None:
    sentence = refusal(recipe, override)
    assert f"'{override}'" in sentence
    assert "train.steps=100" in sentence


@pytest.mark.parametrize("override", ["train.steps=[1", "name=2024-99-99", "train={a: 1, a: 2}", "train=&x [*x]"])
def test_an_override_that_is_not_yaml_is_refused(recipe: Path, override: str) -> None:
    assert refusal(recipe, override).startswith(f"override '{override}': the value is not valid YAML")


def test_an_override_below_a_plain_value_is_refused(recipe: Path) -> None:
    assert "'steps' is not a group of keys" in refusal(recipe, "train.steps=3", "train.steps.few=3")


def test_an_override_of_one_alias_leaves_the_other_place_alone(tmp_path: Path) -> None:
    tree = small_tree()
    del tree["memory"]
    path = tmp_path / "alias.yaml"
    path.write_text(
        yaml.safe_dump(tree)
        + "memory:\n  method: xgram\n  routing: {vip: 20, buckets: 8}\n"
        + "  sites:\n    v: &site {views: 2, kernels: [3]}\n    h: *site\n"
    )
    sites = load_config(path, ["memory.sites.h.views=1"]).memory.sites
    assert (sites["v"].views, sites["h"].views) == (2, 1)


def test_yaml_merge_keys_work(tmp_path: Path) -> None:
    tree = small_tree()
    del tree["memory"]
    path = tmp_path / "merge.yaml"
    path.write_text(
        yaml.safe_dump(tree)
        + "memory:\n  method: xgram\n  routing: {vip: 20, buckets: 8}\n"
        + "  sites:\n    v: &site {views: 2, kernels: [3]}\n    h: {<<: *site, views: 1}\n"
    )
    sites = load_config(path).memory.sites
    assert (sites["h"].views, sites["h"].kernels) == (1, (3,))


def test_a_duplicate_key_is_refused_with_its_line(recipe: Path) -> None:
    recipe.write_text("name: a\nmodel: {}\nname: b\n")
    sentence = refusal(recipe)
    assert "line 3" in sentence
    assert "duplicate key 'name'" in sentence


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        ("[1, 2]", "must be a mapping"),
        ("just words", "must be a mapping"),
        ("name: [1", "line 1"),
        ("? [a, b]\n: 1\n", "a key must be a word"),
        ("2024-01-01: 3\n", "not valid YAML"),
        ("model: &m {inner: *m}\n", "not valid YAML"),
        ("!!map words", "not valid YAML"),
        ("name: \x01\n", "not valid YAML"),
        ("name: " + "[" * 3000 + "]" * 3000, "not valid YAML"),
        ("name: " + "9" * 5000, "not valid YAML"),
    ],
)
def test_a_file_that_is_no_recipe_is_one_sentence_with_its_path(recipe: Path, text: str, words: str) -> None:
    recipe.write_text(text)
    sentence = refusal(recipe)
    assert str(recipe) in sentence
    assert words in sentence


def test_a_file_that_is_not_text_is_refused(recipe: Path) -> None:
    recipe.write_bytes(b"name: \xff\xfe\n")
    assert "is not UTF-8 text" in refusal(recipe)


@pytest.mark.parametrize("where", ["file", "override"])
@pytest.mark.parametrize("tag", ["!!python/object/apply:os.system", "!!python/object/new:os.system"])
def test_a_tag_that_would_run_code_is_refused_and_nothing_runs(
    recipe: Path, tag: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    monkeypatch.setattr(os, "system", ran.append)
    mark = recipe.with_name("mark")
    # The same text does run under an unsafe loader, or this test could not fail.
    attack = f'{tag} ["touch {mark}"]'
    yaml.load(attack, Loader=yaml.UnsafeLoader)
    assert ran.pop() == f"touch {mark}"
    if where == "file":
        recipe.write_text(f"name: {attack}\n")
        refusal(recipe)
    else:
        refusal(recipe, f"name={attack}")
    assert not ran
    assert not mark.exists()


def test_a_config_cannot_be_changed() -> None:
    config = build_config(small_tree())
    with pytest.raises(ValidationError, match="frozen"):
        config.train.steps = 5
    with pytest.raises(ValidationError, match="frozen"):
        config.memory.sites["v"].views = 5
    assert config == build_config(small_tree())


names = st.text(string.ascii_letters + string.digits + "._-", min_size=1, max_size=20).filter(lambda s: s[0].isalnum())
words = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=20)
# Words that YAML would take for something else.
tricky = st.sampled_from(
    ["1e5", "1E-3", "12", "1.5", "null", "true", "yes", "~", "2024-01-01", "0x1f", "1_000", "-", ""]
)


@example(name="1e5", path=" \u2028数据 ", weights={"1E-3": 1.0}, rate=1e-300, layers="all", multiplier=1e30)
@settings(max_examples=60, deadline=None)
@given(
    name=names | st.sampled_from(["1e5", "12", "0x1f", "null", "1_000", "2024-01-01"]),
    path=words | tricky,
    weights=st.none() | st.dictionaries(words | tricky, st.floats(0, 1e30), max_size=4),
    rate=st.floats(min_value=0, exclude_min=True, max_value=1e30),
    layers=st.just("all") | st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True),
    multiplier=st.sampled_from(["sqrt_rows", "sqrt_vocabulary"]) | st.floats(1e-300, 1e30),
)
def test_a_dump_loads_to_the_same_config(
    tmp_path_factory: pytest.TempPathFactory,
    name: str,
    path: str,
    weights: dict[str, float] | None,
    rate: float,
    layers: str | list[int],
    multiplier: str | float,
) -> None:
    tree = small_tree()
    tree["name"] = name
    tree["data"] = {"path": path, "weights": weights}
    tree["optimizer"] = {"learning_rate": rate}
    tree["memory"]["sites"]["v"]["layers"] = layers
    tree["memory"]["learning_rate"] = {"multiplier": multiplier}
    config = build_config(tree)
    assert (config.name, config.data.path, config.data.weights) == (name, path, weights)
    assert config.optimizer.learning_rate == rate
    file = tmp_path_factory.mktemp("dump") / "config.yaml"
    file.write_text(dump_config(config), encoding="utf-8")
    assert load_config(file) == config


@pytest.mark.parametrize("key", sorted(load.REMOVED_KEYS))
def test_a_removed_key_with_its_default_is_ignored(recipe: Path, key: str) -> None:
    assert load_config(recipe, [f"{key}=null"]) == load_config(recipe)


def test_a_config_saved_by_an_earlier_version_is_the_same_config(recipe: Path, tmp_path: Path) -> None:
    config = load_config(recipe)
    tree = config.model_dump(mode="json")
    tree["memory"]["learning_rate"] |= {"cap": None, "vip_cap": None}
    before = copy.deepcopy(tree)
    assert build_config(tree) == config
    assert tree == before  # the caller's tree is not changed
    saved = tmp_path / "config.yaml"
    saved.write_text(yaml.safe_dump(tree))
    assert is_saved_as(config, saved)
    assert not is_saved_as(load_config(recipe, ["train.steps=77"]), saved)
    assert not is_saved_as(config, tmp_path / "gone.yaml")


@pytest.mark.parametrize(
    ("override", "advice"),
    [
        ("memory.learning_rate.cap=2.0", "set memory.learning_rate.multiplier "),
        ("memory.learning_rate.vip_cap=1", "set memory.learning_rate.vip_multiplier "),
    ],
)
def test_a_removed_key_with_a_value_is_refused_with_the_way_out(recipe: Path, override: str, advice: str) -> None:
    sentence = refusal(recipe, override)
    assert sentence.startswith(override.replace("=", " = ") + ": this key was removed; take it out, and ")
    assert advice in sentence


def test_a_renamed_key_is_accepted_with_a_hint(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(load.RENAMED_KEYS, "training.batch", "train.global_batch")
    assert load_config(recipe).train.global_batch == 16
    assert capsys.readouterr().err == ""
    assert "both are set" in refusal(recipe, "training.batch=32")
    capsys.readouterr()
    tree = small_tree()
    del tree["train"]["global_batch"]
    old = write_recipe(recipe.with_name("old.yaml"), tree | {"training": {"batch": 32}})
    assert load_config(old).train.global_batch == 32
    hint = f"recipe '{old}': the key training.batch is now called train.global_batch; please rename it\n"
    assert capsys.readouterr().err == hint


def all_recipes() -> list[Path]:
    bases = ("base.yaml", "paper.yaml", "scale.yaml")
    return sorted(path for path in RECIPES.rglob("*.yaml") if path.name not in bases)


def test_there_are_recipes() -> None:
    assert len(all_recipes()) >= 16


@pytest.mark.parametrize("path", all_recipes(), ids=lambda path: path.relative_to(RECIPES).as_posix())
def test_every_recipe_loads_and_is_named_for_its_file(path: Path) -> None:
    config = load_config(path)
    assert isinstance(config, Config)
    assert config.name == f"{path.parent.name}-{path.stem}"
    ablation = "ablations" in path.parts
    kind = "xgram" if ablation or path.stem == "one-gram" else path.stem.split("-")[0]
    assert config.memory.method == kind
    if ablation:
        assert len(path.read_text().splitlines()) <= 10
