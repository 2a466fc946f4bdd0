"""Batches for training: the tokens of this rank for each optimizer step.

In: `PreparedData`, sequence length, batch sizes, seed, rank, stages, skipped ranges. Out: an endless iterator of
`Batch`, whose tokens are int64 [A, B, T] (A micro-batches of B sequences of T tokens). A chunk gives chunk_tokens // T
sequences; its remaining tokens are dropped. Rank r reads the r-th contiguous slice of the global batch. The sequences
of a global batch are a function of seed, stages and position alone (`order`, `stages`). In a stage of shorter sequences
a micro-batch has as many more of them, so that its number of tokens stays. A thread prefetches steps into a queue. No
collectives.

`Loader.state_dict` is the position and a record of what the order depends on, so that a run resumes exactly.
"""

import contextlib
import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from xgram_dist.data.dataset import PreparedData
from xgram_dist.data.order import GlobalOrder, Samples
from xgram_dist.data.stages import (
    Skips,
    Stage,
    StageRequest,
    mix_weights,
    plan_stages,
    sequences_per_chunk,
    used_tokens,
)
from xgram_dist.errors import UserError

__all__ = ["Batch", "Loader", "mix_weights", "sequences_per_chunk", "validation_batches"]


_FETCH_THREADS = 8
_AHEAD_STEPS = 256  # steps before a block of shards is reached, at which it is fetched


class Batch(NamedTuple):
    tokens: torch.Tensor  # int64 [micro_batches, micro_batch, T]
    samples: Samples  # source, chunk and sequence of every sequence, in the order of `tokens`
    data: list[PreparedData]  # the data set of every sequence


_WAYS_OUT = (
    "accept the change from this step on with --accept-data-change, or take the weights alone into a new run with "
    "--from PATH --weights-only"
)


def _saved_stages(state: Mapping[str, Any]) -> tuple[list[Stage], list[Stage]]:
    """Of a checkpoint: the stages as they were read, and as its recipe asked for them."""
    if "stages" in state:
        return [Stage.read(record) for record in state["stages"]], [Stage.read(record) for record in state["asked"]]
    stage = Stage.read({**state, "position": 0})
    return [stage], [stage]


def _pin(tokens: torch.Tensor) -> torch.Tensor:
    """In pinned memory where there is a GPU, so that the copy to it is asynchronous."""
    return tokens.pin_memory() if torch.cuda.is_available() else tokens


class _OpenStage(NamedTuple):
    stage: Stage
    data: PreparedData
    order: GlobalOrder
    end: int | None  # position of the next stage; None: it has no end


class _BatchReader:
    """Reads this rank's batch of any step. Holds no reference to the loader, which can thus be garbage collected while
    the prefetch thread runs."""

    def __init__(
        self,
        stages: Sequence[tuple[Stage, PreparedData]],
        skips: Skips,
        slot_tokens: int,
        global_batch: int,
        first_slot: int,
        shape: tuple[int, int],
    ):
        ends = [stage.position for stage, _ in stages[1:]]
        self._stages = [
            _OpenStage(stage, data, stage.build_order(data), end)
            for (stage, data), end in zip(stages, [*ends, None], strict=True)
        ]
        self._skips, self._slot_tokens, self._global_batch = skips, slot_tokens, global_batch
        self._first_slot = first_slot  # of this rank in the global batch
        self._micro_batches, self._micro_batch = shape

    def next_position(self, position: int) -> int:
        """Where the step after the one at `position` starts."""
        first, length = self._skips.runs(position, self._global_batch)[-1]
        return first + length

    def blocks_ahead(
        self, position: int
    ) -> Iterator[tuple[PreparedData, dict[int, tuple[tuple[int, int], list[int]]]]]:
        """Blocks of shards of remote data, by source, that are read at `position` and some hundred steps later."""
        for ahead in (position, position + _AHEAD_STEPS * self._global_batch):
            stage = next(item for item in self._stages if item.end is None or ahead < item.end)
            if not stage.data.is_remote:
                continue
            per_slot = self._slot_tokens // stage.stage.sequence_length
            blocks = stage.order.blocks_at((ahead - stage.stage.position) * per_slot)
            if ahead == position or stage.data.has_room_for(blocks):
                yield stage.data, blocks

    def check_boundaries(self, position: int) -> None:
        """A step has one sequence length: from `position` on, lengths must change between steps."""
        for before, after in zip(self._stages, self._stages[1:], strict=False):
            start = after.stage.position
            if start <= position or before.stage.sequence_length == after.stage.sequence_length:
                continue
            slots = start - position - self._skips.before(start) + self._skips.before(position)
            if slots % self._global_batch:
                down, tokens = start - slots % self._global_batch, self._slot_tokens
                raise UserError(
                    f"data.stages: the sequence length changes from {before.stage.sequence_length:,} to "
                    f"{after.stage.sequence_length:,} at token {start * tokens:,}, within a step; the steps around it "
                    f"start at {down * tokens:,} and {(down + self._global_batch) * tokens:,}: take one of these as "
                    f"from_tokens"
                )

    def __call__(self, position: int) -> Batch:
        """The step that starts at `position`."""
        rows: list[NDArray[Any]] = []
        parts: list[Samples] = []
        data: list[PreparedData] = []
        for stage, first, count in self._pieces(position):
            length = stage.stage.sequence_length
            per_slot = self._slot_tokens // length
            samples = stage.order.samples((first - stage.stage.position) * per_slot, count * per_slot)
            tokens_NT = np.empty((count * per_slot, length), dtype=np.int64)
            for n in range(len(tokens_NT)):
                start = int(samples.sequence[n]) * length
                tokens_NT[n] = stage.data.tokens(int(samples.source[n]), int(samples.chunk[n]), start, length)
            if tokens_NT.max() >= stage.data.manifest.vocabulary:
                raise _token_error(stage.data, tokens_NT, samples)
            rows.append(tokens_NT)
            parts.append(samples)
            data += [stage.data] * len(tokens_NT)
        assert len({part.shape[1] for part in rows}) == 1, "lengths change between steps"
        tokens_NT = np.concatenate(rows) if len(rows) > 1 else rows[0]
        sequences = self._micro_batch * (self._slot_tokens // tokens_NT.shape[1])
        tokens_ABT = torch.from_numpy(tokens_NT.reshape(self._micro_batches, sequences, -1))
        joined = Samples(
            np.concatenate([part.source for part in parts]),
            np.concatenate([part.chunk for part in parts]),
            np.concatenate([part.sequence for part in parts]),
        )
        return Batch(_pin(tokens_ABT), joined, data)

    def _pieces(self, position: int) -> Iterator[tuple[_OpenStage, int, int]]:
        """This rank's slots of the step: (stage, first slot, number of slots)."""
        count = self._micro_batches * self._micro_batch
        passed = self._skips.runs(position, self._first_slot)[-1:] if self._first_slot else []
        start = sum(passed[0]) if passed else position
        for first, length in self._skips.runs(start, count):
            while length:
                stage = next(item for item in self._stages if item.end is None or first < item.end)
                part = length if stage.end is None else min(length, stage.end - first)
                yield stage, first, part
                first, length = first + part, length - part


def _token_error(data: PreparedData, tokens_NT: NDArray[Any], samples: Samples) -> UserError:
    vocabulary = data.manifest.vocabulary
    n = int(np.argmax(tokens_NT.max(axis=1) >= vocabulary))
    source, chunk = int(samples.source[n]), int(samples.chunk[n])
    return UserError(
        f"token {tokens_NT[n].max()} in source '{data.source_names[source]}', shard "
        f"'{data.shard_file(source, chunk)}', chunk {chunk}, sequence {samples.sequence[n]} is outside the "
        f"vocabulary of {vocabulary:,}: the data was made with another tokenizer"
    )


class Loader:
    """Endless batches of one rank; `position` is that of the next batch (see `stages`)."""

    def __init__(
        self,
        data: PreparedData,
        *,
        sequence_length: int,
        global_batch: int,
        micro_batch: int,
        seed: int,
        weights: Mapping[str, float] | None = None,
        stages: Sequence[StageRequest] = (),
        skip: Sequence[Sequence[int]] = (),
        rank: int = 0,
        ranks: int = 1,
        prefetch: int = 16,
        vocabulary: int | None = None,
    ):
        """`stages`: by rising `from_tokens`; one from token 0 on takes the place of `data` and `weights`."""
        forward_batch = ranks * micro_batch
        if min(global_batch, micro_batch, ranks) < 1 or global_batch % forward_batch:
            raise UserError(
                f"global batch {global_batch} is not a multiple of {ranks} ranks x micro-batch {micro_batch}; "
                f"the nearest is {max(1, round(global_batch / max(forward_batch, 1))) * max(forward_batch, 1)}"
            )
        if prefetch < 1:
            raise UserError(f"prefetch {prefetch} is not at least 1")
        assert 0 <= rank < ranks
        first = [] if stages and stages[0].from_tokens == 0 else [StageRequest(data, sequence_length, weights)]
        self._requests = [*first, *stages]
        for request in self._requests:
            if vocabulary is not None and vocabulary < request.data.manifest.vocabulary:
                raise UserError(
                    f"the model's vocabulary {vocabulary:,} is smaller than that of '{request.data.folder}' "
                    f"({request.data.manifest.vocabulary:,}): they were made for different tokenizers"
                )
            if request.data.manifest.tokenizer_sha256 != data.manifest.tokenizer_sha256:
                raise UserError(
                    f"{request.key}: '{request.data.folder}' was prepared with another tokenizer than '{data.folder}'; "
                    f"prepare both with the same file"
                )
        self._split, self._slot_tokens, self._seed = data.split, sequence_length, seed
        self._global_batch, self._prefetch = global_batch, prefetch
        self._slice = rank * (global_batch // ranks), (global_batch // forward_batch, micro_batch)
        self._skips = Skips(skip)
        self._asked = plan_stages(self._requests, sequence_length, seed)  # as the recipe asks, from the start
        self._stages = self._asked  # as they are read; they differ after an accepted change
        self._prefetcher: _Prefetcher | None = None
        self.position = 0
        self.change: dict[str, Any] | None = None
        """What the recipe changed in the data of a resumed run, for its history."""
        self._open()

    def _open(self) -> None:
        self._reader = _BatchReader(self._stages, self._skips, self._slot_tokens, self._global_batch, *self._slice)
        self._reader.check_boundaries(self.position)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._prefetcher is None:
            self._prefetcher = _Prefetcher(self._reader, self.position, self._prefetch)
        batch = self._prefetcher.get()
        self.position = self._reader.next_position(self.position)
        return batch

    def batch_at(self, position: int) -> Batch:
        """The batch that starts at any position; the loader stays where it is."""
        first = self._stages[0][0].position
        if position < first:
            raise UserError(
                f"position {position:,} lies before {first:,}, where the data of the run was changed; give the recipe "
                f"of that time"
            )
        return self._reader(position)

    def position_of_step(self, step: int) -> int:
        """Where a step starts, if all steps before it had this batch size."""
        before = (step - 1) * self._global_batch
        first, length = self._skips.runs(0, before + 1)[-1]
        return first + length - 1

    def tokens_before(self, position: int) -> int:
        """Tokens trained on when a run is at `position`: without those skipped."""
        return (position - self._skips.before(position)) * self._slot_tokens

    def state_dict(self) -> dict[str, Any]:
        first = self._asked[0][0]
        state: dict[str, Any] = {
            "position": self.position,
            "seed": self._seed,
            "fingerprint": first.fingerprint,
            "split": self._split,
            "sequence_length": self._slot_tokens,
            "weights": list(first.weights),
        }
        plain = len(self._asked) == 1 and first.sequence_length == self._slot_tokens
        if not plain or self._stages is not self._asked:
            state["stages"] = [stage.record() for stage, _ in self._stages]
            state["asked"] = [stage.record() for stage, _ in self._asked]
        if self._skips.ranges:
            state["skip"] = self._skips.ranges
        return state

    def load_state_dict(self, state: Mapping[str, Any], accept_change: bool = False) -> None:
        """Resume at the position of `state`. Batch size and ranks may differ; what the order depends on may not.

        `accept_change`: it may; then the recipe's stages hold from this position on, and sources go on where they were.
        """
        position = state.get("position")
        if not isinstance(position, int) or position < 0:
            raise UserError(f"the saved position {position!r} is not a number of sequences")
        saved, asked = _saved_stages(state)
        difference = self._difference(state, asked)
        self.change = None
        if difference is None:
            data = [data for _, data in self._asked][len(self._asked) - len(saved) :]
            stages = list(zip(saved, data, strict=True)) if saved != [s for s, _ in self._asked] else self._asked
        elif accept_change:
            before = int(state["sequence_length"])
            used = used_tokens(saved, position, before)
            if position * before % self._slot_tokens:
                raise UserError(
                    f"model.sequence_length = {self._slot_tokens:,}: the run stands at token {position * before:,}, "
                    f"which is not a multiple of it; save a checkpoint at a step whose tokens are"
                )
            position = position * before // self._slot_tokens
            stages = plan_stages(self._requests, self._slot_tokens, self._seed, position, used)
            self.change = {
                "position": position,
                "before": [stage.record() for stage in saved],
                "after": [stage.record() for stage, _ in stages],
            }
        else:
            raise difference
        saved_skips = Skips(state.get("skip", ()))
        if difference is None:
            self._skips.check_resumed(saved_skips, position)
        if self._skips.ranges != saved_skips.ranges:
            self.change = {
                **(self.change or {"position": position}),
                "skip_before": saved_skips.ranges,
                "skip_after": self._skips.ranges,
            }
        self.close()
        self.position, self._stages = position, stages
        self._open()

    def _difference(self, state: Mapping[str, Any], saved: list[Stage]) -> UserError | None:
        """The first thing that the order depends on and that is not as it was saved."""
        ours = [stage for stage, _ in self._asked]
        for number, (stage, was) in enumerate(zip(ours, saved, strict=False)):
            if stage.fingerprint != was.fingerprint:
                return UserError(
                    f"the saved position belongs to another data set (fingerprint {was.fingerprint[:12]}) than "
                    f"'{self._asked[number][1].folder}' ({stage.fingerprint[:12]}); train on the first, or {_WAYS_OUT}"
                )
        pairs: list[tuple[str, Any, Any]] = [
            ("split", state.get("split"), self._split),
            ("sequence_length", state.get("sequence_length"), self._slot_tokens),
            ("number of stages", len(saved), len(ours)),
        ]
        for number, (stage, was) in enumerate(zip(ours, saved, strict=False)):
            place = f"data.stages[{number}] " if len(ours) > 1 else ""
            for key, value in was.record().items():
                pairs.append((place + key, value, stage.record()[key]))
        for key, before, now in pairs:
            if before != now:
                return UserError(
                    f"the saved position was taken with {key} {before}, this run has {now}: the order of data would "
                    f"differ; set it as before, or {_WAYS_OUT}"
                )
        return None

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


class _ShardPrefetcher:
    """Threads that fetch shards of remote data before a batch reads them.

    A block of shards is read in random order from its first sequence on, so all of it is fetched when it is reached,
    and the next block some hundred steps before. A fault is left to the batch that reads the shard, which meets it too.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[PreparedData, int, int] | None] = queue.SimpleQueue()
        self._asked: set[tuple[str, int, tuple[int, int]]] = set()
        self._threads: list[threading.Thread] = []

    def ask(self, data: PreparedData, blocks: Mapping[int, tuple[tuple[int, int], list[int]]]) -> None:
        """Fetch the blocks (by source) that were not asked for yet."""
        for source, (block, shards) in blocks.items():
            key = data.fingerprint, source, block
            if key in self._asked:
                continue
            self._asked.add(key)
            for shard in shards:
                self._queue.put((data, source, shard))
        while self._asked and len(self._threads) < _FETCH_THREADS:
            thread = threading.Thread(target=_fetch_shards, args=(self._queue,), name="shard-prefetch", daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        """Fetches under way end by themselves; those that wait are given up."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._queue.get_nowait()
        for _ in self._threads:
            self._queue.put(None)


def _fetch_shards(shards: "queue.SimpleQueue[tuple[PreparedData, int, int] | None]") -> None:
    while (item := shards.get()) is not None:
        data, source, shard = item
        with contextlib.suppress(Exception):
            data.provide(source, shard)


class _Prefetcher:
    """A thread that keeps the next batches in a queue. Its error is raised by `get`, in place of the batch."""

    def __init__(self, reader: _BatchReader, position: int, depth: int):
        self._queue: queue.Queue[Batch | BaseException] = queue.Queue(maxsize=depth)
        self._stopped = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=_prefetch,
            args=(reader, position, self._queue, self._stopped),
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
    batches: "queue.Queue[Batch | BaseException]",
    stopped: threading.Event,
) -> None:
    shards = _ShardPrefetcher()
    try:
        while not stopped.is_set():
            for data, blocks in reader.blocks_ahead(position):
                shards.ask(data, blocks)
            batches.put(reader(position))
            position = reader.next_position(position)
    except BaseException as error:
        batches.put(error)
    finally:
        shards.stop()


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
