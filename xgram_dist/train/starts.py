"""Where the time of a run went, over all its starts: RUN/starts/0001.json and so on, and the goodput from them.

The first rank writes one small file for each start, again at every status line and save: so of a start that is killed
what is missing is at most one interval between status lines. Times are Unix times and seconds.

    training     all steps but a start's first
    starting     from the start of the process to the end of its first step, which compiles, by part
    saving       while training waited for a save
    evaluating   validation, diagnosis, evaluation
    lost         steps that a later start had to do again
    waiting      between the last sign of a start and the beginning of the next: the queue, or nobody started it

Goodput is the share of (training - lost) in the whole.
"""

import json
import os
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from xgram_dist.environment import MOST_RANKS
from xgram_dist.errors import BadFileError
from xgram_dist.train.metrics_file import MAX_STEP
from xgram_dist.untrusted import read_json

FOLDER = "starts"
PARTS = {
    "python": "start of Python",
    "import": "import",
    "rendezvous": "rendezvous",
    "build": "data and modules",
    "load": "checkpoint",
    "first_step": "first step (compile)",
}
MAX_SECONDS = 1e11
"""Of a time: the year 5138."""
KINDS = ("training", "starting", "saving", "evaluating", "lost", "waiting")


class StartClock:
    """The parts of a start, one after the other."""

    def __init__(self, begun: float | None = None):
        self.begun = begun or process_begin()
        self.parts: dict[str, float] = {}
        self._last = self.begun

    def mark(self, part: str) -> None:
        """What ran since the last call was this part."""
        now = time.time()
        self.parts[part] = round(self.parts.get(part, 0.0) + now - self._last, 4)
        self._last = now


def process_begin() -> float:
    """When this process started; now, where the system does not tell."""
    try:
        fields = Path("/proc/self/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()
        uptime = float(Path("/proc/uptime").read_text(encoding="utf-8").split()[0])
        return time.time() - (uptime - int(fields[19]) / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return time.time()


class StartRecord:
    """Of this start. Every rank has one, and the first writes it."""

    def __init__(self, run: Path | None, clock: StartClock, nodes: list[str], after_step: int):
        """`run`: None on other ranks than the first. `nodes`: of each rank."""
        self._path = None if run is None else _file(run / FOLDER, 1 + _last_number(run / FOLDER))
        self._clock, self._loop = clock, time.monotonic()
        self._saving = self._evaluating = 0.0
        self._facts = {"begun": clock.begun, "nodes": nodes, "ranks": len(nodes), "after_step": after_step}
        self.write(after_step)

    def begin_loop(self) -> None:
        self._loop = time.monotonic()

    def add_saving(self, seconds: float) -> None:
        self._saving += seconds

    def add_evaluating(self, seconds: float) -> None:
        self._evaluating += seconds

    def write(self, step: int, ended: str | None = None) -> None:
        """`ended`: how, if it has. A disk that is full costs this record, not the run."""
        if self._path is None or _file(self._path.parent, int(self._path.stem) + 1).exists():
            return  # of another rank, or of a run whose folder was taken over
        spent = self._saving + self._evaluating + self._clock.parts.get("first_step", 0.0)
        record = {
            **self._facts,
            "parts": self._clock.parts,
            "starting": round(sum(self._clock.parts.values()), 4),
            "training": round(max(0.0, time.monotonic() - self._loop - spent), 4),
            "saving": round(self._saving, 4),
            "evaluating": round(self._evaluating, 4),
            "step": step,
            "seen": time.time(),
            "ended": ended,
        }
        temporary = self._path.with_name(f".{self._path.name}.part")
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary.unlink(missing_ok=True)  # a link is not followed
            temporary.write_text(json.dumps(record), encoding="utf-8")
            temporary.replace(self._path)


def _last_number(folder: Path) -> int:
    return max((int(path.stem) for path in folder.glob("*.json") if _NUMBER.fullmatch(path.stem)), default=0)


_NUMBER = re.compile(r"[0-9]{1,12}")


def _file(folder: Path, number: int) -> Path:
    return folder / f"{number:04d}.json"


def read_starts(run: Path) -> list[dict[str, Any]]:
    """In their order; a file that cannot be read is left out."""
    starts = []
    for path in sorted((run / FOLDER).glob("*.json")):
        with suppress(OSError, BadFileError):
            record = read_json(path)
            if _is_sound(record):
                starts.append(record)
    return starts


def _is_sound(record: Any) -> bool:
    """Whether a record is one that `StartRecord` writes, as far as figures are made of it."""
    if not isinstance(record, dict):
        return False
    parts, nodes, ended = record.get("parts", {}), record.get("nodes", []), record.get("ended")
    seconds = [record.get(key) for key in ("begun", "seen", *KINDS[:4])]
    return (
        isinstance(parts, dict)
        and isinstance(nodes, list)
        and all(type(one) in (int, float) and 0 <= one < MAX_SECONDS for one in [*seconds, *parts.values()])
        and all(type(record.get(key)) is int and 0 <= record[key] <= MAX_STEP for key in ("step", "after_step"))
        and (record.get("ranks") is None or (type(record["ranks"]) is int and 0 < record["ranks"] < MOST_RANKS))
        and all(isinstance(text, str) for text in nodes)
        and (ended is None or isinstance(ended, str))
    )


def goodput(run: Path, submitted: float | None = None) -> dict[str, Any] | None:
    """Seconds by KINDS over all starts, their sum, the goodput, and each start with its parts; None: no start is
    known. `submitted`: when the run was first put into a queue."""
    starts = read_starts(run)
    if not starts:
        return None
    totals = dict.fromkeys(KINDS, 0.0)
    each = []
    before = submitted
    for number, start in enumerate(starts):
        queue = max(0.0, start["begun"] - before) if before is not None else 0.0
        lost = _lost(start, starts[number + 1 :])
        for kind in KINDS[:4]:
            totals[kind] += start[kind]
        totals["training"] -= lost
        totals["lost"] += lost
        totals["waiting"] += queue
        each.append(
            {
                "begun": start["begun"],
                "nodes": list(dict.fromkeys(start.get("nodes", []))),
                "ranks": start.get("ranks"),
                "after_step": start["after_step"],
                "step": start["step"],
                "ended": start.get("ended"),
                "parts": {"queue": round(queue, 4), **start.get("parts", {})},
                "to_first_step": round(queue + start["starting"], 4),
            }
        )
        before = start["seen"]
    whole = sum(totals.values())
    rounded = {kind: round(seconds, 3) for kind, seconds in totals.items()}
    return {
        **rounded,
        "total": round(whole, 3),
        "goodput": totals["training"] / whole if whole else None,
        "starts": each,
    }


def _lost(start: dict[str, Any], later: list[dict[str, Any]]) -> float:
    """Seconds of training on steps that a later start has done again."""
    kept = min((one["after_step"] for one in later), default=start["step"])
    steps = start["step"] - start["after_step"]
    return start["training"] * min(steps, max(0, start["step"] - kept)) / steps if steps > 0 and later else 0.0
