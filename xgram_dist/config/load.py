"""Recipes to configs: YAML files with `extends`, dotted overrides, and errors that name the key.

    config = load_config("recipes/tiny/xgram.yaml", ["train.steps=100"])

A recipe is read as a plain tree (dicts, lists, strings, numbers). The base named by `extends`, the recipe and the
overrides are merged in this order: mappings merge, everything else replaces. Keys of earlier versions are then dropped
or renamed (`REMOVED_KEYS`, `RENAMED_KEYS`), pydantic checks every key, and `validate.check` checks what several keys
must agree on. A mistake is one sentence.

Configs are saved in run folders and checkpoints as YAML with every key (`dump_config`), which `parse_config` reads.
"""

import copy
import json
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from xgram_dist.config.schema import Config
from xgram_dist.config.validate import check
from xgram_dist.errors import BadFileError, UserError, nearest, one_line
from xgram_dist.untrusted import read_file

Model = TypeVar("Model", bound=BaseModel)


MAX_BYTES, MAX_VALUES, MAX_SHOWN = 1 << 20, 20_000, 100
"""Of a recipe file; of its values, aliases counted as copies; of the characters of a value in a message."""
MAX_EXTENDS, MAX_FLOAT = 16, 1e30
"""Files that extend each other; the size of a number, which must fit fp32 with room to multiply."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


class RemovedKey(NamedTuple):
    default: Any
    """Ignored where an old recipe or checkpoint has this value; any other is refused."""
    advice: str


REMOVED_KEYS = {
    "memory.learning_rate.cap": RemovedKey(
        None, "set memory.learning_rate.multiplier to the smaller of the multiplier and the cap"
    ),
    "memory.learning_rate.vip_cap": RemovedKey(
        None, "set memory.learning_rate.vip_multiplier to the smaller of the multiplier and the cap"
    ),
}
"""Keys of earlier versions that no longer exist."""
RENAMED_KEYS: dict[str, str] = {}
"""Old dotted key -> new one. The old key is accepted for one version; a recipe that uses it gets a hint on stderr."""


class _Loader(yaml.SafeLoader):
    """Safe YAML that reads 1e-3 as a number (YAML 1.1 wants a dot) and refuses duplicate keys, and aliases that stand
    for more values than a recipe can have."""

    def __init__(self, stream: str):
        super().__init__(stream)
        self._sizes: dict[int, int] = {}
        """Values within each node, by its id; aliases count as copies."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        node: Any = super().compose_node(parent, index)
        if id(node) not in self._sizes:
            size = 1 + sum(self._sizes[id(child)] for child in _children(node) if id(child) in self._sizes)
            if size > MAX_VALUES:
                problem = f"more than {MAX_VALUES:,} values, each alias counted as what it stands for"
                raise yaml.MarkedYAMLError(None, None, problem, node.start_mark)
            self._sizes[id(node)] = size
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(None, None, "a key must be a word", key_node.start_mark)
            # `<<` merges another mapping and may occur more than once.
            if key_node.value in seen and key_node.tag != "tag:yaml.org,2002:merge":
                raise yaml.MarkedYAMLError(None, None, f"duplicate key '{key_node.value}'", key_node.start_mark)
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


def _children(node: Any) -> list[Any]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []


class _Dumper(yaml.SafeDumper):
    """Quotes strings that `_Loader` would read as numbers."""


for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
    )


def load_config(recipe: str | Path, overrides: list[str] | None = None, scale: str | Path | None = None) -> Config:
    """The config of a recipe file; each override is `key.subkey=value` with a YAML value. `scale`: a recipe that
    replaces everything but `name` and `memory`, with whose keys of `memory` its own merge."""
    tree = read_tree(Path(recipe), "recipe")
    if scale is not None:
        tree = {
            **_merge({"memory": tree.get("memory", {})}, read_tree(Path(scale), "recipe")),
            "name": tree.get("name"),
        }
    for override in overrides or []:
        _apply_override(tree, override)
    for old, new in RENAMED_KEYS.items():
        if _find(tree, old) is not _MISSING:
            print(f"recipe '{recipe}': the key {old} is now called {new}; please rename it", file=sys.stderr)
    return build_config(tree)


def build_config(tree: dict[str, Any]) -> Config:
    """A checked config from a plain tree, which may have keys of earlier versions."""
    config = build_section(Config, _migrate(tree), "recipe")
    check(config)
    return config


def build_section(section: type[Model], tree: dict[str, Any], kind: str) -> Model:
    """A plain tree as `section`, each key checked; errors call the tree a `kind`."""
    try:
        # Through JSON: strict mode then accepts a list for a tuple, but never '5' for 5 or 1 for true.
        built = section.model_validate_json(json.dumps(tree, default=str))
    except ValidationError as error:
        raise UserError(_sentence(error, section, kind)) from None
    _check_values(built.model_dump(mode="json"), "")
    return built


def _check_values(value: Any, key: str) -> None:
    """Refuses what no key can mean: numbers beyond int64 and fp32, and control characters, which no path has."""
    if isinstance(value, dict):
        for name, below in value.items():
            _check_values(name, key)
            _check_values(below, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for below in value:
            _check_values(below, key)
    elif isinstance(value, int) and abs(value) >= 1 << 63:
        raise UserError(f"{one_line(key, MAX_SHOWN)} = {_show(value)}: must be below 2^63")
    elif isinstance(value, float) and not abs(value) <= MAX_FLOAT:
        raise UserError(f"{one_line(key, MAX_SHOWN)} = {value:g}: must be at most {MAX_FLOAT:g} in size")
    elif isinstance(value, str) and _CONTROL.search(value):
        raise UserError(f"{one_line(key, MAX_SHOWN)} = {_show(value)}: must not contain control characters")


def parse_config(text: str) -> Config:
    """The config that `dump_config` wrote, by this version or an earlier one."""
    return build_config(parse_tree(text))


def parse_tree(text: str) -> dict[str, Any]:
    """The plain tree of a recipe in a checkpoint or run folder, of any version."""
    try:
        tree = _parse(text)
    except yaml.YAMLError:
        tree = None
    if not isinstance(tree, dict):
        raise UserError("the recipe cannot be read: it is not a YAML mapping")
    return tree


def is_saved_as(config: Config, path: Path) -> bool:
    """Whether `path` holds this config, as `dump_config` of this or an earlier version wrote it."""
    try:
        return parse_config(read_file(path, limit=MAX_BYTES, follow=True).decode()) == config
    except (OSError, ValueError, UserError):
        return False


def dump_config(config: Config) -> str:
    """The config as YAML with every key; loading it gives the same config."""
    tree = config.model_dump(mode="json")
    # ASCII only: YAML does not read back every character that is written unescaped (for example next-line).
    return str(yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=False))


def read_tree(path: Path, kind: str, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """A YAML file merged over what it extends; errors call it a `kind`. `above`: the files that extend this one."""
    where = f" (extended by {above[-1]})" if above else ""
    if path.resolve() in above:
        raise BadFileError(f"{kind} '{path}' extends itself{where}; remove one of the two 'extends'")
    try:
        tree = _parse(_read_text(path, kind, where))
    except OSError as error:
        raise BadFileError(f"cannot read {kind} '{path}'{where}: {error.strerror}{_similar_file(path)}") from None
    except UnicodeDecodeError:
        raise BadFileError(f"{kind} '{path}'{where} is not UTF-8 text") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        position = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = one_line(getattr(error, "problem", None) or " ".join(str(error).split()), 160)
        raise BadFileError(f"{kind} '{path}'{where}{position}: not valid YAML: {problem}") from None
    if not isinstance(tree, dict):
        content = "empty" if tree is None else f"a {type(tree).__name__}"
        raise BadFileError(
            f"{kind} '{path}'{where} is {content}; it must be a mapping of keys, such as 'name: first-run'"
        )
    base = tree.pop("extends", None)
    if base is None:
        return tree
    if not isinstance(base, str) or _CONTROL.search(base):
        raise BadFileError(f"{kind} '{path}': extends = {_show(base)} must be the path of another {kind}")
    if len(above) == MAX_EXTENDS:
        raise BadFileError(f"{kind} '{path}': more than {MAX_EXTENDS} files extend each other")
    return _merge(read_tree(path.parent / base, kind, (*above, path.resolve())), tree)


def _read_text(path: Path, kind: str, where: str) -> str:
    if path.exists() and not path.is_file():
        raise BadFileError(f"{kind} '{path}'{where} is not a file")
    with path.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise BadFileError(f"{kind} '{path}'{where} is longer than {MAX_BYTES >> 20} MiB, so it is not a {kind}")
    return content.decode("utf-8")


def _show(value: Any) -> str:
    return one_line(repr(value), MAX_SHOWN)


def _parse(text: str) -> Any:
    """YAML as a plain tree of JSON types; every fault is a YAMLError."""
    if len(text) > MAX_BYTES:
        raise yaml.YAMLError(f"it is longer than {MAX_BYTES >> 20} MiB")
    try:
        tree = yaml.load(text, Loader=_Loader)  # a subclass of SafeLoader
        # Through JSON: an alias becomes a copy, so that an override of one occurrence does not change the other.
        return json.loads(json.dumps(tree, default=str))
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None
    except (ValueError, TypeError, OverflowError) as error:  # an invalid date, a list within itself
        raise yaml.YAMLError(str(error)) from None


def _similar_file(path: Path) -> str:
    siblings = sorted(file.name for file in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
    return nearest(path.name, siblings, prefix=f"{path.parent}/")


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(merged.get(key), dict):
            merged[key] = _merge(merged[key], value)
        else:
            merged[key] = value
    return merged


_MISSING = object()


def _find(tree: dict[str, Any], key: str) -> Any:
    """The value of a dotted key, or `_MISSING`."""
    value: Any = tree
    for name in key.split("."):
        if not isinstance(value, dict) or name not in value:
            return _MISSING
        value = value[name]
    return value


def _migrate(tree: dict[str, Any]) -> dict[str, Any]:
    """A copy of `tree` without `REMOVED_KEYS` and with `RENAMED_KEYS` under their new names."""
    tree = copy.deepcopy(tree)
    for key, (default, advice) in REMOVED_KEYS.items():
        value = _find(tree, key)
        if value is _MISSING:
            continue
        if value != default:
            raise UserError(f"{key} = {_show(value)}: this key was removed; take it out, and {advice}")
        _delete(tree, key)
    for old, new in RENAMED_KEYS.items():
        value = _find(tree, old)
        if value is _MISSING:
            continue
        if _find(tree, new) is not _MISSING:
            raise UserError(f"{old} is the old name of {new}, and both are set; take {old} out")
        _delete(tree, old)
        *parents, name = new.split(".")
        section = tree
        for parent in parents:
            section = section.setdefault(parent, {})
        section[name] = value
    return tree


def _delete(tree: dict[str, Any], key: str) -> None:
    """Delete a dotted key, and the sections that are empty without it."""
    name, _, rest = key.partition(".")
    if rest:
        _delete(tree[name], rest)
    if not rest or not tree[name]:
        del tree[name]


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise UserError(
            f"override '{one_line(override, MAX_SHOWN)}' must look like key.subkey=value, for example train.steps=100"
        )
    try:
        value = _parse(text)
    except yaml.YAMLError as error:
        problem = f": {error.problem}" if isinstance(error, yaml.MarkedYAMLError) else ""
        shown = one_line(override, MAX_SHOWN)
        raise UserError(f"override '{shown}': the value is not valid YAML{problem}") from None
    *parents, last = key.split(".")
    for parent in parents:
        below = tree.setdefault(parent, {})
        if not isinstance(below, dict):
            raise UserError(
                f"override '{one_line(override, MAX_SHOWN)}': '{one_line(parent, 40)}' is not a group of keys"
            )
        tree = below
    tree[last] = value


def _sentence(error: ValidationError, section: type[BaseModel], kind: str) -> str:
    by_path: dict[tuple[str, ...], list[Any]] = {}
    for problem in error.errors(include_url=False):
        by_path.setdefault(_location(problem["loc"], section), []).append(problem)
    # A fault inside a value is more specific than the fault of the value.
    paths = [path for path in by_path if not any(path == other[: len(path)] != other for other in by_path)]
    # An unknown key is the most likely mistake, and often the cause of the others: report it first.
    paths.sort(key=lambda path: by_path[path][0]["type"] != "extra_forbidden")
    path = paths[0]
    problem = by_path[path][0]
    key = one_line(".".join(path), MAX_SHOWN)
    if not path:
        text = f"the {kind} cannot be read: {problem['msg']}"
    elif problem["type"] == "extra_forbidden":
        text = f"unknown key '{key}'{_nearest_key(path, section)}"
    elif problem["type"] == "missing":
        text = f"missing key '{key}'"
    elif problem["loc"][-1] == "[key]":
        text = f"unknown key '{key}': must be one of {_in_words(problem['msg']).removeprefix('be ')}"
    else:
        # A key of a union type has one fault for each type of the union.
        limits = [_in_words(other["msg"]) for other in by_path[path]]
        text = f"{key} = {_show(problem['input'])}: must {limits[0]}"
        text += "".join(f" or {limit.removeprefix('be ')}" for limit in limits[1:])
    more = len(paths) - 1
    return text + (f" (and {more} more problem{'s' if more > 1 else ''})" if more else "")


def _in_words(message: str) -> str:
    """Pydantic's message as the text after `must`, without terms of Python or JSON."""
    words = re.sub(r"^(Input|String|Tuple|List) should ", "", message)
    for term, plain in (
        ("a valid integer", "a whole number"),
        ("a valid number", "a number"),
        ("a valid string", "text"),
        ("a valid boolean", "true or false"),
        ("a valid array", "a list"),
        ("an object", "a group of keys"),
        (" after validation", ""),
    ):
        words = words.replace(term, plain)
    return words


def _location(loc: tuple[int | str, ...], section: type[BaseModel]) -> tuple[str, ...]:
    """The keys of a pydantic location, without the parts it adds for the types of a union."""
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
    """What a field contains: a section, a mapping as {"value": what it maps to}, or None for a plain value."""
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
    names = nearest(path[-1], list(model.model_fields), prefix="".join(f"{part}." for part in path[:-1]))
    return one_line(names, 2 * MAX_SHOWN)
