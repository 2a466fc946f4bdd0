"""Download OLMo-mix-1124 or DCLM-baseline, all of it or some sources, for `xgram-dist prepare --mix OUT/data`.

    python tools/download_olmo_mix.py --list                                     # sources with files and bytes
    python tools/download_olmo_mix.py --out olmo-mix-1124 --source wiki --source arxiv
    python tools/download_olmo_mix.py --out olmo-mix-1124 --source dclm --files 100
    python tools/download_olmo_mix.py --data dclm-baseline --out dclm-baseline --files 64

The list of files is taken once, at one revision, and kept in OUT/files.json. Files are fetched in parallel, each to a
partial file that an interrupted run continues, verified against size and SHA-256, and renamed. Run the same command
again until it says that nothing is left. A token for the server, if it wants one, is read from HF_TOKEN.
"""

import argparse
import hashlib
import json
import os
import re
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

from xgram_dist.console import Progress, print_table
from xgram_dist.data.documents import ENDINGS
from xgram_dist.errors import UserError
from xgram_dist.files import write_atomically

SERVER = "https://huggingface.co"
# Repository, folder of the documents in it, and the source of a path inside that folder.
DATA = {
    "olmo-mix-1124": ("allenai/olmo-mix-1124", "data", re.compile(r"([^/]+)/")),
    "dclm-baseline": ("mlfoundations/dclm-baseline-1.0", "", re.compile(r"(global-shard_\d+_of_\d+)/")),
}
LIST = "files.json"
ATTEMPTS = 8
FIRST_PAUSE_SECONDS = 1.0
TIMEOUT_SECONDS = 60
_BLOCK = 1 << 20


@dataclass(frozen=True)
class RemoteFile:
    path: str  # in the repository
    source: str
    size: int
    sha256: str | None  # None: a small file outside of large-file storage, verified by its size


class Server:
    """A Hugging Face server, or one with the same interface."""

    def __init__(self, address: str, repository: str):
        self._address, self._repository = address.rstrip("/"), repository

    def _open(self, url: str, start: int = 0) -> Any:
        request = urllib.request.Request(url)
        token = os.environ.get("HF_TOKEN")
        if token:
            request.add_unredirected_header("Authorization", f"Bearer {token}")
        if start:
            request.add_header("Range", f"bytes={start}-")
        return urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS)

    def revision(self) -> str:
        """The newest commit."""
        url = f"{self._address}/api/datasets/{self._repository}"
        return str(retry(lambda: json.load(self._open(url)), url)["sha"])

    def entries(self, revision: str, folder: str) -> Iterator[dict[str, Any]]:
        """Every file below a folder."""
        place = urllib.parse.quote(folder)
        url: str | None = f"{self._address}/api/datasets/{self._repository}/tree/{revision}/{place}?recursive=true"
        while url is not None:
            page, url = retry(lambda url=url: self._page(url), url)
            yield from (entry for entry in page if entry["type"] == "file")

    def _page(self, url: str) -> tuple[list[dict[str, Any]], str | None]:
        with self._open(url) as reply:
            following = re.search(r'<([^>]+)>;\s*rel="next"', reply.headers.get("Link", ""))
            return json.load(reply), urllib.parse.urljoin(url, following[1]) if following else None

    def download(self, path: str, revision: str, start: int) -> Any:
        """The content of a file from byte `start` on, as an open reply."""
        place = urllib.parse.quote(path)
        return self._open(f"{self._address}/datasets/{self._repository}/resolve/{revision}/{place}", start)


def retry(attempt: Any, what: str) -> Any:
    """Again after growing pauses where the fault may pass; a request that is refused is final."""
    pause = FIRST_PAUSE_SECONDS
    for number in range(1, ATTEMPTS + 1):
        try:
            return attempt()
        except urllib.error.HTTPError as error:
            reason = f"HTTP {error.code} {error.reason}"
            if error.code < 500 and error.code not in (408, 416, 429):
                hint = "; set HF_TOKEN to a token that may read it" if error.code in (401, 403) else ""
                raise UserError(f"cannot fetch '{what}': {reason}{hint}") from None
        except (urllib.error.URLError, HTTPException, OSError, ValueError) as error:
            reason = f"{type(error).__name__}: {error}"
        if number == ATTEMPTS:
            raise UserError(f"cannot fetch '{what}' in {ATTEMPTS} attempts: {reason}; run the same command again")
        time.sleep(pause)
        pause = min(2 * pause, 60)


def list_files(server: Server, name: str) -> tuple[str, list[RemoteFile]]:
    """The revision, and all document files of a data set, in the order of their paths."""
    _, folder, source_pattern = DATA[name]
    revision = server.revision()
    files = []
    for entry in server.entries(revision, folder):
        inside = entry["path"].removeprefix(f"{folder}/") if folder else entry["path"]
        source = source_pattern.match(inside)
        if source and entry["path"].endswith(ENDINGS) and ".." not in entry["path"].split("/"):
            large = entry.get("lfs") or {}
            files.append(RemoteFile(entry["path"], source[1], int(large.get("size", entry["size"])), large.get("oid")))
    if not files:
        raise UserError(f"'{DATA[name][0]}' lists no document file; its layout may have changed")
    return revision, sorted(files, key=lambda file: file.path)


def kept_list(out: Path, server: Server, name: str) -> tuple[str, list[RemoteFile]]:
    """The list that an earlier run has taken, or a new one."""
    path = out / LIST
    if path.is_file():
        record = json.loads(path.read_bytes())
        if record["data"] != name:
            raise UserError(f"'{out}' holds {record['data']}, not {name}; give another --out")
        return record["revision"], [RemoteFile(**file) for file in record["files"]]
    revision, files = list_files(server, name)
    record = {"data": name, "revision": revision, "files": [asdict(file) for file in files]}
    write_atomically(path, json.dumps(record, indent=0))
    return revision, files


def choose(files: list[RemoteFile], sources: list[str], count: int | None) -> list[RemoteFile]:
    """The files of some sources (none: all), and of each the first `count`."""
    known = sorted({file.source for file in files})
    for source in sources:
        if source not in known:
            raise UserError(f"--source {source} is not one of {', '.join(known)}")
    chosen = []
    for source in sources or known:
        chosen += [file for file in files if file.source == source][:count]
    return chosen


def fetch_file(server: Server, revision: str, file: RemoteFile, target: Path, report: Any) -> None:
    """Download, continue or recognise one file; `report` is called with bytes as they are done."""
    if target.is_file() and target.stat().st_size == file.size:
        report(file.size)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.part")
    told = 0

    def attempt() -> None:
        nonlocal told
        have = partial.stat().st_size if partial.is_file() else 0
        if have > file.size:
            partial.unlink()
            have = 0
        if have < file.size or file.size == 0:
            with server.download(file.path, revision, have) as reply, open(partial, "ab") as out:
                if have and reply.status != 206:  # the server does not continue: from the start
                    out.truncate(0)
                while block := reply.read(_BLOCK):
                    out.write(block)
                    position = out.tell()
                    if position > told:
                        report(position - told)
                        told = position
        size = partial.stat().st_size
        if size != file.size:
            raise OSError(f"{size:,} of {file.size:,} bytes came")
        if file.sha256 is not None and sha256(partial) != file.sha256:
            partial.unlink()
            raise OSError("its SHA-256 is not the listed one")

    retry(attempt, file.path)
    report(file.size - told)
    os.replace(partial, target)


def sha256(path: Path) -> str:
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def download(server: Server, revision: str, files: list[RemoteFile], out: Path, workers: int) -> None:
    total = sum(file.size for file in files)
    guard = threading.Lock()
    with Progress(total / 1e6, "MB", "downloading") as progress, ThreadPoolExecutor(workers) as pool:

        def report(size: int) -> None:
            with guard:
                progress.update(size / 1e6)

        jobs = [pool.submit(fetch_file, server, revision, file, out / file.path, report) for file in files]
        try:
            for job in as_completed(jobs):
                job.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def verify(files: list[RemoteFile], out: Path) -> list[str]:
    """A sentence for every chosen file that is missing or damaged."""
    faults = []
    with Progress(sum(file.size for file in files) / 1e6, "MB", "verifying") as progress:
        for file in files:
            path = out / file.path
            if not path.is_file():
                faults.append(f"'{path}' is missing; run without --verify to download it")
            elif path.stat().st_size != file.size or (file.sha256 is not None and sha256(path) != file.sha256):
                faults.append(f"'{path}' is damaged; delete it and run without --verify")
            progress.update(file.size / 1e6)
    return faults


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=list(DATA), default="olmo-mix-1124", help="(default olmo-mix-1124)")
    parser.add_argument("--out", metavar="DIR", help="folder to download to")
    parser.add_argument("--source", action="append", default=[], metavar="NAME", help="repeatable (default: all)")
    parser.add_argument("--files", type=int, metavar="N", help="the first N files of each source (default: all)")
    parser.add_argument("--workers", type=int, default=8, metavar="N", help="downloads at a time (default 8)")
    parser.add_argument("--list", action="store_true", help="print the sources with their files and bytes, and end")
    parser.add_argument("--verify", action="store_true", help="read all downloaded files against their SHA-256")
    parser.add_argument("--server", default=SERVER, metavar="URL", help=f"(default {SERVER})")
    args = parser.parse_args(arguments)
    try:
        return run(args)
    except UserError as error:
        print(f"download_olmo_mix: {error}", file=sys.stderr)
        return 2


def run(args: argparse.Namespace) -> int:
    server = Server(args.server, DATA[args.data][0])
    if args.workers < 1 or (args.files is not None and args.files < 1):
        raise UserError("--workers and --files must be at least 1")
    if args.list:
        _, files = list_files(server, args.data)
        rows = []
        for source in sorted({file.source for file in files}):
            sizes = [file.size for file in files if file.source == source]
            rows.append([source, f"{len(sizes):,}", f"{sum(sizes) / 1e9:,.1f}"])
        print_table(["source", "files", "GB"], rows)
        return 0
    if args.out is None:
        raise UserError("give a folder with --out, or --list")
    out = Path(args.out)
    revision, files = kept_list(out, server, args.data)
    chosen = choose(files, args.source, args.files)
    if args.verify:
        faults = verify(chosen, out)
        for fault in faults:
            print(f"download_olmo_mix: {fault}", file=sys.stderr)
        return 1 if faults else 0
    download(server, revision, chosen, out, args.workers)
    print(f"{len(chosen):,} files, {sum(file.size for file in chosen) / 1e9:,.2f} GB in {out}; nothing is left to do")
    return 0


if __name__ == "__main__":
    sys.exit(main())
