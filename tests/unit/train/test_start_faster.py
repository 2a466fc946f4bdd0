"""If this fails, a run executes what a stranger compiled, or a start reads its checkpoint later than it could."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from xgram_dist.checkpoint.folder import read_ahead
from xgram_dist.train import compile_cache
from xgram_dist.train.compile_cache import SECRET, VARIABLE, compile_folder, keep_compiled


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.delenv(VARIABLE)
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def chosen(run: Path) -> str | None:
    os.environ.pop(VARIABLE, None)
    keep_compiled(run)
    return os.environ.get(VARIABLE)


def test_every_start_of_a_run_finds_what_was_compiled_and_nobody_else_can_name_the_place(home, tmp_path):
    with ThreadPoolExecutor(4) as pool:  # ranks that start together
        secrets = set(pool.map(lambda _: compile_cache._secret(home / SECRET), range(8)))
    assert len(secrets) == 1
    assert (home / SECRET).stat().st_mode & 0o777 == 0o600
    assert [path.name for path in (home / SECRET).parent.iterdir()] == [SECRET.name]
    run = tmp_path / "run"
    assert chosen(run) == chosen(run) == str(compile_folder(run, *secrets))
    assert compile_folder(run, b"x" * 32).name != compile_folder(run, *secrets).name
    assert compile_folder(tmp_path / "copy", *secrets).name != compile_folder(run, *secrets).name
    code = "from torch._inductor.runtime.cache_dir_utils import cache_dir; print(cache_dir())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == chosen(run)  # torch uses it


def test_a_secret_that_others_can_read_and_a_choice_of_the_user_are_left_alone(home, tmp_path, monkeypatch):
    assert chosen(tmp_path) is not None
    (home / SECRET).chmod(0o644)
    assert chosen(tmp_path) is None
    monkeypatch.setenv(VARIABLE, "mine")
    keep_compiled(tmp_path)
    assert os.environ[VARIABLE] == "mine"


def test_a_start_has_its_own_file_of_the_newest_checkpoint_read_at_once(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(
        os, "posix_fadvise", lambda fd, *what: asked.append((os.readlink(f"/proc/self/fd/{fd}"), *what))
    )
    read_ahead(tmp_path, 1)  # nothing to read
    for step in (3, 6):
        folder = tmp_path / "checkpoints" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        for rank in range(2):
            (folder / f"rank-{rank:05d}.safetensors").write_bytes(b"x" * (1000 * step + rank))
    read_ahead(tmp_path, 1)
    read_ahead(tmp_path, 2)  # more ranks than saved it
    (one,) = asked
    assert one[0] == str(tmp_path / "checkpoints" / "step-00000006" / "rank-00001.safetensors")
    assert one[1:] == (0, 6001, os.POSIX_FADV_WILLNEED)
