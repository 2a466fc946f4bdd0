"""A model with 10^9 table rows on disk beside the same model with 10^6: loss, memory, disk, time and checkpoints.

    python tools/tiers_run.py --data data/text --scratch /local/scratch --steps 240 --json docs/results/tiers-run.json \
        --picture docs/tiers-run.png

Trains `recipes/text/engram-zero.yaml` (16 tables) once with each number of rows, on 2 ranks, one after the other, by
`xgram-dist train`. While a run trains, its processes and its scratch folder are looked at four times a second:

memory       the most that a rank holds of its own, and with the pages of the scratch files that are mapped; bytes
disk         blocks of the scratch folder; bytes
checkpoint   bytes that each save wrote
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from xgram_dist.console import print_table
from xgram_dist.train.metrics_file import FILE, read_metrics

RECIPE = Path(__file__).parents[1] / "recipes/text/engram-zero.yaml"
TABLES = 16
"""4 layers, bigrams and trigrams, 2 heads each."""
RANKS = 2
SAMPLE_SECONDS = 0.25
CHECKPOINTS = 4
WARM_STEPS = 20
"""Not counted in the time of a step: the first ones compile and fill caches."""


def rank_memory(launcher: int) -> tuple[int, int]:
    """(of its own, with mapped files): the largest of the ranks; 0 where there are none."""
    own = mapped = 0
    with suppress(OSError):
        for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text(encoding="ascii").split():
            status = dict(
                line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
            )
            kib = {name: int(status.get(name, "0 kB").split()[0]) for name in ("RssAnon", "VmRSS")}
            own, mapped = max(own, 1024 * kib["RssAnon"]), max(mapped, 1024 * kib["VmRSS"])
    return own, mapped


def disk_bytes(folder: Path) -> int:
    total = 0
    for file in folder.glob("*.records"):
        with suppress(OSError):
            total += 512 * file.stat().st_blocks
    return total


def newest_step(run: Path) -> int:
    with suppress(OSError):
        records = read_metrics(run / FILE, tail=1 << 14).records
        return max((one["step"] for one in records if one["kind"] == "train"), default=0)
    return 0


def train(rows: int, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    scratch = folder / "scratch"
    words = [f"data.path={args.data}", f"memory.engram.rows={rows // TABLES}", "memory.rows=touched"]
    words += ["memory.optimizer=catch_up", "memory.placement=disk", f"memory.folder={scratch}"]
    every = args.steps // CHECKPOINTS
    words += [f"train.steps={args.steps}", f"train.validate_every={every}", f"checkpoint.every={every}"]
    words += ["train.log_every=5"]
    command = [sys.executable, "-m", "xgram_dist", "train", str(RECIPE), *words, "--ranks", str(RANKS)]
    run, samples, begun = folder / f"run-{rows}", [], time.monotonic()
    with (folder / f"{rows}.log").open("wb") as log:
        process = subprocess.Popen([*command, "--folder", str(run)], stdout=log, stderr=log)
        while process.poll() is None:
            own, mapped = rank_memory(process.pid)
            samples.append([newest_step(run), own, mapped, disk_bytes(scratch)])
            time.sleep(SAMPLE_SECONDS)
    wall = time.monotonic() - begun
    if process.returncode:
        sys.exit((folder / f"{rows}.log").read_text(errors="replace")[-3000:])
    records = read_metrics(run / FILE).records
    of = {kind: [one for one in records if one["kind"] == kind] for kind in ("train", "validation", "checkpoint")}
    tokens = 8 * 256
    seconds = [[one["step"], tokens / one["tokens_per_second"]] for one in of["train"]]
    # Of several looks within five steps, the largest.
    by_step = {
        step: [max(column) for column in zip(*(s for s in samples if s[0] == step), strict=True)]
        for step in sorted({sample[0] for sample in samples})
    }
    return {
        "rows": rows,
        "wall_seconds": round(wall, 1),
        "seconds_per_step": round(statistics.median(value for step, value in seconds if step > WARM_STEPS), 4),
        "validation_loss": [[one["step"], round(one["loss"], 4)] for one in of["validation"]],
        "train_loss": [[one["step"], round(one["cross_entropy"], 4)] for one in of["train"]],
        "seconds": [[step, round(value, 4)] for step, value in seconds],
        "memory_own": [[step, sample[1]] for step, sample in by_step.items()],
        "memory_mapped": [[step, sample[2]] for step, sample in by_step.items()],
        "disk": [[step, sample[3]] for step, sample in by_step.items()],
        "checkpoints": [[one["step"], one["bytes"]] for one in of["checkpoint"] if one["bytes"]],
    }


def draw(runs: list[dict[str, Any]], file: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 3, figsize=(13, 7), layout="constrained")
    panels = [
        ("validation loss, nats", "validation_loss", 1.0),
        ("memory of a rank, own, GB", "memory_own", 1e9),
        ("memory of a rank, with mapped files, GB", "memory_mapped", 1e9),
        ("scratch files, GB", "disk", 1e9),
        ("seconds a step", "seconds", 1.0),
        ("written by each checkpoint, GB", "checkpoints", 1e9),
    ]
    for axis, (title, key, unit) in zip(axes.flat, panels, strict=True):
        for run, style in zip(runs, ("-o", "--s"), strict=True):
            points = [(step, value / unit) for step, value in run[key] if step]
            axis.plot(*zip(*points, strict=True), style, markersize=3, label=f"{run['rows']:.0e} rows")
        axis.set_title(title)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        if key != "validation_loss":
            axis.set_ylim(bottom=0)
    axes[0, 0].legend()
    figure.savefig(file, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="prepared text (docs/comparison.md has the command)")
    parser.add_argument("--scratch", default=".", help="folder on a local disk for runs and table rows")
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--rows", type=int, nargs=2, default=[10**6, 10**9], help="of all tables (default: 10^6 10^9)")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--picture", type=Path, help="draw the curves there")
    args = parser.parse_args()
    if args.steps < WARM_STEPS + CHECKPOINTS:
        parser.error(f"--steps {args.steps} is below {WARM_STEPS + CHECKPOINTS}")
    with tempfile.TemporaryDirectory(prefix="tiers-run-", dir=args.scratch) as folder:
        runs = [train(rows, args, Path(folder)) for rows in args.rows]
    print_table(
        ["rows", "validation loss", "s a step", "wall", "rank, own", "with mapped files", "scratch", "checkpoints"],
        [
            [
                f"{run['rows']:,}",
                ", ".join(f"{loss:.3f}" for _, loss in run["validation_loss"]),
                f"{run['seconds_per_step']:.3f}",
                f"{run['wall_seconds']:.0f} s",
                *(f"{max(value for _, value in run[key]) / 1e9:.2f} GB" for key in ("memory_own", "memory_mapped")),
                f"{max(value for _, value in run['disk']) / 1e9:.2f} GB",
                ", ".join(f"{size / 1e6:.0f}" for _, size in run["checkpoints"]) + " MB",
            ]
            for run in runs
        ],
    )
    if args.json is not None:
        args.json.write_text(json.dumps(runs) + "\n", encoding="utf-8")
    if args.picture is not None:
        draw(runs, args.picture)


if __name__ == "__main__":
    main()
