"""Speed of the data path: `prepare` against bare tokenization, the loader against what training consumes.

In: documents (a file, a folder, a folder of sources; default: the embedded corpus), a tokenizer (default: a BPE trained
on them), the tokens per second that training consumes. Out: one dictionary of figures. Both sides of the first
comparison tokenize the same texts on the same cores and alternate; the best time of each is compared, since
disturbances only slow a run down. `prepare` is timed from the start of its worker processes to the finished folder;
bare tokenization has its texts in memory and discards the tokens.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from xgram_dist.console import Progress
from xgram_dist.data import corpus as embedded
from xgram_dist.data.dataset import PreparedData
from xgram_dist.data.documents import Document, find_files, read_documents
from xgram_dist.data.loader import Loader
from xgram_dist.data.prepare import Request, Source, prepare
from xgram_dist.data.tokenizer import train_bpe
from xgram_dist.data.workers import available_cores

_EMBEDDED_COPIES = 4  # 12 MB are done in seconds; both sides see the same copies
_BARE = """
import sys, time
from pathlib import Path
from tokenizers import Tokenizer
from xgram_dist.data.documents import Document, find_files, read_documents
library = Tokenizer.from_file(sys.argv[1])
texts = [item.text for path in sys.argv[3:] for file in find_files(Path(path)) for item in read_documents(file)
         if isinstance(item, Document)]
encode = getattr(library, sys.argv[2])
encode(texts[:100], add_special_tokens=False)
start = time.perf_counter()
tokens = sum(len(e) for i in range(0, len(texts), 1000) for e in encode(texts[i:i + 1000], add_special_tokens=False))
print(tokens, time.perf_counter() - start)
"""


def run_data_benchmark(
    corpus: str | None,
    consumption: float,
    *,
    tokenizer: str | None = None,
    repeats: int = 2,
    sequence_length: int = 256,
    seconds: float = 3.0,
) -> dict[str, Any]:
    """Tokens a second of every part, and the two ratios that matter."""
    cores = available_cores()
    with tempfile.TemporaryDirectory(prefix="xgram-dist-bench-") as name:
        folder = Path(name)
        sources = _sources(corpus, folder)
        texts_bytes, vocabulary_file = _tokenizer(sources, tokenizer, folder)
        paths = [str(source.path) for source in sources]
        rates: dict[str, list[float]] = {"prepare": [], "encode_batch": [], "encode_batch_fast": []}
        data = None
        with Progress(3 * repeats, "runs", "measuring prepare and bare tokenization") as progress:
            for repeat in range(repeats):
                out = folder / f"prepared-{repeat}"
                start = time.perf_counter()
                outcome = prepare(
                    Request(
                        out=out, workers=cores, sources=tuple(sources), tokenizer=vocabulary_file, chunk_tokens=4_096
                    )
                )
                rates["prepare"].append(outcome.new_tokens / (time.perf_counter() - start))
                progress.update()
                data = out
                for function in ("encode_batch", "encode_batch_fast"):
                    rates[function].append(_bare(vocabulary_file, function, paths))
                    progress.update()
        assert data is not None
        loader = _loader_rate(data, sequence_length, seconds)
    best = {key: max(values) for key, values in rates.items()}
    return {
        "cores": cores,
        "repeats": repeats,
        "compared": "best of the repeats",
        "text_bytes": texts_bytes,
        "prepare_tokens_per_second": round(best["prepare"]),
        "encode_batch_tokens_per_second": round(best["encode_batch"]),
        "encode_batch_fast_tokens_per_second": round(best["encode_batch_fast"]),
        "prepare_to_encode_batch": round(best["prepare"] / best["encode_batch"], 3),
        "prepare_to_encode_batch_fast": round(best["prepare"] / best["encode_batch_fast"], 3),
        "loader_sequence_length": sequence_length,
        "loader_tokens_per_second": round(loader),
        "consumption_tokens_per_second": consumption,
        "loader_to_consumption": round(loader / consumption, 1),
        "all_rates": {key: [round(value) for value in values] for key, values in rates.items()},
    }


def _sources(corpus: str | None, folder: Path) -> list[Source]:
    if corpus is None:
        files = embedded.write_corpus(folder / "corpus")
        for path in files.values():
            path.write_bytes(path.read_bytes() * _EMBEDDED_COPIES)
        return [Source(name, path) for name, path in files.items()]
    path = Path(corpus)
    inside = sorted(item for item in path.iterdir() if item.is_dir()) if path.is_dir() else []
    return [Source(item.name, item) for item in inside] or [Source("corpus", path)]


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


def _bare(tokenizer: Path, function: str, paths: list[str]) -> float:
    """In a process of its own, with the library's own threads on all cores."""
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "true"}
    command = [sys.executable, "-c", _BARE, str(tokenizer), function, *paths]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    tokens, seconds = done.stdout.split()
    return int(tokens) / float(seconds)


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
