"""gigatoken against Hugging Face: the same ids, the same shards, and a sentence where it cannot be used."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_helpers import SHARED_DATA, jsonl, make_texts, tree, write_packed
from hypothesis import given, settings
from hypothesis import strategies as st

from xgram_dist.cli.main import main
from xgram_dist.data import engines, shards, train_bpe
from xgram_dist.data.documents import Document, read_documents
from xgram_dist.data.engines import choose_engine, hard_sample, load_engine
from xgram_dist.data.prepare import Outcome
from xgram_dist.data.shards import ChunkWriter, Settings, WorkUnit, plan_passes
from xgram_dist.data.tokenizer import Tokenizer, load_tokenizer
from xgram_dist.errors import UserError

QWEN3 = SHARED_DATA / "tokenizers" / "qwen3" / "tokenizer.json"
CORPUS = SHARED_DATA / "corpus"
Prepare = Callable[..., Outcome]

_loaded: dict[Path, list[engines.Engine]] = {}
needs_qwen3 = pytest.mark.skipif(not QWEN3.is_file(), reason="the Qwen3 tokenizer is not beside the checkout")


def both_engines(tokenizer: Tokenizer) -> list[engines.Engine]:
    words = (tokenizer.path, tokenizer.end_of_text, tokenizer.end_of_text_name)
    return [load_engine(name, *words) for name in ("gigatoken", "huggingface")]


def changed(bpe: Path, out: Path, **fields: Any) -> Path:
    """A copy of a tokenizer with other fields, those of its model as `model__NAME`."""
    record = json.loads(bpe.read_text())
    for name, value in fields.items():
        place, _, key = name.rpartition("__")
        (record[place] if place else record)[key] = value
    out.write_text(json.dumps(record))
    return out


def test_a_usual_tokenizer_is_run_by_gigatoken(bpe: Path) -> None:
    assert choose_engine(load_tokenizer(bpe), "auto", make_texts(20, 1)).name == "gigatoken"


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=60), max_size=6))
@settings(deadline=None)
def test_any_texts_have_the_same_ids_in_both_engines(bpe: Path, texts: list[str]) -> None:
    fast, slow = _engines(bpe)
    data = [text.encode() for text in texts]
    assert fast.encode_joined(data).tolist() == slow.encode_joined(data).tolist()


def _engines(file: Path) -> list[engines.Engine]:
    if file not in _loaded:
        _loaded[file] = both_engines(load_tokenizer(file))
    return _loaded[file]


@needs_qwen3
def test_every_character_has_the_same_ids_with_qwen3_also_beside_a_combining_mark() -> None:
    fast, slow = _engines(QWEN3)
    characters = [*range(1, 0x3100), *range(0xA000, 0xD800, 5), *range(0xF900, 0x20000)]
    texts = [
        f"a{chr(c)}b {chr(c)}1 e{chr(c)}\u0301\n{chr(c)}x".encode() for c in characters if not 0xD800 <= c < 0xE000
    ]
    assert np.array_equal(fast.encode_joined(texts), slow.encode_joined(texts))
    hard = [text.encode() for text in hard_sample()]
    assert np.array_equal(fast.encode_joined(hard), slow.encode_joined(hard))


@needs_qwen3
@pytest.mark.skipif(not CORPUS.is_dir(), reason="the corpora are not beside the checkout")
@pytest.mark.parametrize("name", ["peps", "mdn", "web_samples", "stacks_project"])
def test_documents_of_real_corpora_have_the_same_ids_with_qwen3(name: str) -> None:
    fast, slow = _engines(QWEN3)
    items = read_documents(CORPUS / name / "valid.jsonl.zst")
    texts = [item.text.encode() for item in items if isinstance(item, Document)][:60]
    assert np.array_equal(fast.encode_joined(texts), slow.encode_joined(texts))


def test_special_tokens_as_text_stay_text_and_documents_stay_whole(bpe: Path) -> None:
    fast, slow = _engines(bpe)
    end = load_tokenizer(bpe).end_of_text
    texts = [b"before <|endoftext|> after", b"<|endoftext|>", b"a\n\nb\r\n\x00\xff".replace(b"\xff", b"\xc3\xbf")]
    ids = fast.encode_joined(texts)
    assert ids.tolist() == slow.encode_joined(texts).tolist()
    assert (ids == end).sum() == len(texts)


def test_prepare_writes_the_same_bytes_with_either_engine(run_prepare: Prepare, tmp_path: Path) -> None:
    odd = ["x <|endoftext|> y", "e\u0301\u1abf mark", "👩‍👩‍👧‍👦 \u00a0\u3000  z", "a\x00b", "\u200b" * 50]
    for number, name in enumerate(("a.jsonl.zst", "b.json.gz", "c.jsonl")):
        write_packed(tmp_path / "raw" / name, jsonl([*make_texts(2000, number), *odd]))
    trees = []
    for engine in ("gigatoken", "huggingface"):
        outcome = run_prepare({"one": tmp_path / "raw"}, engine, engine=engine, validation=0.1)
        assert outcome.engine is not None
        assert outcome.engine.name == engine
        trees.append(tree(tmp_path / engine))
    assert trees[0] == trees[1]


@needs_qwen3
@pytest.mark.skipif(not CORPUS.is_dir(), reason="the corpora are not beside the checkout")
def test_prepare_writes_the_same_bytes_with_either_engine_for_qwen3(run_prepare: Prepare, tmp_path: Path) -> None:
    for name in ("peps", "web_samples"):
        folder = tmp_path / "raw" / name
        folder.mkdir(parents=True)
        (folder / "valid.jsonl.zst").write_bytes((CORPUS / name / "valid.jsonl.zst").read_bytes())
    for engine in ("gigatoken", "huggingface"):
        run_prepare({"one": tmp_path / "raw"}, engine, engine=engine, tokenizer=QWEN3, chunk_tokens=512)
    assert tree(tmp_path / "gigatoken") == tree(tmp_path / "huggingface")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"model__dropout": 0.1}, "BPE dropout"),
        ({"normalizer": {"type": "Replace", "pattern": {"String": "e"}, "content": "qq"}}, "normalizer Replace"),
        ({"normalizer": {"type": "Lowercase"}}, "normalizer Lowercase"),
    ],
)
def test_what_gigatoken_lacks_falls_back_by_name(
    bpe: Path, tmp_path: Path, fields: dict[str, Any], reason: str
) -> None:
    tokenizer = load_tokenizer(changed(bpe, tmp_path / "changed.json", **fields))
    choice = choose_engine(tokenizer, "auto", ["The Next eEe"])
    assert choice.name == "huggingface"
    assert reason in str(choice.reason)
    with pytest.raises(UserError, match=r"--tokenizer-engine gigatoken: .*; use auto or huggingface"):
        choose_engine(tokenizer, "gigatoken", ["The Next eEe"])


def test_documents_of_the_sources_decide_too(bpe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(self: Any, texts: list[bytes]) -> Any:
        joined = original(self, texts)
        return joined[::-1] if any(b"rare word" in text for text in texts) else joined

    original = engines._GigatokenEngine.encode_joined
    monkeypatch.setattr(engines._GigatokenEngine, "encode_joined", wrong)
    tokenizer = load_tokenizer(bpe)
    assert choose_engine(tokenizer, "auto", ["usual"]).name == "gigatoken"
    assert "'a rare word'" in str(choose_engine(tokenizer, "auto", ["usual", "a rare word"]).reason)


def test_without_the_package_prepare_falls_back_and_says_so(tmp_path: Path, bpe: Path) -> None:
    """In processes that find no gigatoken, workers and their fork server among them."""
    write_packed(tmp_path / "raw" / "a.jsonl", jsonl(make_texts(200, 0)))
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "gigatoken.py").write_text("raise ModuleNotFoundError(name='gigatoken')")
    words = ["prepare", "--source", f"one={tmp_path / 'raw'}", "--tokenizer", str(bpe), "--chunk-tokens", "64"]
    assert main([*words, "--out", str(tmp_path / "with")]) == 0
    paths = [str(tmp_path / "hidden"), str(Path(__file__).parents[3])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "xgram_dist", *words, "--out", str(tmp_path / "without"), *more]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)

    forced = run("--tokenizer-engine", "gigatoken")
    assert forced.returncode == 2
    assert "pip install gigatoken" in forced.stderr
    done = run()
    assert done.returncode == 0, done.stderr
    assert "the package gigatoken is not installed" in done.stderr
    assert tree(tmp_path / "with") == tree(tmp_path / "without")


def test_both_trainers_write_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [*make_texts(200, 3), "before <|endoftext|> after", "naïve 数据 \x00 \U0001f600"]
    for size in (300, 400, 2000):
        fast = train_bpe.train_bpe(iter(texts), size, tmp_path / "fast.json").read_bytes()
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "gigatoken", None)
            assert train_bpe.train_bpe(iter(texts), size, tmp_path / "slow.json").read_bytes() == fast


def test_the_cache_of_words_is_dropped_when_memory_runs_short(bpe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fast, slow = both_engines(load_tokenizer(bpe))
    monkeypatch.setattr(engines, "MAX_WORKER_BYTES", 0)
    monkeypatch.setattr(engines, "_MIN_CACHED_BYTES", 1000)
    assert isinstance(fast, engines._GigatokenEngine)
    library = fast._library
    texts = [text.encode() for text in make_texts(50, 1)]
    assert fast.encode_joined(texts).tolist() == slow.encode_joined(texts).tolist()
    assert fast._library is not library


def test_shards_are_those_of_the_streaming_writer_and_do_not_depend_on_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from xgram_dist.data.streaming_import import streaming

    monkeypatch.setattr(shards, "SHARD_BYTES", 40_000)
    settings = Settings("x", 0, 70_000, 512, 0.0)
    tokens = np.random.default_rng(0).integers(0, 70_000, 100_000).astype(np.uint32)
    indexes = []
    for number, memory in enumerate((1 << 30, 3_000)):
        writer = ChunkWriter(tmp_path / str(number), settings, memory)
        for start in range(0, len(tokens), 7_000):
            writer.add(tokens[start : start + 7_000])
        indexes.append(writer.finish()[0])
    reference = streaming().MDSWriter(
        columns={"tokens": "ndarray:uint32:512"},
        out=str(tmp_path / "reference"),
        compression="zstd",
        hashes=["xxh128"],
        size_limit=40_000,
    )
    for chunk in tokens[: len(tokens) // 512 * 512].reshape(-1, 512):
        reference.write({"tokens": chunk})
    reference.finish()
    assert indexes[0] == indexes[1]
    assert len(indexes[0]) > 3
    for ours, theirs in zip(indexes[0], reference.shards, strict=True):
        assert {**ours, "zip_data": None} == {**theirs, "zip_data": None}  # the level of compression differs


def test_parts_of_a_file_share_a_pass_as_far_as_workers_stay_busy() -> None:
    def unit(file: str, part: int, parts: int, size: float) -> WorkUnit:
        return WorkUnit("s", (file,), part, parts, size / parts, f"{file}-{part}")

    many = [unit(f"{n}", part, 4, 100.0) for n in range(8) for part in range(4)]
    assert sorted(len(group) for group in plan_passes(many, 2)) == [4] * 8
    single = [unit("large", part, 16, 1000.0) for part in range(16)]
    assert sorted(len(group) for group in plan_passes(single, 4)) == [4] * 4
    assert len(plan_passes(single, 64)) == 16
    planned = plan_passes([*many, *single], 8)
    assert sorted(u.key for group in planned for u in group) == sorted(u.key for u in [*many, *single])
