"""Speed of the data path: `prepare` beside its tokenizers alone, the loader beside what training consumes.

In: documents (a file, a folder, a folder of sources; default: the embedded corpus), a tokenizer (default: a BPE trained
on them), the tokens per second that training consumes. Out: one dictionary of figures, in MB of text per second on all
cores, and in CPU time per MB, which says more on a machine that does other work. The sides alternate; the best of each
is compared, since disturbances only slow a run down.

- `prepare`: from the start of its worker processes to the finished folder.
- `gigatoken`: one process per core decompresses the same files and encodes their texts; only these two are timed.
- `huggingface`: `encode_batch_fast` on texts in memory, with the library's threads on all cores.

Files are repeated until there is enough text that the start of processes counts for little.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import zstandard

from xgram_dist.console import Progress
from xgram_dist.data import corpus as embedded
from xgram_dist.data.dataset import PreparedData
from xgram_dist.data.documents import Document, find_files, read_documents
from xgram_dist.data.loader import Loader
from xgram_dist.data.prepare import Request, Source, prepare
from xgram_dist.data.train_bpe import train_bpe
from xgram_dist.data.workers import available_cores
from xgram_dist.environment import PARENT

_TEXT_BYTES = 1_000_000_000
_HUGGINGFACE_BYTES = 16_000_000
_HUGGINGFACE = """
import os, sys, time
from pathlib import Path
from xgram_dist.parallel.launch import end_with_parent
end_with_parent(int(os.environ["XGRAM_DIST_PARENT"]))
from tokenizers import Tokenizer
from xgram_dist.data.documents import Document, find_files, read_documents
library = Tokenizer.from_file(sys.argv[1])
files = [file for path in sys.argv[3:] for file in find_files(Path(path))]
texts, left = [], [int(sys.argv[2]) / len(files)] * len(files)
for number, file in enumerate(files):
    for item in read_documents(file):
        if isinstance(item, Document):
            texts.append(item.text)
            left[number] -= len(item.text)
            if left[number] <= 0:
                break
encode = library.encode_batch_fast
encode(texts[:100], add_special_tokens=False)
start, cpu = time.perf_counter(), time.process_time()
for i in range(0, len(texts), 1000):
    encode(texts[i:i + 1000], add_special_tokens=False)
seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
size = sum(len(text.encode()) for text in texts)
print(size / seconds, cpu / size)
"""
_GIGATOKEN = """
import os, sys, time
from pathlib import Path
from xgram_dist.parallel.launch import end_with_parent
end_with_parent(int(os.environ["XGRAM_DIST_PARENT"]))
from xgram_dist.data import documents
from xgram_dist.data.engines import GIGATOKEN, load_engine
from xgram_dist.data.tokenizer import load_tokenizer
tokenizer = load_tokenizer(sys.argv[1])
engine = load_engine(GIGATOKEN, tokenizer.path, tokenizer.end_of_text, tokenizer.end_of_text_name)
decompressed = documents._decompressed
seconds = cpu = size = 0.0
def timed(path, file):
    global seconds, cpu
    pieces = decompressed(path, file)
    while True:
        start, cpu_start = time.perf_counter(), time.process_time()
        piece = next(pieces, None)
        seconds += time.perf_counter() - start
        cpu += time.process_time() - cpu_start
        if piece is None:
            return
        yield piece
documents._decompressed = timed
def encode(texts):
    global seconds, cpu
    start, cpu_start = time.perf_counter(), time.process_time()
    engine.encode_joined(texts)
    seconds += time.perf_counter() - start
    cpu += time.process_time() - cpu_start
for file in sys.argv[2:]:
    texts, batch = [], 0
    for item in documents.read_documents(Path(file)):
        if isinstance(item, documents.Document):
            texts.append(item.text.encode())
            batch += len(texts[-1])
            if batch > 1 << 22:
                encode(texts)
                size += batch
                texts, batch = [], 0
    encode(texts)
    size += batch
print(size / seconds, cpu / size)
"""


def run_data_benchmark(
    corpus: str | None,
    consumption: float,
    *,
    tokenizer: str | None = None,
    repeats: int = 2,
    sequence_length: int = 256,
    seconds: float = 3.0,
    text_bytes: int = _TEXT_BYTES,
) -> dict[str, Any]:
    """MB of text a second of every part, and the ratios that matter."""
    cores = available_cores()
    with tempfile.TemporaryDirectory(prefix="xgram-dist-bench-") as name:
        folder = Path(name)
        sources = _sources(corpus, folder)
        size, vocabulary_file = _tokenizer(sources, tokenizer, folder)
        sources = _repeated(sources, folder / "repeated", -(-text_bytes // size))
        files = [str(file) for source in sources for file in find_files(source.path)]
        rates: dict[str, list[float]] = {"prepare": [], "gigatoken": [], "huggingface": []}
        data = folder / "prepared"
        cpu: dict[str, list[float]] = {key: [] for key in rates}  # seconds a byte
        engine = memory = None
        with Progress(3 * repeats, "runs", "measuring prepare and its tokenizers") as progress:
            for _ in range(repeats):
                shutil.rmtree(data, ignore_errors=True)
                start = time.perf_counter()
                outcome = prepare(
                    Request(
                        out=data, workers=cores, sources=tuple(sources), tokenizer=vocabulary_file, chunk_tokens=4_096
                    )
                )
                text = sum(source.bytes for source in outcome.manifest.sources)
                rates["prepare"].append(text / (time.perf_counter() - start))
                cpu["prepare"].append(outcome.cpu_seconds / text)
                engine, memory = outcome.engine, outcome.worker_bytes
                progress.update()
                for key, (rate, seconds_a_byte) in {
                    "gigatoken": _gigatoken(vocabulary_file, files, cores),
                    "huggingface": _huggingface(vocabulary_file, [str(source.path) for source in sources]),
                }.items():
                    rates[key].append(rate)
                    cpu[key].append(seconds_a_byte)
                    progress.update()
        loader = _loader_rate(data, sequence_length, seconds)
    best = {key: max(values) for key, values in rates.items()}
    return {
        "cores": cores,
        "repeats": repeats,
        "compared": "best of the repeats",
        "text_mb": round(text / 1e6),
        "engine": None if engine is None else engine.name,
        "prepare_mb_per_second": round(best["prepare"] / 1e6, 1),
        "gigatoken_mb_per_second": round(best["gigatoken"] / 1e6, 1),
        "huggingface_mb_per_second": round(best["huggingface"] / 1e6, 1),
        "prepare_to_gigatoken": round(best["prepare"] / best["gigatoken"], 3),
        "prepare_to_huggingface": round(best["prepare"] / best["huggingface"], 1),
        **{f"{key}_cpu_ms_per_mb": round(1e9 * min(values), 2) for key, values in cpu.items()},
        "worker_memory_mb": round(memory / 1e6) if memory else None,
        "loader_sequence_length": sequence_length,
        "loader_tokens_per_second": round(loader),
        "consumption_tokens_per_second": consumption,
        "loader_to_consumption": round(loader / consumption, 1),
        "all_rates": {key: [round(value / 1e6, 1) for value in values] for key, values in rates.items()},
    }


def _sources(corpus: str | None, folder: Path) -> list[Source]:
    if corpus is None:
        sources = []
        for name, path in embedded.write_corpus(folder / "corpus").items():
            packed = path.parent / name / f"{name}.jsonl.zst"
            packed.parent.mkdir()
            packed.write_bytes(zstandard.ZstdCompressor().compress(path.read_bytes()))
            sources.append(Source(name, packed.parent))
        return sources
    path = Path(corpus)
    inside = sorted(item for item in path.iterdir() if item.is_dir()) if path.is_dir() else []
    return [Source(item.name, item) for item in inside] or [Source("corpus", path)]


def _repeated(sources: list[Source], folder: Path, copies: int) -> list[Source]:
    """The same files under several names."""
    result = []
    for source in sources:
        target = folder / source.name
        target.mkdir(parents=True)
        for number, file in enumerate(find_files(source.path)):
            for copy in range(copies):
                shutil.copyfile(file, target / f"{copy:03d}-{number:05d}-{file.name}")
        result.append(Source(source.name, target))
    return result


def _tokenizer(sources: list[Source], tokenizer: str | None, folder: Path) -> tuple[int, Path]:
    """Bytes of text, and the tokenizer's file (trained on every eighth document where none is given)."""
    size = 0
    sample = []
    for source in sources:
        for file in find_files(source.path):
            for item in read_documents(file):
                if isinstance(item, Document):
                    size += len(item.text.encode("utf-8"))
                    if tokenizer is None and item.line % 8 == 0:
                        sample.append(item.text)
    return size, Path(tokenizer) if tokenizer else train_bpe(sample, 8_192, folder / "bpe.json")


def _huggingface(tokenizer: Path, paths: list[str]) -> tuple[float, float]:
    """(bytes a second, CPU seconds a byte) of a process of its own, with the library's own threads on all cores."""
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "true", PARENT: str(os.getpid())}
    command = [sys.executable, "-c", _HUGGINGFACE, str(tokenizer), str(_HUGGINGFACE_BYTES), *paths]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    rate, cpu = map(float, done.stdout.split())
    return rate, cpu


def _gigatoken(tokenizer: Path, files: list[str], cores: int) -> tuple[float, float]:
    """(bytes a second of all, CPU seconds a byte) of one process per core, each with its share of the files."""
    files = sorted(files, key=lambda file: (-os.path.getsize(file), file))
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _GIGATOKEN, str(tokenizer), *files[core::cores]],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, PARENT: str(os.getpid())},
        )
        for core in range(min(cores, len(files)))
    ]
    outputs = [[float(word) for word in process.communicate()[0].split()] for process in processes]
    return sum(rate for rate, _ in outputs), sum(cpu for _, cpu in outputs) / len(outputs)


def _loader_rate(data: Path, sequence_length: int, seconds: float) -> float:
    """Tokens per second of the loader, including the decompression of shards."""
    with Loader(
        PreparedData.open(data), sequence_length=sequence_length, global_batch=64, micro_batch=16, seed=0
    ) as loader:
        start = time.perf_counter()
        tokens = 0
        while time.perf_counter() - start < seconds:
            tokens += next(loader).tokens.numel()
        return tokens / (time.perf_counter() - start)
