"""Batches for training: the tokens of this rank for each optimizer step.

In: `PreparedData`, sequence length, batch sizes, seed, rank. Out: an endless iterator of `Batch`, whose tokens are
int64 [A, B, T] (A micro-batches of B sequences of T tokens). A chunk gives chunk_tokens // T sequences; its remaining
tokens are dropped. Rank r reads the r-th contiguous slice of the global batch. The sequences of a global batch are a
function of seed and position alone (`order`). A thread prefetches steps into a queue. No collectives.

`Loader.state_dict` is the position and a fingerprint of what the order depends on, so that a run resumes exactly.
"""

import queue
import threading
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from xgram_dist.data.dataset import PreparedData
from xgram_dist.data.order import GlobalOrder, Samples
from xgram_dist.errors import UserError, nearest


class Batch(NamedTuple):
    tokens: torch.Tensor  # int64 [micro_batches, micro_batch, T]
    samples: Samples  # source, chunk and sequence of every sequence, in the order of `tokens`


def sequences_per_chunk(data: PreparedData, sequence_length: int) -> int:
    if sequence_length < 1:
        raise UserError(f"sequence length {sequence_length} is not at least 1")
    if sequence_length > data.chunk_tokens:
        raise UserError(
            f"sequence length {sequence_length:,} is longer than a chunk of '{data.folder}' "
            f"({data.chunk_tokens:,} tokens); prepare it with a larger --chunk-tokens"
        )
    packed = data.manifest.sequence_length
    if packed is not None and packed != sequence_length:
        raise UserError(
            f"'{data.folder}' is packed into sequences of {packed:,} tokens, not {sequence_length:,}; set "
            f"model.sequence_length={packed}, or prepare it with --whole-documents {sequence_length}"
        )
    return data.chunk_tokens // sequence_length


def mix_weights(data: PreparedData, weights: Mapping[str, float] | None) -> list[float]:
    """One weight for each source: the given ones, else the manifest's, else the sizes."""
    names = data.source_names
    sizes = [float(sum(chunks)) for chunks in data.shard_chunks]
    if not any(sizes):
        raise UserError(f"'{data.folder}' has no {data.split} chunk; prepare more documents or smaller --chunk-tokens")
    if weights is not None:
        for name in weights:
            if name not in names:
                raise UserError(f"weight for unknown source '{name}'{nearest(name, names)}")
        result = [float(weights.get(name, 0.0)) for name in names]
        for name, weight, size in zip(names, result, sizes, strict=True):
            if weight and not size:
                raise UserError(f"source '{name}' has weight {weight:g} but no {data.split} chunk; give it weight 0")
        return result
    if any(source.weight is None for source in data.manifest.sources):
        return sizes
    result = [
        float(source.weight or 0.0) if size else 0.0 for source, size in zip(data.manifest.sources, sizes, strict=True)
    ]
    return result if any(result) else sizes


def _pin(tokens: torch.Tensor) -> torch.Tensor:
    """In pinned memory where there is a GPU, so that the copy to it is asynchronous."""
    return tokens.pin_memory() if torch.cuda.is_available() else tokens


class _BatchReader:
    """Reads this rank's batch of any step. Holds no reference to the loader, which can thus be garbage collected while
    the prefetch thread runs."""

    def __init__(
        self,
        data: PreparedData,
        order: GlobalOrder,
        length: int,
        first_sequence: int,
        shape: tuple[int, int],
    ):
        self._data, self._order, self._length = data, order, length
        self._first_sequence = first_sequence  # of this rank in the global batch
        self._micro_batches, self._micro_batch = shape
        self._vocabulary = data.manifest.vocabulary

    def __call__(self, position: int) -> Batch:
        """The step that starts at global sequence `position`."""
        count = self._micro_batches * self._micro_batch
        samples = self._order.samples(position + self._first_sequence, count)
        tokens_NT = np.empty((count, self._length), dtype=np.int64)
        for n in range(count):
            start = int(samples.sequence[n]) * self._length
            tokens_NT[n] = self._data.tokens(int(samples.source[n]), int(samples.chunk[n]), start, self._length)
        if tokens_NT.max() >= self._vocabulary:
            raise self._token_error(tokens_NT, samples)
        tokens_ABT = torch.from_numpy(tokens_NT.reshape(self._micro_batches, self._micro_batch, self._length))
        return Batch(_pin(tokens_ABT), samples)

    def _token_error(self, tokens_NT: NDArray[Any], samples: Samples) -> UserError:
        n = int(np.argmax(tokens_NT.max(axis=1) >= self._vocabulary))
        source, chunk = int(samples.source[n]), int(samples.chunk[n])
        return UserError(
            f"token {tokens_NT[n].max()} in source '{self._data.source_names[source]}', shard "
            f"'{self._data.shard_file(source, chunk)}', chunk {chunk}, sequence {samples.sequence[n]} is outside the "
            f"vocabulary of {self._vocabulary:,}: the data was made with another tokenizer"
        )


class Loader:
    """Endless batches of one rank; `position` is the number of global sequences in the batches returned so far."""

    def __init__(
        self,
        data: PreparedData,
        *,
        sequence_length: int,
        global_batch: int,
        micro_batch: int,
        seed: int,
        weights: Mapping[str, float] | None = None,
        rank: int = 0,
        ranks: int = 1,
        prefetch: int = 16,
        vocabulary: int | None = None,
    ):
        forward_batch = ranks * micro_batch
        if min(global_batch, micro_batch, ranks) < 1 or global_batch % forward_batch:
            raise UserError(
                f"global batch {global_batch} is not a multiple of {ranks} ranks x micro-batch {micro_batch}; "
                f"the nearest is {max(1, round(global_batch / max(forward_batch, 1))) * max(forward_batch, 1)}"
            )
        if prefetch < 1:
            raise UserError(f"prefetch {prefetch} is not at least 1")
        if vocabulary is not None and vocabulary < data.manifest.vocabulary:
            raise UserError(
                f"the model's vocabulary {vocabulary:,} is smaller than that of '{data.folder}' "
                f"({data.manifest.vocabulary:,}): they were made for different tokenizers"
            )
        assert 0 <= rank < ranks
        self._data, self._length, self._seed = data, sequence_length, seed
        self._global_batch, self._prefetch = global_batch, prefetch
        self._weights = mix_weights(data, weights)
        order = GlobalOrder(data.shard_chunks, sequences_per_chunk(data, sequence_length), seed, self._weights)
        self._reader = _BatchReader(
            data,
            order,
            sequence_length,
            rank * (global_batch // ranks),
            (global_batch // forward_batch, micro_batch),
        )
        self._prefetcher: _Prefetcher | None = None
        self.position = 0

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._prefetcher is None:
            self._prefetcher = _Prefetcher(self._reader, self.position, self._global_batch, self._prefetch)
        batch = self._prefetcher.get()
        self.position += self._global_batch
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {
            "position": self.position,
            "seed": self._seed,
            "fingerprint": self._data.fingerprint,
            "split": self._data.split,
            "sequence_length": self._length,
            "weights": list(self._weights),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume at the position of `state`. Batch size and ranks may differ; what the order depends on may not."""
        current = self.state_dict()
        if state.get("fingerprint") != current["fingerprint"]:
            raise UserError(
                f"the saved position belongs to another data set (fingerprint {str(state.get('fingerprint'))[:12]}) "
                f"than '{self._data.folder}' ({current['fingerprint'][:12]}); train on the first, or take the weights "
                "alone into a new run with --from PATH --weights-only"
            )
        for key in ("seed", "split", "sequence_length", "weights"):
            if state.get(key) != current[key]:
                raise UserError(
                    f"the saved position was taken with {key} {state.get(key)}, this run has {current[key]}: "
                    "the order of data would differ; set it as before, or take the weights alone into a new run with "
                    "--from PATH --weights-only"
                )
        position = state.get("position")
        if not isinstance(position, int) or position < 0:
            raise UserError(f"the saved position {position!r} is not a number of sequences")
        self.close()
        self.position = position

    def close(self) -> None:
        """Stop the prefetch thread; iterating again starts a new one at `position`."""
        if self._prefetcher is not None:
            self._prefetcher.stop()
            self._prefetcher = None

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_prefetcher", None) is not None:
            self.close()


class _Prefetcher:
    """A thread that keeps the next batches in a queue. Its error is raised by `get`, in place of the batch."""

    def __init__(self, reader: _BatchReader, position: int, global_batch: int, depth: int):
        self._queue: queue.Queue[Batch | BaseException] = queue.Queue(maxsize=depth)
        self._stopped = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=_prefetch,
            args=(reader, position, global_batch, self._queue, self._stopped),
            name="data-prefetch",
            daemon=True,
        )
        self._thread.start()

    def get(self) -> Batch:
        if self._error is not None:
            raise self._error
        item = self._queue.get()
        if isinstance(item, BaseException):
            self._error = item
            raise item
        return item

    def stop(self) -> None:
        self._stopped.set()
        while self._thread.is_alive():
            try:  # make room, since the thread may be blocked in put
                self._queue.get_nowait()
            except queue.Empty:
                self._thread.join(timeout=0.02)


def _prefetch(
    reader: _BatchReader,
    position: int,
    global_batch: int,
    batches: "queue.Queue[Batch | BaseException]",
    stopped: threading.Event,
) -> None:
    try:
        while not stopped.is_set():
            batches.put(reader(position))
            position += global_batch
    except BaseException as error:
        batches.put(error)


def validation_batches(
    data: PreparedData, sequence_length: int, micro_batch: int, max_sequences: int
) -> list[torch.Tensor]:
    """A fixed list of int64 [B, T]: sources in proportion to their size, sequences spread evenly over each source.

    All batches have `micro_batch` sequences; where there are fewer sequences in all, there is one smaller batch.
    """
    per_chunk = sequences_per_chunk(data, sequence_length)
    available = [sum(chunks) * per_chunk for chunks in data.shard_chunks]
    total = min(sum(available), max_sequences)
    if total < 1:
        raise UserError(
            f"'{data.folder}' has no {data.split} sequence; prepare it with a larger --validation "
            "or smaller --chunk-tokens"
        )
    if total >= micro_batch:
        total -= total % micro_batch
    # Largest-remainder method: integers nearest to the sources' shares that add up to the total.
    shares = [total * count / sum(available) for count in available]
    chosen = [int(share) for share in shares]
    for source in sorted(range(len(shares)), key=lambda s: (chosen[s] - shares[s], s))[: total - sum(chosen)]:
        chosen[source] += 1
    sequences_T = []
    for source, count in enumerate(chosen):
        for number in range(count):
            chunk, sequence = divmod(number * available[source] // count, per_chunk)
            sequences_T.append(data.tokens(source, chunk, sequence * sequence_length, sequence_length).astype(np.int64))
    return [
        torch.from_numpy(np.stack(sequences_T[i : i + micro_batch])) for i in range(0, len(sequences_T), micro_batch)
    ]
