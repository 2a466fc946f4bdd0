"""Runs that several tests look into; none of them changes what it finds."""

import functools
import json
from pathlib import Path

import pytest
from ranks_helper import run_ranks
from test_resume import run_until, settings

from xgram_dist.checkpoint.manifest import FILE, seal
from xgram_dist.data.loader import Loader
from xgram_dist.memory import tables
from xgram_dist.train.loop import Trainer


@pytest.fixture(scope="session")
def finished(data, tmp_path_factory):
    """Eight steps in one process, with checkpoints of steps 6 and 8."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert Trainer(settings(data, optimizer="catch_up"), folder, fresh=False).run() == 0
    return folder


@pytest.fixture(scope="session")
def two_ranks(data, tmp_path_factory):
    """The same on two ranks, lost in step 5 after the checkpoint of step 3, rows placed by another policy than today's;
    and the samples that each rank saw, by step."""
    folder = tmp_path_factory.mktemp("two-ranks") / "run"
    return folder, run_ranks(lost_with_rows_strided, 2, settings(data, optimizer="catch_up"), folder)


def lost_with_rows_strided(ranks, config, folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "plan_placement", functools.partial(tables.plan_placement, policy="strided"))
        seen = watch_samples(patch, config)
        run_until(config, folder, 5, patch, ranks)
    return seen


def watch_samples(patch, config):
    """step -> the samples of this rank's batch, filled as batches are read."""
    seen, original = {}, Loader.__next__

    def read(self):
        batch = original(self)
        places = zip(batch.samples.source, batch.samples.chunk, batch.samples.sequence, strict=True)
        seen[self.position // config.train.global_batch] = [tuple(map(int, place)) for place in places]
        return batch

    patch.setattr(Loader, "__next__", read)
    return seen


def edit_manifest(checkpoint: Path, change) -> None:
    """As someone would who knows the format: with the checksum made again."""
    path = checkpoint / FILE
    tree = json.loads(path.read_text())
    change(tree)
    tree["checksum"] = seal(tree)
    path.write_text(json.dumps(tree))
