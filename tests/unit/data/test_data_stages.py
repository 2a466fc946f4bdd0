"""Stages and skips: every sequence is a function of the position, whatever ranks, batch sizes and interruptions."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_helpers import jsonl, make_texts, read_back, write_packed
from hypothesis import given, settings
from hypothesis import strategies as st

from xgram_dist.data.dataset import PreparedData
from xgram_dist.data.loader import Loader
from xgram_dist.data.prepare import Request, Source, prepare
from xgram_dist.data.stages import Skips, StageRequest
from xgram_dist.data.train_bpe import train_bpe
from xgram_dist.errors import UserError

BATCH: dict[str, Any] = {"sequence_length": 16, "global_batch": 8, "micro_batch": 2, "seed": 5}
SLOT, STEP = 16, 8 * 16  # tokens


def rows(loader: Loader, steps: int) -> list[list[list[int]]]:
    """For each step, its sequences."""
    return [(b := next(loader)).tokens.reshape(-1, b.tokens.shape[-1]).tolist() for _ in range(steps)]


def staged(data: PreparedData) -> list[StageRequest]:
    return [
        StageRequest(data, 16, {"small": 1.0}, 3 * STEP + 2 * SLOT, "data.stages[0]"),
        StageRequest(data, 16, {"large": 0.5, "small": 0.5}, 6 * STEP, "data.stages[1]"),
        StageRequest(data, 8, None, 9 * STEP, "data.stages[2]"),
    ]


def test_a_stage_has_its_weights_and_length_from_its_token_on(mixed: Path) -> None:
    data = PreparedData.open(mixed)
    small = {tuple(row) for chunk in read_back(mixed, "train", "small") for row in chunk.reshape(-1, 16).tolist()}
    with Loader(data, **BATCH, stages=staged(data)) as loader, Loader(data, **BATCH) as plain:
        before = rows(plain, 4)
        steps = rows(loader, 12)
        assert steps[:3] == before[:3]
        assert steps[3][:2] == before[3][:2]
        assert all(tuple(row) in small for step in [steps[3][2:], *steps[4:6]] for row in step)
        shares = Counter(tuple(row) in small for step in steps[6:9] for row in step)
        assert shares == {True: 12, False: 12}
        assert [np.shape(step) for step in steps[8:]] == [(8, 16), (16, 8), (16, 8), (16, 8)]
        assert loader.tokens_before(loader.position) == 12 * STEP
        loader.close()
        assert next(loader).tokens.shape == (4, 4, 8)


def test_a_change_of_weights_repeats_no_sequence_of_an_epoch(mixed: Path) -> None:
    data = PreparedData.open(mixed)
    stages = [StageRequest(data, 16, {"middle": 0.9, "large": 0.1}, 5 * STEP, "data.stages[0]")]
    seen: Counter[tuple[int, int, int]] = Counter()
    size = sum(data.shard_chunks[1]) * 4
    with Loader(data, **BATCH, stages=stages, weights={"middle": 0.5, "large": 0.5}) as loader:
        while sum(count for (source, *_), count in seen.items() if source == 1) < size - 8:
            samples = next(loader).samples
            seen.update(zip(samples.source.tolist(), samples.chunk.tolist(), samples.sequence.tolist(), strict=True))
    assert max(count for (source, *_), count in seen.items() if source == 1) == 1


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 11), st.sampled_from([1, 2, 4]), st.booleans())
def test_interrupted_and_on_other_ranks_stages_and_skips_give_the_same_rest(
    mixed: Path, taken: int, ranks: int, skip: bool
) -> None:
    data = PreparedData.open(mixed)
    words: dict[str, Any] = {**BATCH, "stages": staged(data), "skip": [[3, 7], [30, 42]] if skip else []}
    with Loader(data, **words) as whole:
        expected = rows(whole, 14)
    with Loader(data, **words) as first:
        assert rows(first, taken) == expected[:taken]
        state = json.loads(json.dumps(first.state_dict()))
    parts = [Loader(data, **words, rank=rank, ranks=ranks) for rank in range(ranks)]
    for part in parts:
        part.load_state_dict(state)
    for step in range(taken, 14):
        assert [row for part in parts for row in rows(part, 1)[0]] == expected[step]
    for part in parts:
        part.close()


def test_skipped_positions_are_left_out_and_the_others_stay(mixed: Path) -> None:
    data = PreparedData.open(mixed)
    with Loader(data, **BATCH) as plain:
        everything = [row for step in rows(plain, 10) for row in step]
    with Loader(data, **BATCH, skip=[[10, 13], [20, 40], [12, 15]]) as loader:
        kept = [row for step in rows(loader, 6) for row in step]
        assert loader.tokens_before(loader.position) == 6 * STEP
        assert loader.position == 6 * 8 + 5 + 20
    assert kept == [row for n, row in enumerate(everything) if not (10 <= n < 15 or 20 <= n < 40)][:48]


def test_a_skip_may_be_added_ahead_of_a_checkpoint_and_not_behind_it(mixed: Path) -> None:
    data = PreparedData.open(mixed)
    with Loader(data, **BATCH) as loader:
        rows(loader, 2)
        state = loader.state_dict()
        rest = [row for step in rows(loader, 4) for row in step]
    with Loader(data, **BATCH, skip=[[24, 32]]) as ahead:
        ahead.load_state_dict(state)
        assert ahead.change == {"position": 16, "skip_before": [], "skip_after": [[24, 32]]}
        assert [row for step in rows(ahead, 3) for row in step] == rest[:8] + rest[16:]
    with Loader(data, **BATCH, skip=[[8, 32]]) as behind, pytest.raises(UserError, match=r"below position 16.*--from"):
        behind.load_state_dict(state)


def test_another_mix_is_refused_unless_accepted_and_then_resumes_exactly(mixed: Path) -> None:
    data = PreparedData.open(mixed)
    with Loader(data, **BATCH) as loader:
        seen = next(loader), next(loader)
        state = loader.state_dict()
    words: dict[str, Any] = {**BATCH, "weights": {"large": 0.2, "small": 0.8}}
    with Loader(data, **words) as refused, pytest.raises(UserError, match=r"weights .*--accept-data-change"):
        refused.load_state_dict(state)
    with Loader(data, **words) as changed:
        changed.load_state_dict(state, accept_change=True)
        assert changed.change is not None
        assert changed.change["after"][0]["weights"] == [0.2, 0.0, 0.8]
        batches = [next(changed) for _ in range(3)]
        large = [
            (b.samples.chunk[b.samples.source == 0], b.samples.sequence[b.samples.source == 0])
            for b in (*seen, *batches)
        ]
        drawn = [pair for chunk, sequence in large for pair in zip(chunk.tolist(), sequence.tolist(), strict=True)]
        assert len(set(drawn)) == len(drawn)  # the source went on where it was
        saved = json.loads(json.dumps(changed.state_dict()))
        expected = rows(changed, 3)
    with Loader(data, **words) as again:
        again.load_state_dict(saved)  # without the flag: it is the run's own recipe now
        assert again.change is None
        assert rows(again, 3) == expected
    with Loader(data, **BATCH) as back, pytest.raises(UserError, match="--accept-data-change"):
        back.load_state_dict(saved)


def test_another_data_set_in_a_stage(mixed: Path, tmp_path: Path, bpe: Path) -> None:
    write_packed(tmp_path / "raw" / "a.jsonl", jsonl(make_texts(400, 77)))
    sources = (Source("new", tmp_path / "raw"),)
    prepare(Request(out=tmp_path / "new", workers=1, sources=sources, tokenizer=bpe, chunk_tokens=32, validation=0.0))
    data, new = PreparedData.open(mixed), PreparedData.open(tmp_path / "new")
    written = {
        tuple(row) for chunk in read_back(tmp_path / "new", "train", "new") for row in chunk.reshape(2, 16).tolist()
    }
    with Loader(data, **BATCH, stages=[StageRequest(new, 16, None, 2 * STEP, "data.stages[0]")]) as loader:
        steps = rows(loader, 4)
        state = loader.state_dict()
        rest = rows(loader, 2)
    assert [all(tuple(row) in written for row in step) for step in steps] == [False, False, True, True]
    with Loader(data, **BATCH, stages=[StageRequest(new, 16, None, 2 * STEP, "data.stages[0]")]) as again:
        again.load_state_dict(state)
        assert rows(again, 2) == rest
    other = train_bpe(make_texts(300, 9), 330, tmp_path / "other.json")
    prepare(Request(out=tmp_path / "odd", workers=1, sources=sources, tokenizer=other, chunk_tokens=32, validation=0.0))
    with pytest.raises(UserError, match=r"data.stages\[0\].*another tokenizer"):
        Loader(
            data, **BATCH, stages=[StageRequest(PreparedData.open(tmp_path / "odd"), 16, None, STEP, "data.stages[0]")]
        )


@pytest.mark.parametrize(
    ("length", "tokens", "words"),
    [
        (32, STEP, r"data.stages\[0\].sequence_length = 32 does not divide model.sequence_length = 16"),
        (6, STEP, "does not divide"),
        (16, STEP + 3, "from_tokens = 131 is not a multiple .* 128 and 144"),
        (8, STEP + SLOT, "within a step; .* 128 and 256"),
    ],
)
def test_stages_that_do_not_fit_are_sentences(mixed: Path, length: int, tokens: int, words: str) -> None:
    data = PreparedData.open(mixed)
    with pytest.raises(UserError, match=words):
        Loader(data, **BATCH, stages=[StageRequest(data, length, None, tokens, "data.stages[0]")])


def test_ranges_that_are_none_are_refused() -> None:
    for ranges in ([[3, 3]], [[5, 2]], [[-1, 4]], [[1, 2, 3]]):
        with pytest.raises(UserError, match=r"data\.skip"):
            Skips(ranges)
