"""Recipes: YAML files with `extends`, dotted overrides, and errors that name the key.

    config = load_config("recipes/tiny/xgram.yaml", ["train.steps=100"])

Later wins: the base (recursively), the recipe, the overrides. Mappings merge; everything else replaces.
"""

import json
import re
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from xgram_dist.config.check import check
from xgram_dist.config.schema import Config
from xgram_dist.errors import UserError, nearest

Checked = TypeVar("Checked", bound=BaseModel)


class _Loader(yaml.SafeLoader):
    """Safe YAML that reads 1e-3 as a number (YAML 1.1 wants a dot) and refuses a key that stands twice."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(None, None, "a key must be a word", key_node.start_mark)
            # `<<` merges another mapping, so it may stand twice
            if key_node.value in seen and key_node.tag != "tag:yaml.org,2002:merge":
                raise yaml.MarkedYAMLError(None, None, f"the key '{key_node.value}' stands twice", key_node.start_mark)
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes the words that `_Loader` would read as numbers."""


for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
    )


def load_config(recipe: str | Path, overrides: list[str] | None = None) -> Config:
    tree = read_tree(Path(recipe), "recipe")
    for override in overrides or []:
        _apply_override(tree, override)
    return build_config(tree)


def build_config(tree: dict[str, Any]) -> Config:
    """A checked config from a plain tree (what YAML gives)."""
    config = build_section(Config, tree, "recipe")
    check(config)
    return config


def build_section(section: type[Checked], tree: dict[str, Any], kind: str) -> Checked:
    """A plain tree as a section, each key checked; `kind` is what errors call the whole."""
    try:
        # Through JSON, where strict mode takes a list for a tuple but never '5' for 5 or 1 for true.
        return section.model_validate_json(json.dumps(tree, default=str))
    except ValidationError as error:
        raise UserError(_sentence(error, section, kind)) from None


def parse_config(text: str) -> Config:
    """What `dump_config` gave."""
    try:
        tree = _parse(text)
    except yaml.YAMLError:
        tree = None
    if not isinstance(tree, dict):
        raise UserError("the recipe cannot be read: it is not YAML with keys")
    return build_config(tree)


def dump_config(config: Config) -> str:
    """The resolved recipe as YAML; loading it gives the same config."""
    tree = config.model_dump(mode="json")
    # Letters beyond ASCII are escaped: written as they are, not all of them are read back (a next-line character).
    return str(yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=False))


def read_tree(path: Path, kind: str, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """A YAML file and what it extends, merged; `kind` is what errors call it."""
    where = f" (extended by {above[-1]})" if above else ""
    if path.resolve() in above:
        raise UserError(f"{kind} '{path}' extends itself{where}; take out one of the two 'extends'")
    try:
        text = path.read_text(encoding="utf-8")
        tree = _parse(text)
    except OSError as error:
        raise UserError(f"cannot read {kind} '{path}'{where}: {error.strerror}{_similar_file(path)}") from None
    except UnicodeDecodeError:
        raise UserError(f"{kind} '{path}'{where} is not UTF-8 text") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or " ".join(str(error).split())
        raise UserError(f"{kind} '{path}'{where}{place}: not valid YAML: {problem}") from None
    if not isinstance(tree, dict):
        found = "empty" if tree is None else f"a {type(tree).__name__}"
        raise UserError(f"{kind} '{path}'{where} is {found}; it must be a mapping of keys, such as 'name: first-run'")
    base = tree.pop("extends", None)
    if base is None:
        return tree
    if not isinstance(base, str):
        raise UserError(f"{kind} '{path}': extends = {base!r} must be the path of another {kind}")
    return _merge(read_tree(path.parent / base, kind, (*above, path.resolve())), tree)


def _parse(text: str) -> Any:
    """YAML as a plain tree of JSON's types; all that is wrong with it is a YAMLError."""
    try:
        tree = yaml.load(text, Loader=_Loader)  # a subclass of SafeLoader
        # Through JSON: an alias becomes a copy, which an override of one place leaves alone in the other.
        return json.loads(json.dumps(tree, default=str))
    except (ValueError, TypeError, RecursionError) as error:  # a date that is none, a list within itself
        raise yaml.YAMLError(str(error)) from None


def _similar_file(path: Path) -> str:
    beside = sorted(found.name for found in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
    return nearest(path.name, beside, prefix=f"{path.parent}/")


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(merged.get(key), dict):
            merged[key] = _merge(merged[key], value)
        else:
            merged[key] = value
    return merged


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise UserError(f"override '{override}' must look like key.subkey=value, for example train.steps=100")
    try:
        value = _parse(text)
    except yaml.YAMLError:
        raise UserError(f"override '{override}': the value is not valid YAML") from None
    *parents, last = key.split(".")
    for parent in parents:
        below = tree.setdefault(parent, {})
        if not isinstance(below, dict):
            raise UserError(f"override '{override}': '{parent}' is not a group of keys")
        tree = below
    tree[last] = value


def _sentence(error: ValidationError, section: type[BaseModel], kind: str) -> str:
    by_path: dict[tuple[str, ...], list[Any]] = {}
    for problem in error.errors(include_url=False):
        by_path.setdefault(_location(problem["loc"], section), []).append(problem)
    # What is wrong inside a value says more than that the value is wrong.
    paths = [path for path in by_path if not any(path == other[: len(path)] != other for other in by_path)]
    # An unknown key is the likeliest slip, and often the cause of the others: say it first.
    paths.sort(key=lambda path: by_path[path][0]["type"] != "extra_forbidden")
    path = paths[0]
    problem = by_path[path][0]
    key = ".".join(path)
    if not path:
        text = f"the {kind} cannot be read: {problem['msg']}"
    elif problem["type"] == "extra_forbidden":
        text = f"unknown key '{key}'{_nearest_key(path, section)}"
    elif problem["type"] == "missing":
        text = f"missing key '{key}'"
    elif problem["loc"][-1] == "[key]":
        text = f"unknown key '{key}': must be one of {_in_words(problem['msg']).removeprefix('be ')}"
    else:
        # Where a key takes one of several kinds, each kind has its own complaint.
        limits = [_in_words(other["msg"]) for other in by_path[path]]
        text = f"{key} = {problem['input']!r}: must {limits[0]}"
        text += "".join(f" or {limit.removeprefix('be ')}" for limit in limits[1:])
    more = len(paths) - 1
    return text + (f" (and {more} more problem{'s' if more > 1 else ''})" if more else "")


def _in_words(message: str) -> str:
    """What follows `must`, in words that do not ask for knowledge of Python or JSON."""
    words = re.sub(r"^(Input|String|Tuple|List) should ", "", message)
    for theirs, ours in (
        ("a valid integer", "a whole number"),
        ("a valid number", "a number"),
        ("a valid string", "text"),
        ("a valid boolean", "true or false"),
        ("a valid array", "a list"),
        ("an object", "a group of keys"),
        (" after validation", ""),
    ):
        words = words.replace(theirs, ours)
    return words


def _location(loc: tuple[int | str, ...], section: type[BaseModel]) -> tuple[str, ...]:
    """The keys of a pydantic location: without the marks it adds for alternatives of a union."""
    path: list[str] = []
    model: Any = section
    for part in loc:
        fields = getattr(model, "model_fields", None)
        if part == "[key]":
            continue
        if fields is not None:
            path.append(str(part))
            model = _inner(fields[part].annotation) if part in fields else None
        elif isinstance(model, dict):
            path.append(str(part))
            model = model["value"]
        elif isinstance(part, int):
            path.append(str(part))
    return tuple(path)


def _inner(annotation: Any) -> Any:
    """What stands below a field: a section, a mapping ({'value': what stands below it}), or nothing."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for mapping in (annotation, *get_args(annotation)):
        if get_origin(mapping) is dict:
            return {"value": _inner(get_args(mapping)[1])}
    return None


def _nearest_key(path: tuple[str, ...], section: type[BaseModel]) -> str:
    model: Any = section
    for part in path[:-1]:
        model = model["value"] if isinstance(model, dict) else _inner(model.model_fields[part].annotation)
    return nearest(path[-1], list(model.model_fields), prefix="".join(f"{part}." for part in path[:-1]))
