"""The order of the doctor's checks: cheap ones first, so that what breaks later ones is named before.

The JSON is written after each check: a doctor that hangs in one leaves the results of those before it.
"""

import sys
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from xgram_dist.cluster.doctor import file_system, machine, parity, step_watch, trial
from xgram_dist.cluster.doctor.report import CheckFailedError, Context, Row, print_report, write_json
from xgram_dist.errors import UserError

Check = Callable[[Context], list[Row]]

CHECKS: dict[str, Check] = {
    "versions": machine.check_versions,
    "process": machine.check_process,
    "device": machine.check_device,
    "compiler": machine.check_compiler,
    "clocks": machine.check_clocks,
    "interfaces": machine.check_interfaces,
    "file system": file_system.check_file_system,
    "kernels": parity.check_kernels,
    "parity": parity.check_training,
    "parity of other tables": parity.check_variants,
    "repetition": parity.check_repetition,
    "host waits and copies": step_watch.check_step,
    "links": machine.check_links,
    "bandwidths": machine.check_bandwidths,
    "timed run": trial.check_trial,
}


def run_doctor(context: Context, out: Path | None, checks: dict[str, Check] | None = None) -> bool:
    """Run all checks, print the report, write the JSON; whether none failed. All ranks call it."""
    rows: list[Row] = []
    facts = _facts(context)
    chosen = CHECKS if checks is None else checks
    for number, (name, check) in enumerate(chosen.items(), 1):
        if context.ranks.first:
            print(f"doctor: {number} of {len(chosen)}, {name}", file=sys.stderr, flush=True)
        rows += _run(context, name, check)
        if out is not None and context.ranks.first:
            write_json(out, rows, facts, complete=number == len(chosen))
    if context.ranks.first:
        print_report(rows)
        if out is not None:
            print(f"results in {out}")
    return not any(row.status == "fail" for row in rows)


def _run(context: Context, name: str, check: Check) -> list[Row]:
    try:
        return check(context)
    except CheckFailedError as error:
        return [Row(name, "fail", str(error), "see the error; run the doctor again when it is mended")]
    except (UserError, RuntimeError, OSError) as error:
        if context.ranks.size > 1:
            raise  # the others may wait in a collective: the rank has to exit
        traceback.print_exc()
        return [Row(name, "fail", str(error).splitlines()[0], "see the error above")]


def _facts(context: Context) -> dict[str, Any]:
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "ranks": context.ranks.size,
        "nodes": list(dict.fromkeys(context.nodes)),
        "device": str(context.device),
        "quick": context.quick,
    }
