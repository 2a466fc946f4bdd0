"""The lease of a run folder: only one run at a time writes to it.

    RUN/lease/00000007.json     the holder: token, host, process, job

The file with the highest number is the lease; its modification time is the holder's last heartbeat. A run takes the
lease by creating the next number, which only one process can do (a hard link, also on NFS; the file is whole from the
moment it has its name), and only if the previous holder has released it, is dead on this machine, is an earlier
incarnation of the same job (its scheduler has ended it), or has sent no heartbeat for STALE_SECONDS. A holder touches
its file through its open descriptor only, so that one that lost the lease without knowing it changes nothing.

A holder that was suspended or cut off from the file system finds its number gone when it returns, says so and exits at
once. It cannot commit a checkpoint either: the new holder clears unfinished checkpoints (`folder.py`), so that the
rename fails.
"""

import json
import os
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

from pydantic import TypeAdapter, ValidationError

from xgram_dist.console import format_duration
from xgram_dist.environment import start_of_job, whole_number
from xgram_dist.errors import BadFileError, UserError, one_line
from xgram_dist.files import process_start, remove
from xgram_dist.untrusted import read_json

FOLDER = "lease"
HEARTBEAT_SECONDS = 5.0
STALE_SECONDS = 120.0
DYING_SECONDS = 2.0
MAX_BYTES = 10_000
_FILE = re.compile(r"([0-9]{8,18})\.json", re.ASCII)


@dataclass(frozen=True)
class Holder:
    token: str
    host: str
    machine: str
    """The scope of process ids: this boot of this machine, this container."""
    pid: int
    started: str
    """Start time of the process in clock ticks, because process ids are reused."""
    job: str
    """The scheduler's name of the job; empty: none."""
    incarnation: list[int]
    """How often the scheduler has restarted it."""
    since: str

    def __str__(self) -> str:
        job = f", {self.job}" if self.job else ""
        return one_line(f"process {self.pid} on {self.host}{job}, since {self.since}", 200)


def this_process() -> Holder:
    job, incarnation = _job(dict(os.environ))
    return Holder(
        token=secrets.token_hex(8),
        host=socket.gethostname(),
        machine=_machine(),
        pid=os.getpid(),
        started=process_start(os.getpid()) or "",
        job=job,
        incarnation=incarnation,
        since=datetime.now(UTC).isoformat(sep=" ", timespec="seconds"),
    )


def _job(environment: dict[str, str]) -> tuple[str, list[int]]:
    """(name, restart counts) of the Slurm job, the torchrun run, or one within the other."""
    names, counts = [], []
    if start := start_of_job(environment):
        names.append(f"Slurm job {start[0]}")
        counts += start[1]
    elif slurm := environment.get("SLURM_JOB_ID"):
        names.append(f"Slurm job {slurm}")
        counts.append(whole_number(environment, "SLURM_RESTART_COUNT", default=0))
    run = environment.get("TORCHELASTIC_RUN_ID", "none")
    if run != "none":  # torchrun's id of an unnamed run
        names.append(f"torchrun {run}")
        counts.append(whole_number(environment, "TORCHELASTIC_RESTART_COUNT", default=0))
    return ", ".join(names), counts


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


class Lease:
    """Held by this process until `release`."""

    def __init__(self, run: Path, number: int, holder: Holder, descriptor: int):
        self.run, self.number, self.holder = run, number, holder
        self._descriptor = descriptor
        self._released = threading.Event()
        self._heartbeat = threading.Thread(target=self._send_heartbeats, name="lease", daemon=True)
        self._heartbeat.start()

    @property
    def token(self) -> str:
        return self.holder.token

    def check(self) -> None:
        """Exit this process at once if it no longer holds the lease."""
        try:
            last = max(_numbers(self.run), default=0)
            mine, newest = _read(_path(self.run, self.number)), _read(_path(self.run, last))
        except OSError:
            return  # the file system does not answer; the next write fails by itself
        if last != self.number or mine is None or mine.token != self.token:
            self._end(newest)

    def release(self) -> None:
        """Let the next run start without waiting. The file stays as a record; its number is not reused."""
        self._released.set()
        self._heartbeat.join()
        with suppress(OSError):  # if this fails, the lease goes stale
            os.utime(self._descriptor, (0, 0))
        os.close(self._descriptor)

    def _send_heartbeats(self) -> None:
        while not self._released.wait(HEARTBEAT_SECONDS):
            self.check()
            try:
                os.utime(self._descriptor)
            except OSError:
                continue  # other processes see the missing heartbeat

    def _end(self, taker: Holder | None) -> NoReturn:
        reason = "its lease was removed" if taker is None else f"it was taken over by {taker}"
        print(
            f"xgram-dist train: the run folder '{self.run}' is no longer held by this run: {reason}; this run exits "
            "and writes nothing more",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)


@contextmanager
def hold(run: Path) -> Iterator[Lease]:
    """Hold the lease of a run folder, or raise one sentence about its holder."""
    lease = take(run)
    try:
        yield lease
    finally:
        lease.release()


def take(run: Path) -> Lease:
    me = this_process()
    try:
        (run / FOLDER).mkdir(parents=True, exist_ok=True)
        while True:
            numbers = _numbers(run)
            last = numbers[-1] if numbers else 0
            if numbers:
                _refuse_while_held(run, last, me)
            try:
                descriptor = _create(_path(run, last + 1), me)
            except FileExistsError:
                continue  # another process was faster: look again
            if _numbers(run)[-1] != last + 1:  # taken more than once since we looked
                os.close(descriptor)
                _path(run, last + 1).unlink()
                continue
            for old in numbers:
                remove(_path(run, old))
            return Lease(run, last + 1, me, descriptor)
    except OSError as error:
        raise UserError(
            f"cannot write the run folder '{run}': {error.strerror}; choose another with --folder"
        ) from error


def _create(path: Path, me: Holder) -> int:
    """Create the file of a lease; its descriptor. A process that is killed meanwhile leaves no lease behind."""
    unnamed = path.with_name(f".{me.token}.new")
    descriptor = _create_and_write(unnamed, me)
    try:
        os.link(unnamed, path)
    except FileExistsError:
        os.close(descriptor)
        raise
    except OSError:  # a file system without hard links
        os.close(descriptor)
        return _create_and_write(path, me)
    finally:
        unnamed.unlink(missing_ok=True)
    return descriptor


def _create_and_write(path: Path, me: Holder) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    os.write(descriptor, json.dumps(asdict(me), indent=2).encode())
    os.fsync(descriptor)
    return descriptor


def check_free(run: Path) -> None:
    """Raise if a run folder is held, without taking the lease."""
    numbers = _numbers(run) if (run / FOLDER).is_dir() else []
    if numbers:
        _refuse_while_held(run, numbers[-1], this_process())


def _refuse_while_held(run: Path, number: int, me: Holder) -> None:
    path = _path(run, number)
    try:
        holder, silent = _read(path), _now(run / FOLDER, me) - path.stat().st_mtime
    except FileNotFoundError:
        return  # taken over at this moment; creating the next number will tell
    if silent > STALE_SECONDS or (holder is not None and _is_over(holder, me)):
        return
    raise UserError(
        f"the run folder '{run}' is held by {holder or 'a run that is just starting'} (last sign of life "
        f"{format_duration(max(0.0, silent))} ago); wait for that run to end, stop it, or choose another folder with "
        f"--folder (a run that is dead on another machine is taken over after {format_duration(STALE_SECONDS)})"
    )


def _is_over(holder: Holder, me: Holder) -> bool:
    """Whether the holder is an earlier incarnation of this job, or dead on this machine."""
    if holder.job and holder.job == me.job and me.incarnation > holder.incarnation:
        return True
    return holder.machine == me.machine and bool(holder.started) and _is_gone(holder)


def _is_gone(holder: Holder) -> bool:
    """Whether the process has ended. A killed process takes a moment to die, so a live one is polled for a while."""
    end = time.monotonic() + DYING_SECONDS
    while process_start(holder.pid) == holder.started:
        if time.monotonic() >= end:
            return False
        time.sleep(0.02)
    return True


def _now(folder: Path, me: Holder) -> float:
    """The file system's clock, which may differ from this machine's."""
    probe = folder / f".{me.token}"
    try:
        probe.write_bytes(b"")
        now = probe.stat().st_mtime
        probe.unlink()
    except OSError:
        return time.time()  # a read-only folder is refused elsewhere
    return now


def _path(run: Path, number: int) -> Path:
    return run / FOLDER / f"{number:08d}.json"


def _numbers(run: Path) -> list[int]:
    return sorted(int(match[1]) for path in (run / FOLDER).iterdir() if (match := _FILE.fullmatch(path.name)))


def _read(path: Path) -> Holder | None:
    """None: the file is gone, just being written, or not of a run."""
    try:
        return TypeAdapter(Holder).validate_python(read_json(path, limit=MAX_BYTES))
    except (FileNotFoundError, BadFileError, ValidationError):
        return None
