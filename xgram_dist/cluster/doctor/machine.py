"""The doctor's look at the machine: versions, cores, limits, clocks, network interfaces, links, bandwidths.

Collectives: all-gathers of facts over gloo; the links' check runs the preflight's all-to-all, all-reduce and pairwise
messages on the ranks' own backend.
"""

import importlib.util
import math
import os
import platform
import resource
import shutil
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from xgram_dist import __version__
from xgram_dist.cluster.doctor.report import Context, Row, Status, differing, gather, speed_row
from xgram_dist.cluster.interfaces import GLOO, NCCL, Interface, gloo_interface, nccl_interfaces
from xgram_dist.cluster.preflight import SLOW_SHARE, Links, fastest_seconds, measure_links, slow_nodes
from xgram_dist.estimate.step_time import Machine
from xgram_dist.parallel.device import (
    device_name,
    device_versions,
    empty_on_host,
    free_and_total_memory,
    peak_flops,
    unused_gpu,
)

TESTED_TORCH = "2.13"
PACKAGES = ("torch", "numpy", "triton", "deepspeed", "mosaicml-streaming", "lm-eval")
WARN_SKEW_SECONDS, FAIL_SKEW_SECONDS = 1.0, 30.0
"""Between clocks of two ranks. A lease is stale after 120 s, by the file system's clock."""
CLOCK_ROUNDS = 10
LATENCY_ROUNDS = 20
SHARED_MEMORY_BYTES = 1 << 30
"""What NCCL and the data workers may need of /dev/shm on a node."""
OPEN_FILES = 4096
REPEATS = 5
COPY_BYTES = {"gpu": 1 << 30, "cpu": 1 << 26}
MATMUL_SIZE = {"gpu": 8192, "cpu": 512}


# Versions and the process


def check_versions(context: Context) -> list[Row]:
    facts = gather(context, lambda: {**_package_versions(), **device_versions(context.device)})
    mine = ", ".join(f"{name} {number}" for name, number in facts[0].items() if number)
    odd = differing(facts)
    figures = {"versions": facts[0]}
    if odd:
        other = [f"{name} {facts[odd[0]].get(name)}" for name in facts[0] if facts[odd[0]].get(name) != facts[0][name]]
        found = f"ranks differ: {context.where(odd)} has {', '.join(other)}; rank 0 has {mine}"
        return [Row("versions", "fail", found, "give all nodes the same environment", {"by_rank": facts})]
    rows = [Row("versions", "pass", mine, figures=figures)]
    if not facts[0]["torch"].startswith(TESTED_TORCH):
        found = f"torch {facts[0]['torch']}; tested with {TESTED_TORCH}"
        rows.append(Row("torch", "warn", found, "install the pinned versions of requirements.lock"))
    return rows


def _package_versions() -> dict[str, str]:
    found = {"xgram-dist": __version__, "Python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = ""
    return found


def check_process(context: Context) -> list[Row]:
    """Cores and limits of each rank."""
    cores = gather(context, lambda: len(os.sched_getaffinity(0)))
    rows = []
    found = f"{min(cores)} a rank" if min(cores) == max(cores) else f"{min(cores)} to {max(cores)} a rank"
    if context.on_gpu and min(cores) < 4:
        advice = (
            "planning and data need cores beside the one that drives the GPU: srun --cpus-per-task, or cpus_per_node"
        )
        rows.append(Row("CPU cores", "warn", found, f"{advice} in the site file", {"by_rank": cores}))
    else:
        rows.append(Row("CPU cores", "pass", found, figures={"by_rank": cores}))
    files = min(gather(context, lambda: resource.getrlimit(resource.RLIMIT_NOFILE)[0]))
    files = 1 << 31 if files == resource.RLIM_INFINITY else files
    enough = files >= OPEN_FILES
    advice = f"ulimit -n {OPEN_FILES} before the ranks start: each connection and each data shard is an open file"
    rows.append(Row("open files", "pass" if enough else "warn", f"limit {files:,}", "" if enough else advice))
    if context.on_gpu and context.ranks.size > 1:
        rows += [_shared_memory(context), _locked_memory(context)]
    return rows


def _shared_memory(context: Context) -> Row:
    free = min(gather(context, lambda: shutil.disk_usage("/dev/shm").free))
    if free < SHARED_MEMORY_BYTES:
        advice = "NCCL moves data between processes of a node through it: docker --shm-size, or a larger tmpfs"
        return Row("/dev/shm", "warn", f"{free / 1e6:,.0f} MB free", advice)
    return Row("/dev/shm", "pass", f"{free / 1e9:,.1f} GB free")


def _locked_memory(context: Context) -> Row:
    limits = gather(context, lambda: resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
    limited = [rank for rank, limit in enumerate(limits) if limit != resource.RLIM_INFINITY]
    if limited and Path("/sys/class/infiniband").exists():
        advice = "InfiniBand needs it: ulimit -l unlimited (on Slurm, LimitMEMLOCK of slurmd)"
        return Row("locked memory", "warn", f"limited for {context.where(limited)}", advice)
    return Row("locked memory", "pass", "unlimited" if not limited else "limited, and there is no InfiniBand")


# Clocks


def check_clocks(context: Context, clock: Callable[[], float] = time.time) -> list[Row]:
    if context.ranks.size == 1:
        return [Row("clock skew", "skip", "one rank", "compare clocks with several nodes")]
    offsets = clock_offsets(context, clock)
    worst = max(range(len(offsets)), key=lambda rank: abs(offsets[rank][0]))
    skew, uncertainty = offsets[worst]
    # What is certain: the clocks differ at least by this much.
    certain = max(0.0, abs(skew) - uncertainty)
    found = f"{1000 * abs(skew):,.1f} ms (± {1000 * uncertainty:,.1f}) between {context.where([worst])} and rank 0"
    figures = {"seconds": [offset for offset, _ in offsets], "uncertainty": [bound for _, bound in offsets]}
    if certain < WARN_SKEW_SECONDS:
        return [Row("clock skew", "pass", found, figures=figures)]
    status: Status = "fail" if certain >= FAIL_SKEW_SECONDS else "warn"
    return [Row("clock skew", status, found, "start chrony or ntpd on the nodes (chronyc tracking)", figures)]


def clock_offsets(context: Context, clock: Callable[[], float]) -> list[tuple[float, float]]:
    """(clock of each rank minus that of rank 0, uncertainty), in seconds.

    No rank leaves an all-gather before all have entered it. So after_i - before_j bounds the offset of clock i against
    clock j from above, and -(after_j - before_i) from below; the smallest of some rounds counts."""
    ranks = context.ranks.host
    upper, lower = [math.inf] * ranks.size, [-math.inf] * ranks.size
    for _ in range(CLOCK_ROUNDS):
        before = clock()
        ranks.all_gather_object(None)
        times = ranks.all_gather_object((before, clock()))
        first_before, first_after = times[0]
        for rank, (rank_before, rank_after) in enumerate(times):
            upper[rank] = min(upper[rank], rank_after - first_before)
            lower[rank] = max(lower[rank], rank_before - first_after)
    return [((high + low) / 2, (high - low) / 2) for high, low in zip(upper, lower, strict=True)]


# Network


def check_interfaces(context: Context) -> list[Row]:
    """Which interface gloo and NCCL use, and whether ranks agree. That other nodes reach gloo's is checked by the
    check-in, before the process group exists."""
    rows = [_gloo_row(context, gather(context, gloo_interface))]
    if not context.on_gpu:
        return [*rows, Row("NCCL interface", "skip", "no GPU", "run the doctor on a GPU")]
    named = gather(context, nccl_interfaces)
    setting = os.environ.get(NCCL, "")
    infiniband = sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))
    found = f"{', '.join(named[0])} ({NCCL} = '{setting}'), InfiniBand: {', '.join(infiniband) or 'none'}"
    odd = differing(named)
    if odd:
        advice = (
            f"set {NCCL} to the network of the job, or interface in the site file; NCCL_DEBUG=INFO shows its choice"
        )
        found = f"{context.where(odd)} has {', '.join(named[odd[0]])}; others {found}"
        return [*rows, Row("NCCL interface", "warn", found, advice)]
    return [*rows, Row("NCCL interface", "pass", found)]


def _gloo_row(context: Context, interfaces: list[Interface]) -> Row:
    names = [interface.name for interface in interfaces]
    figures = {"by_rank": [str(interface) for interface in interfaces]}
    odd, setting = differing(names), os.environ.get(GLOO, "")
    how = f"{GLOO} = '{setting}'" if setting else "by the machine's name"
    if odd:
        found = f"ranks differ: {context.where(odd)} uses {interfaces[odd[0]]}, rank 0 uses {interfaces[0]}"
        advice = f"set {GLOO} to one that all nodes have, or interface in the site file"
        return Row("gloo interface", "warn", found, advice, figures)
    networks = sorted({interface.network for interface in interfaces if interface.network})
    if len(networks) > 1:
        found = f"{interfaces[0].name}, in {len(networks)} networks: {', '.join(networks[:3])}"
        advice = f"fine if they are routed at full speed (see the links below); else set {GLOO}"
        return Row("gloo interface", "warn", found, advice, figures)
    return Row("gloo interface", "pass", f"{interfaces[0]} ({how})", figures=figures)


def check_links(context: Context) -> list[Row]:
    """Speed of all-to-all and all-reduce, the slow nodes, and the latency of a small message."""
    links = measure_links(context.ranks, context.nodes, context.device)
    if links is None:
        return [Row("links between ranks", "skip", "one rank", "run on several ranks: --ranks N, torchrun or srun")]
    latency = _latency(context)
    context.measured["bandwidth"] = links.all_to_all
    return [
        _link_row(context, links),
        Row("latency of gloo", "pass", f"{1e3 * latency:.2f} ms an all-reduce", figures={"seconds": latency}),
        *_slow_node_rows(links),
    ]


def _link_row(context: Context, links: Links) -> Row:
    found = f"all-to-all {links.all_to_all:.3g} GB/s, all-reduce {links.all_reduce:.3g} GB/s a rank"
    figures: dict[str, Any] = {"all_to_all": links.all_to_all, "all_reduce": links.all_reduce, "nodes": links.nodes}
    if not context.on_gpu:
        return Row("links between ranks", "pass", found, figures=figures)
    plan = Machine()
    expected = plan.bandwidth if len(set(context.nodes)) > 1 else plan.node_bandwidth
    if min(links.all_to_all, links.all_reduce) >= SLOW_SHARE * expected:
        return Row("links between ranks", "pass", f"{found} (plan: {expected:g})", figures=figures)
    advice = (
        f"below half of what 'xgram-dist plan' assumes ({expected:g} GB/s): look at NCCL_DEBUG=INFO for the transport "
        f"(IB, NVLink or sockets), and plan with the measured figure (--bandwidth, --node-bandwidth)"
    )
    return Row("links between ranks", "warn", found, advice, figures)


def _slow_node_rows(links: Links) -> list[Row]:
    slow = slow_nodes(links.nodes)
    if slow:
        found = ", ".join(f"{node} {links.nodes[node]:.3g} GB/s" for node in slow)
        return [Row("slow nodes", "warn", f"{found} at best", "exclude them (sbatch --exclude), or have them repaired")]
    return [Row("slow nodes", "pass", f"none of {len(links.nodes)}")] if len(links.nodes) > 2 else []


def _latency(context: Context) -> float:
    group, number = context.ranks.host.group, torch.zeros(1)
    start = time.perf_counter()
    for _ in range(LATENCY_ROUNDS):
        dist.all_reduce(number, group=group)
    return (time.perf_counter() - start) / LATENCY_ROUNDS


# Device


def check_device(context: Context) -> list[Row]:
    """Name, free memory, and a GPU that torch does not use."""
    facts = gather(context, lambda: (device_name(context.device), free_and_total_memory(context.device), unused_gpu()))
    names, unused = [name for name, _, _ in facts], [rank for rank, (_, _, why) in enumerate(facts) if why]
    if unused:
        advice = "install the CUDA build of torch for this driver, and make the GPUs visible"
        return [Row("device", "fail", f"{facts[unused[0]][2]} ({context.where(unused)})", advice)]
    free, total = min(memory for _, memory, _ in facts)
    found = f"{names[0]}, {free / 1e9:,.1f} of {total / 1e9:,.1f} GB free"
    if not context.on_gpu:
        return [Row("device", "skip", f"{found}: no GPU", "everything else ran on the CPU; repeat it on a GPU")]
    odd = differing(names)
    if odd:
        return [
            Row("device", "warn", f"{found}; {context.where(odd)} has {names[odd[0]]}", "use one kind of GPU in a job")
        ]
    if free < 0.9 * total:
        return [Row("device", "warn", found, "another process holds memory of the GPU (nvidia-smi)")]
    return [Row("device", "pass", found)]


def check_bandwidths(context: Context) -> list[Row]:
    """Copies within the device's memory, between host and device, and matrix products."""
    device, size = context.device, COPY_BYTES["gpu" if context.on_gpu else "cpu"] >> (3 if context.quick else 0)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copies = gather(context, lambda: 2 * size / fastest_seconds(lambda: target.copy_(source), device, REPEATS) / 1e9)
    name = "memory of the device" if context.on_gpu else "memory of the host"
    rows = [
        speed_row(
            context, f"{name}, read + written", copies, "GB/s", "look for throttling or ECC errors (nvidia-smi -q)"
        )
    ]
    if context.on_gpu:
        host = empty_on_host(source)
        up = gather(
            context,
            lambda: size / fastest_seconds(lambda: target.copy_(host, non_blocking=True), device, REPEATS) / 1e9,
        )
        down = gather(
            context,
            lambda: size / fastest_seconds(lambda: host.copy_(source, non_blocking=True), device, REPEATS) / 1e9,
        )
        context.measured.update(memory_bandwidth=min(copies), host_bandwidth=min(up))
        advice = "bind ranks to the cores near their GPU (srun --gpu-bind=closest, nvidia-smi topo -m)"
        rows += [
            speed_row(context, "host to device", up, "GB/s", advice),
            speed_row(context, "device to host", down, "GB/s", advice),
        ]
    else:
        rows.append(Row("host to device", "skip", "no GPU", "run the doctor on a GPU"))
    return [*rows, _matmul_row(context)]


def _matmul_row(context: Context) -> Row:
    size = MATMUL_SIZE["gpu" if context.on_gpu else "cpu"]
    dtype = torch.bfloat16 if context.on_gpu else torch.float32
    a = torch.randn(size, size, device=context.device).to(dtype)
    speeds = gather(context, lambda: 2 * size**3 / fastest_seconds(lambda: a @ a, context.device, REPEATS) / 1e12)
    row = speed_row(
        context, f"matrix products, {dtype}".replace("torch.", ""), speeds, "TFLOP/s", "look for throttling"
    )
    peak = peak_flops(context.device)
    if peak is None or row.status != "pass":
        return row
    share = min(speeds) * 1e12 / peak
    found = f"{row.found}, {100 * share:.0f} % of the data sheet's peak"
    if share < 0.5:
        return Row(
            row.check,
            "warn",
            found,
            "half is usual at least: power limit or clocks (nvidia-smi -q -d CLOCK)",
            row.figures,
        )
    return Row(row.check, "pass", found, figures=row.figures)


def check_compiler(context: Context) -> list[Row]:
    """torch.compile needs Triton on a GPU and a C++ compiler on the CPU."""
    need = "triton" if context.on_gpu else "g++"
    there = gather(
        context,
        lambda: importlib.util.find_spec("triton") is not None if need == "triton" else shutil.which("g++") is not None,
    )
    absent = [rank for rank, found in enumerate(there) if not found]
    if absent:
        advice = f"install {need}, or train with train.compile=false"
        return [Row("torch.compile", "warn", f"{need} is absent ({context.where(absent)})", advice)]
    return [Row("torch.compile", "pass", f"{need} is there")]
