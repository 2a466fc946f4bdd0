"""Records of touched rows in every memory tier: growth, values, threads, reservations that cost nothing."""

import resource
import threading
import time

import numpy as np
import pytest
import torch

from xgram_dist.errors import UserError
from xgram_dist.tables.storage import open_storage
from xgram_dist.tables.storage.memory import DeviceStorage, HostStorage
from xgram_dist.tables.storage.system import memory_limit

CPU = torch.device("cpu")
TIERS = ("device", "host", "disk")


@pytest.fixture
def opened(tmp_path):
    """Opens storages of any tier, and closes them."""
    storages = []

    def build(placement, width=6, max_slots=10_000):
        if placement == "device":  # as on a GPU; on the CPU the device is the host
            storage = DeviceStorage(width, max_slots, CPU)
        else:
            storage = open_storage(placement, width, max_slots, CPU, tmp_path, f"shard-{len(storages)}")
        storages.append(storage)
        return storage

    yield build
    for storage in storages:
        storage.close()


@pytest.mark.parametrize("placement", TIERS)
@pytest.mark.parametrize("width", [6, 7, 1100])
def test_records_keep_their_values_while_the_storage_grows(opened, placement, width):
    storage, random = opened(placement, width, max_slots=3000), np.random.default_rng(0)
    expected = np.zeros((3000, width), np.float32)
    for num_slots in (1, 2, 700, 1500, 2999, 3000):
        before = storage.records
        assert storage.ensure(num_slots) == (storage.records is not before)
        assert storage.records.shape[0] >= num_slots
        slots = random.choice(num_slots, max(1, num_slots // 2), replace=False)
        storage.prefetch(slots)
        expected[slots] += random.standard_normal((len(slots), width)).astype(np.float32)
        with storage.writing(slots):
            storage.records.index_copy_(0, torch.from_numpy(slots), torch.from_numpy(expected[slots]))
        np.testing.assert_array_equal(storage.records[:num_slots].numpy(), expected[:num_slots])
    storage.verify(np.arange(3000))


@pytest.mark.parametrize("placement", ["host", "disk"])
def test_a_view_of_host_or_disk_records_stays_valid(opened, placement):
    storage = opened(placement, max_slots=50_000)
    storage.ensure(1)
    view = storage.records[:, 2:4]
    assert not storage.ensure(50_000)
    storage.records[49_999] = 3.0
    assert view[49_999].tolist() == [3.0, 3.0]


@pytest.mark.parametrize("placement", ["host", "disk"])
def test_reserving_1e11_slots_takes_no_time_memory_or_disk(opened, placement, tmp_path):
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    storage = opened(placement, width=64, max_slots=10**11)
    storage.ensure(10)
    storage.records[9] = 1.0
    assert time.perf_counter() - start < 1.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KiB
    blocks = sum(file.stat().st_blocks * 512 for file in tmp_path.iterdir())
    assert blocks < 100e6


def test_host_memory_that_is_too_small_is_a_sentence(opened):
    storage = opened("host", width=64, max_slots=10**11)
    with pytest.raises(UserError, match=r"more than this host's memory; set memory\.placement=disk"):
        storage.ensure(10**11)


def test_device_and_host_are_the_same_on_a_cpu():
    assert isinstance(open_storage("device", 4, 10, CPU, None, "x"), HostStorage)


def test_prefetch_from_threads_changes_nothing(opened):
    storage, random = opened("disk", width=600, max_slots=4000), np.random.default_rng(0)
    storage.ensure(4000)
    expected = np.zeros((4000, 600), np.float32)
    done = threading.Event()

    def hint(seed):
        own = np.random.default_rng(seed)
        while not done.is_set():
            storage.prefetch(own.integers(0, 4000, 50))
            time.sleep(0.001)

    threads = [threading.Thread(target=hint, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(60):
        slots = random.choice(4000, 300, replace=False)
        expected[slots] += 1
        with storage.writing(slots):
            storage.records.numpy()[slots] += 1
    done.set()
    for thread in threads:
        thread.join()
    np.testing.assert_array_equal(storage.records.numpy(), expected)
    storage.verify(np.arange(4000))


def written_back(storage, num_slots):
    storage.ensure(num_slots)
    with storage.writing(np.arange(num_slots)):
        storage.records[:num_slots] = 1.0
    storage._write_back()


def test_readahead_works_where_the_kernel_refuses_the_batched_call(opened, monkeypatch):
    asked = []
    monkeypatch.setattr("xgram_dist.tables.storage.system._SYS_PROCESS_MADVISE", 100_000)
    monkeypatch.setattr("os.posix_fadvise", lambda *arguments: asked.append(arguments[1:3]))
    storage = opened("disk", width=1024)
    written_back(storage, 100)
    storage._read_ahead(np.array([7, 3, 4]), 1)
    assert asked == [(3 * 4096, 2 * 4096), (7 * 4096, 4096)]


def test_the_batched_call_reads_every_range(opened, monkeypatch):
    """Ranges that the kernel would refuse fall back, one by one; here it takes them all."""
    monkeypatch.setattr("os.posix_fadvise", lambda *_: pytest.fail("the batched call was refused"))
    storage = opened("disk", width=1024)
    written_back(storage, 5000)
    storage._read_ahead(np.arange(0, 5000, 2), 1)


def test_records_that_were_just_written_are_not_read_ahead(opened, monkeypatch):
    storage = opened("disk", width=1024)
    written_back(storage, 100)
    with storage.writing(np.arange(50, 100)):
        storage.records[50:100] = 2.0
    asked = []
    monkeypatch.setattr(storage._pages, "will_need", lambda starts, sizes: asked.append((starts, sizes)))
    storage._read_ahead(np.arange(50, 100), 1)
    assert not asked
    storage._read_ahead(np.arange(40, 60), 2)
    assert asked == [(40 * 4096, 10 * 4096)]


def test_the_memory_limit_is_that_of_the_machine_or_less():
    assert 0 < memory_limit() <= 2**50
