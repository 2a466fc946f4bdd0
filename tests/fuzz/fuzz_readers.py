"""Damaged and odd files for every reader of files from elsewhere: `make fuzz`.

    python tests/fuzz/fuzz_readers.py --inputs 100000
    python tests/fuzz/fuzz_readers.py --inputs 1000000 --seconds 3600 --seed 7
    python tests/fuzz/fuzz_readers.py --only manifest,lease --seconds 20

Real files (fuzz_targets.py makes them with the package's own commands) are changed (fuzz_changes.py). A reader may
answer or raise `UserError`. A finding is: any other exception, a message that is long or not printable, more than a
second of CPU time, 20 seconds without an answer, more than 500 MB, or the end of the process. Its input is kept.
"""

import argparse
import math
import mmap
import os
import random
import resource
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path

import numpy as np
from fuzz_targets import Target, build_targets

from xgram_dist.errors import UserError
from xgram_dist.parallel.launch import end_with_parent

CPU_SECONDS, HANG_SECONDS, MEGABYTES = 1.0, 20.0, 500
LONGEST_MESSAGE = 400
FEWEST, SHOWN = 10, 2
"""Inputs of a reader; findings of one reader and place that are printed and kept."""
ADDRESS_SPACE = 8 << 30
"""Beyond what the process has at its start: a reader that wants more than the machine has fails instead of others."""


def schedule(targets: list[Target], inputs: int) -> dict[str, int]:
    """Inputs of each target: the slower it is, the fewer, so that those that take long get a little less time."""
    shares = {target.name: target.cost**-1.5 for target in targets}
    whole = sum(shares.values())
    return {name: max(FEWEST, math.ceil(inputs * share / whole)) for name, share in shares.items()}


class Progress:
    """What the working process is doing, for the one that watches it."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 16)

    def set(self, number: int, findings: int) -> None:
        self._memory[:] = struct.pack("<qq", number, findings)

    def get(self) -> tuple[int, int]:
        number, findings = struct.unpack("<qq", self._memory[:])
        return number, findings


def run_target(target: Target, first: int, last: int, args: argparse.Namespace, end: float, progress: Progress) -> None:
    """Inputs `first` to `last` of a target, in a process of its own."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * mmap.PAGESIZE + ADDRESS_SPACE
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    held, findings = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, progress.get()[1]
    nowhere = open(os.devnull, "w")  # noqa: SIM115
    kinds: Counter[str] = Counter()
    for number in range(first, last):
        if time.monotonic() > end:
            break
        progress.set(number, findings)
        data = target.input(random.Random(f"{args.seed} {target.name} {number}"))
        target.file.write_bytes(data)
        before, started, fault, kind = held, time.process_time(), None, "limits"
        try:
            with redirect_stdout(nowhere), redirect_stderr(nowhere):
                target.read(target.file)
        except UserError as error:
            text = str(error)
            if not text.isprintable() or len(text) > LONGEST_MESSAGE:
                fault = f"a message of {len(text):,} characters: {text[:200]!r}"
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            fault = "".join(traceback.format_exception_only(error)).strip()[:300]
            places = traceback.extract_tb(error.__traceback__)
            ours = [one for one in places if "xgram_dist" in one.filename] or places
            kind = f"{type(error).__name__} at {ours[-1].filename.rpartition('/')[2]}:{ours[-1].lineno}"
            fault = f"{kind}: {fault}"
        seconds = time.process_time() - started
        held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if fault is None and seconds > CPU_SECONDS:
            fault = f"took {seconds:.1f} s"
        if fault is None and held - before > MEGABYTES * 1024:
            fault = f"took {(held - before) // 1024:,} MB"
        if fault is not None:
            findings += 1
            kinds[kind] += 1
            if kinds[kind] <= SHOWN:
                report(target, number, fault, data, args)
    target.file.write_bytes(target.original)
    progress.set(last, findings)


def report(target: Target, number: int, fault: str, data: bytes, args: argparse.Namespace) -> None:
    args.keep.mkdir(parents=True, exist_ok=True)
    kept = args.keep / f"{target.name.replace(' ', '-')}-{args.seed}-{number}"
    kept.write_bytes(data)
    print(f"{target.name}: {fault} ({kept})", file=sys.stderr, flush=True)


def watch(target: Target, count: int, args: argparse.Namespace, end: float) -> tuple[int, int]:
    """(inputs, findings) of a target. A process that dies or hangs is a finding, and the next one goes on behind it."""
    progress, first = Progress(), 0
    progress.set(0, 0)
    while first < count and time.monotonic() < end:
        parent, child = os.getpid(), os.fork()
        if child == 0:
            code = 1
            try:
                end_with_parent(parent)
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                run_target(target, first, count, args, end, progress)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        last, since, hangs = -1, time.monotonic(), False
        while not (ended := os.waitpid(child, os.WNOHANG))[0]:
            if progress.get()[0] != last:
                last, since = progress.get()[0], time.monotonic()
            elif time.monotonic() - since > HANG_SECONDS and not hangs:
                hangs = True
                os.kill(child, signal.SIGKILL)
            time.sleep(0.002)
        if ended[1] == 0:
            break
        number, findings = progress.get()
        fault = f"no answer in {HANG_SECONDS:g} s" if hangs else f"the process ended ({ended[1]})"
        report(target, number, fault, target.file.read_bytes(), args)
        target.file.write_bytes(target.original)
        progress.set(number, findings + 1)
        first = number + 1
    return progress.get()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--inputs", type=int, default=100_000, metavar="N", help="in all")
    parser.add_argument("--seconds", type=float, default=math.inf, metavar="S", help="stop after")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", metavar="NAME,...", help="readers (default: all)")
    parser.add_argument(
        "--keep", type=Path, default=Path("fuzz-findings"), metavar="DIR", help="for inputs of findings"
    )
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the files go
    counts: Counter[str] = Counter()
    rates: dict[str, float] = {}
    findings = 0
    memory = Path("/dev/shm")  # files are written a hundred thousand times
    with tempfile.TemporaryDirectory(prefix="xgram-dist-fuzz-", dir=memory if memory.is_dir() else None) as folder:
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            targets = build_targets(Path(folder))
        if args.only is not None:
            wanted = args.only.split(",")
            unknown = [name for name in wanted if name not in {target.name for target in targets}]
            if unknown:
                parser.error(f"no reader '{unknown[0]}'; there are {', '.join(one.name for one in targets)}")
            targets = [target for target in targets if target.name in wanted]
        wanted_inputs = schedule(targets, args.inputs)
        begun = time.monotonic()
        for place, target in enumerate(targets):
            # What is left of the time is shared by the readers that are left.
            started = time.monotonic()
            end = started + (args.seconds - (started - begun)) / (len(targets) - place)
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            counts[target.name], found = watch(target, wanted_inputs[target.name], args, end)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            rates[target.name] = seconds / max(1, counts[target.name])
            findings += found
            with suppress(OSError):
                target.file.write_bytes(target.original)
    each = ", ".join(f"{name} {count:,} ({1e3 * rates[name]:.2f} ms)" for name, count in counts.items())
    print(f"{sum(counts.values()):,} inputs in {time.monotonic() - begun:.0f} s, {findings} findings: {each}")
    return 1 if findings else 0


if __name__ == "__main__":
    np.seterr(all="ignore")
    sys.exit(main())
