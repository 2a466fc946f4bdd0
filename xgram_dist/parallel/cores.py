"""Cores of one machine shared out among its ranks, so that the threads of one do not push another's off its core."""

import os
from pathlib import Path

TOPOLOGY = Path("/sys/devices/system/cpu")


def cores_of(rank: int, ranks: int) -> set[int]:
    """This rank's share of the cores that this process may use: neighbours, and the two halves of a core together.
    Where ranks outnumber cores and some core would have more of them than another, all of them."""
    cores = sorted(os.sched_getaffinity(0), key=_where) if hasattr(os, "sched_getaffinity") else []
    if len(cores) < ranks and (not cores or ranks % len(cores)):
        return set(cores)
    first = rank * len(cores) // ranks
    return set(cores[first : max(first + 1, (rank + 1) * len(cores) // ranks)])


def bind(process: int, cores: set[int]) -> None:
    """Let a process (0: this one) and the threads it starts from now on run on these cores alone; none: anywhere."""
    if cores:
        os.sched_setaffinity(process, cores)


def _where(core: int) -> tuple[int, int, int]:
    """Cores in the order of the machine's sockets."""
    try:
        folder = TOPOLOGY / f"cpu{core}" / "topology"
        return int((folder / "physical_package_id").read_text()), int((folder / "core_id").read_text()), core
    except (OSError, ValueError):
        return 0, core, core
