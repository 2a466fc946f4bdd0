"""The few lines that differ between devices."""

import contextlib
import ctypes
import os
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from xgram_dist.errors import UserError

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h
_MADV_HUGEPAGE, _LARGE_PAGE = 14, 1 << 21  # sys/mman.h

PEAK_FLOPS = {"B200": 2250e12, "H200": 989e12, "H100": 989e12, "H800": 989e12, "A100": 312e12, "A800": 312e12}
"""By what a device's name holds."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def choose_device() -> torch.device:
    """This process's accelerator (by LOCAL_RANK), else the CPU, with its memory kept."""
    if torch.cuda.is_available():
        local, found = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if local >= found:
            raise UserError(
                f"local rank {local} has no GPU: this machine has {found}; start at most {found} rank(s), or hide "
                f"the GPUs with CUDA_VISIBLE_DEVICES= to train on the CPU"
            )
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
        return device
    keep_host_memory()
    return torch.device("cpu")


def make_deterministic(enabled: bool) -> None:
    """Ask for algorithms that repeat bitwise; cuBLAS needs its workspace set before the first call."""
    if enabled:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(enabled, warn_only=True)


def keep_host_memory() -> None:
    """Tell the C library to keep freed memory instead of returning it to the system.

    A step on the CPU allocates and frees the same hundreds of megabytes again and again; fetched anew from the system
    each time, page by page, they cost a tenth of the step. Where the C library is not glibc, nothing is changed.
    """
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_MMAP_MAX, 0)
    mallopt(_M_TRIM_THRESHOLD, -1)


def large_pages(tensor: Tensor) -> Tensor:
    """Ask the system to back a tensor in host memory, not yet written to, with large pages.

    Rows that are read lie far apart: with small pages each costs walks through page tables that no cache holds. Where
    the system has no large pages, or the tensor is on another device or small, nothing is changed.
    """
    start = -(-tensor.data_ptr() // _LARGE_PAGE) * _LARGE_PAGE
    size = tensor.data_ptr() + tensor.nbytes - start
    if tensor.device.type == "cpu" and size >= _LARGE_PAGE:
        with contextlib.suppress(OSError, AttributeError):
            madvise = ctypes.CDLL("libc.so.6").madvise
            madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _MADV_HUGEPAGE)
    return tensor


def step_aside() -> None:
    """Let this thread run when others have nothing to do: what it works on is not needed yet."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """From host memory, without waiting."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def empty_on_host(like: Tensor) -> Tensor:
    """Host memory for a tensor's values, contiguous; that of a GPU's is pinned."""
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=like.device.type == "cuda")


def now(device: torch.device) -> Any:
    """This moment in the device's queue of work, for `seconds_between`."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()  # type: ignore[no-untyped-call]
    return event


def seconds_between(start: Any, end: Any) -> float:
    """Both moments must have passed: synchronise first."""
    return end - start if isinstance(end, float) else start.elapsed_time(end) / 1000


def peak_memory(device: torch.device) -> int:
    """Most bytes ever held: of the device's allocator, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:")), 0)


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 operations a second the device is sold with; None where that is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops for part, flops in PEAK_FLOPS.items() if part in name), None)


def synchronize(device: torch.device) -> None:
    """Wait for queued work, for honest timing."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
