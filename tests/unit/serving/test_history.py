"""Tokens before a position are those of its sequence, wherever its slots are."""

import random

import numpy as np

from xgram_dist.serving.history import Slots, TokenHistory

BLOCK, REACH = 4, 3


def test_positions_find_the_tokens_before_them_through_the_block_table() -> None:
    chooser = random.Random(0)
    sequences = [[chooser.randrange(1, 90) for _ in range(n)] for n in (9, 1, 14, 5)]
    blocks = chooser.sample(range(20), 16)
    table = [blocks[4 * n : 4 * n + 4] for n in range(len(sequences))]
    history, done = TokenHistory(None), [0] * len(sequences)
    while any(done[n] < len(sequence) for n, sequence in enumerate(sequences)):
        batch = [n for n, sequence in enumerate(sequences) if done[n] < len(sequence)]
        chooser.shuffle(batch)
        batch = batch[: chooser.randint(1, len(batch))]
        ends = {n: min(len(sequences[n]), done[n] + chooser.randint(1, 5)) for n in batch}
        new = [(n, position) for n in batch for position in range(done[n], ends[n])]
        counts = [ends[n] - done[n] for n in batch]
        padding = 2
        starts = np.array([0, *np.cumsum(counts)], dtype=np.int32)
        of_batch = np.array([table[n] for n in batch], dtype=np.int32)
        slots = np.array([table[n][p // BLOCK] * BLOCK + p % BLOCK for n, p in new])
        positions = np.array([p for _, p in new] + [0] * padding)
        tokens = np.array([sequences[n][p] for n, p in new] + [0] * padding)
        found = history.extend(tokens, Slots.find(positions, starts, of_batch, slots, REACH, BLOCK), REACH, 20 * BLOCK)
        for (n, p), row in zip(new, found, strict=False):
            expected = [sequences[n][p - back] if p >= back else -1 for back in range(REACH + 1)]
            assert row.tolist() == expected
        done = [ends.get(n, done[n]) for n in range(len(sequences))]


def test_tokens_of_earlier_documents_are_none() -> None:
    tokens = np.array([[5, 9, 4, 4], [9, 1, 9, 2], [3, 2, 1, 9]])
    assert TokenHistory(9).within_document(tokens).tolist() == [[5, -1, -1, -1], [9, 1, -1, -1], [3, 2, 1, -1]]
    assert TokenHistory(None).within_document(tokens) is tokens
