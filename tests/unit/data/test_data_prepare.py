import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from data_helpers import SHARED_DATA, jsonl, make_texts, read_back, tree, write_packed
from tokenizers import Tokenizer as Library

from xgram_dist.cli.main import main
from xgram_dist.cli.prepare import parse_source
from xgram_dist.data import merge
from xgram_dist.data.manifest import read_manifest
from xgram_dist.data.prepare import Outcome
from xgram_dist.errors import UserError

Prepare = Callable[..., Outcome]


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "xgram_dist", "prepare", *map(str, words)]


def large_source(folder: Path, files: int = 4) -> Path:
    """Enough text for several units."""
    for number in range(files):
        write_packed(folder / f"{number}" / "documents.jsonl", jsonl(make_texts(9000, number)))
    return folder


def expected_stream(bpe: Path, texts: list[str]) -> np.ndarray:
    library = Library.from_file(str(bpe))
    end = library.token_to_id("<|endoftext|>")
    return np.array([t for text in texts for t in [*library.encode(text, add_special_tokens=False).ids, end]])


def test_chunks_are_the_joined_documents_cut(run_prepare: Prepare, tmp_path: Path, bpe: Path) -> None:
    texts = make_texts(400, 3)
    write_packed(tmp_path / "raw" / "b" / "2.json.gz", jsonl(texts[200:]))
    write_packed(tmp_path / "raw" / "a.jsonl.zst", jsonl(texts[:200]))
    outcome = run_prepare({"one": tmp_path / "raw"})
    stream = expected_stream(bpe, texts)
    chunks = read_back(tmp_path / "out", "train", "one")
    assert chunks.ravel().tolist() == stream[: len(stream) // 64 * 64].tolist()
    assert outcome.dropped_tokens == len(stream) % 64
    source = outcome.manifest.sources[0]
    assert (source.documents, source.bytes) == (400, sum(len(text.encode()) for text in texts))


def test_counts_are_exactly_the_tokens_of_the_train_chunks(mixed: Path) -> None:
    stored = np.load(mixed / "counts.npz")["counts"]
    read = [read_back(mixed, "train", name).ravel() for name in ("large", "middle", "small")]
    assert stored.dtype == np.int64
    assert stored.tolist() == np.bincount(np.concatenate(read), minlength=len(stored)).tolist()


def test_the_manifest_agrees_with_what_is_written(mixed: Path) -> None:
    manifest = read_manifest(mixed)
    for source in manifest.sources:
        for split in ("train", "validation"):
            chunks = read_back(mixed, split, source.name)
            assert (len(chunks), chunks.size) == (source.split(split).chunks, source.split(split).tokens)
        assert source.train.documents + source.validation.documents == source.documents
        assert 0 < source.validation.documents < 0.3 * source.documents
    assert (mixed / "tokenizer.json").is_file()
    assert not (mixed / ".staging").exists()


def test_equal_documents_are_never_in_both_splits(run_prepare: Prepare, tmp_path: Path) -> None:
    text = make_texts(1, 1)[0]
    write_packed(tmp_path / "raw.jsonl", jsonl([text] * 500))
    source = run_prepare({"one": tmp_path / "raw.jsonl"}, validation=0.5).manifest.sources[0]
    assert sorted([source.train.documents, source.validation.documents]) == [0, 500] or pytest.fail(str(source))


def test_output_is_bitwise_the_same_for_any_number_of_workers(run_prepare: Prepare, tmp_path: Path) -> None:
    source = large_source(tmp_path / "raw")
    outcome = run_prepare({"one": source}, "first", workers=1, validation=0.02, chunk_tokens=512)
    run_prepare({"one": source}, "second", workers=3, validation=0.02, chunk_tokens=512)
    assert outcome.units > 3
    assert tree(tmp_path / "first") == tree(tmp_path / "second")


def test_a_killed_prepare_continues_and_gives_the_same_result(run_prepare: Prepare, tmp_path: Path, bpe: Path) -> None:
    source = large_source(tmp_path / "raw", 6)
    words = ["--source", f"one={source}", "--tokenizer", bpe, "--chunk-tokens", 64, "--validation", 0]
    process = subprocess.Popen(command(*words, "--out", tmp_path / "killed", "--workers", 1), stderr=subprocess.DEVNULL)
    units = tmp_path / "killed" / ".staging" / "units"
    deadline = time.monotonic() + 60
    while not (units.is_dir() and any(len(item.name) == 24 for item in units.iterdir())):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "killed" / "dataset.json").exists()
    outcome = run_prepare({"one": source}, "killed")
    assert 0 < outcome.units_kept < outcome.units
    run_prepare({"one": source}, "whole")
    assert tree(tmp_path / "killed") == tree(tmp_path / "whole")


def living_processes(group: int) -> list[str]:
    """Processes of a group, without those that only wait for their exit code to be read."""
    listing = subprocess.run(["ps", "-eo", "pgid=,stat=,args="], capture_output=True, text=True, check=True).stdout
    rows = [line.split(maxsplit=2) for line in listing.splitlines()]
    return [row[-1] for row in rows if row[0] == str(group) and not row[1].startswith("Z")]


def test_ctrl_c_is_one_line_and_leaves_no_worker_behind(tmp_path: Path, bpe: Path) -> None:
    source = large_source(tmp_path / "raw", 16)
    words = command("--source", f"one={source}", "--tokenizer", bpe, "--out", tmp_path / "out", "--workers", 2)
    words += ["--tokenizer-engine", "huggingface"]  # the slower one
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("out/.staging/units/*")):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert errors.strip().splitlines()[-1] == "xgram-dist prepare: stopped by Ctrl-C"
    assert "Traceback" not in errors
    deadline = time.monotonic() + 10
    while alive := living_processes(process.pid):
        assert time.monotonic() < deadline, alive
        time.sleep(0.05)


def test_a_changed_input_is_prepared_again_and_not_mixed_with_old_units(run_prepare: Prepare, tmp_path: Path) -> None:
    path = write_packed(tmp_path / "raw.jsonl", jsonl(make_texts(200, 1)))
    first = run_prepare({"one": path})
    assert run_prepare({"one": path}).already_there
    write_packed(path, jsonl(make_texts(200, 2)))
    with pytest.raises(UserError, match="--overwrite"):
        run_prepare({"one": path})
    second = run_prepare({"one": path}, overwrite=True)
    assert second.manifest.fingerprint != first.manifest.fingerprint


def test_few_bad_lines_are_counted_and_many_stop_with_file_and_line(run_prepare: Prepare, tmp_path: Path) -> None:
    good = jsonl(make_texts(300, 1))
    path = write_packed(tmp_path / "raw" / "a.jsonl.zst", good + b'{"text": ""}\n{"text"\n' + good)
    outcome = run_prepare({"one": path})
    assert outcome.manifest.sources[0].rejected == {"broken JSON": 1, "empty text": 1}
    assert outcome.first_rejections[0] == f"{path}:301: empty text"
    with pytest.raises(UserError, match=r"2 of 602 lines \(0.33 %\).*a.jsonl.zst:301: empty text.*:302: broken JSON"):
        run_prepare({"one": path}, "strict", max_rejected=0.001)
    assert not (tmp_path / "strict" / "dataset.json").exists()


def test_a_truncated_archive_is_counted_and_the_rest_is_used(run_prepare: Prepare, tmp_path: Path) -> None:
    path = write_packed(tmp_path / "raw" / "a.json.gz", jsonl(make_texts(1000, 1)))
    path.write_bytes(path.read_bytes()[:-500])
    source = run_prepare({"one": path}).manifest.sources[0]
    assert source.rejected == {"truncated archive": 1}
    assert source.documents > 500


def test_a_full_disk_is_one_sentence_and_nothing_looks_finished(
    run_prepare: Prepare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_packed(tmp_path / "raw.jsonl", jsonl(make_texts(200, 1)))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(merge, "_link", full)
        with pytest.raises(UserError, match="no space is left"):
            run_prepare({"one": path})
    assert not (tmp_path / "out" / "dataset.json").exists()
    assert run_prepare({"one": path}).units_kept == 1


def test_a_second_prepare_on_the_same_folder_is_refused(run_prepare: Prepare, tmp_path: Path) -> None:
    import fcntl

    path = write_packed(tmp_path / "raw.jsonl", jsonl(make_texts(200, 1)))
    (tmp_path / "out" / ".staging").mkdir(parents=True)
    with open(tmp_path / "out" / ".staging" / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another `xgram-dist prepare`"):
            run_prepare({"one": path})


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"chunk_tokens": 1}, "--chunk-tokens"),
        ({"validation": 1.0}, "--validation"),
        ({"max_rejected": 2.0}, "--max-rejected"),
        ({"workers": 0}, "--workers"),
        ({"train_bpe": 400}, "exactly one of"),
        ({"chunk_tokens": 1 << 20}, "fewer tokens than one chunk"),
    ],
)
def test_impossible_settings_are_a_sentence(
    run_prepare: Prepare, tmp_path: Path, changes: dict[str, float], sentence: str
) -> None:
    path = write_packed(tmp_path / "raw.jsonl", jsonl(make_texts(20, 1)))
    with pytest.raises(UserError, match=sentence):
        run_prepare({"one": path}, **changes)


def test_a_folder_with_other_things_is_not_written_to(run_prepare: Prepare, tmp_path: Path) -> None:
    path = write_packed(tmp_path / "raw.jsonl", jsonl(make_texts(20, 1)))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("precious")
    with pytest.raises(UserError, match="not empty"):
        run_prepare({"one": path})


def test_a_source_is_read_with_its_weight_and_at_signs_in_paths_are_kept(tmp_path: Path) -> None:
    (tmp_path / "a@2").mkdir()
    assert parse_source(f"x={tmp_path}@0.25").weight == 0.25
    assert parse_source(f"x={tmp_path}/a@2").weight is None
    for wrong in ("x", "=y", "x=", f"x={tmp_path}@often", f"x={tmp_path}@-1", f"x={tmp_path}@nan"):
        with pytest.raises(UserError, match="--source"):
            parse_source(wrong)


def test_the_embedded_corpus_gives_three_weighted_sources_and_frequencies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "data"
    words = ["prepare", "--train-bpe", "512", "--corpus-bytes", "600000", "--chunk-tokens", "512", "--out", str(out)]
    assert main([*words, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert [source["weight"] for source in summary["sources"]] == [0.2, 0.5, 0.3]
    assert all(source["train"]["chunks"] for source in summary["sources"])
    assert summary["rejected"] == {}
    assert main([*words]) == 0
    assert "nothing was done" in capsys.readouterr().out
    frequencies = tmp_path / "f.npz"
    assert main(["frequencies", str(out), "--out", str(frequencies), "--vocabulary", "600", "--json"]) == 0
    counts = np.load(frequencies)["counts"]
    assert (counts.shape, counts.dtype, int(counts.sum())) == ((600,), np.int64, summary["train_tokens"])
    assert main(["frequencies", str(out), "--out", str(frequencies), "--vocabulary", "5"]) == 2


@pytest.mark.skipif(
    not (SHARED_DATA / "corpus" / "peps").is_dir(), reason="the text corpora are not beside the checkout"
)
def test_a_real_corpus_and_a_sentencepiece_model_go_through(run_prepare: Prepare) -> None:
    model = SHARED_DATA / "tokenizers" / "sentencepiece" / "sp_test_en_1k.model"
    outcome = run_prepare({"web": SHARED_DATA / "corpus" / "web_samples"}, tokenizer=model, chunk_tokens=4096)
    assert outcome.manifest.sources[0].documents == 560
    assert outcome.manifest.tokenizer_file == "tokenizer.model"


def test_parts_side_by_side_then_merged_are_the_data_set_of_one_process(tmp_path: Path, bpe: Path) -> None:
    raw = large_source(tmp_path / "raw")
    words = ["--source", f"one={raw}", "--tokenizer", bpe, "--chunk-tokens", "64", "--workers", "1"]
    parts = [subprocess.Popen(command(*words, "--out", tmp_path / "parts", "--part", f"{k}/2")) for k in range(2)]
    assert [part.wait(120) for part in parts] == [0, 0]
    assert not (tmp_path / "parts" / "dataset.json").exists()
    merged = json.loads(subprocess.check_output(command(*words, "--out", tmp_path / "parts", "--json")))
    assert merged["units_kept"] == merged["units"] > 2
    assert main([*map(str, command(*words, "--out", tmp_path / "whole")[3:])]) == 0
    assert tree(tmp_path / "parts") == tree(tmp_path / "whole")


@pytest.mark.parametrize("part", ["2/2", "-1/2", "1", "a/b", "1/"])
def test_a_part_that_is_none_is_refused(
    tmp_path: Path, bpe: Path, capsys: pytest.CaptureFixture[str], part: str
) -> None:
    write_packed(tmp_path / "raw" / "a.jsonl", jsonl(make_texts(10, 0)))
    words = ["--source", f"one={tmp_path / 'raw'}", "--tokenizer", str(bpe), "--out", str(tmp_path / "out")]
    assert main(["prepare", *words, f"--part={part}"]) == 2
    assert f"--part {part}" in capsys.readouterr().err.replace("'", "")
    assert main(["prepare", "--train-bpe", "300", "--out", str(tmp_path / "out"), "--part", "0/2"]) == 2
    assert "--part needs --tokenizer" in capsys.readouterr().err
