"""Stages of a run's data: from which position on which mix of which data set is read, at which sequence length.

A position counts slots of `model.sequence_length` tokens from the start of the run, skipped ones included. A stage
begins at a position and ends where the next begins. Its slots hold one sequence, or several shorter ones. Which
sequences a slot holds is a function of the stages and its position alone.

A source goes on where earlier stages of the same data set left it (`first_draws`), so a change of weights repeats no
sequence of an epoch. After a change of sequence length it goes on with the same number of tokens used.

`data.skip` names ranges of positions that are passed over; `Skips` gives the positions that are not.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xgram_dist.data import order
from xgram_dist.data.dataset import PreparedData
from xgram_dist.data.order import GlobalOrder, SourceMix
from xgram_dist.errors import UserError, nearest
from xgram_dist.untrusted import shown

Used = dict[tuple[str, int], int]
"""Tokens used so far, by fingerprint of the data set and number of the source in it."""


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


@dataclass(frozen=True)
class StageRequest:
    """A stage as the recipe asks for it."""

    data: PreparedData
    sequence_length: int
    weights: Mapping[str, float] | None = None
    from_tokens: int = 0
    key: str = "data"  # of the recipe, for messages


@dataclass(frozen=True)
class Stage:
    """What the order of one stage depends on; the part of it that a checkpoint records."""

    position: int  # its first slot
    seed: int
    fingerprint: str
    sequence_length: int
    weights: tuple[float, ...]
    first_draws: tuple[int, ...]  # of every source

    def record(self) -> dict[str, Any]:
        return {
            "position": self.position,
            "seed": self.seed,
            "fingerprint": self.fingerprint,
            "sequence_length": self.sequence_length,
            "weights": list(self.weights),
            "first_draws": list(self.first_draws),
        }

    @staticmethod
    def read(record: Any) -> "Stage":
        try:
            return Stage(
                int(record["position"]),
                int(record["seed"]),
                str(record["fingerprint"]),
                int(record["sequence_length"]),
                tuple(float(weight) for weight in record["weights"]),
                tuple(int(draws) for draws in record.get("first_draws") or [0] * len(record["weights"])),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(f"the saved stages of the data are damaged: {shown(str(error))}") from None

    def build_order(self, data: PreparedData) -> GlobalOrder:
        per_chunk = sequences_per_chunk(data, self.sequence_length)
        block = order.BLOCK_CHUNKS
        return GlobalOrder(data.shard_chunks, per_chunk, self.seed, self.weights, block, self.first_draws)


def plan_stages(
    requests: Sequence[StageRequest], slot_tokens: int, seed: int, start: int = 0, used: Used | None = None
) -> list[tuple[Stage, PreparedData]]:
    """The stages from position `start` on; `used`: tokens that the run has used before it.

    `slot_tokens`: of a slot, `model.sequence_length`. The first request begins at token 0.
    """
    assert requests
    assert requests[0].from_tokens == 0
    used = dict(used or {})
    positions = [_stage_position(number, request, requests, slot_tokens) for number, request in enumerate(requests)]
    planned: list[tuple[Stage, PreparedData]] = []
    for number, (request, position) in enumerate(zip(requests, positions, strict=True)):
        end = positions[number + 1] if number + 1 < len(requests) else None
        if end is not None and end <= start:
            continue
        data, length = request.data, request.sequence_length
        sequences_per_chunk(data, length)
        draws = tuple(-(-used.get((data.fingerprint, i), 0) // length) for i in range(len(data.source_names)))
        weights = tuple(mix_weights(data, request.weights))
        stage = Stage(max(position, start), seed, data.fingerprint, length, weights, draws)
        planned.append((stage, data))
        if end is not None:
            _add_use(used, stage, end, slot_tokens)
    return planned


def used_tokens(stages: Sequence[Stage], position: int, slot_tokens: int) -> Used:
    """What stages have used of every source when a run is at `position`."""
    used: Used = {}
    for stage in stages:
        for source, draws in enumerate(stage.first_draws):
            key = stage.fingerprint, source
            used[key] = max(used.get(key, 0), draws * stage.sequence_length)
    for stage, after in zip(stages, [*stages[1:], None], strict=True):
        end = position if after is None else min(position, after.position)
        if end > stage.position:
            _add_use(used, stage, end, slot_tokens)
    return used


def _add_use(used: Used, stage: Stage, end: int, slot_tokens: int) -> None:
    mix = SourceMix(stage.weights, stage.seed)
    count = (end - stage.position) * (slot_tokens // stage.sequence_length)
    for source, first in enumerate(stage.first_draws):
        draws = first + mix.draws_before(count, source)
        used[stage.fingerprint, source] = draws * stage.sequence_length


def _stage_position(number: int, request: StageRequest, requests: Sequence[StageRequest], slot_tokens: int) -> int:
    key, length, tokens = request.key, request.sequence_length, request.from_tokens
    if length > slot_tokens or slot_tokens % length:
        raise UserError(
            f"{key}.sequence_length = {length:,} does not divide model.sequence_length = {slot_tokens:,}; a step keeps "
            f"its number of tokens, and model.sequence_length is the longest of all stages"
        )
    if number and tokens <= requests[number - 1].from_tokens:
        raise UserError(
            f"{key}.from_tokens = {tokens:,} is not above the {requests[number - 1].from_tokens:,} tokens at which the "
            f"stage before it begins; order the stages by from_tokens"
        )
    if tokens % slot_tokens:
        down = tokens // slot_tokens * slot_tokens
        raise UserError(
            f"{key}.from_tokens = {tokens:,} is not a multiple of model.sequence_length = {slot_tokens:,}; the nearest "
            f"are {down:,} and {down + slot_tokens:,}"
        )
    return tokens // slot_tokens


class Skips:
    """Positions that are passed over: sorted ranges [first, last) that do not touch."""

    def __init__(self, ranges: Sequence[Sequence[int]] = ()):
        merged: list[list[int]] = []
        for item in sorted(list(pair) for pair in ranges):
            if len(item) != 2 or not 0 <= item[0] < item[1]:
                raise UserError(f"data.skip: {item} is not a range [A, B] of positions with 0 <= A < B")
            if merged and item[0] <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], item[1])
            else:
                merged.append(item)
        self.ranges = merged

    def before(self, position: int) -> int:
        """How many positions below `position` are passed over."""
        return sum(max(0, min(last, position) - first) for first, last in self.ranges)

    def runs(self, position: int, count: int) -> list[tuple[int, int]]:
        """The next `count` positions that are not passed over, as runs (first, length)."""
        runs = []
        for first, last in self.ranges:
            if not count:
                break
            if position < first:
                length = min(count, first - position)
                runs.append((position, length))
                count -= length
                position += length
            if first <= position < last:
                position = last
        if count:
            runs.append((position, count))
        return runs

    def check_resumed(self, saved: "Skips", position: int) -> None:
        """A run that resumes at `position` with `saved` skips: new ranges must lie ahead of it."""
        behind = [[[first, min(last, position)] for first, last in s.ranges if first < position] for s in (saved, self)]
        if behind[0] != behind[1]:
            raise UserError(
                f"data.skip = {self.ranges} differs from the run's {saved.ranges} below position {position:,}, up to "
                f"which it has trained; name ranges from there on, or resume from an earlier checkpoint with --from"
            )
