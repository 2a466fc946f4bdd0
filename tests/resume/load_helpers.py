"""Runs that are lost, watched, or whose checkpoints someone has changed."""

import functools
import json
from pathlib import Path

import pytest
from test_resume import run_until

from xgram_dist.checkpoint.manifest import FILE, manifest_checksum
from xgram_dist.data.loader import Loader
from xgram_dist.tables import exchange as tables


def lost_with_rows_strided(ranks, config, folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "plan_row_sharding", functools.partial(tables.plan_row_sharding, policy="strided"))
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
    tree["checksum"] = manifest_checksum(tree)
    path.write_text(json.dumps(tree))


def make_version_1(checkpoint: Path, policy: str) -> None:
    """As the release before row ids wrote it: the policy's name instead of the ids, and slabs instead of views."""

    def downgrade(tree):
        tree["version"] = 1
        del tree["row_ids"]
        del tree["run"]["row_sharding"]
        tree["run"]["placement"] = policy
        tensors = {}
        for name, entry in tree["tensors"].items():
            del entry["row_ids"]
            if not name.startswith("row_ids."):
                tensors[name.replace("tables.view-", "tables.slab-")] = entry
        tree["tensors"] = tensors

    edit_manifest(checkpoint, downgrade)
