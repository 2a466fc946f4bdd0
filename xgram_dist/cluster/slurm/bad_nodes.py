"""Nodes that a run leaves out at its next start: those that failed it twice, and those that the preflight found slow.

    RUN/slurm/nodes.jsonl     a line for each time that a node was lost, that a rank failed on it, or that it was slow

Everything is forgotten after a day. An error that ranks on several nodes ended with is the run's, not a node's. Lines
are appended, because the first process of a job writes them as well as the first rank. Standard library only.
"""

import json
import re
import subprocess
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from xgram_dist.cluster.slurm.commands import job_environment, run_command
from xgram_dist.errors import BadFileError, UserError, one_line
from xgram_dist.untrusted import JsonError, open_itself, parse_json, read_file

FILE = "nodes.jsonl"
FORGET_SECONDS = 86_400.0
LOST, FAILED, SLOW = "lost", "failed", "slow"
TIMES = 2
"""Failures after which a node is left out."""
MAX_BYTES = 16 << 20
MAX_TIME = 1e11
"""Unix time: the year 5138."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}", re.ASCII)


@dataclass(frozen=True)
class NodeEvent:
    node: str
    time: float
    """Unix time."""
    kind: str
    """LOST, FAILED or SLOW."""
    why: str


@dataclass(frozen=True)
class Excluded:
    why: str
    until: float
    """Unix time."""


def note_node(run: Path, node: str, kind: str, why: str) -> None:
    """Best effort: a disk that is full costs this line, not the run."""
    event = NodeEvent(node, time.time(), kind, one_line(why, 300))
    try:
        path = run / "slurm" / FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a", encoding="utf-8", opener=open_itself) as file:
            file.write(json.dumps(asdict(event)) + "\n")
    except OSError:
        return


def read_events(run: Path, since: float = 0.0) -> list[NodeEvent]:
    """Those after `since`; lines that are none are left out."""
    try:
        lines = read_file(run / "slurm" / FILE, limit=MAX_BYTES).splitlines()
    except (FileNotFoundError, BadFileError):
        return []
    events = []
    for line in lines:
        try:
            event = NodeEvent(**parse_json(line))
        except (JsonError, TypeError, ValueError):
            continue
        sound = all(isinstance(text, str) for text in (event.node, event.kind, event.why))
        sound = sound and type(event.time) in (int, float) and 0 <= event.time < MAX_TIME
        sound = sound and _NAME.fullmatch(event.node) is not None
        if sound and event.time > since:
            events.append(event)
    return events


def excluded_nodes(run: Path, now: float) -> dict[str, Excluded]:
    """By node: those that the next start of the run leaves out."""
    events = read_events(run, now - FORGET_SECONDS)
    where: dict[str, set[str]] = {}
    for event in events:
        if event.kind == FAILED:
            where.setdefault(event.why, set()).add(event.node)
    found = {}
    for node in dict.fromkeys(event.node for event in events):
        of_node = [event for event in events if event.node == node]
        failures = [one for one in of_node if one.kind == LOST or (one.kind == FAILED and len(where[one.why]) == 1)]
        slow = [one for one in of_node if one.kind == SLOW]
        if slow:
            found[node] = Excluded(f"slow: {slow[-1].why}", slow[-1].time + FORGET_SECONDS)
        if len(failures) >= TIMES:
            until = failures[-TIMES].time + FORGET_SECONDS
            found[node] = Excluded(f"failed {len(failures)} times, the last: {failures[-1].why}", until)
    return found


def choose_excluded(script: Path, always: str, bad: Mapping[str, Excluded]) -> list[str]:
    """Those of the bad nodes that can be left out: Slurm says whether the job could start without them. `always`: what
    the site excludes, as Slurm writes lists of nodes."""
    chosen = list(bad)
    while chosen and not could_start(script, exclude_list(always, chosen)):
        chosen.pop()
    return chosen


def could_start(script: Path, exclude: str) -> bool:
    words = ["sbatch", "--test-only", f"--exclude={exclude}", str(script)]
    try:
        run_command(words, job_environment())
    except UserError:
        return False
    return True


def exclude_list(always: str, nodes: list[str]) -> str:
    return ",".join([*([always] if always else []), *nodes])


def lost_nodes(nodes: list[str], since: float) -> dict[str, str]:
    """Of these nodes those that Slurm does not reach, or whose daemon has started after `since`; with what it says."""
    try:
        lines = run_command(["scontrol", "show", "node", "-o", ",".join(nodes)]).splitlines()
    except UserError:
        return {}
    lost = {}
    for line in lines:
        facts = dict(word.split("=", 1) for word in line.split() if "=" in word)
        name, state = facts.get("NodeName", ""), facts.get("State", "")
        try:
            started = time.mktime(time.strptime(facts.get("SlurmdStartTime", ""), "%Y-%m-%dT%H:%M:%S"))
        except ValueError:
            started = 0.0
        if any(word in state for word in ("DOWN", "NOT_RESPONDING", "FAIL")) or state.endswith("*"):
            lost[name] = f"Slurm says {state}"
        elif started > since:
            lost[name] = f"it came up again at {facts['SlurmdStartTime']}"
    return lost


def requeue_without(job: str, nodes: str) -> None:
    """Requeue the job and leave nodes out. Slurm takes the list of a waiting job only, and ends this process as soon as
    it has requeued the job: another one, which ignores that signal, does both."""
    script = 'trap "" TERM; scontrol requeue "$1" && scontrol update JobId="$1" ExcNodeList="$2"'
    try:
        done = subprocess.run(["sh", "-c", script, "sh", job, nodes], capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        raise UserError("'scontrol requeue' did not answer in 60 s; is Slurm's controller up?") from None
    if done.returncode != 0:
        raise UserError(f"scontrol: {done.stderr.strip() or f'exit code {done.returncode}'}")
