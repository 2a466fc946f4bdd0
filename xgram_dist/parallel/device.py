"""The few lines that differ between devices."""

import os

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def choose_device() -> torch.device:
    """This process's accelerator (by LOCAL_RANK), else the CPU."""
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


def make_deterministic(enabled: bool) -> None:
    """Ask for algorithms that repeat bitwise; cuBLAS needs its workspace set before the first call."""
    if enabled:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(enabled, warn_only=True)


def synchronize(device: torch.device) -> None:
    """Wait for queued work, for honest timing."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
