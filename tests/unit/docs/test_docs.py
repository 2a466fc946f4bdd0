"""The documentation agrees with the repository: links, file references, the code tour, commands and recipe keys."""

import argparse
import ast
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import yaml

from xgram_dist import __version__
from xgram_dist.cli.main import COMMANDS, build_parser
from xgram_dist.config import load_config

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob(".github/**/*.md"), *ROOT.glob("tools/**/*.md")]
)
PAGES = [page for page in PAGES if ".venv" not in page.parts]

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
INLINE_CODE = re.compile(r"`([^`\n]+)`")
REPO_PATH = re.compile(r"^(?:xgram_dist|tests|tools|recipes|slurm|docs)/[\w./-]*$")
MAKE_TARGET = re.compile(r"\bmake ((?:[a-z]+-)*[a-z]+)\b")
TOUR_ROW = re.compile(r"^\| (.+?) \| `([\w/]+\.py):([\w.]+)` \|$", re.MULTILINE)
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:work|root|home|tmp)/")


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


every_page = pytest.mark.parametrize("page", PAGES, ids=page_id)


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def code_and_prose(text: str) -> tuple[list[str], str]:
    """(the lines of fenced and indented code blocks, with continued lines joined; the rest)."""
    code, prose, fenced, after_blank = [], [], False, True
    in_list = False
    for line in text.splitlines():
        if line.startswith("```"):
            fenced = not fenced
        elif fenced or (line.startswith("    ") and (after_blank or not in_list)):
            code.append(line.strip())
        else:
            in_list = line.startswith(("- ", "  ")) or bool(re.match(r"\d+\. ", line))
            prose.append(line)
        after_blank = not line.strip() or line.startswith("    ")
    return re.sub(r"\s*\\\n\s*", " ", "\n".join(code)).splitlines(), "\n".join(prose)


def anchors(text: str) -> set[str]:
    """GitHub's anchors of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).strip().replace(" ", "-") for heading in plain}


@every_page
def test_relative_links_resolve(page: Path) -> None:
    _, prose = code_and_prose(text_of(page))
    for target in LINK.findall(prose):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        linked = page if not path else (page.parent / path).resolve()
        assert linked.exists(), f"{target}: no such file"
        if anchor:
            assert anchor in anchors(text_of(linked)), f"{target}: no such heading"


@every_page
def test_files_named_in_the_text_exist(page: Path) -> None:
    if page.name == "CHANGELOG.md":
        pytest.skip("names what earlier versions had")
    for code in INLINE_CODE.findall(text_of(page)):
        if REPO_PATH.match(code) and "NAME" not in code and ".venv" not in code:
            assert (ROOT / code).exists(), f"{code}: no such file"


def symbols(tree: ast.AST) -> set[str]:
    """Classes, functions, methods and module-level names, with dots."""
    found: set[str] = set()

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found.add(prefix + child.name)
                if isinstance(child, ast.ClassDef):
                    visit(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.Assign | ast.AnnAssign):
                targets = child.targets if isinstance(child, ast.Assign) else [child.target]
                found.update(prefix + target.id for target in targets if isinstance(target, ast.Name))

    visit(tree, "")
    return found


def tour() -> list[tuple[str, str, str]]:
    return TOUR_ROW.findall(text_of(ROOT / "docs" / "architecture.md"))


def test_the_code_tour_has_its_twenty_rows() -> None:
    assert len(tour()) >= 20


@pytest.mark.parametrize(("what", "file", "symbol"), tour(), ids=lambda value: str(value).replace(" ", "-"))
def test_the_code_tour_names_what_exists(what: str, file: str, symbol: str) -> None:
    path = ROOT / file
    assert path.exists(), f"{what}: {file} does not exist"
    assert symbol in symbols(ast.parse(text_of(path))), f"{what}: {file} has no {symbol}"


def words_of(line: str) -> list[str] | None:
    """The words after `xgram-dist` (or `-m xgram_dist`) in a shell line; None: another command."""
    try:
        words = shlex.split(line.removeprefix("$ "), comments=True)
    except ValueError:
        return None
    for name in ("xgram-dist", "xgram_dist"):
        if name in words and (name == "xgram_dist" or words[0] in (name, "srun")):
            return words[words.index(name) + 1 :]
    return None


def shown_commands() -> list[tuple[str, list[str]]]:
    found = []
    for page in PAGES:
        lines, _ = code_and_prose(text_of(page))
        found += [(page_id(page), words) for line in lines if (words := words_of(line)) is not None]
    return found


@pytest.mark.parametrize(
    ("page", "words"), shown_commands(), ids=lambda value: None if isinstance(value, list) else value
)
def test_commands_in_code_blocks_parse(page: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        args, rest = build_parser(words[0]).parse_known_args(words)
    except SystemExit:
        pytest.fail(f"xgram-dist {' '.join(words)}: {capsys.readouterr().err}")
    assert not [word for word in rest if word.startswith("-")], f"xgram-dist {' '.join(words)}: unknown {rest}"
    check_recipes(args, rest)


def check_recipes(args: argparse.Namespace, rest: list[str]) -> None:
    """Recipes that are named exist, and so do the keys that are changed."""
    named = [word for word in [getattr(args, "recipe", None), *vars(args).get("recipes", [])] if word]
    others = [*(vars(args).get("overrides") or []), *rest]
    recipes = [word for word in [*named, *others] if word.endswith(".yaml") and not re.search(r"[{*]", word)]
    overrides = [word for word in others if re.match(r"^[a-z_.]+=", word)]
    for recipe in recipes:
        assert (ROOT / recipe).exists(), f"{recipe}: no such recipe"
        load_config(ROOT / recipe, overrides)


@every_page
def test_options_in_the_text_exist(page: Path) -> None:
    """`xgram-dist COMMAND ... --option ...` in running text."""
    _, prose = code_and_prose(text_of(page))
    for code in INLINE_CODE.findall(prose):
        words = code.split()
        if words[0] != "xgram-dist" or len(words) < 2 or words[1] not in COMMANDS:
            assert words[0] != "xgram-dist" or words[1:2] == ["--version"] or len(words) == 1, code
            continue
        choices = next(a.choices for a in build_parser(words[1])._actions if isinstance(a, argparse._SubParsersAction))
        known = choices[words[1]]._option_string_actions
        assert all(word in known for word in words if word.startswith("--")), code


@every_page
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", text_of(ROOT / "Makefile"), re.MULTILINE))
    lines, prose = code_and_prose(text_of(page))
    code = [*lines, *INLINE_CODE.findall(prose)]
    for line in code:
        if line.startswith("make "):
            assert set(MAKE_TARGET.findall(line.partition("#")[0])) <= targets, line


@every_page
def test_no_page_names_a_path_of_one_machine(page: Path) -> None:
    assert not MACHINE_PATH.search(text_of(page))


def test_the_index_links_every_page() -> None:
    linked = set(LINK.findall(text_of(ROOT / "docs" / "index.md")))
    assert {page.name for page in ROOT.glob("docs/*.md")} - {"index.md"} <= linked


def test_the_version_is_the_same_everywhere() -> None:
    released = re.findall(r"^## \[(\d[^]]*)\]", text_of(ROOT / "CHANGELOG.md"), re.MULTILINE)
    assert released[0] == __version__
    assert yaml.safe_load(text_of(ROOT / "CITATION.cff"))["version"] == __version__
    assert tomllib.loads(text_of(ROOT / "pyproject.toml"))["project"]["version"] == __version__
