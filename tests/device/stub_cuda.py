"""A CUDA device on a machine without one: the compiled guard, stand-ins for `torch.cuda`, and the ledger.

    build_guard()       host_cuda.cpp -> a shared library, compiled once per environment (a few seconds)
    load_guard()        loads it; before torch is imported, because torch looks for CUDA only once
    stub_torch_cuda()   replaces the functions of torch.cuda that would call the driver
    Ledger              what a run did that a GPU would notice: host waits, copies, collectives, faults

Only for a process that ends with the test (isolated.py): nothing is undone.
"""

import contextlib
import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import types
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xgram_dist.parallel.call_site import Place, call_site

SOURCE = Path(__file__).with_name("host_cuda.cpp")


def reason_to_skip() -> str | None:
    """Why there can be no stand-in here, or None."""
    import torch

    if torch.version.cuda is not None:
        return "torch is a CUDA build, which has a device of its own: see test_real_gpu.py"
    return None if shutil.which("g++") else "needs g++ to build the stand-in for a CUDA device"


def build_guard() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    torch_folder = Path(spec.origin).parent  # without importing it
    # It is loaded before torch and loads torch's libraries from this folder: one for each environment.
    environment = f"{importlib.metadata.version('torch')} {torch_folder}"
    key = hashlib.sha256(SOURCE.read_bytes() + environment.encode()).hexdigest()[:16]
    library = Path(tempfile.gettempdir()) / f"xgram-dist-{os.getuid()}" / f"host_cuda-{key}.so"
    if library.exists():
        return library
    library.parent.mkdir(mode=0o700, exist_ok=True)
    partial = library.with_suffix(f".{os.getpid()}")
    include, libraries = torch_folder / "include", torch_folder / "lib"
    paths = [f"-I{include}", f"-I{include / 'torch/csrc/api/include'}", f"-L{libraries}", f"-Wl,-rpath,{libraries}"]
    command = ["g++", "-O1", "-std=c++20", "-shared", "-fPIC", str(SOURCE), "-o", str(partial), *paths]
    subprocess.run([*command, "-lc10", "-ltorch_cpu"], check=True, capture_output=True, text=True)
    partial.rename(library)  # another process may have built it meanwhile
    return library


def load_guard() -> None:
    assert "torch" not in sys.modules, "torch has already looked for CUDA"
    ctypes.CDLL(str(build_guard()))


# What a GPU would notice


@dataclass
class Ledger:
    """Counters by phase ("build", "plan", "step")."""

    phase: str = "build"
    waits: Counter[tuple[str, Place, str]] = field(default_factory=Counter)
    """Where the host waits for the device."""
    copies: Counter[tuple[str, Place, str]] = field(default_factory=Counter)
    """Between host and device: "to device, async, pinned"."""
    faults: Counter[tuple[str, Place, str]] = field(default_factory=Counter)
    """What a GPU or NCCL would refuse, or silently do wrong."""
    collectives: Counter[tuple[str, Place, str]] = field(default_factory=Counter)
    """"nccl all_reduce"."""
    warns: bool = False
    """As `torch.cuda.set_sync_debug_mode("warn")`: torch warns of waits within operations."""

    def clear(self) -> None:
        for counter in (self.waits, self.copies, self.faults, self.collectives):
            counter.clear()

    def wait(self, what: str) -> None:
        if self.warns and "ynchronize" not in what:
            self._warn()
        self.waits[self.phase, call_site(), what] += 1

    def _warn(self) -> None:
        warnings.warn("called a synchronizing CUDA operation", stacklevel=2)

    def fault(self, what: str) -> None:
        self.faults[self.phase, call_site(), what] += 1

    def copy(self, *, to_device: bool, non_blocking: bool, pinned: bool) -> None:
        direction = "to device" if to_device else "to host"
        what = f"{direction}, {'async' if non_blocking else 'blocking'}, {'pinned' if pinned else 'pageable'}"
        if self.warns and not non_blocking:
            self._warn()
        self.copies[self.phase, call_site(), what] += 1

    def collective(self, backend: str, name: str, tensors: list[Any]) -> None:
        self.collectives[self.phase, call_site(), f"{backend} {name}"] += 1
        for tensor in tensors:
            if (tensor.device.type == "cuda") != (backend == "nccl"):
                self.fault(f"{name} over {backend} was given a tensor on {tensor.device.type}")
            if not tensor.is_contiguous():
                self.fault(f"{name} over {backend} was given a tensor that is not contiguous")

    def of(self, phase: str) -> dict[str, dict[tuple[Place, str], int]]:
        """Plain data, to be sent to the test."""
        kinds = {"waits": self.waits, "copies": self.copies, "faults": self.faults, "collectives": self.collectives}
        return {
            kind: {(where, what): count for (at, where, what), count in counter.items() if at == phase}
            for kind, counter in kinds.items()
        }


def stops_the_host(copy: str) -> bool:
    """Whether the host waits in such a copy: CUDA copies pageable memory through a buffer of its own."""
    return copy != "to device, async, pinned" and copy != "to host, async, pinned"


# torch.cuda

H100 = types.SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    uuid="GPU-0",
    major=9,
    minor=0,
    total_memory=80 << 30,
    multi_processor_count=132,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    regs_per_multiprocessor=65536,
    shared_memory_per_block=48 << 10,
    shared_memory_per_block_optin=227 << 10,
    shared_memory_per_multiprocessor=228 << 10,
    L2_cache_size=50 << 20,
    gcnArchName="",
)


def stub_torch_cuda(ledger: Ledger) -> None:
    import torch

    class Event:
        def __init__(self, enable_timing: bool = False, **_: Any) -> None: ...
        def record(self, *_: Any) -> None: ...
        def wait(self, *_: Any) -> None: ...

        def query(self) -> bool:
            return True

        def synchronize(self) -> None:
            ledger.wait("Event.synchronize")

        def elapsed_time(self, _: Any) -> float:
            return 0.0

    class Stream:
        device, device_index, device_type, stream_id, cuda_stream = torch.device("cuda", 0), 0, 1, 0, 0

        def __init__(self, *_: Any, **__: Any) -> None: ...
        def wait_stream(self, _: Any) -> None: ...
        def wait_event(self, _: Any) -> None: ...

        def record_event(self, event: Any = None) -> Any:
            return event or Event()

        def query(self) -> bool:
            return True

        def synchronize(self) -> None:
            ledger.wait("Stream.synchronize")

        def __enter__(self) -> "Stream":
            return self

        def __exit__(self, *_: Any) -> None: ...

    def answers(value: Any) -> Any:
        return lambda *_, **__: value

    cuda: Any = torch.cuda
    cuda.Event, cuda.Stream = Event, Stream
    cuda.current_stream = cuda.default_stream = lambda *_: Stream()
    cuda.stream = lambda _: contextlib.nullcontext()
    cuda.set_sync_debug_mode = lambda mode: setattr(ledger, "warns", mode == "warn")
    cuda.synchronize = lambda *_: ledger.wait("synchronize")
    for name in ("is_available", "is_initialized", "is_bf16_supported"):
        setattr(cuda, name, answers(True))
    for name in ("_lazy_init", "set_device", "empty_cache", "reset_peak_memory_stats", "set_rng_state"):
        setattr(cuda, name, answers(None))
    for name in ("current_device", "_exchange_device", "_maybe_exchange_device"):
        setattr(cuda, name, answers(0))
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(cuda, name, answers(0))
    cuda.device_count = answers(8)
    cuda.get_device_name = answers(H100.name)
    cuda.get_device_capability = answers((H100.major, H100.minor))
    cuda.get_device_properties = answers(H100)
    cuda.get_rng_state = lambda *_: torch.zeros(16, dtype=torch.uint8)
    cuda.nvtx.range_push = cuda.nvtx.range_pop = answers(None)
    torch.Tensor.record_stream = answers(None)  # type: ignore[method-assign,assignment]
