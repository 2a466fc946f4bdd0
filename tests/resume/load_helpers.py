"""Runs that are lost, watched, or whose checkpoints someone has changed."""

import functools
import json
from pathlib import Path

import pytest
from test_resume import run_until

from xgram_dist.checkpoint.manifest import FILE, seal
from xgram_dist.data.loader import Loader
from xgram_dist.memory import tables


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
