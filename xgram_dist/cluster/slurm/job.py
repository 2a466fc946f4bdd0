"""The first process of a job: starts the ranks, and decides what to do when they end.

    python -m xgram_dist.cluster.slurm.job --folder RUN --ranks 8 -- python -m xgram_dist train RECIPE --folder RUN

| the ranks                                   | the job                                                              |
|---------------------------------------------|----------------------------------------------------------------------|
| end with 0: training is complete            | ends with 0                                                          |
| were asked to stop (USR1, TERM, the time    | requeues itself; the next start resumes from that checkpoint. It     |
| limit), and saved                           | ends with 1 if too many stops in a row left no new checkpoint        |
| refuse their input (exit code 2)            | ends with 2: a restart would be refused again                        |
| end in any other way                        | starts the ranks again on its nodes if all of them answer, and       |
|                                             | requeues itself if not, or if the last start left no new checkpoint. |
|                                             | It ends with 1 if too many starts in a row left none                 |

Where Slurm does not start a job again, it ends with 1 instead of requeueing itself, and its successor carries the run
on (`successor.py`). A lost node ends this process too; then Slurm requeues the job, or starts the successor. A
cancelled job is not requeued, nor one that Slurm has restarted elsewhere in the meantime. Nodes that failed twice or
were slow are left out of the next start (`bad_nodes.py`). Standard library only: the host's Python runs this, outside
the ranks' container.
"""

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from xgram_dist.checkpoint.folder import list_steps
from xgram_dist.cluster.slurm.attempts import COMPLETE, CRASHED, REFUSED, STOPPED, Attempt, AttemptLog
from xgram_dist.cluster.slurm.bad_nodes import (
    FAILED,
    LOST,
    choose_excluded,
    exclude_list,
    excluded_nodes,
    lost_nodes,
    note_node,
    read_events,
    requeue_without,
)
from xgram_dist.cluster.slurm.commands import hostnames, job_facts, run_command, was_cancelled
from xgram_dist.cluster.slurm.ranks import STOPPED_CODE, Ranks
from xgram_dist.cluster.slurm.successor import move_evaluation, starts_again, submit_successor
from xgram_dist.cluster.slurm.time_limit import TimeLimit
from xgram_dist.environment import read_slurm_job
from xgram_dist.errors import UserError

CANCELLED = "cancelled"
"""A file in RUN/slurm, written by `xgram-dist cancel`: the job is not requeued."""
MAX_STOPS = 10
"""In a row without a new checkpoint. Preemption may end many starts early; a time limit that is too short ends all."""
PROBE_SECONDS = 15.0
"""For an empty step on all nodes."""
LIMIT_SHARE = 1.1
"""Of the seconds to save: the job asks the ranks to stop that long before its limit if Slurm has not. Slurm's signal
comes earlier."""
REPLACED, MOVED = "Slurm has restarted this job", "to be started on other nodes"
"""In the reasons of attempts."""


class Job:
    def __init__(self, args: argparse.Namespace):
        self.args, self.folder = args, Path(args.folder)
        job = read_slurm_job()
        self.number, self.id, self.restart, self.nodelist = job.number, job.id, job.restart, job.nodelist
        self.script = Path(args.script) if args.script else None
        self.attempts = AttemptLog(self.folder, self.id)
        self.ranks: Ranks | None = None
        self.stopping = False
        self.limit: TimeLimit | None = None
        self.decision = threading.Lock()  # held by the thread that requeues the job
        self.requeued = False
        self.kept: set[str] = set()
        """Bad nodes of which the log says that the run cannot start without them."""

    def run(self) -> int:
        given = hostnames(self.nodelist)
        step, before = newest_step(self.folder), self.attempts.before()
        if before is not None:
            self.note_lost_nodes(before)
        bad = excluded_nodes(self.folder, time.time())
        nodes = choose_nodes(given, self.args.counts, set(bad))
        self.attempts.begin(self.restart, nodes, step)
        if (self.folder / "slurm" / CANCELLED).exists():
            return self.finish(STOPPED, "it was cancelled", 130)
        if before is not None and before.job != self.id and was_cancelled(known_facts(before.job)):
            return self.finish(STOPPED, f"job {before.job}, which this one was to carry on, was cancelled", 130)
        failed = self.attempts.without_progress(step)[:-1]
        if len(failed) > self.args.restarts:
            return self.give_up([attempt.explain() for attempt in failed])
        self.prepare_successor()
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, lambda number, _: self.stop(signal.Signals(number).name))
        moved = before is not None and MOVED in before.reason  # Slurm has given such a node all the same
        avoidable = [] if moved or not set(bad) & set(nodes) else set(self.bad_nodes()) & set(nodes)
        if avoidable:
            why = "; ".join(f"{node} {bad[node].why}" for node in sorted(avoidable))
            return self.requeue(STOPPED, f"{why}: {MOVED}")
        say(f"job {self.id}, start {self.restart + 1}, on {', '.join(nodes)}: {begun(step)}")
        self.limit = TimeLimit(
            self.id, self.args.time, LIMIT_SHARE * self.args.save_seconds, lambda: self.stop("the time limit"), say
        )
        try:
            return self.train(nodes)
        finally:
            self.limit.close()

    def train(self, nodes: list[str]) -> int:
        while True:
            self.ranks = Ranks(self.args, nodes, self.number, self.lease())
            if self.stopping:
                self.ranks.ask_to_stop()
            code = self.decide(self.ranks, self.ranks.run())
            if code is not None:
                return code
            self.attempts.begin(self.restart, nodes, newest_step(self.folder))

    def lease(self) -> str:
        """For the lease of the run folder: a later start of the same run takes it over at once."""
        jobs = self.attempts.jobs
        first, _, _ = jobs[0].partition("_")
        return f"{first}:{len(jobs) - 1}.{self.restart}.{self.attempts.current.again}"

    def stop(self, why: str) -> None:
        """Make all ranks save and end. Called by USR1 and TERM, and before the time limit."""
        if self.requeued:  # Slurm ends the job it has just requeued
            os._exit(1)
        if self.stopping or self.decision.locked():
            return
        self.stopping = True
        self.attempts.signalled()
        say(f"{why}: asking the ranks to save and end")
        if self.ranks is not None:
            self.ranks.ask_to_stop()
        timer = threading.Timer(self.args.save_seconds, self.requeue_unsaved)
        timer.daemon = True
        timer.start()

    def requeue_unsaved(self) -> None:
        """Requeue without waiting for the save any longer: Slurm does not requeue a job that hits its time limit."""
        if self.decision.locked():
            return
        say(f"the ranks did not end within {self.args.save_seconds:g} s of the signal")
        code = self.requeue(STOPPED, f"asked to stop, but the ranks did not end within {self.args.save_seconds:g} s")
        os._exit(code)

    def decide(self, ranks: Ranks, code: int) -> int | None:
        """What to do after the ranks ended with srun's exit code. The job's exit code; None: start the ranks again."""
        if code == 0:
            return self.finish(COMPLETE, "training is complete", 0)
        failure = ranks.failure
        cause = str(failure or ranks.srun_error or f"srun ended with exit code {code}")
        if ranks.refused:
            return self.finish(REFUSED, f"{cause}; a restart would fail in the same way: see the log above", 2)
        if self.stopping or (failure.stopped if failure else code == STOPPED_CODE):
            stops = 1 + len(self.attempts.without_progress(newest_step(self.folder), (STOPPED,)))
            if stops < MAX_STOPS:
                return self.requeue(STOPPED, "asked to stop")
            reason = f"asked to stop {stops} times in a row before there was a new checkpoint; not requeued: a longer "
            reason += "--time, or more frequent checkpoints (checkpoint.every), would help"
            return self.finish(STOPPED, reason, 1)
        if self.limit is not None and self.limit.just_resumed() and self.nodes_answer(ranks.nodes):
            # Ranks that waited for others when the job was suspended have waited for too long when it resumes.
            self.end(STOPPED, f"{cause}, after the job was suspended; the ranks are started again on the same nodes", 1)
            return None
        self.note_failure(ranks)
        failed = self.attempts.without_progress(newest_step(self.folder))
        if len(failed) > self.args.restarts:
            return self.give_up([*(attempt.explain() for attempt in failed[:-1]), cause])
        keep = failure is not None and failure.node not in self.bad_nodes()
        if len(failed) <= 1 and keep and self.nodes_answer(ranks.nodes):
            self.end(CRASHED, f"{cause}; the ranks are started again on the same nodes", 1)
            return None
        if len(failed) > 1:
            wait = self.args.restart_wait * 4.0 ** (len(failed) - 2)
            say(f"{cause}; requeueing in {wait:g} s: start {len(failed)} in a row without a new checkpoint")
            time.sleep(wait)
        return self.requeue(CRASHED, cause)

    def nodes_answer(self, nodes: list[str]) -> bool:
        """Whether this start of the job still has all of its nodes, and is to go on."""
        if (self.folder / "slurm" / CANCELLED).exists():
            return False
        words = ["srun", f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", "--nodelist", ",".join(nodes), "true"]
        try:
            answered = subprocess.run(words, capture_output=True, timeout=PROBE_SECONDS).returncode == 0
            facts = job_facts(self.id) or {}
        except (subprocess.TimeoutExpired, UserError):
            return False
        return answered and facts.get("JobState") == "RUNNING" and int(facts.get("Restarts", -1)) == self.restart

    def give_up(self, reasons: list[str]) -> int:
        return self.finish(
            CRASHED,
            f"{len(reasons)} starts in a row left no new checkpoint, the last: {reasons[-1]}; not requeued: look "
            f"at the log, then submit again",
            1,
        )

    def requeue(self, outcome: str, reason: str) -> int:
        """Slurm ends this process as soon as it has requeued the job, so everything is printed and written before.
        Where Slurm does not requeue it, its successor starts when it has ended with 1."""
        if not self.decision.acquire(blocking=False):  # the other thread is requeueing
            time.sleep(60)
            return 1
        facts = job_facts_with_retries(self.id)
        if int(facts.get("Restarts", -1)) != self.restart:
            return self.end(STOPPED, f"{reason}; {REPLACED}, so this start ends", 1)
        if (self.folder / "slurm" / CANCELLED).exists() or self.ended_by_a_person(facts):
            code = self.finish(STOPPED, f"{reason}; cancelled, so not requeued", 130)
            if facts.get("JobState") == "RUNNING":
                run_command(["scancel", self.id])
                time.sleep(30)
            return code
        known = self.script is not None and bool(read_events(self.folder))  # else nothing was or is to be excluded
        exclude = exclude_list(self.args.exclude, self.bad_nodes()) if known else None
        if self.attempts.current.successor:
            return self.hand_over(outcome, reason, exclude)
        self.end(outcome, f"{reason}; requeued", 1)
        self.requeued = True
        try:
            if exclude is None:
                run_command(["scontrol", "requeue", self.id])
            else:
                requeue_without(self.id, exclude)
        except UserError as error:
            self.requeued = False
            return self.requeue_refused(outcome, f"{reason}; it could not be requeued: {error}", exclude or "")
        time.sleep(60)
        return 1

    def ended_by_a_person(self, facts: dict[str, str]) -> bool:
        """A job that ends may look the same to Slurm when it was preempted; its steps tell. A successor looks itself,
        when this job has ended."""
        preempted = self.ranks is not None and self.ranks.preempted
        return not self.attempts.current.successor and not preempted and was_cancelled(facts)

    def hand_over(self, outcome: str, reason: str, exclude: str | None) -> int:
        successor = self.attempts.current.successor
        try:
            if exclude is not None:
                run_command(["scontrol", "update", f"JobId={successor}", f"ExcNodeList={exclude}"])
        except UserError as error:
            say(f"no node could be excluded from job {successor}: {error}")
        return self.end(outcome, f"{reason}; job {successor} carries the run on", 1)

    def requeue_refused(self, outcome: str, reason: str, exclude: str) -> int:
        if self.script is None or not self.submit_successor(exclude):
            return self.end(outcome, f"{reason}; submit again to resume", 1)
        return self.end(outcome, f"{reason}; job {self.attempts.current.successor} carries the run on", 1)

    # ---- the successor

    def prepare_successor(self) -> None:
        """Before anything can happen to this job."""
        if self.script is None or starts_again(known_facts(self.id)):
            return
        if self.submit_successor(exclude_list(self.args.exclude, self.bad_nodes())):
            successor = self.attempts.current.successor
            say(f"Slurm does not start job {self.id} again by itself; job {successor} waits to carry the run on")

    def submit_successor(self, exclude: str) -> bool:
        assert self.script is not None
        try:
            self.attempts.succeeded_by(submit_successor(self.folder, self.script, self.id, exclude))
        except (UserError, OSError) as error:
            say(f"a successor of job {self.id} could not be submitted: {error}")
            return False
        try:
            move_evaluation(self.folder)
        except UserError as error:
            say(f"the evaluation waits for job {self.id} alone: {error}")
        return True

    # ---- bad nodes

    def bad_nodes(self) -> list[str]:
        """Those that the next start can do without."""
        bad = excluded_nodes(self.folder, time.time())
        if not bad or self.script is None:
            return []
        chosen = choose_excluded(self.script, self.args.exclude, bad)
        for node in bad:
            if node not in chosen and node not in self.kept:
                self.kept.add(node)
                say(f"node {node} ({bad[node].why}) stays: the run cannot start without it")
        return chosen

    def note_failure(self, ranks: Ranks) -> None:
        """Unless the ranks have named the node themselves."""
        failure = ranks.failure
        if failure is None or not failure.of_its_node:
            return
        if not read_events(self.folder, self.attempts.current.started):
            note_node(self.folder, failure.node, FAILED, failure.of_its_node)

    def note_lost_nodes(self, before: Attempt) -> None:
        """Of a start that was cut off: nodes that Slurm does not reach, or that came up again after its last sign."""
        if before.outcome is None or REPLACED in before.reason:
            for node, why in lost_nodes(before.nodes, last_sign(self.folder, before.started)).items():
                note_node(self.folder, node, LOST, f"lost: {why}")

    def finish(self, outcome: str, reason: str, code: int) -> int:
        """The end of the run's jobs: no successor is to start."""
        if self.attempts.current.successor:
            try:
                run_command(["scancel", "--quiet", self.attempts.current.successor])
            except UserError as error:
                say(str(error))
        return self.end(outcome, reason, code)

    def end(self, outcome: str, reason: str, code: int) -> int:
        """The end of this attempt."""
        self.attempts.end(outcome, reason)
        say(reason)
        return code


def choose_nodes(given: list[str], counts: list[int], bad: set[str]) -> list[str]:
    """As many of the given nodes as the batch divides over. `counts`: those possible; empty: any. Bad nodes are left
    out where enough others are given."""
    good = [node for node in given if node not in bad]
    for nodes in (good, given):
        usable = [count for count in counts or [len(given)] if count <= len(nodes)]
        if usable:
            return nodes[: max(usable)]
    raise UserError(f"Slurm gave {len(given)} node(s), this run needs one of {counts}")


def begun(step: int) -> str:
    return f"after step {step}" if step else "from the beginning"


def newest_step(folder: Path) -> int:
    return max(list_steps(folder), default=0)


def last_sign(folder: Path, default: float) -> float:
    """The last heartbeat of the run's lease."""
    try:
        return max((path.stat().st_mtime for path in (folder / "lease").glob("*.json")), default=0.0) or default
    except OSError:
        return default


def known_facts(job: str) -> dict[str, str]:
    """None where Slurm does not answer: the run starts all the same."""
    try:
        return job_facts(job) or {}
    except UserError:
        return {}


def job_facts_with_retries(job: str) -> dict[str, str]:
    """Slurm's controller may be unreachable for a while."""
    for wait in (5, 15, 60, 120):
        try:
            return job_facts(job) or {}
        except UserError as error:
            say(f"{error}; trying again in {wait} s")
            time.sleep(wait)
    return job_facts(job) or {}


def say(text: str) -> None:
    print(f"slurm: {text}", flush=True)


def parse_arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m xgram_dist.cluster.slurm.job", description=__doc__.splitlines()[0])
    parser.add_argument("--folder", required=True, metavar="RUN", help="the run folder")
    parser.add_argument("--ranks", type=int, required=True, metavar="R", help="ranks per node")
    parser.add_argument("--counts", default="", metavar="1,2,4", help="node counts the run can use (default: any)")
    parser.add_argument(
        "--restarts", type=int, default=3, metavar="N", help="limit in a row without a new checkpoint (3)"
    )
    parser.add_argument(
        "--restart-wait", type=float, default=60.0, metavar="S", help="seconds before the second of these (60)"
    )
    parser.add_argument(
        "--save-seconds", type=float, default=240.0, metavar="S", help="time to save when stopped (240)"
    )
    parser.add_argument("--time", default="", metavar="LIMIT", help="time limit, where Slurm does not tell it")
    parser.add_argument("--script", metavar="FILE", help="what to submit as the successor, with its options in it")
    parser.add_argument("--exclude", default="", metavar="NODES", help="nodes that the site excludes")
    parser.add_argument("--launcher", choices=("srun", "torchrun"), default="srun")
    parser.add_argument("--node-suffix", default="", metavar="WORD", help="appended to a node's name to reach it")
    parser.add_argument("--srun", action="append", default=[], metavar="OPTION", help="more options of srun")
    parser.add_argument("command", nargs="+", metavar="-- COMMAND", help="what a rank runs")
    args = parser.parse_args(words)
    args.counts = [int(count) for count in args.counts.split(",") if count]
    return args


def main() -> int:
    try:
        return Job(parse_arguments(sys.argv[1:])).run()
    except UserError as error:
        say(str(error))
        return 2


if __name__ == "__main__":
    sys.exit(main())
