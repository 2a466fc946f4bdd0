"""Print docs/configuration.md, the reference of all keys of a recipe, from the schema itself.

    python tools/config_reference.py > docs/configuration.md

Meanings are the texts below the keys in xgram_dist/config/schema.py, types and limits its annotations.
"""

import sys
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from xgram_dist.config import Config

INTRODUCTION = """\
# Configuration

A recipe is a YAML file. Every key is typed and checked before anything is built: an unknown key is answered with the
nearest valid one, a value out of its limits with the limit. Numbers are numbers (`5`, not `'5'`); `1e-3` is a number.

`extends: FILE` takes over another recipe, whose path is relative to the file it stands in. Groups of keys merge;
everything else, lists too, replaces what the other recipe says. A base may extend another one.

```yaml
extends: base.yaml
name: first-run
train:
  steps: 500
```

On the command line, `KEY=VALUE` after the recipe changes a key of any depth; the value is YAML:

    xgram-dist train recipes/tiny/xgram.yaml train.steps=100 'memory.sites.v.layers=[0, 2]'

Later wins: the base, the recipe, the command line. What came out of it is written to `config.yaml` in the run folder;
training with that file repeats the run. `xgram-dist plan RECIPE` says what a recipe costs before anything is built.

This page is made by `tools/config_reference.py` from `xgram_dist/config/schema.py`.
"""


def main() -> int:
    sys.stdout.write(reference())
    return 0


def reference() -> str:
    return INTRODUCTION + "".join(_section(path, model) for path, model in sections("", Config))


def sections(path: str, model: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    """Each group of keys with its dotted path, from the outside in."""
    yield path, model
    for name, field in model.model_fields.items():
        below = f"{path}.{name}" if path else name
        if _is_section(field.annotation):
            assert isinstance(field.annotation, type)
            yield from sections(below, field.annotation)
        elif get_origin(field.annotation) is dict and _is_section(get_args(field.annotation)[1]):
            yield from sections(f"{below}.SITE", get_args(field.annotation)[1])


def _section(path: str, model: type[BaseModel]) -> str:
    head = f"\n## `{path}`\n\n{_text(model.__doc__)}\n" if path else "\n## Beside all groups\n"
    rows = [_row(path, name, field) for name, field in model.model_fields.items() if not _is_section(field.annotation)]
    return head + "\n| key | type | default | meaning |\n|---|---|---|---|\n" + "".join(rows)


def _row(path: str, name: str, field: FieldInfo) -> str:
    key = f"{path}.{name}" if path else name
    kind = in_words(Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation)
    assert field.description, f"{key} has no meaning below it"
    return f"| `{key}` | {kind} | {_default(field)} | {_text(field.description)} |\n"


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is PydanticUndefined:
        return "required"
    if value is None:
        return "none"
    # On one line, as it would stand in a recipe.
    plain = list(value) if isinstance(value, tuple) else value
    text = yaml.safe_dump(plain, default_flow_style=True, width=10_000).removesuffix("...\n").strip()
    return f"`{text}`"


def in_words(annotation: Any) -> str:
    """`whole number, at least 0` and the like."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        limits = [limit for item in arguments[1:] for limit in _limits(item)]
        kind, comma, rest = in_words(arguments[0]).partition(", ")  # of a list: what each is, after its own limits
        return ", ".join([kind, *limits]) + comma + rest
    if origin in (Union, UnionType):
        return " or ".join(in_words(argument) for argument in arguments if argument is not NoneType)
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            return f"list, each {in_words(arguments[0])}"
        return f"list of {len(arguments)}, each {in_words(arguments[0])}"
    if origin is dict:
        if _is_section(arguments[1]):
            return f"group of keys for each of {in_words(arguments[0])}"
        return f"mapping of names, each to {in_words(arguments[1])}"
    return {int: "whole number", float: "number", bool: "`true` or `false`", str: "text", Any: "anything"}[annotation]


def _limits(item: Any) -> Iterator[str]:
    if isinstance(item, FieldInfo):
        for inner in item.metadata:
            yield from _limits(inner)
        return
    words = {
        "gt": "above {}",
        "ge": "at least {}",
        "lt": "below {}",
        "le": "at most {}",
        "min_length": "at least {} long",
        "max_length": "at most {} long",
        "pattern": "of the form `{}`",
    }
    for name, form in words.items():
        value = getattr(item, name, None)
        if value is not None:
            yield form.format(value)


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _text(text: str | None) -> str:
    assert text
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
