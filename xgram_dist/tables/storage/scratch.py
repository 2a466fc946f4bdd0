"""The scratch folder of the disk tier (`memory.folder`): files that are worth nothing once their process has ended.

    FOLDER/NAME.records       sparse; as large as the disk, with blocks for the records in use
    FOLDER/NAME.owner.json    host, process and command it belongs to; written before the records, removed after them
    FOLDER/.lock              held for a moment while files are taken or cleared

Whoever opens a file here first clears those whose process has ended, under any name: a killed run leaves nothing behind
for long. A file whose process lives is refused. Files with other names are not touched, and links are not followed.

A write to a hole of a mapped file on a full disk would kill the process by SIGBUS. So blocks are allocated before
records are written, and a full disk ends the run by a sentence.
"""

import errno
import fcntl
import json
import os
import socket
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from xgram_dist.errors import UserError, one_line
from xgram_dist.files import process_start

RECORDS, OWNER, LOCK = ".records", ".owner.json", ".lock"
NETWORK = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "gpfs", "ceph", "beegfs", "afs", "9p", "orangefs", "panfs")
"""Types of network file systems in /proc/self/mountinfo; those through FUSE count as such, too."""
PROBE_BYTES = 16 << 20
MAX_SHOWN = 300
"""Characters of an owner in a message."""
DYING_SECONDS = 10.0
"""How long the memory of a killed process may take to be freed."""


@dataclass(frozen=True)
class Owner:
    host: str
    boot: str
    """Changes when the machine restarts."""
    processes: str
    """The namespace in which `pid` counts."""
    pid: int
    started: str
    """By the kernel's clock: tells a process from a later one with the same number."""
    command: str
    since: str

    def is_sound(self) -> bool:
        """Whether its fields are of their types: files of this name may be anybody's."""
        texts = (self.host, self.boot, self.processes, self.started, self.command, self.since)
        return all(isinstance(text, str) for text in texts) and type(self.pid) is int and 0 < self.pid < 1 << 31

    def __str__(self) -> str:
        return one_line(f"process {self.pid} on {self.host} since {self.since} ({self.command})", MAX_SHOWN)


def _this_process() -> Owner:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    pid = os.getpid()
    return Owner(
        socket.gethostname(),
        boot,
        os.readlink("/proc/self/ns/pid"),
        pid,
        process_start(pid) or "",
        " ".join(sys.argv)[:200],
        datetime.now(UTC).isoformat(sep=" ", timespec="seconds"),
    )


def _is_over(owner: Owner, me: Owner) -> bool:
    """Whether the owner has ended. One in a container whose processes cannot be seen from here counts as alive."""
    if owner.host != me.host:
        return False
    if owner.boot != me.boot:
        return True
    return owner.processes == me.processes and process_start(owner.pid) != owner.started


class ScratchFile:
    """An open file of this process in a scratch folder, until `close`."""

    def __init__(self, folder: Path, name: str):
        assert "/" not in name, name
        self.folder, self.path = folder, folder / f"{name}{RECORDS}"
        self._name, self._allocated = name, 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            _refuse_network(folder)
            with self._locked():
                me = _this_process()
                self._clear_leftovers(me)
                self._refuse_taken(me)
                self._write_owner(me)
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                self.descriptor = os.open(f"{name}{RECORDS}", flags, 0o600, dir_fd=self._folder)
        except OSError as error:
            raise UserError(
                f"memory.folder '{folder}' cannot be used: {error.strerror} ('{error.filename or folder}'); choose "
                "another folder on a disk of this node"
            ) from error

    def reserve(self, num_bytes: int) -> int:
        """Make the file this long, or as long as the disk is large or the file system allows. Returns its length."""
        disk = os.fstatvfs(self.descriptor)
        size = min(num_bytes, disk.f_blocks * disk.f_frsize)
        while size and not self._lengthen(size):
            size //= 2
        if self._is_dense(size):
            self.close()
            raise UserError(
                f"memory.folder '{self.folder}' is on a file system without sparse files ({file_system(self.folder)}); "
                "choose a folder on ext4, xfs or btrfs"
            )
        return size

    def _lengthen(self, size: int) -> bool:
        """To `size`, unless a file may not be so long. One that is not sparse stays short."""
        try:
            os.ftruncate(self.descriptor, min(size, PROBE_BYTES))
            if not self._is_dense(size):
                os.ftruncate(self.descriptor, size)
        except OSError:
            return False
        return True

    def _is_dense(self, size: int) -> bool:
        return os.fstat(self.descriptor).st_blocks * 512 > min(size, PROBE_BYTES) // 2

    def allocate(self, num_bytes: int, ahead: int) -> None:
        """Blocks of the disk for the first `num_bytes`, and for `ahead` bytes more where there is plenty."""
        if num_bytes <= self._allocated:
            return
        disk = os.fstatvfs(self.descriptor)
        if disk.f_bavail * disk.f_frsize > num_bytes - self._allocated + 2 * ahead:
            num_bytes += ahead
        try:
            os.posix_fallocate(self.descriptor, self._allocated, num_bytes - self._allocated)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            raise self.full(num_bytes) from error
        self._allocated = num_bytes

    def full(self, num_bytes: int) -> UserError:
        """The sentence for a disk without room for a file of so many bytes."""
        disk = os.fstatvfs(self.descriptor)
        return UserError(
            f"no room for table rows in memory.folder '{self.folder}': '{self.path.name}' needs {num_bytes:,} bytes, "
            f"has {self._allocated:,}, and {disk.f_bavail * disk.f_frsize:,} are free; make room there, or choose a "
            "folder on a larger disk, and resume from the last checkpoint"
        )

    def close(self) -> None:
        """Remove the file."""
        os.close(self.descriptor)
        for suffix in (RECORDS, OWNER):
            with suppress(FileNotFoundError):
                os.unlink(self._name + suffix, dir_fd=self._folder)
        os.close(self._folder)

    # Owners. The folder is locked.

    @contextmanager
    def _locked(self) -> Iterator[None]:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        lock = os.open(LOCK, flags, 0o666, dir_fd=self._folder)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def _clear_leftovers(self, me: Owner) -> None:
        for entry in os.listdir(self._folder):
            if entry.endswith(OWNER):
                owner = self._read_owner(entry)
                if owner is not None and _is_over(owner, me):
                    self._remove(entry.removesuffix(OWNER))

    def _refuse_taken(self, me: Owner) -> None:
        end = time.monotonic() + DYING_SECONDS
        entries = os.listdir(self._folder)
        if self._name + OWNER not in entries and self._name + RECORDS not in entries:
            return
        owner = self._read_owner(self._name + OWNER)
        while owner is not None and owner.pid != me.pid and time.monotonic() < end and not _is_over(owner, me):
            time.sleep(0.05)
        if owner is not None and _is_over(owner, me):
            self._remove(self._name)
            return
        holder = f"used by {one_line(str(owner), 120)}" if owner is not None else "not of a run that is known"
        raise UserError(
            f"'{self.path}' in memory.folder is {holder}; wait for that run to end, choose another memory.folder, or "
            f"delete {self._name}{RECORDS} and {self._name}{OWNER} if it is over"
        )

    def _remove(self, name: str) -> None:
        for suffix in (RECORDS, OWNER):
            with suppress(FileNotFoundError):
                os.unlink(name + suffix, dir_fd=self._folder)

    def _read_owner(self, entry: str) -> Owner | None:
        """None: not a file of ours."""
        try:
            descriptor = os.open(entry, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=self._folder)
        except OSError:
            return None
        with open(descriptor, encoding="utf-8", errors="replace") as stream:
            try:
                owner = Owner(**json.loads(stream.read(10_000))) if _is_plain(descriptor) else None
            except (ValueError, TypeError, RecursionError):
                return None
        return owner if owner is not None and owner.is_sound() else None

    def _write_owner(self, me: Owner) -> None:
        """Whole from the moment it has its name."""
        new = f".{self._name}.new"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(new, flags, 0o644, dir_fd=self._folder), "w", encoding="utf-8") as stream:
            json.dump(asdict(me), stream, indent=2)
        os.rename(new, self._name + OWNER, src_dir_fd=self._folder, dst_dir_fd=self._folder)


def _is_plain(descriptor: int) -> bool:
    return stat.S_ISREG(os.fstat(descriptor).st_mode)


def file_system(folder: Path) -> str:
    """Its type, as the kernel names it; empty where it does not tell."""
    found, longest = "", -1
    folder = folder.resolve()
    with suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            before, after = line.split(" - ", 1)
            point = Path(before.split()[4].replace("\\040", " "))
            if folder.is_relative_to(point) and len(point.parts) >= longest:  # of several mounts the last one counts
                found, longest = after.split()[0], len(point.parts)
    return found


def _refuse_network(folder: Path) -> None:
    kind = file_system(folder)
    if kind in NETWORK or kind.startswith("fuse."):
        raise UserError(
            f"memory.folder '{folder}' is on a network file system ({kind}); choose a folder on a disk of this node"
        )
