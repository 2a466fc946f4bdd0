"""The only place that imports mosaicml-streaming, lazily.

`streaming()` gives the few names this project uses: the cloud downloader, and the MDS writer to compare with.

Why not `import streaming`: its package files import torchvision (through `streaming.vision`) and transformers (through
`streaming.base.dataloader`), which this project does not use. torchvision has no build that works with a CPU-only
torch, and transformers takes seconds to import in every worker. The modules needed here import neither. So
`streaming/__init__.py` and `streaming/base/__init__.py` are skipped: during the import, empty packages with the same
search path take their place in `sys.modules`. They are removed afterwards, so that other code in the process can still
import all of `streaming` where its requirements are installed.
"""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from xgram_dist.errors import UserError


class Streaming(NamedTuple):
    """Names of mosaicml-streaming, which has no type annotations."""

    MDSWriter: Any
    CloudDownloader: Any


@cache
def streaming() -> Streaming:
    with _empty_packages():
        from streaming.base.format.mds import MDSWriter
        from streaming.base.storage import CloudDownloader

    return Streaming(MDSWriter, CloudDownloader)


@contextmanager
def _empty_packages() -> Iterator[None]:
    """`streaming` and `streaming.base` as packages whose `__init__.py` is not run."""
    if "streaming" in sys.modules:  # other code has imported all of it
        yield
        return
    spec = importlib.util.find_spec("streaming")
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            "addresses other than 's3://' need the package mosaicml-streaming, which is not installed: "
            "pip install 'xgram-dist[streaming]'"
        )
    root = Path(next(iter(spec.submodule_search_locations)))
    folders = {"streaming": root, "streaming.base": root / "base"}
    for name, folder in folders.items():
        module = ModuleType(name)
        module.__path__ = [str(folder)]
        module.__spec__ = importlib.util.spec_from_file_location(name, folder / "__init__.py")
        sys.modules[name] = module
    try:
        yield
    finally:
        for name in folders:
            sys.modules.pop(name, None)
