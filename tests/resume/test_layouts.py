"""What one layout saved goes on with any other; a rank reads its own parts; no sample is lost or seen twice."""

import shutil

import numpy as np
import pytest
from load_helpers import make_version_1, watch_samples
from ranks_helper import run_ranks
from test_resume import run_until, settings
from train_helpers import read_metrics

from xgram_dist.checkpoint import load
from xgram_dist.checkpoint.folder import list_steps
from xgram_dist.checkpoint.reader import CheckpointReader
from xgram_dist.checkpoint.sharded_tensor import backbone_state, table_state
from xgram_dist.errors import UserError
from xgram_dist.train.trainer import Trainer


def losses(folder):
    return {record["step"]: record["loss"] for record in read_metrics(folder, "train")}


def watched(ranks, config, folder):
    """Run to the end; (samples by step, bytes verified, read, own, of the whole checkpoint)."""
    readers = []

    class Reader(CheckpointReader):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            readers.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "CheckpointReader", Reader)
        seen = watch_samples(patch, config)
        trainer = Trainer(config, folder, fresh=False, ranks=ranks)
        tensors = backbone_state(trainer.engine, trainer.mesh)
        tensors |= table_state(trainer.optimizer.shards, trainer.mesh).row_tensors()
        own = sum(shard.tensor.nbytes for tensor in tensors.values() for shard in tensor.shards)
        assert trainer.run() == 0
    (reader,) = readers
    whole = sum(reader.manifest.nbytes(name) for name in reader.manifest.tensors)
    return seen, reader.bytes_verified, reader.bytes_read, own, whole


def test_two_ranks_to_four_read_their_own_parts_and_no_sample_twice(data, finished, two_ranks, tmp_path):
    start, seen_before = two_ranks
    assert list_steps(start) == [3]
    shutil.copytree(start, tmp_path / "run")
    config = settings(data, optimizer="catch_up")
    parallel = config.parallel.model_copy(update={"engine": "hsdp"})
    found = run_ranks(watched, 4, config.model_copy(update={"parallel": parallel}), tmp_path / "run")
    assert losses(tmp_path / "run") == pytest.approx(losses(finished), rel=1e-5)
    check_samples(seen_before, [one[0] for one in found], config)
    whole = found[0][4]
    assert sum(verified for _, verified, *_ in found) == whole  # each byte once
    for _, verified, taken, own, _ in found:
        assert taken == own < 0.3 * whole
        assert verified < 0.4 * whole


def test_two_ranks_to_one_without_a_sample_lost(data, finished, two_ranks, tmp_path):
    start, seen_before = two_ranks
    shutil.copytree(start, tmp_path / "run")
    config = settings(data, optimizer="catch_up", placement="host")
    found = watched(None, config, tmp_path / "run")
    assert losses(tmp_path / "run") == pytest.approx(losses(finished), rel=1e-5)
    check_samples(seen_before, [found[0]], config)


def check_samples(before, after, config):
    """Steps 1 to 3 were trained by the first run, what it read beyond was lost with it."""
    assert all(min(rank) == 4 for rank in after)
    samples = [sample for rank in before for step in (1, 2, 3) for sample in rank[step]]
    samples += [sample for rank in after for batch in rank.values() for sample in batch]
    assert len(samples) == len(set(samples)) == config.train.steps * config.train.global_batch


def test_a_run_goes_through_engines_stages_and_tensor_degrees(data, tmp_path):
    config = settings(data, optimizer="dense")
    config = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"every": 1, "keep": 1})})
    assert Trainer(config, tmp_path / "whole", fresh=False).run() == 0
    layouts = [
        (2, {"engine": "deepspeed", "zero_stage": 1, "tensor": 2}, 3),
        (2, {"engine": "deepspeed", "zero_stage": 3}, 5),
        (2, {"engine": "hsdp"}, 7),
        (1, {"engine": "replicated"}, None),
    ]
    folder = tmp_path / "run"
    for size, parallel, lost_at in layouts:
        changed = config.model_copy(update={"parallel": config.parallel.model_copy(update=parallel)})
        if lost_at is None:
            assert Trainer(changed, folder, fresh=False).run() == 0
        else:
            run_ranks(lost_on_ranks_at, size, changed, folder, lost_at)
            assert list_steps(folder) == [lost_at - 1]
    found, expected = losses(folder), losses(tmp_path / "whole")
    assert list(found) == list(expected)
    np.testing.assert_allclose(list(found.values()), list(expected.values()), rtol=1e-5)


def lost_on_ranks_at(ranks, config, folder, step):
    with pytest.MonkeyPatch.context() as patch:
        run_until(config, folder, step, patch, ranks)


def test_a_run_goes_through_replicas_of_its_tables(data, finished, tmp_path):
    """The same layout goes on bit for bit; from other replicas to none, and back, up to rounding."""
    replicated = settings(data, optimizer="catch_up", shard=1)
    run_ranks(run_on_ranks, 2, replicated, tmp_path / "whole")
    run_ranks(lost_on_ranks_at, 2, replicated, tmp_path / "same", 4)
    run_ranks(run_on_ranks, 2, replicated, tmp_path / "same")
    assert losses(tmp_path / "same") == losses(tmp_path / "whole")
    run_ranks(lost_on_ranks_at, 2, replicated, tmp_path / "other", 4)
    run_ranks(lost_on_ranks_at, 2, settings(data, optimizer="catch_up"), tmp_path / "other", 7)
    run_ranks(run_on_ranks, 2, replicated, tmp_path / "other")
    for folder in ("whole", "other"):
        assert losses(tmp_path / folder) == pytest.approx(losses(finished), rel=1e-5)


def test_a_run_goes_through_ranks_that_share_sequences(data, finished, tmp_path):
    """The same layout goes on bit for bit; from other degrees and numbers of ranks, up to rounding."""

    def shared(**degrees):
        config = settings(data, optimizer="catch_up")
        return config.model_copy(update={"parallel": config.parallel.model_copy(update=degrees)})

    run_ranks(run_on_ranks, 2, shared(context=2), tmp_path / "whole")
    run_ranks(lost_on_ranks_at, 2, shared(context=2), tmp_path / "same", 4)
    run_ranks(run_on_ranks, 2, shared(context=2), tmp_path / "same")
    assert losses(tmp_path / "same") == losses(tmp_path / "whole")
    run_ranks(lost_on_ranks_at, 2, shared(context=2), tmp_path / "other", 4)
    run_ranks(lost_on_ranks_at, 2, shared(), tmp_path / "other", 7)
    run_ranks(run_on_ranks, 4, shared(context=2, tensor=2), tmp_path / "other")
    for folder in ("whole", "other"):
        assert losses(tmp_path / folder) == pytest.approx(losses(finished), rel=1e-5)


def run_on_ranks(ranks, config, folder):
    assert Trainer(config, folder, fresh=False, ranks=ranks).run() == 0


def test_version_1_rows_sharded_in_an_unknown_way_are_refused(data, finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    for folder in (tmp_path / "run" / "checkpoints").iterdir():
        make_version_1(folder, "by moonlight")
    with pytest.raises(UserError, match=r"sharded by 'by moonlight', this release knows bucket, token"):
        Trainer(settings(data, optimizer="catch_up"), tmp_path / "run", fresh=False)
