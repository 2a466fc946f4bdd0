"""Rows of the doctor's result, their table and the JSON; and how checks collect facts from all ranks.

Every rank runs every check. Facts are collected by an all-gather over gloo, and every rank judges all of them by the
same rules, so all ranks have the same rows. The first rank prints.
"""

import json
import statistics
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from xgram_dist.files import write_atomically
from xgram_dist.parallel.process_group import ProcessGroup

Status = Literal["pass", "warn", "fail", "skip"]
Fact = TypeVar("Fact")
WIDTH = 120
SLOW_SHARE = 0.8
"""Of the median; below it a rank is named."""


@dataclass(frozen=True)
class Row:
    check: str
    status: Status
    found: str
    """What was measured or seen, in one phrase."""
    advice: str = ""
    """What to do about a warning or failure; for a skipped check, what it needs."""
    figures: dict[str, Any] = field(default_factory=dict)
    """Numbers for the JSON."""


@dataclass(frozen=True)
class Context:
    """What a check gets."""

    ranks: ProcessGroup
    nodes: list[str]
    """The node of each rank."""
    device: torch.device
    folder: Path
    """Where the runs are to be written."""
    quick: bool
    seconds: float
    """Of the timed run."""
    recipe: Path | None
    overrides: list[str]
    measured: dict[str, float] = field(default_factory=dict)
    """Bandwidths in GB/s, by field of `Machine`, for the comparison with the plan."""

    @property
    def on_gpu(self) -> bool:
        return self.device.type != "cpu"

    def where(self, ranks: Sequence[int]) -> str:
        """`rank 3 on n2`; of many, the first ones."""
        named = [f"rank {rank} on {self.nodes[rank]}" for rank in ranks[:4]]
        return ", ".join(named) + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")


class CheckFailedError(Exception):
    """A local part of a check raised on some rank."""


def gather(context: Context, local: Callable[[], Fact]) -> list[Fact]:
    """What `local` returns on each rank, in rank order. It must not communicate. Where it raises on any rank, all ranks
    raise `CheckFailedError`, so that none is left waiting."""
    try:
        mine: tuple[bool, Any] = True, local()
    except Exception as error:
        mine = False, f"{type(error).__name__}: {error}"
    everyone = context.ranks.host.all_gather_object(mine)
    failed = [rank for rank, (fine, _) in enumerate(everyone) if not fine]
    if failed:
        raise CheckFailedError(f"{everyone[failed[0]][1]} ({context.where(failed)})")
    return [value for _, value in everyone]


def differing(values: Sequence[object]) -> list[int]:
    """Ranks whose value is not the most frequent one."""
    usual = max(values, key=values.count)
    return [rank for rank, value in enumerate(values) if value != usual]


def slow_ranks(speeds: Sequence[float]) -> list[int]:
    """Ranks far below the median."""
    usual = statistics.median(speeds)
    return [rank for rank, speed in enumerate(speeds) if speed < SLOW_SHARE * usual]


def speed_row(context: Context, check: str, speeds: list[float], unit: str, advice: str) -> Row:
    """A row about a speed of each rank: a warning names those far below the median."""
    usual, slow = statistics.median(speeds), slow_ranks(speeds)
    found = f"{usual:.3g} {unit}" + (f" (median), {min(speeds):.3g} at least" if len(speeds) > 1 else "")
    figures = {"unit": unit, "by_rank": speeds}
    # Ranks that share a CPU also share its speed: their differences say nothing.
    if slow and context.on_gpu:
        return Row(check, "warn", f"{found}; {context.where(slow)} below {SLOW_SHARE:g} of it", advice, figures)
    return Row(check, "pass", found, figures=figures)


def print_row(row: Row) -> None:
    indent = " " * 8
    lines = textwrap.wrap(f"{row.check}: {row.found}", WIDTH - len(indent)) or [""]
    print(f"{row.status:<8}{lines[0]}")
    for line in lines[1:]:
        print(indent + line)
    for line in textwrap.wrap(f"-> {row.advice}", WIDTH - len(indent), subsequent_indent="   ") if row.advice else []:
        print(indent + line)


def print_report(rows: list[Row]) -> None:
    """The table, the worst rows last so that they stay on the screen, and a summary."""
    order: list[Status] = ["pass", "skip", "warn", "fail"]
    counts = {status: [row for row in rows if row.status == status] for status in order}
    print()
    for status in order:
        for row in counts[status]:
            print_row(row)
    print("\n" + ", ".join(f"{len(found)} {status}" for status, found in counts.items()))


def write_json(path: Path, rows: list[Row], facts: dict[str, Any], *, complete: bool) -> None:
    """`complete`: False while checks are still to come; a doctor that hangs or is killed leaves such a file."""
    verdict = "fail" if any(row.status == "fail" for row in rows) else "pass"
    content = {"complete": complete, "verdict": verdict, **facts, "rows": [asdict(row) for row in rows]}
    write_atomically(path, json.dumps(content, indent=2, default=str) + "\n")
