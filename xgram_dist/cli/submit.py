"""`xgram-dist submit`."""

import argparse
import json
from pathlib import Path

EXAMPLES = """
  xgram-dist submit recipes/0.73b/xgram-2x-50.yaml --nodes 2
  xgram-dist submit recipes/1.15b/xgram-4x-50.yaml memory.window=16GiB --nodes 2-4 --then eval --follow
  xgram-dist submit recipes/0.73b/xgram-1x-50.yaml --nodes 2 --array train.seed=0,1,2
  xgram-dist submit recipes/0.73b/vanilla.yaml recipes/0.73b/xgram-1x-50.yaml train.steps=1000 --nodes 2 --dry-run
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help="YAML file")
    parser.add_argument(
        "overrides", nargs="*", metavar="RECIPE|KEY=VALUE", help="further recipes (an array), or keys to change"
    )
    parser.add_argument(
        "--nodes", default="1", metavar="N|MIN-MAX", help="nodes, or as many of a range as are free (1)"
    )
    parser.add_argument("--site", metavar="FILE", help="the cluster's file (default: slurm/sites/default.yaml)")
    parser.add_argument("--folder", metavar="DIR", help="run folder (default: runs/NAME; of an array runs/NAME-array)")
    parser.add_argument("--array", metavar="KEY=V1,V2,...", help="one run for each value, as a job array")
    parser.add_argument("--then", choices=("eval",), help="a job that evaluates the run when it is complete")
    parser.add_argument("--follow", action="store_true", help="show the log until the job has ended")
    parser.add_argument("--dry-run", action="store_true", help="print the script; write and submit nothing")
    parser.add_argument("--no-preflight", action="store_true", help="do not check ranks and links before training")
    parser.add_argument("--force", action="store_true", help="also what the plan or the files here speak against")
    parser.add_argument("--json", action="store_true", help="print jobs, folders and logs as JSON")


def run(args: argparse.Namespace) -> int:
    from xgram_dist.errors import UserError
    from xgram_dist.slurm.record import FOLDER, LOG
    from xgram_dist.slurm.site import load_site
    from xgram_dist.slurm.submit import Request, plan_submission, submit

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
        )
    )
    if args.follow and len(submission.runs) > 1:
        raise UserError("--follow shows one log, but this is an array; leave it out and follow with `tail -f`")
    if args.dry_run:
        print("\n".join([submission.train, *submission.evals]), end="")
        return 0
    jobs = submit(submission)
    found = [
        {"job": job, "run": str(one.folder), "log": str(one.folder / FOLDER / LOG), "change": one.change}
        for job, one in zip(jobs, submission.runs, strict=True)
    ]
    if args.json:
        print(json.dumps(found, indent=1))
    else:
        for one in found:
            print(f"job {one['job']}: {one['run']}" + (f" ({one['change']})" if len(found) > 1 else ""))
            print(f"  log: {one['log']}")
    return _follow(jobs[0], Path(found[0]["log"])) if args.follow else 0


def _follow(job: str, log: Path) -> int:
    from xgram_dist.slurm.follow import follow

    try:
        state = follow(job, log)
    except KeyboardInterrupt:
        print(f"\njob {job} goes on; its log: {log}")
        return 0
    return 0 if state == "COMPLETED" else 1
