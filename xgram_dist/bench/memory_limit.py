"""A cgroup of the benchmark's own, with a limit of memory.

    with MemoryLimit(num_bytes) as limit: ...       # a process calls limit.enter()

What a process allocates and reads from files after it entered counts; what it held before does not. The group is
removed at the end, or by the next benchmark.
"""

import contextlib
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

PREFIX = "xgram-bench-"
_ROOTS = {
    Path("/sys/fs/cgroup/memory"): ("memory.limit_in_bytes", "memory.max_usage_in_bytes"),
    Path("/sys/fs/cgroup"): ("memory.max", "memory.peak"),
}
"""Versions 1 and 2: file of the limit, and of the most that was used."""


def why_not() -> str:
    """Why no limit can be set here; empty where one can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "cgroups need Linux and root"
    try:
        with MemoryLimit(1 << 40):
            return ""
    except OSError as error:
        return f"no cgroup with a memory limit can be made here: {error.strerror}"


@dataclass
class MemoryLimit:
    """Plain data: it can be handed to another process."""

    num_bytes: int
    folder: Path | None = None

    def __enter__(self) -> "MemoryLimit":
        root = next((root for root, (limit, _) in _ROOTS.items() if self._has(root, limit)), Path("/sys/fs/cgroup"))
        self.folder = root / f"{PREFIX}{os.getpid()}"
        for other in root.glob(f"{PREFIX}*"):  # of a benchmark that was killed
            if not Path("/proc", other.name.removeprefix(PREFIX)).exists():
                with contextlib.suppress(OSError):
                    other.rmdir()
        self.folder.mkdir(exist_ok=True)
        try:
            (self.folder / _ROOTS[root][0]).write_text(str(self.num_bytes), encoding="ascii")
        except OSError:
            self.folder.rmdir()
            raise
        return self

    @staticmethod
    def _has(root: Path, limit: str) -> bool:
        if limit == "memory.max":
            controllers = root / "cgroup.subtree_control"
            return controllers.exists() and "memory" in controllers.read_text(encoding="ascii").split()
        return (root / limit).exists()

    def enter(self) -> None:
        """This process, and those it starts from now on."""
        assert self.folder is not None
        (self.folder / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")

    def peak(self) -> int:
        """The most bytes in use so far, with cached pages of files."""
        assert self.folder is not None
        for _, file in _ROOTS.values():
            with contextlib.suppress(OSError):
                return int((self.folder / file).read_text(encoding="ascii"))
        return 0

    def __exit__(self, *_: object) -> None:
        assert self.folder is not None
        for _attempt in range(100):  # a process that has just ended may still be in it
            with contextlib.suppress(OSError):
                self.folder.rmdir()
                return
            time.sleep(0.05)
