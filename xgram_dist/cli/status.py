"""`xgram-dist status`."""

import argparse
import json
from pathlib import Path

EXAMPLES = """
  xgram-dist status runs/0.73b-xgram-2x-50
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders")
    parser.add_argument("--json", action="store_true", help="print as JSON")


def run(args: argparse.Namespace) -> int:
    from xgram_dist.progress import table
    from xgram_dist.slurm.status import status

    found = [status(Path(folder)) for folder in args.runs]
    if args.json:
        print(json.dumps(found, indent=1))
        return 0
    for one in found:
        rows = [["job", one["job"]], ["state", _state(one)], ["nodes", one["nodes"] or "-"]]
        if one["run_time"] is not None:
            rows.append(["time, limit", f"{one['run_time']}, {one['time_limit']}"])
        if one["step"] is not None:
            rows.append(["step", f"{one['step']:,}"])
            rows.append(["loss", "-" if one["loss"] is None else f"{one['loss']:.4f}"])
            rows.append(["tokens a second", f"{one['tokens_per_second']:,.0f}"])
        rows.append(["newest checkpoint", "-" if one["checkpoint"] is None else f"step {one['checkpoint']:,}"])
        if one["eval_job"] is not None:
            rows.append(["evaluation", f"job {one['eval_job']}, {one['eval_state'] or 'no longer known to Slurm'}"])
        table([one["run"], ""], rows)
        for number, start in enumerate(one["starts"], start=1):
            after = f"after step {start['after_step']:,}" if start["after_step"] else "from the beginning"
            took = "" if start["seconds_to_stop"] is None else f", {start['seconds_to_stop']} s after the signal"
            print(f"start {number} on {','.join(start['nodes'])} {after}: {start['reason'] or 'under way'}{took}")
        print(f"log: {one['log']}\n")
    return 0


def _state(one: dict[str, object]) -> str:
    if one["state"] is None:
        return "complete" if one["complete"] else "no longer known to Slurm"
    return f"{one['state']}, {one['reason']}" if one["reason"] else str(one["state"])
