"""The folder of the runs: what checkpoints, leases and several nodes need of a file system.

Each check runs in a hidden folder of its own, which is removed at the end. Between the steps of a check, ranks wait for
each other by the all-gather that collects their facts.
"""

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from xgram_dist.checkpoint.lease import Lease, check_free, take
from xgram_dist.cluster.doctor.report import CheckFailedError, Context, Row, gather
from xgram_dist.errors import UserError

VISIBLE_SECONDS = 60.0
"""How long a node may take to see a new file of another one."""
SLOW_VISIBLE_SECONDS = 5.0
SLOW_FSYNC_SECONDS = 2.0
SLOW_WRITE = 20e6
"""Bytes a second of a rank."""
FREE_BYTES = 20e9
REPLACEMENTS = 100
EXCLUSIVE_FILES = 10
CLOCK_SECONDS = 5.0
"""Between the clocks of the file system and a rank."""
SHARED = "put runs on a file system that all nodes share, with --folder"

Replace = Callable[[Path, Path], object]


def check_file_system(context: Context, replace: Replace = os.replace) -> list[Row]:
    token = context.ranks.host.all_gather_object(f"{time.time_ns():x}")[0]
    folder = context.folder / f".doctor-{token}"
    try:
        gather(context, lambda: folder.mkdir(parents=True) if context.ranks.first else None)
    except CheckFailedError as error:
        advice = "choose a folder that can be written to, with --folder"
        return [Row("run folder", "fail", f"cannot write '{context.folder}': {error}", advice)]
    try:
        shared = _visibility(context, folder)
        if shared.status == "fail":
            return [shared]
        return [
            _space(context, folder),
            shared,
            _rename(context, folder, replace),
            _exclusive_creation(context, folder),
            *_writes(context, folder),
            _clock(context, folder),
            _lease(context, folder),
        ]
    finally:
        context.ranks.host.all_gather_object(None)
        if context.ranks.first:
            shutil.rmtree(folder, ignore_errors=True)


def _space(context: Context, folder: Path) -> Row:
    free = shutil.disk_usage(folder).free if context.ranks.first else 0
    free = context.ranks.host.all_gather_object(free)[0]
    found = f"'{context.folder}' can be written, {free / 1e9:,.0f} GB free"
    if free < FREE_BYTES:
        return Row("run folder", "warn", found, "a checkpoint of 0.73B with 1.2B of tables is 23 GB; make room")
    return Row("run folder", "pass", found, figures={"free_bytes": free})


def _visibility(context: Context, folder: Path) -> Row:
    """How long the other ranks take to see what the first wrote."""
    file = folder / "written"
    gather(context, lambda: file.write_text("by the first rank") if context.ranks.first else None)
    seconds = gather(context, lambda: _wait_for(file))
    blind = [rank for rank, taken in enumerate(seconds) if taken is None]
    if blind:
        return Row("shared folder", "fail", f"{context.where(blind)} does not see a file that rank 0 wrote", SHARED)
    slowest = max(taken for taken in seconds if taken is not None)
    nodes = len(set(context.nodes))
    found = f"all ranks see a new file after {slowest:.2f} s"
    if nodes == 1:
        return Row("shared folder", "skip", f"one node; {found}", "run on several nodes to see whether they share it")
    if slowest > SLOW_VISIBLE_SECONDS:
        advice = "attributes are cached for long (NFS: mount with actimeo=1 or noac); a resume may miss a checkpoint"
        return Row("shared folder", "warn", found, advice)
    return Row("shared folder", "pass", f"{found}, on {nodes} nodes")


def _wait_for(file: Path) -> float | None:
    start = time.monotonic()
    while not file.exists():
        if time.monotonic() - start > VISIBLE_SECONDS:
            return None
        os.listdir(file.parent) if file.parent.exists() else None  # refreshes what NFS caches
        time.sleep(0.01)
    return time.monotonic() - start


# Rename


class Reads(NamedTuple):
    whole: int
    broken: int
    """Absent, empty or mixed."""
    stale: int
    """Refused with ESTALE, as NFS does for a file that was replaced."""


def _rename(context: Context, folder: Path, replace: Replace) -> Row:
    """The first rank replaces a file again and again, while all ranks read it."""
    target, done = folder / "replaced", folder / "done"
    if context.ranks.first:
        target.write_bytes(b"a" * 65536)
    gather(context, lambda: _wait_for(target))
    writer = threading.Thread(target=_keep_replacing, args=(target, done, replace))
    if context.ranks.first:
        writer.start()
    reads = gather(context, lambda: _keep_reading(target, done))
    if context.ranks.first:
        writer.join()
    whole, broken, stale = (sum(column) for column in zip(*reads, strict=True))
    found = f"{REPLACEMENTS} replacements under {whole + broken + stale} reads"
    figures = {"whole": whole, "broken": broken, "stale": stale}
    if broken:
        advice = "a checkpoint could be seen half written; use a file system with POSIX rename, with --folder"
        return Row("atomic rename", "fail", f"{found}: {broken} saw no file or half of one", advice, figures)
    if stale:
        advice = "normal on NFS; readers of the project retry, other tools may not"
        return Row("atomic rename", "warn", f"{found}: {stale} were refused as stale", advice, figures)
    return Row("atomic rename", "pass", f"{found}: each saw a whole file", figures=figures)


def _keep_replacing(target: Path, done: Path, replace: Replace) -> None:
    part = target.with_suffix(".part")
    try:
        for number in range(REPLACEMENTS):
            part.write_bytes((b"b", b"a")[number % 2] * 65536)
            replace(part, target)
    finally:
        done.write_bytes(b"")


def _keep_reading(target: Path, done: Path) -> Reads:
    whole = broken = stale = 0
    until = time.monotonic() + VISIBLE_SECONDS
    while not done.exists() and time.monotonic() < until:
        try:
            content = target.read_bytes()
            if len(content) == 65536 and len(set(content)) == 1:
                whole += 1
            else:
                broken += 1
        except OSError as error:
            if error.errno == errno.ESTALE:
                stale += 1
            else:
                broken += 1
    return Reads(whole, broken, stale)


# Exclusive creation, writing, clock, lease


def _exclusive_creation(context: Context, folder: Path) -> Row:
    """All ranks try to create the same files; each must have one winner. With one rank, the second try must fail."""

    def winners() -> list[int]:
        won = []
        for number in range(EXCLUSIVE_FILES):
            for _ in range(2):
                try:
                    os.close(os.open(folder / f"exclusive-{number}", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
                    won.append(number)
                except FileExistsError:
                    continue
        return won

    won = [number for rank in gather(context, winners) for number in rank]
    if sorted(won) != list(range(EXCLUSIVE_FILES)):
        found = f"{len(won)} winners for {EXCLUSIVE_FILES} files"
        advice = "two runs could hold one run folder at a time; use another file system, with --folder"
        return Row("exclusive creation", "fail", found, advice)
    return Row("exclusive creation", "pass", f"one winner for each of {EXCLUSIVE_FILES} files")


def _writes(context: Context, folder: Path) -> list[Row]:
    """fsync of a small file, and a larger one of each rank at a time, as a checkpoint writes them."""
    size = (8 if context.quick else 256) << 20

    def write(count: int) -> float:
        path = folder / f"rank-{context.ranks.rank}"
        start = time.monotonic()
        with path.open("wb") as file:
            for _ in range(0, count, 1 << 20):
                file.write(b"\0" * min(count, 1 << 20))
            file.flush()
            os.fsync(file.fileno())
        taken = time.monotonic() - start
        path.unlink()
        return taken

    small = max(gather(context, lambda: max(write(4096) for _ in range(3))))
    speeds = [size / taken for taken in gather(context, lambda: write(size))]
    slow = small > SLOW_FSYNC_SECONDS
    advice = "saving waits for fsync; look at the load of the file system"
    rows = [Row("fsync", "warn" if slow else "pass", f"{1000 * small:,.1f} ms for 4 kB", advice if slow else "")]
    found = f"{sum(speeds) / 1e6:,.0f} MB/s over all ranks, {min(speeds) / 1e6:,.0f} MB/s at least"
    figures = {"bytes_per_second": speeds}
    if min(speeds) < SLOW_WRITE:
        advice = "checkpoints are written in the background, but one must end before the next; raise checkpoint.every"
        return [*rows, Row("checkpoint writes", "warn", found, advice, figures)]
    return [*rows, Row("checkpoint writes", "pass", found, figures=figures)]


def _clock(context: Context, folder: Path) -> Row:
    def offset() -> float:
        file = folder / f"clock-{context.ranks.rank}"
        file.write_bytes(b"")
        return file.stat().st_mtime - time.time()

    offsets = gather(context, offset)
    worst = max(range(len(offsets)), key=lambda rank: abs(offsets[rank]))
    found = f"{abs(offsets[worst]):.2f} s at most from the ranks' own ({context.where([worst])})"
    if abs(offsets[worst]) > CLOCK_SECONDS:
        advice = (
            "leases use the file server's clock and are safe; times in listings are not. Start chrony on both sides"
        )
        return Row("clock of the file system", "warn", found, advice, {"seconds": offsets})
    return Row("clock of the file system", "pass", found, figures={"seconds": offsets})


def _lease(context: Context, folder: Path) -> Row:
    """The first rank holds the lease; every rank must see that; then the last rank takes it."""
    held: list[Lease] = []
    gather(context, lambda: held.append(take(folder)) if context.ranks.first else None)
    try:
        seen = gather(context, lambda: sees_lease(folder))
    finally:
        for lease in held:
            lease.release()
        gather(context, lambda: None)  # nobody takes it before its release
    blind = [rank for rank, sees in enumerate(seen) if not sees]
    if blind:
        advice = "two runs could write to one folder; use another file system, with --folder"
        return Row("lease", "fail", f"{context.where(blind)} does not see the lease that rank 0 holds", advice)
    last = context.ranks.rank == context.ranks.size - 1
    try:
        gather(context, lambda: take(folder).release() if last else None)
    except CheckFailedError as error:
        return Row(
            "lease", "fail", f"released, but not to be had again: {error}", "use another file system, with --folder"
        )
    return Row("lease", "pass", "held by one, seen by all, taken over after its release")


def sees_lease(folder: Path) -> bool:
    try:
        check_free(folder)
    except UserError:
        return True
    return False
