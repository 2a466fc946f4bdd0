"""What the screen knows of a run: its records, followed as they are written, its starts and its job.

In: a run folder, which is only read. metrics.jsonl is read from where the last look ended; all else is small.
"""

import math
import os
import time
from pathlib import Path

from xgram_dist.analysis.report.chart import Point
from xgram_dist.cluster.slurm.commands import job_facts
from xgram_dist.cluster.slurm.successor import read_jobs
from xgram_dist.config import Config, load_config
from xgram_dist.console import format_duration
from xgram_dist.errors import BadFileError, UserError, one_line
from xgram_dist.train.metrics_file import FILE, MAX_LINE_BYTES, Record, number, parse_record
from xgram_dist.train.starts import read_starts
from xgram_dist.untrusted import open_file

KEPT_POINTS = 4000
"""Of a curve; older ones are thinned."""
SILENT_SECONDS = 120.0
"""Without a sign, after which a run is said to be silent."""
JOB_SECONDS = 10.0
"""Between questions to Slurm."""
SHOWN_SAVES = 5
LAST = ("train", "validation", "stragglers", "checkpoint", "upload", "eval", "end")


class RunView:
    """What is known of a run; `look` reads what is new."""

    def __init__(self, folder: Path, label: str | None = None):
        """`label`: what it is called; by default its name in the recipe."""
        self.folder, self._label = folder, label
        if not (folder / FILE).exists() and not (folder / "slurm").exists():
            raise UserError(f"'{folder}' is not a run folder: it has no {FILE}; give the folder of a run")
        self.config: Config | None = None
        self._job: dict[str, str] | None = None
        self._job_seen = -math.inf
        self._clear()

    def _clear(self) -> None:
        self._inode, self._offset, self._rest = -1, 0, b""
        self.last: dict[str, Record] = {}
        self.memory: dict[int, Record] = {}
        self.saves: list[Record] = []
        self.loss: list[Point] = []
        self.validation: list[Point] = []
        self.rates: list[Point] = []
        self.skipped: list[int] = []
        self.spikes: list[int] = []

    def look(self) -> None:
        if self.config is None and (self.folder / "config.yaml").exists():
            self.config = load_config(self.folder / "config.yaml")
        try:
            with os.fdopen(open_file(self.folder / FILE), "rb") as file:
                found = os.fstat(file.fileno())
                if found.st_ino != self._inode or found.st_size < self._offset:  # a resume writes it anew
                    self._clear()
                    self._inode = found.st_ino
                file.seek(self._offset)
                while block := file.read(MAX_LINE_BYTES):
                    self._offset += len(block)
                    *lines, self._rest = (self._rest + block).split(b"\n")
                    self._rest = self._rest[: MAX_LINE_BYTES + 1]
                    for line in lines:
                        record = parse_record(line)
                        if record is not None:
                            self._take(record)
        except FileNotFoundError:
            self._clear()
        except OSError as error:
            raise BadFileError(f"cannot read '{self.folder / FILE}': {error.strerror}") from error

    def _take(self, record: Record) -> None:
        kind, step = record["kind"], record["step"]
        if kind in LAST:
            self.last[kind] = record
        if kind == "train":
            _append(self.loss, step, number(record, "cross_entropy"))
            _append(self.rates, step, number(record, "tokens_per_second"))
            self.last.pop("end", None)
        elif kind == "validation":
            _append(self.validation, step, number(record, "loss"))
        elif kind == "memory":
            self.memory[int(number(record, "rank") or 0)] = record
        elif kind == "checkpoint":
            self.saves = [*self.saves, record][-SHOWN_SAVES:]
        elif kind in ("skipped", "spike"):
            (self.skipped if kind == "skipped" else self.spikes).append(step)

    def job(self) -> dict[str, str] | None:
        """Slurm's facts of the run's job; None: there is none, or Slurm does not answer."""
        if time.monotonic() - self._job_seen > JOB_SECONDS and (self.folder / "slurm").exists():
            self._job_seen = time.monotonic()
            try:
                self._job = job_facts(read_jobs(self.folder)["train"])
            except (UserError, OSError, KeyError):
                self._job = None
        return self._job

    @property
    def name(self) -> str:
        return plain(self._label or (self.config.name if self.config is not None else self.folder.name), 60)

    @property
    def steps(self) -> int | None:
        return self.config.train.steps if self.config is not None else None

    @property
    def step(self) -> int:
        return int(self.last["train"]["step"]) if "train" in self.last else 0

    def state(self) -> tuple[str, str]:
        """(word, colour)"""
        end, job, starts = self.last.get("end"), self.job(), read_starts(self.folder)
        if end is not None and end.get("complete"):
            return "complete", "green"
        if job is not None and job.get("JobState") not in (None, "RUNNING"):
            return plain(str(job["JobState"]).lower()), "yellow"
        if end is not None or (starts and starts[-1].get("ended")):
            return plain(str((starts[-1].get("ended") if starts else None) or "ended")), "yellow"
        if not starts:
            return "starting", "yellow"
        silent = time.time() - starts[-1]["seen"]
        if silent > SILENT_SECONDS + 3 * (number(self.last.get("train", {}), "step_seconds") or 0) * self._log_every():
            return f"no sign for {format_duration(silent)}", "red"
        return "running", "cyan"

    def _log_every(self) -> int:
        return self.config.train.log_every if self.config is not None else 10

    def seconds_left(self) -> float | None:
        pace = number(self.last.get("train", {}), "step_seconds")
        return None if pace is None or self.steps is None else pace * max(0, self.steps - self.step)


def views_of(folders: list[Path]) -> list[RunView]:
    """Several runs, which may have the same recipe, are called by their folders."""
    if len(folders) == 1:
        return [RunView(folders[0])]
    names = [folder.resolve().name for folder in folders]
    return [
        RunView(folder, name if names.count(name) == 1 else str(folder))
        for folder, name in zip(folders, names, strict=True)
    ]


def _append(points: list[Point], step: int, value: float | None) -> None:
    if value is None:
        return
    points.append((step, float(value)))
    if len(points) > KEPT_POINTS:
        half = KEPT_POINTS // 2
        points[:half] = points[:half:2]


def plain(value: str, limit: int = 80) -> str:
    """Of a run's files, for a terminal: in one line, without control characters."""
    return one_line(value, limit)
