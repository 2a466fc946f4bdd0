"""Log-likelihoods of continuations: which rows are computed, in which batches, and by whom.

A row is what the network reads; its targets are the tokens that are scored at its last positions. Continuations that
share what is read (the letters of a multiple choice) share a row. Rows are batched by length, longest first.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from xgram_dist.inference.open import Model

POSITIONS_AT_ONCE = 512
"""Whose logits exist at one time."""


class Score(NamedTuple):
    log_likelihood: float
    greedy: bool
    """Every token is the likeliest."""


@dataclass
class Row:
    tokens: list[int]
    targets: list[list[int]] = field(default_factory=list)
    """Each of at most as many tokens as the row; its last token is what follows the row."""


class Scorer(Protocol):
    def score(self, rows: list[Row]) -> list[list[Score]]:
        """For each row, a score for each of its targets."""


class Rows:
    """Continuations as rows, and the way back."""

    def __init__(self, pairs: list[tuple[list[int], list[int]]], context: int):
        """`pairs`: context and continuation; the context is cut at its left where both are too long."""
        found: dict[tuple[int, ...], Row] = {}
        self._place: list[tuple[tuple[int, ...], int] | None] = []
        for before, after in pairs:
            if not after:
                self._place.append(None)
                continue
            read = tuple((before + after)[-(context + 1) : -1])
            row = found.setdefault(read, Row(list(read)))
            row.targets.append(after[-len(read) :])
            self._place.append((read, len(row.targets) - 1))
        self.rows = sorted(found.values(), key=lambda row: (-len(row.tokens), row.tokens))

    def gather(self, scores: list[list[Score]]) -> list[Score]:
        """Scores of the rows as scores of the pairs; nothing is certain, and likeliest."""
        by_row = {tuple(row.tokens): found for row, found in zip(self.rows, scores, strict=True)}
        return [Score(0.0, True) if place is None else by_row[place[0]][place[1]] for place in self._place]


def batches(rows: list[Row], tokens: int) -> list[list[Row]]:
    """Neighbours together, as many as keep a batch within `tokens`, padding included; at least one."""
    found: list[list[Row]] = []
    for row in rows:
        if found and len(found[-1][0].tokens) * (len(found[-1]) + 1) <= tokens:
            found[-1].append(row)
        else:
            found.append([row])
    return found


def padded(rows: list[list[int]], multiple: int = 1) -> Tensor:
    """[B, T], filled up at the right, where a causal network does not look."""
    longest = -(-max(len(row) for row in rows) // multiple) * multiple
    return torch.tensor([row + [0] * (longest - len(row)) for row in rows])


class CheckpointScorer:
    """Through the inference network. Only positions that are scored meet the head."""

    def __init__(self, model: Model):
        self.model = model

    @torch.inference_mode()
    def score(self, rows: list[Row]) -> list[list[Score]]:
        hidden_BTD = self.model.hidden(padded([row.tokens for row in rows]))
        counts = [max(len(target) for target in row.targets) for row in rows]
        picked = [hidden_BTD[i, len(row.tokens) - counts[i] : len(row.tokens)] for i, row in enumerate(rows)]
        positions_ND = torch.cat(picked)
        entries = list(_entries(rows, counts))
        likelihood = torch.empty(len(entries), dtype=torch.float32)
        greedy = torch.empty(len(entries), dtype=torch.bool)
        position_E, token_E = (torch.tensor(column) for column in zip(*entries, strict=True))
        for start in range(0, len(positions_ND), POSITIONS_AT_ONCE):
            logits = self.model.logits(positions_ND[start : start + POSITIONS_AT_ONCE])
            here = (position_E >= start) & (position_E < start + POSITIONS_AT_ONCE)
            at, wanted = (position_E[here] - start).to(logits.device), token_E[here].to(logits.device)
            likelihood[here] = (logits[at, wanted] - logits.logsumexp(-1)[at]).float().cpu()
            greedy[here] = (logits.argmax(-1)[at] == wanted).cpu()
        return _collect(rows, likelihood, greedy)


def _entries(rows: list[Row], counts: list[int]) -> Iterator[tuple[int, int]]:
    """(scored position, token) of every token of every target."""
    first = 0
    for row, count in zip(rows, counts, strict=True):
        for target in row.targets:
            for number, token in enumerate(target):
                yield first + count - len(target) + number, token
        first += count


def _collect(rows: list[Row], likelihood: Tensor, greedy: Tensor) -> list[list[Score]]:
    sizes = [len(target) for row in rows for target in row.targets]
    of_targets = zip(likelihood.split(sizes), greedy.split(sizes), strict=True)
    made = [Score(float(sums.sum()), bool(each.all())) for sums, each in of_targets]
    ends = torch.tensor([len(row.targets) for row in rows]).cumsum(0).tolist()
    return [made[end - len(row.targets) : end] for row, end in zip(rows, ends, strict=True)]
