"""`xgram-dist submit`, `status`, `cancel`: runs as Slurm jobs."""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from xgram_dist.cli.command import Command

SUBMIT_EXAMPLES = """
  xgram-dist submit recipes/0.73b/xgram-2x-50.yaml --nodes 2
  xgram-dist submit recipes/1.15b/xgram-4x-50.yaml memory.window=16GiB --nodes 2-4 --then eval --follow
  xgram-dist submit recipes/0.73b/xgram-1x-50.yaml --nodes 2 --array train.seed=0,1,2 --at-once 2
  xgram-dist submit recipes/0.73b/vanilla.yaml recipes/0.73b/xgram-1x-50.yaml train.steps=1000 --nodes 2 --dry-run
"""
STATUS_EXAMPLES = """
  xgram-dist status runs/0.73b-xgram-2x-50
  xgram-dist status runs/tiny-xgram --stacks
"""
CANCEL_EXAMPLES = """
  xgram-dist cancel runs/0.73b-xgram-2x-50
  xgram-dist cancel runs/0.73b-xgram-2x-50 --now
"""


def add_submit_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help="YAML file")
    parser.add_argument(
        "overrides", nargs="*", metavar="RECIPE|KEY=VALUE", help="more recipes (a job array), or keys to change"
    )
    parser.add_argument(
        "--nodes", default="1", metavar="N|MIN-MAX", help="nodes, or as many of a range as are free (default 1)"
    )
    parser.add_argument("--site", metavar="FILE", help="the cluster's settings (default: slurm/sites/default.yaml)")
    parser.add_argument("--folder", metavar="DIR", help="run folder (default: runs/NAME; for an array runs/NAME-array)")
    parser.add_argument("--array", metavar="KEY=V1,V2,...", help="one run for each value, as a job array")
    parser.add_argument("--at-once", type=int, metavar="K", help="let at most K tasks of an array run at a time")
    parser.add_argument("--then", choices=("eval",), help="submit a second job that evaluates the finished run")
    parser.add_argument("--follow", action="store_true", help="print the log until the job ends")
    parser.add_argument("--dry-run", action="store_true", help="print the job script; write and submit nothing")
    parser.add_argument("--no-preflight", action="store_true", help="do not check ranks and links before training")
    parser.add_argument("--force", action="store_true", help="submit although the estimate or a file check fails")
    parser.add_argument("--json", action="store_true", help="print jobs, folders and logs as JSON")


def run_submit(args: argparse.Namespace) -> int:
    from xgram_dist.cluster.slurm.run_record import LOG
    from xgram_dist.cluster.slurm.site import load_site
    from xgram_dist.cluster.slurm.submit import Request, plan_submission, submit
    from xgram_dist.cluster.slurm.successor import FOLDER
    from xgram_dist.errors import UserError

    submission = plan_submission(
        Request(
            recipes=[args.recipe, *(word for word in args.overrides if "=" not in word)],
            overrides=[word for word in args.overrides if "=" in word],
            sweep=args.array,
            site=load_site(args.site),
            nodes=args.nodes,
            folder=Path(args.folder) if args.folder else None,
            then_eval=args.then == "eval",
            preflight=not args.no_preflight,
            force=args.force,
            at_once=args.at_once,
        )
    )
    if args.follow and len(submission.runs) > 1:
        raise UserError("--follow prints one log, but this is an array; leave it out and follow with `tail -f`")
    if args.dry_run:
        print("\n".join([submission.train, *submission.evals]), end="")
        return 0
    jobs = submit(submission)
    submitted = [
        {"job": job, "run": str(run.folder), "log": str(run.folder / FOLDER / LOG), "change": run.change}
        for job, run in zip(jobs, submission.runs, strict=True)
    ]
    if args.json:
        print(json.dumps(submitted, indent=1))
    else:
        for entry in submitted:
            change = f" ({entry['change']})" if len(submitted) > 1 else ""
            print(f"job {entry['job']}: {entry['run']}{change}\n  log: {entry['log']}")
    return _follow(jobs[0], submission.runs[0].folder) if args.follow else 0


def _follow(job: str, run: Path) -> int:
    from xgram_dist.cluster.slurm.status import follow

    try:
        state = follow(job, run)
    except KeyboardInterrupt:
        print(f"\nthe run goes on; `xgram-dist submit` has said where its log is, `xgram-dist status {run}` shows it")
        return 0
    return 0 if state == "COMPLETED" else 1


def add_status_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders")
    parser.add_argument("--stacks", action="store_true", help="ask every rank for its Python stacks, and print them")
    parser.add_argument("--json", action="store_true", help="print as JSON")


def run_status(args: argparse.Namespace) -> int:
    from xgram_dist.cluster.slurm.status import goodput_rows, status
    from xgram_dist.console import MAX_CELL, print_table
    from xgram_dist.errors import one_line
    from xgram_dist.train.stragglers import STRAGGLER_HEADER, straggler_rows

    runs = [status(Path(folder)) for folder in args.runs]
    for run in runs if args.stacks else ():
        run["stacks"] = _collect_stacks(run)
    if args.json:
        print(json.dumps(runs, indent=1))
        return 0
    for run in runs:
        rows = [["job", run["job"] or "-"], ["state", _state(run)], ["nodes", run["nodes"] or "-"]]
        if run["run_time"] is not None:
            rows.append(["time, limit", f"{run['run_time']}, {run['time_limit']}"])
        if run["step"] is not None:
            rows.append(["step", f"{run['step']:,}"])
            rows.append(["loss", "-" if run["loss"] is None else f"{run['loss']:.4f}"])
            rate = run["tokens_per_second"]
            rows.append(["tokens/s", "-" if rate is None else f"{rate:,.0f}"])
        rows.append(["newest checkpoint", "-" if run["checkpoint"] is None else f"step {run['checkpoint']:,}"])
        if run["eval_job"] is not None:
            rows.append(["evaluation", f"job {run['eval_job']}, {run['eval_state'] or 'no longer known to Slurm'}"])
        if run["goodput"] is not None:
            rows += goodput_rows(run["goodput"])
        print_table([run["run"], ""], rows, left=(0, 1))
        if run["stragglers"] is not None:
            print(f"\nstragglers at step {run['stragglers']['step']:,}:")
            print_table(STRAGGLER_HEADER, straggler_rows(run["stragglers"]), left=(0, 2, 5))
        for node, one in run["excluded"].items():
            until = time.strftime("%Y-%m-%d %H:%M", time.localtime(one["until"]))
            print(f"excluded from the next start, until {until}: {node}, {one_line(one['why'], MAX_CELL)}")
        for number, start in enumerate(run["starts"], start=1):
            after = f"after step {start['after_step']:,}" if start["after_step"] else "from the beginning"
            stopped = "" if start["seconds_to_stop"] is None else f", {start['seconds_to_stop']} s after the signal"
            nodes, reason = one_line(",".join(start["nodes"]), MAX_CELL), one_line(start["reason"], MAX_CELL)
            print(f"start {number} on {nodes} {after}: {reason or 'running'}{stopped}")
        for text in run.get("stacks", {}).values():
            print(f"\n{text.rstrip()}")
        print(f"log: {run['log']}\n" if run["log"] else "")
    return 0


STACK_SECONDS = 15.0
"""How long ranks may take to answer; on a network file system they may see the request seconds later."""


def _collect_stacks(run: dict[str, Any]) -> dict[int, str]:
    from xgram_dist.parallel.stacks import collect_stacks
    from xgram_dist.train.run_dir import STACKS

    starts = (run["goodput"] or {}).get("starts") or [{"ranks": 1}]
    found = collect_stacks(Path(run["run"]) / STACKS, starts[-1]["ranks"], STACK_SECONDS)
    missing = sorted(set(range(starts[-1]["ranks"])) - set(found))
    if missing:
        names = ", ".join(map(str, missing))
        print(
            f"no answer in {STACK_SECONDS:g} s from rank {names}: not running, or stuck outside Python", file=sys.stderr
        )
    return found


def _state(run: dict[str, Any]) -> str:
    if run["state"] is None:
        if run["job"] is None:
            ended = (run["goodput"] or {"starts": [{}]})["starts"][-1].get("ended")
            return "complete" if run["complete"] else ended or "running, or was killed"
        return "complete" if run["complete"] else "no longer known to Slurm"
    return f"{run['state']}, {run['reason']}" if run["reason"] else str(run["state"])


def add_cancel_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders")
    parser.add_argument("--now", action="store_true", help="stop at once, without a checkpoint")


def run_cancel(args: argparse.Namespace) -> int:
    from xgram_dist.cluster.slurm.commands import ENDED, job_state, run_command
    from xgram_dist.cluster.slurm.job import CANCELLED
    from xgram_dist.cluster.slurm.successor import FOLDER, current_job, read_jobs

    for folder in map(Path, args.runs):
        job, facts = current_job(folder)
        state = None if facts is None else facts["JobState"]
        for dependent in (number for number in read_jobs(folder).values() if number != job):
            if (job_state(dependent) or "COMPLETED") not in ENDED:
                run_command(["scancel", dependent])
        if state is None or state in ENDED:
            print(f"job {job} has already ended ({state or 'no longer known to Slurm'})")
            continue
        (folder / FOLDER / CANCELLED).touch()  # tells the stopping job not to requeue itself
        if state == "RUNNING" and not args.now:
            run_command(["scancel", "--signal=USR1", "--batch", job])
            print(f"job {job}: saves a checkpoint and stops; `xgram-dist status {folder}` shows when")
        else:
            run_command(["scancel", job])
            print(f"job {job}: cancelled")
    return 0


COMMANDS = {
    "submit": Command(SUBMIT_EXAMPLES, add_submit_arguments, run_submit),
    "status": Command(STATUS_EXAMPLES, add_status_arguments, run_status),
    "cancel": Command(CANCEL_EXAMPLES, add_cancel_arguments, run_cancel),
}
