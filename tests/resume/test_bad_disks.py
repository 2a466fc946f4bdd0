"""Runs whose table rows lie on a bad disk: they end as if nothing had happened.

Rows that the disk has damaged: the run goes back to its last checkpoint by itself. A full disk: the run ends with a
sentence, and its last checkpoint is good.
"""

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from kills import Run, assert_same_end, steps_saved
from train_helpers import small_config

from xgram_dist.config import dump_config
from xgram_dist.errors import GO_BACK
from xgram_dist.parallel.launch import MOST_RETURNS

DAMAGING = Path(__file__).parent / "damaging_train.py"


@pytest.fixture(scope="module")
def recipes(tmp_path_factory, data):
    """Of the same run in memory and on disk."""
    folder, written = tmp_path_factory.mktemp("recipes"), {}
    for tier, more in {"memory": {}, "disk": {"placement": "disk", "folder": str(folder / "scratch")}}.items():
        train = {"steps": 30, "log_every": 5, "validation_sequences": 4}
        tree = small_config(data, train=train).memory.model_dump(exclude_unset=True)
        memory = {**tree, "optimizer": "catch_up", "rows": "touched", **more}
        written[tier] = folder / f"{tier}.yaml"
        written[tier].write_text(dump_config(small_config(data, train=train, memory=memory, checkpoint={"every": 5})))
    return written


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_whose_disk_damages_rows_goes_back_by_itself(tmp_path, recipes, ranks, zygote):
    undisturbed = Run(str(recipes["memory"]), tmp_path / "undisturbed", ranks=ranks, zygote=zygote)
    command = (sys.executable, str(DAMAGING), str(tmp_path / "marker"))
    again = ["--restarts", "1"] if ranks > 1 else []  # ranks are forks then, which damage, too
    run = Run(str(recipes["disk"]), tmp_path / "run", *again, "--fresh", ranks=ranks, command=command)
    assert run.end(240) == 0, run.said()
    said = run.said()
    assert (tmp_path / "marker").exists()
    damaged = re.search(r"the disk has damaged table rows: in .*/rank-\d\.view-\d\.records', the checksum of ", said)
    assert damaged, said
    assert f"going back to the last checkpoint, 1 of {MOST_RETURNS} times" in said
    assert "resuming after step " in said
    assert undisturbed.end(120) == 0, undisturbed.said()
    assert_same_end(run.folder, undisturbed.folder)


def test_a_disk_that_damages_rows_again_and_again_ends_the_run(tmp_path, recipes):
    (tmp_path / "marker.always").touch()
    command = (sys.executable, str(DAMAGING), str(tmp_path / "marker"))
    run = Run(str(recipes["disk"]), tmp_path / "run", ranks=1, command=command)
    assert run.end(240) == GO_BACK, run.said()
    assert f"going back to the last checkpoint, {MOST_RETURNS} of {MOST_RETURNS} times" in run.said()


@pytest.fixture
def small_disk(tmp_path):
    """24 MiB of ext4 on a loop device."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    image, point = tmp_path / "image", tmp_path / "disk"
    point.mkdir()
    with image.open("wb") as stream:
        stream.truncate(24 << 20)
    made = subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], capture_output=True, check=False)
    if made.returncode or subprocess.run(["mount", "-o", "loop", image, point], capture_output=True).returncode:
        pytest.skip("no loop devices here")
    yield point
    subprocess.run(["umount", "-l", str(point)], check=True)


def test_a_disk_that_is_full_twice_costs_the_steps_since_the_last_checkpoint(tmp_path, data, small_disk, zygote):
    """New rows of n-grams until somebody else fills the disk; again with the disk still full; then with room."""
    engram = {"method": "engram", "compression": 1.0, "sites": {}, "routing": {}, "optimizer": "catch_up"}
    engram |= {"engram": {"heads": 2, "rows": 300_000, "width": 24, "taps": 3, "layers": [0, 1]}, "rows": "touched"}
    recipes = {}
    for tier, more in {"memory": {}, "disk": {"placement": "disk", "folder": str(small_disk / "rows")}}.items():
        train = {"steps": 60, "log_every": 1, "validation_sequences": 4}
        recipes[tier] = tmp_path / f"{tier}.yaml"
        config = small_config(data, train=train, memory={**engram, **more}, checkpoint={"every": 5})
        recipes[tier].write_text(dump_config(config))
    undisturbed = Run(str(recipes["memory"]), tmp_path / "undisturbed", ranks=1, zygote=zygote)
    run = Run(str(recipes["disk"]), tmp_path / "run", ranks=1, zygote=zygote)
    assert run.stop_at(lambda run: len(steps_saved(run.folder)) > 1, 120), run.said()
    with (small_disk / "of somebody else").open("wb", buffering=0) as other, suppress(OSError):
        while True:
            other.write(bytes(4096))
    run.send(signal.SIGCONT)
    full = "no room for table rows in memory.folder"
    assert run.end(120) == 2, run.said()
    assert full in run.said()
    saved = steps_saved(run.folder)
    run = Run(str(recipes["disk"]), run.folder, ranks=1, zygote=zygote)
    assert run.end(120) == 2, run.said()
    assert full in run.said() or "No space left on device" in run.said(), run.said()
    assert steps_saved(run.folder) == saved
    (small_disk / "of somebody else").unlink()
    run = Run(str(recipes["disk"]), run.folder, ranks=1, zygote=zygote)
    assert run.end(240) == 0, run.said()
    assert f"resuming after step {saved[-1]}" in run.said()
    assert undisturbed.end(240) == 0, undisturbed.said()
    assert_same_end(run.folder, undisturbed.folder)
    assert not list((small_disk / "rows").glob("*.records"))
