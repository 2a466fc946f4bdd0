"""`xgram-dist completion`: commands, options, values of options, keys of a recipe and their values in a shell.

The script of a shell passes the line up to the cursor to this command again, which prints what may stand there. It
prints nothing where a file belongs, so that the shell completes files. No torch, no pydantic: the keys are those of the
recipes' schema.json.
"""

import argparse
import json
import shlex
from collections.abc import Iterator
from typing import Any

from xgram_dist.cli.command import Command
from xgram_dist.cli.recipes import ROOT, SCHEMA

EXAMPLES = """
  xgram-dist completion bash >> ~/.bashrc
  xgram-dist completion zsh >> ~/.zshrc                                    # after compinit
  xgram-dist completion fish > ~/.config/fish/completions/xgram-dist.fish
"""

BASH = """\
_xgram_dist() {
    local line
    COMPREPLY=()
    while IFS= read -r line; do
        # Bash takes what stands after '=' for a word of its own.
        [[ "${COMP_LINE:0:COMP_POINT}" == *=* && "$line" == *=* ]] && line="${line#*=}"
        COMPREPLY+=("$line")
    done < <(xgram-dist completion bash "${COMP_LINE:0:COMP_POINT}" 2>/dev/null)
    [[ ${#COMPREPLY[@]} == 1 && "${COMPREPLY[0]}" == *= ]] && compopt -o nospace
    return 0
}
complete -o bashdefault -o default -F _xgram_dist xgram-dist
"""
ZSH = """\
_xgram_dist() {
    local -a found keys
    found=("${(@f)$(xgram-dist completion zsh "${(j: :)words[1,CURRENT]}" 2>/dev/null)}")
    found=(${found:#})
    keys=(${(M)found:#*=})
    found=(${found:#*=})
    (( ${#keys} )) && compadd -S '' -a keys
    (( ${#found} )) && compadd -a found
    (( ${#keys} + ${#found} )) || _files
}
compdef _xgram_dist xgram-dist
"""
FISH = """\
complete -c xgram-dist -a '(xgram-dist completion fish (commandline -cp | string collect) 2>/dev/null)'
"""
SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SCRIPTS)
    parser.add_argument("line", nargs="?", help="the script passes the line so far: print what may stand at its end")


def run(args: argparse.Namespace) -> int:
    if args.line is None:
        print(SCRIPTS[args.shell], end="")
    else:
        words = _split(args.line)[1:]
        for candidate in candidates(words):
            if candidate.startswith(words[-1]):
                print(candidate)
    return 0


def _split(line: str) -> list[str]:
    """The words of a line; the last one may be empty or have an open quote."""
    for closing in ("", "'", '"'):
        try:
            words = shlex.split(line + closing)
            return [*words, ""] if not closing and (not line or line[-1].isspace()) else words
        except ValueError:
            continue
    return line.split(" ")


def candidates(words: list[str]) -> Iterator[str]:
    """What may stand in place of the last word."""
    from xgram_dist.cli.main import COMMANDS, build_parser

    *before, last = words
    command = next((word for word in before if not word.startswith("-")), None)
    if command is None:
        yield from ("--help", "--version") if last.startswith("-") else COMMANDS
        return
    if command not in COMMANDS:
        return
    choices = next(a.choices for a in build_parser(command)._actions if isinstance(a, argparse._SubParsersAction))
    parser: argparse.ArgumentParser = choices[command]
    options = parser._option_string_actions
    option = options.get(before[-1])
    if option is not None and option.nargs != 0:
        yield from map(str, option.choices or ())
        return
    if last.startswith("-"):
        yield from (name for name in options if name.startswith("--"))
        return
    positional = [action for action in parser._actions if not action.option_strings]
    for action in positional[:1]:  # of the first word alone, such as the name of a benchmark
        if action.choices and all(word.startswith("-") for word in before[1:]):
            yield from map(str, action.choices)
    if any(action.dest == "overrides" for action in positional) and any(word.endswith(".yaml") for word in before):
        key, equals, _ = last.partition("=")
        keys = recipe_keys()
        yield from (f"{key}={value}" for value in keys.get(key, ())) if equals else (f"{name}=" for name in keys)


def recipe_keys() -> dict[str, list[str]]:
    """Dotted key -> its values, if it has few."""
    schema = json.loads((ROOT / SCHEMA).read_text(encoding="utf-8"))

    def keys(group: dict[str, Any], above: str) -> Iterator[tuple[str, list[str]]]:
        for name, key in group["properties"].items():
            if "$ref" in key:
                yield from keys(schema["$defs"][key["$ref"].rpartition("/")[2]], f"{above}{name}.")
            else:
                kinds = [key, *key.get("anyOf", ())]
                values = [
                    str(value)
                    for kind in kinds
                    for value in (*kind.get("enum", ()), kind.get("const"))
                    if value is not None
                ]
                yield f"{above}{name}", ["true", "false"] if key.get("type") == "boolean" else values

    return {name: values for name, values in keys(schema, "") if name not in ("extends", "name")}


COMMANDS = {"completion": Command(EXAMPLES, add_arguments, run)}
