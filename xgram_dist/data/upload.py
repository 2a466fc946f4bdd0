"""`prepare --out ADDRESS`: a data set made in a folder and moved to object storage.

Files are uploaded in parallel, `dataset.json` last of all: until it is there, the address holds no data set. An
interrupted upload is repeated by the same command; objects that are there already are left alone.
"""

import hashlib
import os
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from xgram_dist.console import Progress
from xgram_dist.data.manifest import MANIFEST, Manifest, read_manifest
from xgram_dist.data.prepare import STAGING, Outcome, Request, prepare
from xgram_dist.data.storage import fetch, open_store, upload
from xgram_dist.errors import UserError
from xgram_dist.files import private_folder

_UPLOADS = 8  # at a time


def prepare_at(request: Request, address: str, work: Path | None) -> Outcome:
    """Prepare in the folder `work` (default: one in the temporary folder, named after the address), then upload."""
    address = address.rstrip("/")
    there = _existing(address)
    if work is None:
        name = hashlib.sha256(address.encode()).hexdigest()[:16]
        work = private_folder(Path(tempfile.gettempdir()) / f"xgram-dist-{os.getuid()}") / f"prepare-{name}"
    outcome = prepare(replace(request, out=work))
    if there is not None and there.request == outcome.manifest.request and not request.overwrite:
        return replace(outcome, already_there=True)
    if there is not None and not request.overwrite:
        raise UserError(
            f"'{address}' holds a data set of other documents or settings; give another --out or --overwrite"
        )
    _upload_folder(work, address)
    shutil.rmtree(work, ignore_errors=True)
    return replace(outcome, already_there=False)


def _existing(address: str) -> Manifest | None:
    try:
        data = fetch(address, open_store(address), MANIFEST)
    except FileNotFoundError:
        return None
    with tempfile.TemporaryDirectory(prefix="xgram-dist-") as folder:
        (Path(folder) / MANIFEST).write_bytes(data)
        return read_manifest(Path(folder))


def _upload_folder(folder: Path, address: str) -> None:
    store = open_store(address)
    names = sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file()
        and path.name != MANIFEST
        and STAGING not in path.parts
        and path.suffix not in (".mds", ".lock")
    )
    total = sum((folder / name).stat().st_size for name in names)

    def send(name: str) -> int:
        content = (folder / name).read_bytes()
        upload(address, store, name, content)
        return len(content)

    with Progress(total / 1e6, "MB", f"uploading to {address}") as progress, ThreadPoolExecutor(_UPLOADS) as pool:
        for size in pool.map(send, names):
            progress.update(size / 1e6)
    upload(address, store, MANIFEST, (folder / MANIFEST).read_bytes())
