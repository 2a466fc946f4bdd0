"""The JSON schema of a recipe, for editors: it completes keys, shows what they mean and marks mistakes.

It is made from the same classes that check a recipe. Two things differ from a whole recipe: a file may say `extends`,
and no key is required, because the rest may be in the file that it extends or on the command line.
"""

from typing import Any

from xgram_dist.config.schema import Config

EXTENDS = {
    "type": "string",
    "description": "Path of another recipe, relative to this one, whose keys this one changes.",
}


def recipe_schema() -> dict[str, Any]:
    schema = Config.model_json_schema()
    properties = {"extends": EXTENDS, **schema["properties"]}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Recipe of xgram-dist",
        **_tidy({**schema, "properties": properties}),
    }


def _tidy(schema: dict[str, Any]) -> dict[str, Any]:
    """Without `required`, titles that repeat the key, and defaults that repeat those of a group's keys."""
    dropped = {"required", "title"} | ({"default"} if "$ref" in schema else set())
    return {key: _tidy_below(key, value) for key, value in schema.items() if key not in dropped}


def _tidy_below(key: str, value: Any) -> Any:
    if key in ("properties", "$defs"):  # names of keys and groups
        return {name: _tidy(below) for name, below in value.items()}
    if key == "description":
        return " ".join(value.split())
    if isinstance(value, dict):
        return _tidy(value)
    if isinstance(value, list):
        return [_tidy(one) if isinstance(one, dict) else one for one in value]
    return value
