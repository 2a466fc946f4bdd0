"""Batches for training: a prepared data set to one optimizer step's tokens for this rank.

In: `PreparedData`, sequence length, batch sizes, seed, rank. Out: an endless iterator of `Batch`, whose tokens are
int64 [micro_batches, micro_batch, T]. A chunk gives chunk_tokens // T sequences and its rest is dropped. Rank r
takes the contiguous slice r of the global batch; which sequences the global batch holds is a function of seed and
position alone (see `order`). A thread reads ahead into a queue. No collective runs.
"""

import queue
import threading
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from xgram_dist.data.dataset import PreparedData
from xgram_dist.data.order import GlobalOrder, Places
from xgram_dist.errors import UserError, nearest


class Batch(NamedTuple):
    tokens: torch.Tensor  # int64 [micro_batches, micro_batch, T]
    samples: Places  # source, chunk and sequence of every row, in the order of the rows


def sequences_per_chunk(data: PreparedData, sequence_length: int) -> int:
    if sequence_length < 1:
        raise UserError(f"sequence length {sequence_length} is not at least 1")
    if sequence_length > data.chunk_tokens:
        raise UserError(
            f"sequence length {sequence_length:,} is longer than a chunk of '{data.folder}' "
            f"({data.chunk_tokens:,} tokens); prepare it with a larger --chunk-tokens"
        )
    return data.chunk_tokens // sequence_length


def mix_weights(data: PreparedData, weights: Mapping[str, float] | None) -> list[float]:
    """One weight a source: as given, else of the manifest, else by size."""
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


def _ready_for_device(tokens: torch.Tensor) -> torch.Tensor:
    """Pinned where there is a device to copy to: the one line here that knows of devices."""
    return tokens.pin_memory() if torch.cuda.is_available() else tokens


class _StepReader:
    """This rank's batch of any step: what the thread needs, and nothing that would keep a forgotten loader alive."""

    def __init__(
        self,
        data: PreparedData,
        order: GlobalOrder,
        length: int,
        first_row: int,
        shape: tuple[int, int],
    ):
        self._data, self._order, self._length = data, order, length
        self._first_row = first_row
        self._micro_batches, self._micro_batch = shape
        self._vocabulary = data.manifest.vocabulary

    def __call__(self, position: int) -> Batch:
        """The step that starts at global sequence `position`."""
        count = self._micro_batches * self._micro_batch
        places = self._order.places(position + self._first_row, count)
        rows = np.empty((count, self._length), dtype=np.int64)
        for row in range(count):
            start = int(places.sequence[row]) * self._length
            rows[row] = self._data.tokens(int(places.source[row]), int(places.chunk[row]), start, self._length)
        if rows.max() >= self._vocabulary:
            raise self._wrong_token(rows, places)
        tokens = torch.from_numpy(rows.reshape(self._micro_batches, self._micro_batch, self._length))
        return Batch(_ready_for_device(tokens), places)

    def _wrong_token(self, rows: NDArray[Any], places: Places) -> UserError:
        row = int(np.argmax(rows.max(axis=1) >= self._vocabulary))
        source, chunk = int(places.source[row]), int(places.chunk[row])
        return UserError(
            f"token {rows[row].max()} in source '{self._data.source_names[source]}', shard "
            f"'{self._data.shard_file(source, chunk)}', chunk {chunk}, sequence {places.sequence[row]} is outside the "
            f"vocabulary of {self._vocabulary:,}: the data was made with another tokenizer"
        )


class Loader:
    """Endless batches of one rank; `position` counts the global sequences in the steps handed out."""

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
        unit = ranks * micro_batch
        if min(global_batch, micro_batch, ranks) < 1 or global_batch % unit:
            raise UserError(
                f"global batch {global_batch} is not a multiple of {ranks} ranks x micro-batch {micro_batch}; "
                f"the nearest is {max(1, round(global_batch / max(unit, 1))) * max(unit, 1)}"
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
        self._read_step = _StepReader(
            data,
            order,
            sequence_length,
            rank * (global_batch // ranks),
            (global_batch // unit, micro_batch),
        )
        self._ahead: _ReadAhead | None = None
        self.position = 0

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._ahead is None:
            self._ahead = _ReadAhead(self._read_step, self.position, self._global_batch, self._prefetch)
        batch = self._ahead.get()
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
        """Continue exactly where `state` was taken; batch size and ranks may differ, the order's inputs may not."""
        mine = self.state_dict()
        if state.get("fingerprint") != mine["fingerprint"]:
            raise UserError(
                f"the saved position belongs to another data set (fingerprint {str(state.get('fingerprint'))[:12]}) "
                f"than '{self._data.folder}' ({mine['fingerprint'][:12]}); train on the first, or take the weights "
                "alone into a new run with --from PATH --weights-only"
            )
        for key in ("seed", "split", "sequence_length", "weights"):
            if state.get(key) != mine[key]:
                raise UserError(
                    f"the saved position was taken with {key} {state.get(key)}, this run has {mine[key]}: "
                    "the order of data would differ; set it as before, or take the weights alone into a new run with "
                    "--from PATH --weights-only"
                )
        position = state.get("position")
        if not isinstance(position, int) or position < 0:
            raise UserError(f"the saved position {position!r} is not a number of sequences")
        self.close()
        self.position = position

    def close(self) -> None:
        """End the reading thread; iterating again starts a new one at `position`."""
        if self._ahead is not None:
            self._ahead.stop()
            self._ahead = None

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_ahead", None) is not None:
            self.close()


class _ReadAhead:
    """A thread that keeps the next steps in a queue; its error is raised where the step would have been."""

    def __init__(self, read: _StepReader, position: int, step: int, depth: int):
        self._queue: queue.Queue[Batch | BaseException] = queue.Queue(maxsize=depth)
        self._stopped = threading.Event()
        self._failed: BaseException | None = None
        self._thread = threading.Thread(
            target=_fill,
            args=(read, position, step, self._queue, self._stopped),
            name="data-prefetch",
            daemon=True,
        )
        self._thread.start()

    def get(self) -> Batch:
        if self._failed is not None:
            raise self._failed
        item = self._queue.get()
        if isinstance(item, BaseException):
            self._failed = item
            raise item
        return item

    def stop(self) -> None:
        self._stopped.set()
        while self._thread.is_alive():
            try:  # make room: the thread may be waiting to put
                self._queue.get_nowait()
            except queue.Empty:
                self._thread.join(timeout=0.02)


def _fill(
    read: _StepReader,
    position: int,
    step: int,
    target: "queue.Queue[Batch | BaseException]",
    stopped: threading.Event,
) -> None:
    try:
        while not stopped.is_set():
            target.put(read(position))
            position += step
    except BaseException as error:
        target.put(error)


def validation_batches(
    data: PreparedData, sequence_length: int, micro_batch: int, max_sequences: int
) -> list[torch.Tensor]:
    """A fixed list of int64 [micro_batch, T]: sources by size, spread evenly over each; one smaller batch when there
    are fewer sequences than that."""
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
    # Largest remainder: whole numbers that add up to the total and are nearest to the sources' shares.
    shares = [total * count / sum(available) for count in available]
    chosen = [int(share) for share in shares]
    for source in sorted(range(len(shares)), key=lambda s: (chosen[s] - shares[s], s))[: total - sum(chosen)]:
        chosen[source] += 1
    rows = []
    for source, count in enumerate(chosen):
        for number in range(count):
            place = number * available[source] // count
            chunk, sequence = divmod(place, per_chunk)
            rows.append(data.tokens(source, chunk, sequence * sequence_length, sequence_length).astype(np.int64))
    return [torch.from_numpy(np.stack(rows[i : i + micro_batch])) for i in range(0, len(rows), micro_batch)]
