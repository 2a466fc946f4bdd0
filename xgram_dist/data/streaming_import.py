"""The one place that imports `streaming`.

In: nothing. Out: the few names of mosaicml-streaming that this project uses (MDS writer and reader, `Stream` for
download, verification and decompression of shards, the cloud downloader, hashes).

Why not `import streaming`: its package files import torchvision (through `streaming.vision`) and transformers
(through `streaming.base.dataloader`) for data sets and a loader this project never touches. torchvision has no
build that works beside a CPU-only torch, and transformers takes seconds to import in every worker. The modules we
do need import neither. So the two package files `streaming/__init__.py` and `streaming/base/__init__.py` are passed
over: while our imports run, bare packages with the same search path stand in for them, and are taken away again
afterwards, so that another part of the process can still import the whole of `streaming` if its requirements are
there.
"""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from xgram_dist.errors import UserError


@contextmanager
def _bare_packages() -> Iterator[None]:
    """`streaming` and `streaming.base` as packages whose own code has not run."""
    if "streaming" in sys.modules:  # somebody imported the whole of it already
        yield
        return
    spec = importlib.util.find_spec("streaming")
    if spec is None or not spec.submodule_search_locations:
        raise UserError("the package mosaicml-streaming is not installed: pip install mosaicml-streaming")
    root = Path(next(iter(spec.submodule_search_locations)))
    names = {"streaming": root, "streaming.base": root / "base"}
    for name, folder in names.items():
        module = ModuleType(name)
        module.__path__ = [str(folder)]
        module.__spec__ = importlib.util.spec_from_file_location(name, folder / "__init__.py")
        sys.modules[name] = module
    try:
        yield
    finally:
        for name in names:
            sys.modules.pop(name, None)


with _bare_packages():
    from streaming.base.format import reader_from_json
    from streaming.base.format.mds import MDSReader, MDSWriter
    from streaming.base.hashing import get_hash
    from streaming.base.storage import CloudDownloader
    from streaming.base.stream import Stream

__all__ = ["CloudDownloader", "MDSReader", "MDSWriter", "Stream", "get_hash", "reader_from_json"]
