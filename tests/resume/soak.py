"""Kill a run again and again, and compare its end with that of a run nothing happened to.

python tests/resume/soak.py --kills 60
"""

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path += [str(Path(__file__).parents[1] / "unit" / "train")]

from forked import Zygote
from kills import MOMENTS, Run, assert_same_end, kill_loop
from train_helpers import make_documents, small_config

from xgram_dist.cli.main import main
from xgram_dist.config import dump_config
from xgram_dist.console import format_duration, print_table

WHOM = ("all ranks", "the first", "the last")


def prepare(folder: Path) -> Path:
    lines = "".join(json.dumps({"text": text}) + "\n" for text in make_documents(120))
    (folder / "raw.jsonl").write_text(lines, encoding="utf-8")
    words = ["--train-bpe", "300", "--chunk-tokens", "128", "--validation", "0.1", "--workers", "1"]
    assert main(["prepare", "--source", f"web={folder / 'raw.jsonl'}", *words, "--out", str(folder / "data")]) == 0
    return folder / "data"


def soak(folder: Path, kills: int, seed: int) -> None:
    train = {"steps": 10 * kills, "log_every": 1, "validation_sequences": 4}
    recipe = folder / "recipe.yaml"
    recipe.write_text(dump_config(small_config(prepare(folder), train=train, checkpoint={"every": 5})))
    print(f"a run of {10 * kills} steps on 2 ranks, undisturbed", flush=True)
    zygote = Zygote()
    whole = Run(str(recipe), folder / "whole", zygote=zygote)
    assert whole.end(600) == 0, whole.said()
    start = time.monotonic()
    number = 0

    def tell(text: str) -> None:
        nonlocal number
        number += 1
        left = (time.monotonic() - start) / number * (kills - number)
        print(f"{text}; {format_duration(left)} left", flush=True)

    done = kill_loop(str(recipe), folder / "killed", kills, seed, zygote, tell)
    zygote.close()
    assert_same_end(folder / "killed", folder / "whole")
    found = Counter((kill.moment, kill.whom) for kill in done)
    print_table(["killed", *WHOM], [[moment, *(str(found[moment, whom]) for whom in WHOM)] for moment in MOMENTS])
    print(
        f"{kills} kills, {kills} restarts in {format_duration(time.monotonic() - start)}; weights, optimizer state and "
        f"generators after step {10 * kills} equal the undisturbed run's bit for bit"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="xgram-soak-") as path:
        soak(Path(path), args.kills, args.seed)
