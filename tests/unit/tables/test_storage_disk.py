"""The disk tier when things go wrong: killed runs, live runs, full disks, damaged pages, unsuitable folders."""

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from xgram_dist.bench import memory_limit
from xgram_dist.errors import UserError
from xgram_dist.tables.storage import DamagedRecordsError, open_storage, scratch
from xgram_dist.tables.storage.disk import DiskStorage
from xgram_dist.tables.storage.system import memory_limit as memory_limit_of_node

CPU = torch.device("cpu")

TRAINS = """
    import sys, numpy as np, torch
    from pathlib import Path
    from xgram_dist.tables.storage import open_storage
    storage = open_storage("disk", 1024, 10**6, torch.device("cpu"), Path(sys.argv[1]), sys.argv[2])
    step = 0
    while True:
        step += 1
        storage.ensure(100 * step)
        slots = np.arange(max(0, 100 * step - 300), 100 * step)
        storage.prefetch(slots)
        with storage.writing(slots):
            storage.records.numpy()[slots] += 1
        if step == 5:
            print("running", flush=True)
"""


@contextlib.contextmanager
def running(folder, name="shard"):
    """A process that writes records, killed at the end."""
    command = [sys.executable, "-c", textwrap.dedent(TRAINS), str(folder), name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "running\n"
        try:
            yield process
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()


def opened(folder, name="shard", width=1024, max_slots=10**6):
    return open_storage("disk", width, max_slots, CPU, folder, name)


def rows_of(storage, slots, value):
    with storage.writing(slots):
        storage.records.numpy()[slots] = value + slots[:, None]


# Killed and live runs


def test_leftovers_of_a_killed_run_are_cleared_under_any_name(tmp_path):
    (tmp_path / "mine.txt").write_text("not a record")
    with running(tmp_path, "rank-0"), running(tmp_path, "rank-1"):
        pass
    assert (tmp_path / "rank-1.records").stat().st_blocks > 0
    storage = opened(tmp_path, "rank-0")
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != scratch.LOCK) == [
        "mine.txt",
        "rank-0.owner.json",
        "rank-0.records",
    ]
    storage.ensure(1000)
    assert not storage.records[:1000].any(), "records of the killed run are read"
    storage.close()
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != scratch.LOCK) == ["mine.txt"]


def test_the_files_of_a_live_run_are_refused_and_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(scratch, "DYING_SECONDS", 0.2)
    with running(tmp_path) as process:
        with pytest.raises(UserError, match=f"used by process {process.pid} on .* choose another memory.folder"):
            opened(tmp_path)
        opened(tmp_path, "another").close()
        assert (tmp_path / "shard.records").exists()
        assert process.poll() is None


def test_a_second_storage_of_the_same_name_in_one_process_is_refused(tmp_path):
    storage = opened(tmp_path)
    with pytest.raises(UserError, match=f"used by process {os.getpid()}"):
        opened(tmp_path)
    storage.close()
    opened(tmp_path).close()


def test_a_process_with_the_number_of_a_dead_one_does_not_count_as_it(tmp_path):
    opened(tmp_path)  # not closed, as by a kill
    owner = tmp_path / "shard.owner.json"
    facts = json.loads(owner.read_text())
    owner.write_text(json.dumps({**facts, "started": "1"}))
    opened(tmp_path).close()


def test_leftovers_from_before_a_restart_of_the_machine_are_cleared(tmp_path):
    opened(tmp_path)
    owner = tmp_path / "shard.owner.json"
    owner.write_text(json.dumps({**json.loads(owner.read_text()), "boot": "another"}))
    opened(tmp_path).close()


def test_links_are_not_followed(tmp_path):
    target = tmp_path / "precious"
    target.write_text("as it was")
    folder = tmp_path / "scratch"
    folder.mkdir()
    (folder / "shard.records").symlink_to(target)
    with pytest.raises(UserError, match=r"delete shard\.records"):
        opened(folder)
    (folder / "old.owner.json").symlink_to(target)
    opened(folder, "other").close()
    assert target.read_text() == "as it was"
    assert (folder / "old.owner.json").is_symlink()


# Full disks and unsuitable folders


@pytest.fixture
def small_disk(tmp_path):
    """16 MiB of ext4 on a loop device."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    image, point = tmp_path / "image", tmp_path / "disk"
    point.mkdir()
    with image.open("wb") as stream:
        stream.truncate(16 << 20)
    made = subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], capture_output=True, check=False)
    mounted = made.returncode or subprocess.run(["mount", "-o", "loop", image, point], capture_output=True).returncode
    if mounted:
        pytest.skip("no loop devices here")
    yield point
    subprocess.run(["umount", "-l", str(point)], check=True)


def test_a_full_disk_is_a_sentence_and_what_was_written_stays(small_disk):
    storage = opened(small_disk)
    storage.ensure(1000)
    rows_of(storage, np.arange(1000), 1.0)
    with pytest.raises(UserError, match=r"no room for table rows in memory\.folder .*/disk': .* resume from the last"):
        storage.ensure(4000)
    np.testing.assert_array_equal(storage.records[:1000, 5], 1 + np.arange(1000))
    storage.verify(np.arange(1000))
    storage.close()
    again = opened(small_disk)
    again.ensure(1000)
    again.close()


def test_a_disk_that_others_fill_is_a_sentence_not_a_crash(small_disk):
    storage = opened(small_disk, max_slots=2000)
    storage.ensure(100)
    with contextlib.suppress(OSError), (small_disk / "of somebody else").open("wb", buffering=0) as other:
        while True:
            other.write(bytes(4096))
            os.fsync(other.fileno())
    with pytest.raises(UserError, match="needs 819,200 bytes"):
        storage.ensure(200)
    rows_of(storage, np.arange(100), 2.0)
    storage.close()


def test_a_folder_that_cannot_be_made_is_a_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"memory\.folder .* cannot be used: Not a directory"):
        opened(tmp_path / "file" / "folder")


@pytest.mark.parametrize("kind", ["nfs4", "lustre", "fuse.sshfs"])
def test_a_network_file_system_is_refused(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(scratch, "file_system", lambda folder: kind)
    with pytest.raises(UserError, match=rf"on a network file system \({kind}\); choose a folder on a disk"):
        opened(tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_type_of_a_file_system_is_that_of_the_innermost_mount():
    assert scratch.file_system(Path("/proc/self/fd")) == "proc"
    assert scratch.file_system(Path("/")) != ""


def test_a_file_system_without_sparse_files_is_refused(tmp_path, monkeypatch):
    def truncate(descriptor, size):  # as on FAT: every byte gets a block
        assert size <= scratch.PROBE_BYTES
        os.posix_fallocate(descriptor, 0, size)

    monkeypatch.setattr(scratch.os, "ftruncate", truncate)
    with pytest.raises(UserError, match="without sparse files"):
        opened(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [scratch.LOCK]


def test_a_limit_of_file_sizes_is_a_sentence_when_it_is_reached(tmp_path):
    program = """
        import resource, sys, torch
        from pathlib import Path
        from xgram_dist.errors import UserError
        from xgram_dist.tables.storage import open_storage
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        storage = open_storage("disk", 1024, 10**6, torch.device("cpu"), Path(sys.argv[1]), "shard")
        try:
            storage.ensure(10_000)
        except UserError as error:
            print(error)
        storage.close()
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "no room for table rows" in done.stdout


# Memory limits


def test_a_run_under_a_memory_limit_keeps_every_value(tmp_path):
    """40 MB of records in 12 MB of memory: pages leave and return all the time."""
    if memory_limit.why_not():
        pytest.skip(memory_limit.why_not())
    program = """
        import pickle, sys, numpy as np, torch
        from pathlib import Path
        from xgram_dist.tables.storage import open_storage
        limit = pickle.loads(sys.stdin.buffer.read())
        limit.enter()
        storage = open_storage("disk", 1024, 10**6, torch.device("cpu"), Path(sys.argv[1]), "shard")
        storage.ensure(10_000)
        assert storage._dirty_limit <= limit.num_bytes // 16
        random, expected = np.random.default_rng(0), np.zeros(10_000, np.float32)
        drawn = [random.choice(10_000, 300, replace=False) for _ in range(30)]
        for slots, following in zip(drawn, drawn[1:] + drawn[:1]):
            storage.prefetch(following)
            rows = storage.records.numpy()[slots]
            assert (rows == expected[slots, None]).all()
            expected[slots] += 1
            with storage.writing(slots):
                storage.records.numpy()[slots] = rows + 1
        for slots in np.array_split(np.arange(10_000), 40):
            assert (storage.records.numpy()[slots] == expected[slots, None]).all()
            storage.verify(slots)
        storage.close()
        assert limit.peak() <= limit.num_bytes
    """
    with memory_limit.MemoryLimit(12 << 20) as limit:
        command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)]
        done = subprocess.run(command, input=pickle.dumps(limit), capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


# Damaged pages


def damage(storage, slot):
    """Flip a bit in the file, as a disk would: the page is not in memory when it is read next."""
    record_bytes = 4 * storage.records.shape[1]
    with storage._file.path.open("r+b") as stream:
        stream.seek(slot * record_bytes + 100)
        byte = stream.read(1)[0]
        stream.seek(slot * record_bytes + 100)
        stream.write(bytes([byte ^ 4]))


@pytest.fixture
def written(tmp_path):
    """500 records that have been written back."""
    storage = opened(tmp_path, width=300)
    storage.ensure(500)
    rows_of(storage, np.arange(500), 1.0)
    storage._write_back()
    yield storage
    storage.close()


def test_a_damaged_record_is_found_by_the_next_save_and_named(written):
    damage(written, 321)
    written.verify(np.arange(321))
    with pytest.raises(DamagedRecordsError, match=r"shard\.records', the checksum of record 321 \(byte 385,200\)"):
        written.verify(np.arange(500))


def test_a_damaged_record_is_found_by_prefetch_before_it_is_overwritten(written):
    damage(written, 40)
    written.prefetch(np.arange(30, 50))
    with pytest.raises(DamagedRecordsError, match="record 40 "):
        rows_of(written, np.arange(30, 50), 2.0)
    assert written.records[41, 0] == 42, "a record was overwritten"


def test_a_damaged_record_is_found_without_prefetch_before_it_is_overwritten(written):
    damage(written, 40)
    rows_of(written, np.arange(41, 50), 2.0)
    with pytest.raises(DamagedRecordsError, match="record 40 "):
        rows_of(written, np.arange(30, 50), 2.0)


def test_a_lost_write_is_found(written):
    with written._file.path.open("r+b") as stream:  # a page of zeros: records 3 to 6
        stream.seek(4096)
        stream.write(bytes(4096))
    with pytest.raises(DamagedRecordsError, match=r"record 3 .* and 1 more"):
        written.verify(np.arange(500))


def test_damage_is_an_error_that_a_job_is_requeued_for():
    assert DamagedRecordsError.exit_code != UserError.exit_code


def test_a_disk_that_cannot_be_written_is_a_sentence(written, monkeypatch):
    def fail(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("xgram_dist.tables.storage.disk.write_back", fail)
    written._dirty_limit = 0
    rows_of(written, np.arange(10), 2.0)
    written._pass.result()
    with pytest.raises(DamagedRecordsError, match=r"cannot be written .* Input/output error; resume from the last"):
        written.verify(np.arange(10))


def test_write_back_reaches_the_disk_a_piece_at_a_time(tmp_path, monkeypatch):
    pieces = []
    monkeypatch.setattr("xgram_dist.tables.storage.disk.write_back", lambda *arguments: pieces.append(arguments[1:]))
    monkeypatch.setattr("xgram_dist.tables.storage.disk.WRITE_BACK_BYTES", 1 << 20)
    storage = DiskStorage(1024, 10**6, tmp_path, "shard")
    storage._dirty_limit = 2 << 20
    storage.ensure(1000)
    rows_of(storage, np.arange(500), 1.0)
    rows_of(storage, np.arange(500), 2.0)
    assert storage._pass is None, "a page that is written twice is one dirty page"
    rows_of(storage, np.arange(500, 600), 3.0)
    storage._pass.result()
    assert pieces == [(0, 1 << 20), (1 << 20, 1 << 20), (2 << 20, 1 << 20)]
    storage._last_pass -= 60
    rows_of(storage, np.arange(300, 301), 9.0)
    storage._pass.result()
    assert pieces[3:] == [(1 << 20, 1 << 20)], "records stay dirty for long, or clean pieces are written"
    storage.close()


def test_pages_that_are_written_all_the_time_are_mapped_for_writing_again(tmp_path):
    mapped = []
    storage = opened(tmp_path, width=1024)
    storage._pages.will_write = lambda starts, sizes: mapped.append((starts.tolist(), sizes.tolist()))
    storage.ensure(100)
    rows_of(storage, np.arange(100), 1.0)
    storage._write_back()
    rows_of(storage, np.array([3, 4, 9]), 2.0)
    assert mapped == []
    storage._write_back()
    assert mapped == [([3 * 4096, 9 * 4096], [2 * 4096, 4096])], "each write would fault"
    rows_of(storage, np.array([9, 50]), 3.0)
    storage._write_back()
    assert mapped[1:] == [([9 * 4096], [4096])], "what is not written any more becomes dirty"
    storage.close()


def test_a_step_waits_for_a_disk_that_is_slower_than_the_run(tmp_path, monkeypatch):
    writes, may_write = threading.Event(), threading.Event()

    def slow(*_):
        writes.set()
        assert may_write.wait(60)

    monkeypatch.setattr("xgram_dist.tables.storage.disk.write_back", slow)
    storage = DiskStorage(1024, 10**6, tmp_path, "shard")
    storage._dirty_limit = 1 << 20
    storage.ensure(3000)
    rows_of(storage, np.arange(300), 1.0)  # begins a pass
    assert writes.wait(60)
    rows_of(storage, np.arange(1000, 2000), 1.0)
    step = threading.Thread(target=rows_of, args=(storage, np.arange(2000, 2100), 1.0))
    step.start()
    step.join(0.5)
    assert step.is_alive(), "dirty pages have no limit"
    may_write.set()
    step.join(60)
    assert not step.is_alive()
    storage.close()


def test_storages_of_a_node_share_its_memory_for_dirty_pages(tmp_path):
    alone, shared = (DiskStorage(16, 10, tmp_path, f"shard-{n}", sharers=n) for n in (1, 64))
    assert shared._dirty_limit <= min(alone._dirty_limit, memory_limit_of_node() // 16 // 64)
    for storage in (alone, shared):
        storage.close()


def test_records_written_while_their_checksums_are_computed_raise_no_alarm(tmp_path):
    storage, random = opened(tmp_path, width=64), np.random.default_rng(0)
    storage._dirty_limit = 1
    storage.ensure(2000)
    for step in range(100):
        slots = random.choice(2000, 300, replace=False)
        storage.prefetch(random.choice(2000, 300, replace=False))
        rows_of(storage, slots, float(step))
        storage.verify(np.arange(2000))
    storage.close()
