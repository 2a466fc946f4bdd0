"""Measure another system on W1: lookup, backward and update of token-indexed tables over gloo ranks of one machine.

In: the tokens of every step and rank (.npz with `tokens`, int64 [steps, ranks, count]). Out: one line of JSON. A step
runs from a barrier to the end of the slowest rank's update; what a step needs of its tokens is made before.
"""

import argparse
import importlib
import json
import os
import socket
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from workload import Peer, Workload

# Name -> module and class: torchrec is imported only for its own peers.
PEERS = {
    "raw": ("raw", "Raw"),
    "torchrec": ("torchrec_rows", "AsShipped"),
    "torchrec-unique": ("torchrec_rows", "UniqueByHand"),
    "fsdp": ("fsdp", "Fsdp"),
    "sparse-adam": ("sparse_adam", "SparseAdam"),
}
# glibc returns large buffers to the kernel and pays for their pages again at every step. PyTorch's tuning guide advises
# an allocator that keeps them; these settings make glibc keep them too.
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 36)}
PACKAGES = ("torch", "torchrec", "fbgemm-gpu-cpu")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", required=True, choices=PEERS)
    parser.add_argument("--tokens", required=True, type=Path, help=".npz with tokens, int64 [steps, ranks, count]")
    parser.add_argument("--rows", type=int, default=75_968, help="rows of a table (default 75968)")
    parser.add_argument("--tables", type=int, default=20, help="tables (default 20)")
    parser.add_argument("--width", type=int, default=64, help="width of a row (default 64)")
    parser.add_argument("--warm", type=int, default=3, help="first steps that do not count (default 3)")
    parser.add_argument("--tuned", action="store_true", help="glibc keeps freed memory, ranks keep to their cores")
    args = parser.parse_args()
    if args.peer.startswith("torchrec") and find_spec("torchrec") is None:
        parser.error("torchrec is not installed beside this Python; README.md says how to make an environment")
    with np.load(args.tokens) as file:
        steps, ranks, _ = file["tokens"].shape
        highest = file["tokens"].max()
    if steps <= args.warm:
        parser.error(f"{args.tokens} has {steps} steps, but --warm {args.warm} leaves none to count")
    if highest >= args.rows:
        parser.error(f"{args.tokens} has token {highest}, but tables have --rows {args.rows}")
    if args.tuned:
        os.environ.update(KEEP_MEMORY)  # read by the ranks when they start
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        out = Path(folder) / "figures.json"
        mp.spawn(_run_rank, args=(args, ranks, _free_port(), out), nprocs=ranks)
        print(out.read_text(encoding="utf-8"))
    return 0


def _run_rank(rank: int, args: argparse.Namespace, ranks: int, port: int, out: Path) -> None:
    os.dup2(2, 1)  # what libraries print goes to stderr: stdout is for the figures alone
    cores = sorted(os.sched_getaffinity(0))
    torch.set_num_threads(max(1, len(cores) // ranks))
    if args.tuned and (ranks <= len(cores) or ranks % len(cores) == 0):
        first = rank * len(cores) // ranks
        os.sched_setaffinity(0, cores[first : max(first + 1, (rank + 1) * len(cores) // ranks)])
    torch.manual_seed(rank)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    with np.load(args.tokens) as file:
        tokens = torch.from_numpy(np.ascontiguousarray(file["tokens"][:, rank], dtype=np.int64))
    module, name = PEERS[args.peer]
    peer = getattr(importlib.import_module(module), name)(Workload(rank, ranks, args.rows, args.tables, args.width))
    seconds, losses = _run_steps(peer, tokens)
    found: list[Any] = [None] * ranks
    dist.all_gather_object(found, (seconds, losses, _peak_bytes()))
    if rank == 0:
        times, all_losses, peaks = zip(*found, strict=True)
        figures = {
            "peer": args.peer,
            "ms": [round(1000 * max(step), 3) for step in zip(*times, strict=True)][args.warm :],
            "peak_rss_bytes": max(peaks),
            "versions": _versions(),
            "note": peer.note,
            "ranks": ranks,
            "tuned": args.tuned,
            "losses": [sum(step) / ranks for step in zip(*all_losses, strict=True)],
        }
        out.write_text(json.dumps(figures), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def _run_steps(peer: Peer, tokens: torch.Tensor) -> tuple[list[float], list[float]]:
    """Seconds and losses of all steps on this rank."""
    seconds, losses = [], []
    for of_step in tokens:
        ready = peer.prepare(of_step)
        dist.barrier()
        start = time.perf_counter()
        loss = peer.step(ready)
        seconds.append(time.perf_counter() - start)
        if loss is not None:
            losses.append(loss.item())
    return seconds, losses


def _peak_bytes() -> int:
    """Of this process since it started, by the kernel's own mark (getrusage's is inherited from the parent)."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM")


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    sys.exit(main())
