"""The few lines that differ between devices."""

import ctypes
import os

import torch

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def choose_device() -> torch.device:
    """This process's accelerator (by LOCAL_RANK), else the CPU, with its memory kept."""
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
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


def synchronize(device: torch.device) -> None:
    """Wait for queued work, for honest timing."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
