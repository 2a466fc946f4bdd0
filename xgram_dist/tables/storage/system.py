"""Calls of Linux that Python has no name for: reserving memory, hints for mapped files, memory limits.

Every hint has a fallback, for kernels and containers that refuse the call.
"""

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from xgram_dist.parallel.device import free_and_total_memory

PAGE = mmap.PAGESIZE
_MAP_NORESERVE, _MADV_WILLNEED, _MADV_POPULATE_WRITE = 0x4000, 3, 23  # sys/mman.h
_SYS_PROCESS_MADVISE, _MAX_RANGES = 440, 1024  # the same number on every architecture; limits.h
_WRITE_AND_WAIT = 1 | 2 | 4  # fcntl.h: SYNC_FILE_RANGE_WAIT_BEFORE, _WRITE, _WAIT_AFTER


def reserve_memory(num_bytes: int) -> mmap.mmap:
    """Zeroed memory that takes address space now, and pages when they are written."""
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)


class MappedFile:
    """Hints for pages of a file that is mapped as a whole. Ranges are bytes of the file, at page boundaries."""

    def __init__(self, descriptor: int, address: int):
        self._descriptor, self._address = descriptor, address
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._process = os.pidfd_open(os.getpid())

    def will_need(self, starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> None:
        """Read pages from the disk; the caller does not wait for it. Pages in memory cost a lookup."""
        for start, size in self._advise(_MADV_WILLNEED, starts, sizes):
            os.posix_fadvise(self._descriptor, start, size, os.POSIX_FADV_WILLNEED)

    def will_write(self, starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> None:
        """Map pages for writing, so that the write itself does not fault. They count as dirty from now on."""
        for start, size in self._advise(_MADV_POPULATE_WRITE, starts, sizes):
            address = ctypes.c_void_p(self._address + start)
            if self._libc.madvise(address, ctypes.c_size_t(size), _MADV_POPULATE_WRITE) != 0:
                return  # older than Linux 5.14

    def _advise(self, advice: int, starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
        """Many ranges a call. Yields the ranges that are left where the kernel does not take them so."""
        ranges = np.stack((starts + self._address, sizes), axis=1).astype(np.uint64)
        for first in range(0, len(ranges), _MAX_RANGES):
            batch = ranges[first : first + _MAX_RANGES]
            arguments = ctypes.c_void_p(batch.ctypes.data), ctypes.c_size_t(len(batch)), advice, 0
            if self._libc.syscall(_SYS_PROCESS_MADVISE, self._process, *arguments) < 0:
                yield from zip(starts[first:].tolist(), sizes[first:].tolist(), strict=True)
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
