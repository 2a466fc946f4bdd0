"""What a data set holds: sizes, lengths of documents, samples, the documents of a batch; and whether it is undamaged.

In: `PreparedData` or a `Loader`. Out: plain dictionaries for `xgram-dist data`.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

from xgram_dist.data.dataset import PreparedData
from xgram_dist.data.loader import Loader
from xgram_dist.data.manifest import HASH
from xgram_dist.data.tokenizer import Tokenizer
from xgram_dist.errors import UserError

_LENGTH_RUNS, _RUN_CHUNKS = 32, 8  # runs of consecutive chunks from which lengths of documents are measured
_TEXT_TOKENS = 48  # of a sample or document that is shown


def describe(data: PreparedData) -> dict[str, Any]:
    """Sizes by source, with lengths of documents measured on chunks spread over each."""
    manifest = data.manifest
    sources = []
    for number, source in enumerate(manifest.sources):
        info = source.split(data.split)
        lengths = _document_lengths(data, number)
        sources.append(
            {
                "name": source.name,
                "weight": source.weight,
                "documents": info.documents,
                "tokens": info.tokens,
                "padding": info.padding,
                "chunks": info.chunks,
                "shards": len(data.shard_chunks[number]),
                "text_bytes": source.bytes,
                "rejected": source.rejected,
                "tokens_per_document": round(info.tokens / info.documents, 1) if info.documents else None,
                "length_quantiles": {
                    str(share): int(np.quantile(lengths, share)) for share in (0.1, 0.5, 0.9, 0.99) if len(lengths)
                },
            }
        )
    return {
        "data": str(data.folder),
        "split": data.split,
        "fingerprint": manifest.fingerprint,
        "vocabulary": manifest.vocabulary,
        "chunk_tokens": manifest.chunk_tokens,
        "sequence_length": manifest.sequence_length,
        "sources": sources,
    }


def _document_lengths(data: PreparedData, source: int) -> NDArray[Any]:
    """Of documents that begin and end within runs of consecutive chunks."""
    chunks = sum(data.shard_chunks[source])
    lengths = [np.zeros(0, dtype=np.int64)]
    starts = sorted({number * chunks // _LENGTH_RUNS for number in range(_LENGTH_RUNS)}) if chunks else []
    for first in starts:
        last = min(first + _RUN_CHUNKS, chunks)
        tokens = np.concatenate([data.chunk(source, index) for index in range(first, last)])
        ends = np.flatnonzero(tokens == data.manifest.end_of_text)
        steps = np.diff(ends)
        lengths.append(steps[steps > 1] if data.manifest.sequence_length is not None else steps)
    return np.concatenate(lengths)


def decoded_samples(data: PreparedData, tokenizer: Tokenizer, count: int) -> Iterator[dict[str, Any]]:
    """`count` beginnings of chunks of every source, spread over it."""
    for number, name in enumerate(data.source_names):
        chunks = sum(data.shard_chunks[number])
        for sample in range(min(count, chunks)):
            chunk = sample * chunks // count
            tokens = data.tokens(number, chunk, 0, min(_TEXT_TOKENS, data.chunk_tokens))
            yield {"source": name, "chunk": chunk, "text": tokenizer.decode(tokens.tolist())}


def batch_contents(loader: Loader, position: int, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """The sequences of the loader's batch at a position, and the documents of each; without a tokenizer, without their
    text."""
    batch = loader.batch_at(position)
    length = batch.tokens.shape[-1]
    rows = batch.tokens.reshape(-1, length).numpy()
    sequences = []
    for number, (row, data) in enumerate(zip(rows, batch.data, strict=True)):
        source, chunk, sequence = (
            int(values[number]) for values in (batch.samples.source, batch.samples.chunk, batch.samples.sequence)
        )
        sequences.append(
            {
                "source": data.source_names[source],
                "shard": str(data.shard_file(source, chunk)),
                "chunk": chunk,
                "sequence": sequence,
                "documents": list(_documents(row, data.manifest.end_of_text, tokenizer)),
            }
        )
    return {"position": position, "sequence_length": length, "sequences": sequences}


def _documents(row: NDArray[Any], end_of_text: int, tokenizer: Tokenizer | None) -> Iterator[dict[str, Any]]:
    """The documents, or parts of them, in a sequence."""
    start = 0
    for end in [*(np.flatnonzero(row == end_of_text) + 1).tolist(), len(row)]:
        if end - start > 1 or (end > start and row[start] != end_of_text):
            shown = row[start : min(end, start + _TEXT_TOKENS)].tolist()
            text = None if tokenizer is None else tokenizer.decode(shown)
            yield {"first_token": start, "tokens": end - start, "text": text}
        start = end


def find_damage(data: PreparedData, workers: int, report: Callable[[int], None] = lambda size: None) -> Iterator[str]:
    """A sentence for every shard that is missing or not as it was written; `report` is called with bytes checked."""
    with ThreadPoolExecutor(workers) as pool:
        jobs = {
            pool.submit(_shard_damage, data, source, shard): (source, shard)
            for source in range(len(data.source_names))
            for shard in range(len(data.shard_chunks[source]))
        }
        for job in as_completed(jobs):
            size, sentence = job.result()
            report(size)
            if sentence is not None:
                yield sentence


def _shard_damage(data: PreparedData, source: int, shard: int) -> tuple[int, str | None]:
    """Bytes of the compressed shard, and what is wrong with it."""
    entry = data.shard_entry(source, shard)
    size = int(entry["zip_data"]["bytes"])
    try:
        packed = data.packed_shard(source, shard)
    except (OSError, UserError) as error:
        return size, str(error)
    name = data.shard_name(source, shard)
    if len(packed) != size:
        return size, f"shard '{name}' has {len(packed):,} bytes, not {size:,} as in index.json"
    if xxhash.xxh128_hexdigest(packed) != entry["zip_data"]["hashes"][HASH]:
        return size, f"shard '{name}' is corrupt: its {HASH} is not the one in index.json"
    try:
        raw = zstandard.ZstdDecompressor().decompress(packed, max_output_size=int(entry["raw_data"]["bytes"]))
    except zstandard.ZstdError as error:
        return size, f"shard '{name}' cannot be decompressed: {error}"
    if xxhash.xxh128_hexdigest(raw) != entry["raw_data"]["hashes"][HASH]:
        return size, f"shard '{name}' decompresses to something else than was written"
    return size, None
