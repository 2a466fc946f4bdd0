"""`bench streaming`: its slow server is one that the S3 client reads, and counts what it gave."""

import os
from pathlib import Path

import pytest

from xgram_dist.bench.streaming import _slow_server
from xgram_dist.cli.main import main
from xgram_dist.data.storage import StorageError, open_store


def test_the_slow_server_gives_the_files_and_leaves_the_environment(tmp_path: Path) -> None:
    (tmp_path / "data" / "train").mkdir(parents=True)
    content = os.urandom(300_000)
    (tmp_path / "data" / "train" / "shard").write_bytes(content)
    before = dict(os.environ)
    with _slow_server(tmp_path, 0.001, 50e6) as (address, fetched):
        store = open_store(address)
        assert store.get("train/shard") == content
        with pytest.raises(StorageError, match="does not exist"):
            store.get("train/other")
        objects, size = fetched()
    assert objects == 2
    assert size >= len(content)
    assert dict(os.environ) == before


def test_no_consumption_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "streaming", "--consumption", "0"]) == 2
    assert "--consumption 0" in capsys.readouterr().err
