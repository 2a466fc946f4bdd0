import shutil
from pathlib import Path

import pytest
import torch
from train_helpers import small_config

from xgram_dist.train.trainer import Trainer


@pytest.fixture(scope="session")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps with checkpoints of steps 2 and 4; not to be changed."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    folder = tmp_path_factory.mktemp("trained") / "run"
    config = small_config(data, checkpoint={"every": 2}, memory={"optimizer": "catch_up"})
    assert Trainer(config, folder, fresh=False).run() == 0
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"
