"""Object storage against a real S3 server, also one that is slow, breaks off, and lies."""

import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from data_helpers import jsonl, make_texts, write_packed
from s3_helper import KEY, SECRET, Proxy, serve_s3, serve_through_proxy

from xgram_dist.cli.main import main
from xgram_dist.data import storage
from xgram_dist.data.dataset import PreparedData
from xgram_dist.data.loader import Loader
from xgram_dist.data.storage import fetch, open_store, upload
from xgram_dist.errors import UserError

BATCH: dict[str, Any] = {"sequence_length": 16, "global_batch": 8, "micro_batch": 2, "seed": 5}


@pytest.fixture(scope="module")
def s3() -> Iterator[tuple[str, int]]:
    yield from serve_s3()


@pytest.fixture
def proxy(s3: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    yield from serve_through_proxy(s3, monkeypatch)


@pytest.fixture
def address(proxy: Proxy, mixed: Path) -> str:
    """The data set `mixed` on S3, uploaded by the first test that needs it."""
    where = "s3://bucket/mixed"
    store = open_store(where)
    if not store.holds("dataset.json", (mixed / "dataset.json").read_bytes()):
        names = [path.relative_to(mixed).as_posix() for path in mixed.rglob("*") if path.is_file()]
        for name in sorted(names, key=lambda name: name == "dataset.json"):
            if not name.endswith((".mds", ".lock")):
                upload(where, store, name, (mixed / name).read_bytes())
    proxy.gets.clear()
    return where


def rows(loader: Loader, steps: int) -> list[Any]:
    return [next(loader).tokens.tolist() for _ in range(steps)]


def test_training_batches_from_s3_are_those_of_the_folder(address: str, mixed: Path, tmp_path: Path) -> None:
    with Loader(PreparedData.open(mixed), **BATCH) as local:
        expected = rows(local, 12)
    remote = PreparedData.open(None, remote=address, cache=tmp_path / "cache")
    with Loader(remote, **BATCH) as loader:
        assert rows(loader, 12) == expected
    assert [file.name for file in remote.tokenizer_files()] == ["tokenizer.json"]


def spoiled(kinds: list[str | None]) -> Callable[[str, int], str | None]:
    return lambda path, number: kinds[number - 1] if number <= len(kinds) and "zstd" in path else None


@pytest.mark.parametrize("kinds", [["500", "500"], ["broken", "500"], ["short"], ["corrupt", "corrupt"]])
def test_a_server_that_fails_or_lies_for_a_while_is_asked_again(
    address: str, proxy: Proxy, mixed: Path, tmp_path: Path, kinds: list[str | None]
) -> None:
    proxy.spoil = spoiled(kinds)
    remote = PreparedData.open(None, remote=address, cache=tmp_path / "cache")
    with Loader(remote, **BATCH) as loader, Loader(PreparedData.open(mixed), **BATCH) as local:
        assert rows(loader, 6) == rows(local, 6)
    assert max(count for path, count in proxy.gets.items() if "zstd" in path) == len(kinds) + 1


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("500", "InternalError"), ("corrupt", "its hash"), ("short", "bytes came"), ("broken", r"\w+Error")],
)
def test_a_server_that_never_recovers_is_named_with_the_object_and_the_fault(
    address: str, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, reason: str
) -> None:
    monkeypatch.setattr(storage, "ATTEMPTS", 3)
    proxy.spoil = lambda path, number: kind if "large" in path and "zstd" in path else None
    sentence = rf"cannot fetch '{address}/train/large/shard.\d+.mds.zstd' in 3 attempts: .*{reason}"
    data = PreparedData.open(None, remote=address, cache=tmp_path / "cache")
    with Loader(data, **BATCH) as loader, pytest.raises(UserError, match=sentence):
        rows(loader, 30)


def test_a_server_that_does_not_answer_is_a_time_out(
    address: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "ATTEMPTS", 2)
    monkeypatch.setattr(storage, "_READ_SECONDS", 0.3)
    proxy.latency = 1.5
    with pytest.raises(UserError, match="in 2 attempts: ReadTimeout"):
        fetch(address, open_store(address), "dataset.json")


def test_credentials_are_in_no_error_and_no_address(
    address: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(storage, "ATTEMPTS", 2)
    shown = []
    for kind in ("500", "broken", "short"):
        proxy.spoil = lambda path, number, kind=kind: kind  # type: ignore[misc]
        with pytest.raises(UserError) as caught:
            fetch(address, open_store(address), "dataset.json", 3)
        shown += [str(caught.value), repr(caught.value.__cause__)]
    for address in (f"s3://{KEY}:{SECRET}@bucket/data", f"s3://{KEY}:a/b{SECRET}@bucket/data"):
        with pytest.raises(UserError) as caught:
            open_store(address)
        shown.append(str(caught.value))
    everything = "\n".join([*shown, caplog.text])
    assert SECRET not in everything
    assert KEY not in everything
    assert "environment" in shown[-1]


def test_missing_data_and_missing_shards_are_sentences(address: str, proxy: Proxy, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist; is 's3://bucket/nowhere' a data set"):
        PreparedData.open(None, remote="s3://bucket/nowhere", cache=tmp_path)
    proxy.spoil = lambda path, number: "404" if "small" in path and "zstd" in path else None
    data = PreparedData.open(None, remote=address, cache=tmp_path / "cache")
    with pytest.raises(UserError, match=r"train/small/shard.000000.mds.zstd' is missing"):
        data.chunk(2, 0)


def _read_all(address: str, cache: Path, limit: int | None, seed: int) -> None:
    data = PreparedData.open(None, remote=address, cache=cache, cache_limit=limit)
    with Loader(data, **{**BATCH, "seed": seed}) as loader:
        rows(loader, 40)


def test_each_shard_is_fetched_once_for_all_ranks_of_a_node(address: str, proxy: Proxy, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=_read_all, args=(address, tmp_path / "cache", None, rank)) for rank in range(3)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(120)
        assert rank.exitcode == 0
    shards = {path: count for path, count in proxy.gets.items() if "zstd" in path}
    assert shards
    assert set(shards.values()) == {1}


def test_the_cache_stays_below_its_limit_and_what_a_kill_left_is_removed(
    proxy: Proxy, mixed: Path, bpe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from xgram_dist.data import shards

    monkeypatch.setattr(shards, "SHARD_BYTES", 4_000)
    write_packed(tmp_path / "raw" / "a.jsonl", jsonl(make_texts(600, 3)))
    out = tmp_path / "small"
    # The workers of `prepare` do not see the patch: write the shards in this process.
    _write_small_shards(out, tmp_path / "raw" / "a.jsonl", bpe)
    cache, limit = tmp_path / "cache", 20_000
    data = PreparedData.open(None, remote=str(out), cache=cache, cache_limit=limit)
    abandoned = data.folder / "train" / "one" / "shard.000999.mds.part"
    abandoned.write_bytes(b"x" * 50_000)
    os.utime(abandoned, (1, 1))
    chunks = sum(data.shard_chunks[0])
    expected = PreparedData.open(out)
    for index in [*range(chunks), *range(0, chunks, 7)]:
        assert data.chunk(0, index).tolist() == expected.chunk(0, index).tolist()
        assert sum(path.stat().st_size for path in cache.rglob("*.mds*") if ".lock" not in path.name) <= limit
    assert len(data.shard_chunks[0]) > 8


def test_ranks_that_are_killed_while_they_fetch_leave_a_cache_that_works(
    address: str, proxy: Proxy, mixed: Path, tmp_path: Path
) -> None:
    proxy.latency = 0.2  # most of the time is in fetches
    context = multiprocessing.get_context("spawn")
    for number in range(3):
        rank = context.Process(target=_read_all, args=(address, tmp_path / "cache", None, number))
        rank.start()
        deadline = time.monotonic() + 60
        while not list((tmp_path / "cache").rglob("*.mds.lock")) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1 * number)
        assert rank.pid is not None
        os.kill(rank.pid, signal.SIGKILL)
        rank.join()
    proxy.latency = 0.0
    remote = PreparedData.open(None, remote=address, cache=tmp_path / "cache")
    with Loader(remote, **BATCH) as loader, Loader(PreparedData.open(mixed), **BATCH) as local:
        assert rows(loader, 12) == rows(local, 12)


def _write_small_shards(out: Path, raw: Path, bpe: Path, chunk_tokens: int = 64) -> None:
    from xgram_dist.data import merge, shards
    from xgram_dist.data.engines import load_engine
    from xgram_dist.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(bpe)
    settings = shards.Settings(tokenizer.sha256, tokenizer.end_of_text, tokenizer.vocabulary, chunk_tokens, 0.0)
    units = shards.plan_units("one", [(raw, "x")], settings, 1 << 30)
    engine = load_engine("gigatoken", tokenizer.path, tokenizer.end_of_text, tokenizer.end_of_text_name)
    staging = out / ".staging"
    staging.mkdir(parents=True)
    shards.tokenize_units(units, settings, engine, staging, lambda report: None)
    merge.merge_units(out, units, settings, tokenizer, staging, {"one": None}, "key")


def test_prefetch_hides_latency_and_bandwidth_at_ten_times_the_rate_of_the_tiny_recipe(
    proxy: Proxy, bpe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """250,000 tokens/s in steps of 16,384, at 20 ms and 50 MB/s, a new block of shards every few steps."""
    monkeypatch.setattr("xgram_dist.data.shards.SHARD_BYTES", 200_000)
    monkeypatch.setattr("xgram_dist.data.order.BLOCK_CHUNKS", 100)
    monkeypatch.setattr("xgram_dist.data.loader._AHEAD_STEPS", 24)
    write_packed(tmp_path / "raw.jsonl", jsonl(make_texts(2_000, 5) * 16))
    _write_small_shards(tmp_path / "out", tmp_path / "raw.jsonl", bpe, chunk_tokens=1024)
    address, store = "s3://bucket/fast", open_store("s3://bucket/fast")
    for path in sorted((tmp_path / "out").rglob("*")):
        if path.is_file() and ".staging" not in path.parts:
            upload(address, store, path.relative_to(tmp_path / "out").as_posix(), path.read_bytes())
    proxy.gets.clear()
    proxy.latency, proxy.seconds_per_byte = 0.02, 1 / 50e6
    batch = {"sequence_length": 256, "global_batch": 64, "micro_batch": 16, "seed": 5}
    data = PreparedData.open(None, remote=address, cache=tmp_path / "cache")
    waits = []
    with Loader(data, **batch, prefetch=4) as loader:
        next(loader)
        for _ in range(60):
            time.sleep(16_384 / 250_000)
            start = time.perf_counter()
            next(loader)
            waits.append(time.perf_counter() - start)
    fetched = len([path for path in proxy.gets if "zstd" in path])
    assert fetched > 6
    assert sum(wait > 0.03 for wait in waits) <= 2  # the machine may be busy with something else
    assert sorted(waits)[len(waits) // 2] < 0.002


def test_prepare_writes_to_s3_what_it_writes_to_a_folder_and_repeats_nothing(
    proxy: Proxy, tmp_path: Path, bpe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_packed(tmp_path / "raw" / "a.jsonl", jsonl(make_texts(300, 0)))
    words = ["prepare", "--source", f"one={tmp_path / 'raw'}", "--tokenizer", str(bpe), "--chunk-tokens", "64"]
    assert main([*words, "--out", str(tmp_path / "folder")]) == 0
    work = ["--work", str(tmp_path / "work")]
    assert main([*words, "--out", "s3://bucket/prepared", *work]) == 0
    assert not (tmp_path / "work").exists()
    data = PreparedData.open(None, remote="s3://bucket/prepared", cache=tmp_path / "cache")
    assert data.fingerprint == PreparedData.open(tmp_path / "folder").fingerprint
    assert main(["data", "s3://bucket/prepared", "--verify", "--cache", str(tmp_path / "cache")]) == 0
    capsys.readouterr()
    assert main([*words, "--out", "s3://bucket/prepared", *work]) == 0
    assert "already holds this data set" in capsys.readouterr().out
    write_packed(tmp_path / "raw" / "a.jsonl", jsonl(make_texts(300, 1)))
    assert main([*words, "--out", "s3://bucket/prepared", "--work", str(tmp_path / "other")]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert main([*words, "--out", "s3://bucket/prepared", "--part", "0/2"]) == 2


def test_other_stores_of_fsspec_read_and_write(mixed: Path, tmp_path: Path) -> None:
    address = "memory://data/mixed"
    store = open_store(address)
    for path in mixed.rglob("*"):
        if path.is_file() and path.suffix not in (".mds", ".lock"):
            upload(address, store, path.relative_to(mixed).as_posix(), path.read_bytes())
    data = PreparedData.open(None, remote=address, cache=tmp_path / "cache")
    assert data.chunk(0, 0).tolist() == PreparedData.open(mixed).chunk(0, 0).tolist()
    with pytest.raises(FileNotFoundError):
        fetch(address, store, "nothing")
