import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_helpers import read_back
from hypothesis import given, settings
from hypothesis import strategies as st

from xgram_dist.data.dataset import PreparedData
from xgram_dist.data.loader import Loader, validation_batches
from xgram_dist.data.manifest import read_manifest
from xgram_dist.data.order import GlobalOrder
from xgram_dist.errors import UserError

Copy = Callable[[], Path]
BATCH: dict[str, Any] = {"sequence_length": 16, "global_batch": 8, "micro_batch": 2, "seed": 5}


@pytest.fixture
def fresh(mixed: Path, tmp_path: Path) -> Path:
    """A copy nobody has read from: no decompressed shard in it."""
    return Path(shutil.copytree(mixed, tmp_path / "copy", ignore=shutil.ignore_patterns("*.mds", "*.lock")))


def first_shard(folder: Path, source: str = "large") -> Path:
    return min((folder / "train" / source).glob("*.zstd"))


def steps(loader: Loader, count: int) -> list[list[Any]]:
    return [next(loader).tokens.tolist() for _ in range(count)]


def test_chunks_read_are_the_chunks_written(mixed: Path) -> None:
    for split in ("train", "validation"):
        data = PreparedData.open(mixed, split)
        for number, name in enumerate(data.source_names):
            written = read_back(mixed, split, name)
            assert sum(data.shard_chunks[number]) == len(written)
            for index, chunk in enumerate(written):
                assert data.chunk(number, index).tolist() == chunk.tolist()


def test_every_row_is_the_sequence_its_sample_names_with_the_rest_of_a_chunk_dropped(mixed: Path) -> None:
    data = PreparedData.open(mixed)
    written = [read_back(mixed, "train", name) for name in data.source_names]
    with Loader(data, **{**BATCH, "sequence_length": 24}) as loader:
        for _ in range(20):
            batch = next(loader)
            assert batch.tokens.dtype == torch.int64
            assert batch.tokens.shape == (4, 2, 24)
            rows = batch.tokens.reshape(8, 24)
            for row in range(8):
                source, chunk, number = (
                    int(x[row]) for x in (batch.samples.source, batch.samples.chunk, batch.samples.sequence)
                )
                assert number < 64 // 24
                assert rows[row].tolist() == written[source][chunk, number * 24 : number * 24 + 24].tolist()


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_together_read_the_global_batch_of_one_rank(mixed: Path, ranks: int) -> None:
    data = PreparedData.open(mixed)
    alone = Loader(data, **BATCH)
    parts = [Loader(data, **BATCH, rank=rank, ranks=ranks) for rank in range(ranks)]
    for _ in range(5):
        whole = next(alone).tokens.reshape(8, 16)
        assert torch.equal(torch.cat([next(part).tokens.reshape(-1, 16) for part in parts]), whole)
    for loader in (alone, *parts):
        loader.close()


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 40), st.integers(1, 20))
def test_restoring_at_any_step_gives_the_same_rest_on_any_ranks(mixed: Path, taken: int, prefetch: int) -> None:
    data = PreparedData.open(mixed)
    with Loader(data, **BATCH, prefetch=prefetch) as first:
        steps(first, taken)
        state = json.loads(json.dumps(first.state_dict()))
        rest = steps(first, 4)
    assert state["position"] == 8 * taken
    with Loader(data, **BATCH) as second:
        next(second)
        second.load_state_dict(state)
        assert steps(second, 4) == rest
    halves = [Loader(data, **BATCH, rank=rank, ranks=2) for rank in range(2)]
    for half in halves:
        half.load_state_dict(state)
    joined = [steps(half, 4) for half in halves]
    for half in halves:
        half.close()
    assert [a + b for a, b in zip(*joined, strict=True)] == rest


def test_a_position_of_another_data_set_seed_or_length_is_refused_by_name(mixed: Path) -> None:
    data = PreparedData.open(mixed)
    loader = Loader(data, **BATCH)
    state = loader.state_dict()
    changed = {"fingerprint": "0" * 64, "seed": 6, "sequence_length": 8, "weights": [1.0, 0.0, 0.0], "position": -1}
    for key, value in changed.items():
        with pytest.raises(UserError, match="saved position"):
            loader.load_state_dict({**state, key: value})


def test_sources_are_mixed_by_weight(mixed: Path) -> None:
    data = PreparedData.open(mixed)
    for weights, expected in ((None, [0.5, 0.3, 0.2]), ({"small": 3.0, "large": 1.0}, [0.25, 0.0, 0.75])):
        with Loader(data, **BATCH, weights=weights) as loader:
            drawn = np.concatenate([next(loader).samples.source for _ in range(100)])
        assert np.abs(np.bincount(drawn, minlength=3) / 800 - expected).max() < 0.01
    with pytest.raises(UserError, match="did you mean 'small'"):
        Loader(data, **BATCH, weights={"smal": 1.0})


def test_a_corrupt_shard_is_named(fresh: Path) -> None:
    shard = first_shard(fresh)
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    with pytest.raises(UserError, match=f"{shard.name}' is corrupt"):
        PreparedData.open(fresh).chunk(0, 0)
    with Loader(PreparedData.open(fresh), **BATCH) as loader, pytest.raises(UserError, match="is corrupt"):
        steps(loader, 50)


def test_a_missing_shard_is_named(fresh: Path) -> None:
    shard = first_shard(fresh)
    shard.unlink()
    with pytest.raises(UserError, match=f"{shard.name}' is missing"):
        PreparedData.open(fresh).chunk(0, 0)


@pytest.mark.parametrize("keep", [0, 100, -1])
def test_a_damaged_decompressed_shard_is_made_again(fresh: Path, keep: int) -> None:
    expected = PreparedData.open(fresh).chunk(0, 0).tolist()
    raw = next((fresh / "train" / "large").glob("*.mds"))
    raw.write_bytes(raw.read_bytes()[:keep])
    assert PreparedData.open(fresh).chunk(0, 0).tolist() == expected


def test_an_index_that_was_tampered_with_is_refused(fresh: Path) -> None:
    index = fresh / "train" / "large" / "index.json"
    record = json.loads(index.read_bytes())
    record["shards"][0]["raw_data"]["basename"] = "../../escape.mds"
    index.write_text(json.dumps(record))
    with pytest.raises(UserError, match="no plain file name"):
        PreparedData.open(fresh)
    record["shards"][0]["raw_data"]["basename"] = "shard.000000.mds"
    record["shards"][0]["samples"] += 1
    index.write_text(json.dumps(record))
    with pytest.raises(UserError, match="is not the index"):
        PreparedData.open(fresh)


@pytest.mark.parametrize(
    ("key", "value"),
    [("vocabulary", "many"), ("dtype", "object"), ("tokenizer_file", "../x"), ("sources", []), ("chunk_tokens", 63)],
)
def test_a_manifest_that_was_tampered_with_is_refused_by_field(fresh: Path, key: str, value: Any) -> None:
    record = json.loads((fresh / "dataset.json").read_bytes())
    (fresh / "dataset.json").write_text(json.dumps({**record, key: value}))
    with pytest.raises(UserError, match=f"dataset.json' is damaged: field '({key}|fingerprint)'"):
        PreparedData.open(fresh)


def test_a_folder_that_is_no_data_set_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a prepared data set"):
        PreparedData.open(tmp_path)


def test_a_token_outside_the_vocabulary_names_source_shard_and_sample(fresh: Path) -> None:
    replace(read_manifest(fresh), vocabulary=100).write(fresh)
    sentence = r"token \d+ in source '\w+', shard '.*mds.zstd', chunk \d+, sequence \d"
    with Loader(PreparedData.open(fresh), **BATCH) as loader, pytest.raises(UserError, match=sentence):
        steps(loader, 50)


def test_a_model_with_a_smaller_vocabulary_is_refused(mixed: Path) -> None:
    with pytest.raises(UserError, match="different tokenizers"):
        Loader(PreparedData.open(mixed), **BATCH, vocabulary=100)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"global_batch": 9}, "not a multiple"),
        ({"sequence_length": 65}, "longer than a chunk"),
        ({"prefetch": 0}, "prefetch"),
    ],
)
def test_impossible_batches_are_a_sentence(mixed: Path, changes: dict[str, int], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        Loader(PreparedData.open(mixed), **{**BATCH, **changes})


def test_closing_ends_the_thread_and_an_error_is_raised_again(mixed: Path, fresh: Path) -> None:
    loader = Loader(PreparedData.open(mixed), **BATCH, prefetch=2)
    next(loader)
    assert any(thread.name == "data-prefetch" for thread in threading.enumerate())
    loader.close()
    assert not any(thread.name == "data-prefetch" for thread in threading.enumerate())
    for shard in fresh.rglob("*.zstd"):
        shard.unlink()
    broken = Loader(PreparedData.open(fresh), **BATCH)
    for _ in range(2):
        with pytest.raises(UserError, match="is missing"):
            next(broken)
    assert broken.position == 0


def test_shared_memory_of_a_killed_run_does_not_block_and_none_is_made(fresh: Path) -> None:
    stale = []
    for name in ("000000_locals", "000000_barrier", "000000_next_epoch", "000000_cache_usage"):
        try:
            stale.append(SharedMemory(name=name, create=True, size=64))
        except FileExistsError:
            continue
    try:
        before = set(os.listdir("/dev/shm"))
        with Loader(PreparedData.open(fresh), **BATCH) as loader:
            assert len(steps(loader, 3)) == 3
            assert set(os.listdir("/dev/shm")) <= before
    finally:
        for memory in stale:
            memory.close()
            memory.unlink()


def test_a_remote_is_read_through_the_cache_and_left_untouched(fresh: Path, tmp_path: Path) -> None:
    before = sorted(path.name for path in fresh.rglob("*"))
    cache = tmp_path / "cache"
    remote = PreparedData.open(None, remote=str(fresh), cache=cache)
    assert remote.chunk(0, 1).tolist() == read_back(fresh, "train", "large")[1].tolist()
    assert sorted(path.name for path in fresh.rglob("*")) == before
    assert not list(cache.rglob("*.zstd"))
    through = PreparedData.open(fresh, cache=tmp_path / "other")
    assert through.chunk(2, 0).tolist() == read_back(fresh, "train", "small")[0].tolist()
    assert sorted(path.name for path in fresh.rglob("*")) == before


def test_a_cache_limit_removes_old_shards_and_reading_goes_on(fresh: Path, tmp_path: Path) -> None:
    data = PreparedData.open(fresh, cache=tmp_path / "cache", cache_limit=1)
    for source in (0, 1, 2, 0):
        assert data.chunk(source, 0).tolist() == read_back(fresh, "train", data.source_names[source])[0].tolist()
    assert len(list((tmp_path / "cache").rglob("*.mds"))) == 1


def test_processes_that_open_the_same_fresh_data_at_once_all_read_it(fresh: Path) -> None:
    script = (
        "import sys, hashlib; from xgram_dist.data.dataset import PreparedData; d = PreparedData.open(sys.argv[1]);"
        "print(hashlib.sha256(b''.join(d.chunk(s, i).tobytes() for s, c in enumerate(d.shard_chunks)"
        " for i in range(sum(c)))).hexdigest())"
    )
    running = [subprocess.Popen([sys.executable, "-c", script, str(fresh)], stdout=subprocess.PIPE) for _ in range(3)]
    expected = hashlib.sha256(
        b"".join(read_back(fresh, "train", name).tobytes() for name in ("large", "middle", "small"))
    ).hexdigest()
    assert [process.communicate(timeout=60)[0].decode().strip() for process in running] == [expected] * 3


def test_validation_batches_are_fixed_and_proportional(mixed: Path) -> None:
    data = PreparedData.open(mixed, "validation")
    first, again = (validation_batches(data, 16, 4, 40) for _ in range(2))
    assert len(first) == 10
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    sequences = [sum(chunks) * 4 for chunks in data.shard_chunks]
    everything = validation_batches(data, 16, 1, 10**9)
    assert len(everything) == sum(sequences)
    assert len({tuple(batch.ravel().tolist()) for batch in everything}) > 0.9 * len(everything)
    few = validation_batches(data, 16, 64, 3)
    assert [batch.shape for batch in few] == [(3, 16)]


def test_streaming_is_imported_without_torchvision_or_transformers() -> None:
    names = "{'torchvision', 'transformers', 'streaming'}"
    script = (
        "import sys, xgram_dist.data.loader, xgram_dist.data.prepare\n"
        "print(any(name.startswith('streaming') for name in sys.modules))\n"  # lazily
        "from xgram_dist.data.streaming_import import streaming\n"
        f"print(streaming().MDSWriter.__name__, sorted({names} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["False", "MDSWriter []"]


def test_the_loader_follows_the_order(mixed: Path) -> None:
    data = PreparedData.open(mixed)
    expected = GlobalOrder(data.shard_chunks, 4, 5, [0.5, 0.3, 0.2]).samples(0, 40)
    with Loader(data, **BATCH) as loader:
        drawn = np.concatenate([next(loader).samples.chunk for _ in range(5)])
    assert drawn.tolist() == expected.chunk.tolist()
