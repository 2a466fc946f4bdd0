"""A disk of its own: a file as a block device with a file system, which can be filled and slowed down.

The limit of bytes a second is a cgroup's (version 1, blkio), so it holds for the processes that were put into it.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup/blkio")
LIMITS = ("blkio.throttle.write_bps_device", "blkio.throttle.read_bps_device")


class BlockDisk:
    def __init__(self, path: Path, size: int):
        self.path, self._size, self._image = path, size, path.with_name(f"{path.name}.image")

    @staticmethod
    def why_not() -> str:
        """Why there can be none here; empty where there can."""
        if sys.platform != "linux" or os.geteuid() != 0:
            return "a disk of its own needs Linux and root"
        tools = [tool for tool in ("losetup", "mkfs.ext4") if shutil.which(tool) is None]
        if tools:
            return f"{', '.join(tools)} not found"
        tried = subprocess.run(["losetup", "-f"], capture_output=True, text=True)
        if tried.returncode:
            return f"no loop device here: {tried.stderr.strip()}"
        return "" if (GROUPS / LIMITS[0]).exists() else f"no cgroup with limits of bytes a second at {GROUPS}"

    def __enter__(self) -> "BlockDisk":
        self.path.mkdir()
        with self._image.open("wb") as file:
            file.truncate(self._size)
        found = subprocess.run(["losetup", "-f", "--show", self._image], capture_output=True, text=True, check=True)
        self._device = found.stdout.strip()
        try:
            subprocess.run(["mkfs.ext4", "-q", "-m", "0", self._device], check=True)
            subprocess.run(["mount", self._device, self.path], check=True)
        except BaseException:
            subprocess.run(["losetup", "-d", self._device])
            raise
        return self

    def __exit__(self, *_: object) -> None:
        subprocess.run(["umount", "-l", self.path])
        subprocess.run(["losetup", "-d", self._device])
        self._image.unlink()

    def fill(self) -> None:
        """All that is left."""
        with (self.path / "filler").open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(4096))

    def empty(self) -> None:
        (self.path / "filler").unlink()

    @contextmanager
    def throttle(self, num_bytes: int, process: int) -> Iterator[None]:
        """At most so many bytes a second each way, for a process and those it starts from now on."""
        device = Path("/sys/block", Path(self._device).name, "dev").read_text().strip()
        group = GROUPS / f"xgram-soak-{os.getpid()}"
        before = next(line for line in Path(f"/proc/{process}/cgroup").read_text().splitlines() if ":blkio:" in line)
        group.mkdir()
        try:
            for limit in LIMITS:
                (group / limit).write_text(f"{device} {num_bytes}")
            (group / "cgroup.procs").write_text(str(process))
            yield
        finally:
            (GROUPS / before.split(":", 2)[2].lstrip("/") / "cgroup.procs").write_text(str(process))
            for _ in range(600):  # processes that were killed may still be in it
                with suppress(OSError):
                    group.rmdir()
                    break
                time.sleep(0.1)
