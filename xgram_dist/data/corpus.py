"""The embedded default corpus: English and Python text of the Python installation itself.

In: a size in bytes. Out: documents of three sources: `reference` (the language reference in `pydoc_data`), `library`
(the source of the standard library) and `docstrings` (its docstrings, one document per module). Deterministic for one
Python version; tests and installed packages are left out. No network access.
"""

import ast
import hashlib
import importlib
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

import orjson

from xgram_dist.errors import UserError

# Weights of the sources in the mix. They differ from the shares of the text, so that the weighting has an effect.
WEIGHTS = {"reference": 0.2, "library": 0.5, "docstrings": 0.3}
DEFAULT_BYTES = 12_000_000
_BYTES_SHARE = {"reference": 0.05, "library": 0.78, "docstrings": 0.17}
_SKIPPED_FOLDERS = {
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "dist-packages",
    "__pycache__",
    "_bundled",
    "lib2to3",
}
_MIN_DOCUMENT = 200  # characters; shorter documents are skipped


def source_documents(source: str, max_bytes: int) -> Iterator[str]:
    """Documents of one source until `max_bytes` bytes of text."""
    readers = {"reference": _reference, "library": _library, "docstrings": _docstrings}
    left = max_bytes
    for text in readers[source]():
        if len(text) < _MIN_DOCUMENT:
            continue
        size = len(text.encode("utf-8"))
        if size > left:
            continue  # a smaller document may still fit
        left -= size
        yield text


def write_corpus(folder: Path, max_bytes: int = DEFAULT_BYTES) -> dict[str, Path]:
    """Write one `.jsonl` file per source; the files by source name."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    for source in WEIGHTS:
        target = folder / f"{source}.jsonl"
        count = 0
        with open(target, "wb") as file:
            for text in source_documents(source, int(max_bytes * _BYTES_SHARE[source])):
                file.write(orjson.dumps({"id": f"{source}-{count}", "text": text}) + b"\n")
                count += 1
        if count == 0:
            raise UserError(
                f"this Python installation has no text for the embedded corpus's source '{source}' "
                "(its standard library was installed without source); give your own with --source NAME=PATH"
            )
        files[source] = target
    return files


def _reference() -> Iterator[str]:
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except ImportError:
        return
    for name in sorted(topics):
        yield topics[name].strip() + "\n"


def _library_files() -> list[Path]:
    """Source files in a pseudo-random order that does not depend on where Python is installed."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [file for file in root.rglob("*.py") if not _SKIPPED_FOLDERS & set(file.relative_to(root).parts[:-1])]
    return sorted(files, key=lambda file: hashlib.sha256(file.relative_to(root).as_posix().encode()).digest())


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _library() -> Iterator[str]:
    for file in _library_files():
        # Codec tables and the topics of pydoc are data, not source.
        if file.parent.name not in {"encodings", "pydoc_data"}:
            yield _read(file)


def _docstrings() -> Iterator[str]:
    for file in _library_files():
        text = _read(file)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(text)
        except (SyntaxError, ValueError):
            continue
        yield "\n".join(f"{name}\n\n{docstring}\n" for name, docstring in _docstrings_of(tree, file.stem))


def _docstrings_of(
    node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, name: str
) -> Iterator[tuple[str, str]]:
    """Name and docstring of a definition and of all definitions nested in it."""
    docstring = ast.get_docstring(node)
    if docstring:
        yield name, docstring
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _docstrings_of(child, child.name)
