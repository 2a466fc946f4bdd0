"""One cluster for all tests of a worker; Slurm's commands first in PATH."""

import os
import tempfile
from pathlib import Path

import pytest
from cluster import Cluster, missing


@pytest.fixture(scope="session")
def cluster():
    reason = missing()
    if reason:
        pytest.skip(reason)
    before = os.environ["PATH"]
    with tempfile.TemporaryDirectory(prefix="slurm-") as top:  # munge wants a path that all may walk down
        os.chmod(top, 0o755)
        folder = Path(top) / "cluster"
        with Cluster(folder, nodes=8) as running:
            os.environ["PATH"] = f"{folder}/bin:{before}"
            yield running
            os.environ["PATH"] = before


def pytest_collection_modifyitems(items):
    """A cluster, its jobs and their clocks share two cores: what fails is tried once more, and shown as rerun."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.flaky(reruns=1))
