"""`xgram-dist recipes` and `xgram-dist schema`: the recipes that come with the package, and how to write one."""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

import xgram_dist
from xgram_dist.cli.command import Command
from xgram_dist.errors import UserError, nearest

ROOT = Path(xgram_dist.__file__).parent / "recipes"
SCHEMA = "schema.json"

RECIPES_EXAMPLES = """
  xgram-dist recipes                             # all recipes, with a line on each
  xgram-dist recipes --copy recipes              # copies all of them to the folder 'recipes'
  xgram-dist recipes tiny text/xgram-50.yaml --copy recipes
"""
SCHEMA_EXAMPLES = """
  xgram-dist schema > recipes/schema.json
"""


def add_recipes_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="recipe or folder of recipes (default: all)")
    parser.add_argument("--copy", metavar="DIR", help="copy them, and what they extend, to this folder")


def run_recipes(args: argparse.Namespace) -> int:
    recipes = _named(args.names)
    if args.copy is not None:
        copied = _copy(recipes, Path(args.copy))
        print(f"{len(recipes)} recipe(s) in '{args.copy}', {copied} file(s) written")
        return 0
    runs = [recipe for recipe in recipes if re.search(r"^name:", _text(recipe), re.MULTILINE)]
    width = max((len(recipe) for recipe in runs), default=0)
    for recipe in runs:
        print(f"{recipe:<{width}}  {_about(_text(recipe))}".rstrip())
    return 0


def _named(names: list[str]) -> list[str]:
    """Paths below ROOT of recipes and of those in folders; all of them without names."""
    every = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.yaml"))
    if not names:
        return every
    chosen = []
    for name in names:
        plain = name.strip("/")
        found = [recipe for recipe in every if recipe == plain or recipe.startswith(f"{plain}/")]
        if not found:
            folders = {str(parent) for recipe in every for parent in Path(recipe).parents} - {"."}
            raise UserError(f"there is no recipe and no folder '{name}'{nearest(plain, [*sorted(folders), *every])}")
        chosen += found
    return sorted(set(chosen))


def _copy(recipes: list[str], to: Path) -> int:
    """Files written. Refuses to change a file that is there, before it writes any."""
    missing = []
    for name in sorted({SCHEMA, *(file for recipe in recipes for file in _with_bases(recipe))}):
        try:
            if (to / name).read_bytes() != (ROOT / name).read_bytes():
                raise UserError(f"'{to / name}' exists and differs; remove it, or choose another folder with --copy")
        except FileNotFoundError:
            missing.append(name)
    for name in missing:
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        (to / name).write_bytes((ROOT / name).read_bytes())
    return len(missing)


def _with_bases(recipe: str) -> Iterator[str]:
    """A recipe and the files that it extends."""
    yield recipe
    base = re.search(r"^extends: *(\S+)", _text(recipe), re.MULTILINE)
    if base is not None:
        yield from _with_bases(
            (ROOT / recipe).parent.joinpath(base[1]).resolve().relative_to(ROOT.resolve()).as_posix()
        )


def _text(recipe: str) -> str:
    return (ROOT / recipe).read_text(encoding="utf-8")


def _about(text: str) -> str:
    """The first sentence of the comment at the top of a recipe; else what it extends."""
    comment = re.match(r"(?:# yaml-language-server.*\n)?((?:#.*\n)*)", text)
    assert comment is not None
    sentence = " ".join(line.lstrip("# ") for line in comment[1].splitlines()).partition(". ")[0].removesuffix(".")
    base = re.search(r"^extends: *(\S+)", text, re.MULTILINE)
    return sentence or (f"extends {base[1]}" if base else "")


def add_schema_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Print the JSON schema of a recipe. Editors with a YAML language server complete and check the keys of a file "
        f"whose first line is '# yaml-language-server: $schema=PATH/{SCHEMA}', as in the recipes of the package."
    )


def run_schema(args: argparse.Namespace) -> int:
    import json

    from xgram_dist.config.json_schema import recipe_schema

    print(json.dumps(recipe_schema(), indent=1))
    return 0


COMMANDS = {
    "recipes": Command(RECIPES_EXAMPLES, add_recipes_arguments, run_recipes),
    "schema": Command(SCHEMA_EXAMPLES, add_schema_arguments, run_schema),
}
