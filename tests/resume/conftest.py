"""Runs that several tests look into; none of them changes what it finds. And a process to fork runs from."""

from collections.abc import Iterator

import pytest
from forked import Zygote
from load_helpers import lost_with_rows_strided
from ranks_helper import run_ranks
from test_resume import settings

from xgram_dist.train.trainer import Trainer


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    made = Zygote()
    yield made
    made.close()


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
