"""Calls of Linux that Python has no name for: reserving memory, hints for mapped files, memory limits.

Every hint has a fallback, for kernels and containers that refuse the call.
"""

import contextlib
import ctypes
import mmap
import os
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from xgram_dist.parallel.device import free_and_total_memory

PAGE = mmap.PAGESIZE
_MAP_NORESERVE, _MADV_WILLNEED = 0x4000, 3  # sys/mman.h
_SYS_PROCESS_MADVISE, _MAX_RANGES = 440, 1024  # the same number on every architecture; limits.h
_WRITE_AND_WAIT = 1 | 2 | 4  # fcntl.h: SYNC_FILE_RANGE_WAIT_BEFORE, _WRITE, _WAIT_AFTER


def reserve_memory(num_bytes: int) -> mmap.mmap:
    """Zeroed memory that takes address space now, and pages when they are written."""
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)


class PageReader:
    """Asks the system to read pages of a mapped file. The caller does not wait for the disk."""

    def __init__(self, descriptor: int, address: int):
        """`address`: of the file's first byte in memory."""
        self._descriptor, self._address = descriptor, address
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._process = os.pidfd_open(os.getpid())

    def will_need(self, starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> None:
        """Byte ranges of the file, at page boundaries. Pages in memory cost a lookup."""
        ranges = np.stack((starts + self._address, sizes), axis=1).astype(np.uint64)
        for first in range(0, len(ranges), _MAX_RANGES):
            batch = ranges[first : first + _MAX_RANGES]
            arguments = ctypes.c_void_p(batch.ctypes.data), ctypes.c_size_t(len(batch)), _MADV_WILLNEED, 0
            if self._libc.syscall(_SYS_PROCESS_MADVISE, self._process, *arguments) < 0:
                for start, size in zip(starts[first:].tolist(), sizes[first:].tolist(), strict=True):
                    os.posix_fadvise(self._descriptor, start, size, os.POSIX_FADV_WILLNEED)
                return

    def close(self) -> None:
        os.close(self._process)


def write_back(descriptor: int, start: int, size: int) -> None:
    """Write the dirty pages of a file's byte range to the disk, and wait for it. File size and times are not synced:
    after a power cut the file does not count."""
    with contextlib.suppress(AttributeError):
        call = ctypes.CDLL(None, use_errno=True).sync_file_range
        if call(descriptor, ctypes.c_int64(start), ctypes.c_int64(size), _WRITE_AND_WAIT) == 0:
            return
    os.fdatasync(descriptor)


def memory_limit() -> int:
    """Bytes of memory that this process may use: those of the machine, or the limit of its cgroup or of one above."""
    limits = [free_and_total_memory(torch.device("cpu"))[1]]
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                root, file = Path("/sys/fs/cgroup"), "memory.max"
            elif "memory" in controllers.split(","):
                root, file = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"
            else:
                continue
            group = root / path.lstrip("/")
            for folder in (group, *group.parents):
                with contextlib.suppress(OSError, ValueError):  # no such file at the root, or "max"
                    limits.append(int((folder / file).read_text(encoding="ascii")))
                if folder == root:
                    break
    return min(limits)
