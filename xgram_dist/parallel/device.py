"""Everything that differs between devices: which one, dtypes, host memory, timing, limits."""

import contextlib
import ctypes
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xgram_dist.environment import read_place
from xgram_dist.errors import UserError
from xgram_dist.parallel.call_site import Place, call_site

Item = TypeVar("Item")
Result = TypeVar("Result")

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""By `train.precision`."""

PEAK_FLOPS = {"B200": 2250e12, "H200": 989e12, "H100": 989e12, "H800": 989e12, "A100": 312e12, "A800": 312e12}
"""Dense bf16 FLOP/s, by a word in the device's name."""


# Choice


GPU_RESTRICTIONS = ("CUDA_VISIBLE_DEVICES", "SLURM_GPUS_PER_TASK", "SLURM_GPU_BIND", "SLURM_STEP_GPUS")
"""Environment variables, one of which is set where a rank sees some GPUs of its machine only."""
ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Environment variables in which a user configures the CUDA allocator; the first is the older name."""


def choose_device() -> torch.device:
    """This process's GPU, else the CPU."""
    if torch.cuda.is_available():
        # The allocator reads this at the first allocation. Working sets change their size from step to step, which
        # fragments memory in fixed segments.
        if not any(name in os.environ for name in ALLOCATOR_SETTINGS):
            os.environ[ALLOCATOR_SETTINGS[0]] = "expandable_segments:True"
        device = torch.device("cuda", _gpu_index(read_place().local_rank, torch.cuda.device_count()))
        set_thread_device(device)
        return device
    retain_freed_host_memory()
    return torch.device("cpu")


def describe_gpu(device: torch.device) -> str:
    """Name and memory; empty for a CPU."""
    if device.type != "cuda":
        return ""
    found = torch.cuda.get_device_properties(device)
    return f"{found.name} of {found.total_memory / 2**30:.0f} GiB"


def _gpu_index(local_rank: int, num_gpus: int) -> int:
    """By local rank; 0 where a rank sees one GPU, as with Slurm's --gpus-per-task and --gpu-bind. Whether that one is
    its own is checked where ranks meet (`gpu_id`)."""
    if local_rank < num_gpus:
        return local_rank
    if num_gpus == 1 and any(os.environ.get(name) for name in GPU_RESTRICTIONS):
        return 0
    raise UserError(
        f"local rank {local_rank} has no GPU: this machine has {num_gpus}; start at most {num_gpus} rank(s), "
        f"or hide the GPUs with CUDA_VISIBLE_DEVICES= to train on the CPU"
    )


def gpu_id(device: torch.device) -> str | None:
    """Identifies the GPU over all machines; None on the CPU, which ranks may share."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def set_thread_device(device: torch.device) -> None:
    """Makes `device` the default of the calling thread. A new thread begins with the first GPU, whatever the others
    use."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def collective_options(device: torch.device) -> dict[str, Any]:
    """Keywords of `init_process_group`. With a device, NCCL connects at once: errors show at the start."""
    return {"backend": "nccl", "device_id": device} if device.type == "cuda" else {"backend": "gloo"}


def make_deterministic(enabled: bool) -> None:
    """Chooses algorithms that repeat bitwise, and makes torch refuse operations that have none.

    Not `warn_only`: with it, the backward pass of attention on a GPU stays non-deterministic. cuBLAS reads its variable
    at the first call.
    """
    if enabled:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # By default, torch fills every empty tensor.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(enabled)


@contextlib.contextmanager
def writes_in_any_order(device: torch.device) -> Iterator[None]:
    """Suspends deterministic mode on a GPU, for code that repeats bitwise by construction."""
    enabled = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(enabled and device.type != "cuda")
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled)


# Host memory and threads

MAX_PLANNING_THREADS = 8
"""Of a rank. A node with 8 GPUs has 12 cores or more for each."""
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h
_MADV_HUGEPAGE, _HUGE_PAGE_BYTES = 14, 1 << 21  # sys/mman.h


def retain_freed_host_memory() -> None:
    """Makes glibc's malloc keep freed memory instead of returning it to the system; no effect with another libc.

    A step on the CPU allocates and frees the same hundreds of megabytes again and again. Page faults on fresh memory
    cost a tenth of the step.
    """
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_MMAP_MAX, 0)
    mallopt(_M_TRIM_THRESHOLD, -1)


def advise_huge_pages(tensor: Tensor) -> Tensor:
    """Asks the system to back a tensor in host memory, not yet written to, with huge pages, and returns it.

    Table rows are read at random: with small pages nearly every read misses the TLB. No effect where the system has no
    huge pages, or the tensor is small or not in host memory.
    """
    start = -(-tensor.data_ptr() // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    size = tensor.data_ptr() + tensor.nbytes - start
    if tensor.device.type == "cpu" and size >= _HUGE_PAGE_BYTES:
        with contextlib.suppress(OSError, AttributeError):
            madvise = ctypes.CDLL("libc.so.6").madvise
            madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _MADV_HUGEPAGE)
    return tensor


def lower_thread_priority() -> None:
    """For a thread whose results are not needed yet: it yields to the others."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


def begin_planning_thread(device: torch.device) -> None:
    """Initializer of a thread that plans ahead for `device`."""
    lower_thread_priority()
    set_thread_device(device)


class PlanningPool:
    """Threads among which a planning thread divides its work."""

    def __init__(self) -> None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._num_threads = min(MAX_PLANNING_THREADS, cores)
        self._threads = ThreadPoolExecutor(self._num_threads, "plan-part", lower_thread_priority)

    def map(self, function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
        """The results in the order of the items."""
        one_by_one = len(items) == 1 or self._num_threads == 1
        return list(map(function, items) if one_by_one else self._threads.map(function, items))

    def close(self) -> None:
        """Stop the threads. What is asked for later runs in the caller's."""
        self._threads.shutdown()
        self._num_threads = 1


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """From host memory, without waiting for the copy."""
    return pin_for(device, tensor).to(device, non_blocking=True)


def index_to_device(index: NDArray[Any], device: torch.device) -> Tensor:
    """An index in host memory, each number below 2^31, as int64 on the device. To a GPU it travels as int32."""
    if device.type != "cpu":
        index = index.astype(np.int32, copy=False)
    return to_device(torch.from_numpy(index), device).long()


def pin_for(device: torch.device, tensor: Tensor) -> Tensor:
    """A tensor that is to be copied to `device`: in pinned memory, without which the copy to a GPU would wait."""
    return tensor.pin_memory() if device.type == "cuda" and tensor.device.type == "cpu" else tensor


def empty_on_host(like: Tensor) -> Tensor:
    """An empty contiguous tensor in host memory; pinned for a tensor on a GPU."""
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=like.device.type == "cuda")


class CopyStream:
    """Copies between host memory and a device on a stream of their own, beside what the device computes. Any thread may
    use it. On the CPU, a copy is done when the call returns, and there is nothing to wait for."""

    def __init__(self, device: torch.device):
        self.device = device
        self._computing = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._copying = torch.cuda.Stream(device) if device.type == "cuda" else None

    def empty_on_device(self, *shape: int) -> Tensor:
        """fp32, to be copied to. It may be freed while the device still uses it."""
        if self._copying is None:
            return torch.empty(*shape)
        with torch.cuda.stream(self._copying):
            tensor = torch.empty(*shape, device=self.device)
        tensor.record_stream(self._computing)  # type: ignore[arg-type]
        return tensor

    def empty_on_host(self, *shape: int) -> Tensor:
        """fp32, in pinned memory for a GPU."""
        return pin_for(self.device, torch.empty(*shape))

    def index_on_device(self, index: NDArray[Any]) -> Tensor:
        """As `index_to_device`. It has arrived when a later `copy` is done."""
        if self._copying is None:
            return index_to_device(index, self.device)
        with torch.cuda.stream(self._copying):
            tensor = index_to_device(index, self.device)
        tensor.record_stream(self._computing)  # type: ignore[arg-type]
        return tensor

    def follow(self) -> None:
        """From now on, what computes is the calling thread's current stream."""
        if self._copying is not None:
            self._computing = torch.cuda.current_stream(self.device)

    def computed(self) -> Any:
        """The point that the device's computing has been asked to reach so far."""
        return None if self._computing is None else self._computing.record_event()

    def copy(self, target: Tensor, source: Tensor, after: Any = None) -> Any:
        """Copy once the device has computed `after`; the point at which it is done."""
        if self._copying is None:
            target.copy_(source)
            return None
        with torch.cuda.stream(self._copying):
            if after is not None:
                self._copying.wait_event(after)
            target.copy_(source, non_blocking=True)
            return self._copying.record_event()

    def fill(self, target: Tensor, write: Callable[[Tensor], None], after: Any = None) -> Any:
        """As `copy`, from host memory that `write` fills; where `target` is in host memory, it fills that."""
        if self._copying is None:
            write(target)
            return None
        staged = empty_on_host(target)
        write(staged)
        return self.copy(target, staged, after)

    def read_on_host(self, *tensors: Tensor) -> list[NDArray[Any]]:
        """Values of tensors. From a GPU they come together, and the host waits once."""
        if self._copying is None:
            return [tensor.numpy() for tensor in tensors]
        computed, held, point = self.computed(), [empty_on_host(tensor) for tensor in tensors], None
        for target, source in zip(held, tensors, strict=True):
            point = self.copy(target, source, computed)
        self.wait_on_host(point)
        return [target.numpy() for target in held]

    def compute_after(self, point: Any) -> None:
        """What is computed from now on waits for a copy; the host does not."""
        if self._computing is not None and point is not None:
            self._computing.wait_event(point)

    def wait_on_host(self, point: Any) -> None:
        if point is not None:
            point.synchronize()


# Arithmetic


def accumulate_matmul(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, with `total` in fp32 (or fp64) and the factors in the compute dtype. On a GPU one matrix
    product reads and writes `total`; on the CPU no such product takes bf16."""
    if total.device.type != "cuda":
        total += (left @ right).to(total.dtype)
    elif left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)


def has_flex_attention(device: torch.device) -> bool:
    """With a compiled backward pass."""
    return device.type == "cuda"


def fuses_loss_passes(device: torch.device) -> bool:
    """Whether `train.compile` includes the passes over the logits. The CPU keeps the eager ones, and with them its
    numbers bit for bit: there the matrix products take most of the time."""
    return device.type == "cuda"


def recompute_elementwise(device: torch.device) -> None:
    """On a GPU, graphs that are compiled from now on compute elementwise results again in their backward pass instead
    of keeping them. By inductor's count a block with tables moves a third fewer bytes; no GPU has timed it yet."""
    if device.type == "cuda":
        from torch._functorch import config

        config.aggressive_recomputation = True


# Timing and limits


def record_time(device: torch.device) -> Any:
    """The current point of the device's stream, for `seconds_between`."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()  # type: ignore[no-untyped-call]
    return event


def seconds_between(start: Any, end: Any) -> float:
    """Synchronise the device first."""
    return end - start if isinstance(end, float) else start.elapsed_time(end) / 1000


def is_reached(point: Any) -> bool:
    """Whether the device's stream has reached a point of `record_time`. The host does not wait."""
    return isinstance(point, float) or bool(point.query())


def dump_flight_recorder(device: torch.device, path: Path) -> None:
    """Writes the last NCCL collectives, as torch's flight recorder kept them, for `torchfrtrace`; no effect without
    NCCL, or in a torch without the recorder."""
    dump = getattr(getattr(torch._C, "_distributed_c10d", None), "_dump_nccl_trace", None)
    if device.type == "cuda" and dump is not None:
        path.write_bytes(dump())


def synchronize(device: torch.device) -> None:
    """Waits for the device's stream."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_memory(device: torch.device) -> int:
    """Peak bytes: of the GPU's allocator, or, on the CPU, of this process (0 where the system does not tell)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:")), 0)


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 FLOP/s by the vendor's data sheet; None where not known."""
    if device.type != "cuda":
        return None
    device_name = torch.cuda.get_device_name(device)
    return next((flops for name, flops in PEAK_FLOPS.items() if name in device_name), None)


# What a device is, for `xgram-dist doctor`


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def device_versions(device: torch.device) -> dict[str, str]:
    """Versions of what torch runs on: CUDA, cuDNN, NCCL and the driver; empty on the CPU."""
    if device.type != "cuda":
        return {}
    driver = Path("/proc/driver/nvidia/version")
    words = driver.read_text(encoding="utf-8").split() if driver.exists() else []
    return {
        "CUDA": str(torch.version.cuda),
        "cuDNN": str(torch.backends.cudnn.version()),
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())),  # type: ignore[no-untyped-call]
        "driver": next((word for word in words if word[:1].isdigit() and "." in word), "?"),
    }


def unused_gpu() -> str:
    """Why torch does not use a GPU that the machine has; empty: it has none, or it is used."""
    if torch.cuda.is_available() or not Path("/proc/driver/nvidia/version").exists():
        return ""
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return "CUDA_VISIBLE_DEVICES hides the GPUs"
    return f"CUDA {torch.version.cuda} of this torch does not start; the driver may be too old"


def free_and_total_memory(device: torch.device) -> tuple[int, int]:
    """Bytes of the GPU, or, on the CPU, of the host."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith("kB")}
    return found["MemAvailable"], found["MemTotal"]


def release_cached_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()


@contextlib.contextmanager
def record_host_waits(device: torch.device) -> Iterator[list[Place]]:
    """Collects where within the block the host waits for the device: in operations that need a value or copy, and in
    explicit synchronisation. On the CPU, nothing. Waits of other threads count too."""
    found: list[Place] = []
    if device.type != "cuda":
        yield found
        return

    def note(message: Warning | str, *_: Any, **__: Any) -> None:
        if "synchronizing CUDA operation" in str(message):
            found.append(call_site(skip="parallel/device.py"))

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            found.append(call_site(skip="parallel/device.py"))
            return function(*arguments)

        return call

    # torch's debug mode says nothing about these.
    owners: tuple[Any, ...] = (torch.cuda, torch.cuda.Stream, torch.cuda.Event)
    explicit = [(owner, owner.synchronize) for owner in owners]
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        for owner, function in explicit:
            owner.synchronize = noting(function)
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
            for owner, function in explicit:
                owner.synchronize = function


@contextlib.contextmanager
def record_device_operations(device: torch.device) -> Iterator[list[str]]:
    """Collects the names of kernels and copies that the device runs within the block; on the CPU, nothing."""
    found: list[str] = []
    if device.type != "cuda":
        yield found
        return
    synchronize(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        yield found
        synchronize(device)
    found += [event.name for event in profiler.events() or () if event.device_type.name == "CUDA"]
