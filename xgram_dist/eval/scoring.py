"""Log-likelihoods of continuations: which sequences are computed, in which batches, and by which network.

A `ScoringInput` is a sequence the network reads, with targets: tokens scored at its last positions. Continuations with
the same input (the letters of a multiple choice) share one. Inputs are batched by length, longest first.

Two scorers: `CheckpointScorer` runs the inference network, `EngineScorer` the network of a training run.
Shapes: B inputs, T positions, D model width, N scored positions, E scored tokens.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from xgram_dist.config import Config
from xgram_dist.engine.base import Engine
from xgram_dist.inference.model import Model
from xgram_dist.model.loss import VocabParallelHead
from xgram_dist.tables.working_set import Lookup

LOGIT_POSITIONS = 512
"""Positions whose logits exist at one time; bounds the memory of the head."""


class Score(NamedTuple):
    log_likelihood: float
    greedy: bool
    """Every token of the target is the likeliest at its position."""


@dataclass
class ScoringInput:
    tokens: list[int]
    targets: list[list[int]] = field(default_factory=list)
    """Each has at most as many tokens as the input; its last token follows the input's last."""


class Scorer(Protocol):
    def score(self, inputs: list[ScoringInput]) -> list[list[Score]]:
        """For each input, a score for each of its targets."""


class Continuations:
    """(context, continuation) pairs as scoring inputs, and the way back from scores of inputs to scores of pairs."""

    def __init__(self, pairs: list[tuple[list[int], list[int]]], max_length: int):
        """A pair longer than `max_length` + 1 tokens loses the beginning of its context."""
        inputs: dict[tuple[int, ...], ScoringInput] = {}
        self._targets: list[tuple[tuple[int, ...], int] | None] = []  # input and target of each pair; None: empty
        for context, continuation in pairs:
            if not continuation:
                self._targets.append(None)
                continue
            read = tuple((context + continuation)[-(max_length + 1) : -1])
            shared = inputs.setdefault(read, ScoringInput(list(read)))
            shared.targets.append(continuation[-len(read) :])
            self._targets.append((read, len(shared.targets) - 1))
        self.inputs = sorted(inputs.values(), key=lambda one: (-len(one.tokens), one.tokens))

    def unpack(self, scores: list[list[Score]]) -> list[Score]:
        """Scores of `inputs` as scores of the pairs. An empty continuation has probability 1."""
        of_input = {tuple(one.tokens): of_targets for one, of_targets in zip(self.inputs, scores, strict=True)}
        return [Score(0.0, True) if target is None else of_input[target[0]][target[1]] for target in self._targets]


def batch_inputs(inputs: list[ScoringInput], max_tokens: int) -> list[list[ScoringInput]]:
    """Neighbours batched, within `max_tokens` including padding, or alone. `inputs` are sorted longest first."""
    batches: list[list[ScoringInput]] = []
    for one in inputs:
        if batches and len(batches[-1][0].tokens) * (len(batches[-1]) + 1) <= max_tokens:
            batches[-1].append(one)
        else:
            batches.append([one])
    return batches


def pad_right(sequences: list[list[int]], multiple: int = 1, shortest: int = 1) -> Tensor:
    """[B, T], padded on the right, where a causal network does not look, to a multiple of `multiple`."""
    longest = -(-max(shortest, *(len(one) for one in sequences)) // multiple) * multiple
    return torch.tensor([one + [0] * (longest - len(one)) for one in sequences])


class CheckpointScorer:
    """Scores with the inference network. Only scored positions pass through the head."""

    def __init__(self, model: Model):
        self.model = model

    @torch.inference_mode()
    def score(self, inputs: list[ScoringInput]) -> list[list[Score]]:
        hidden_BTD = self.model.hidden(pad_right([one.tokens for one in inputs]))
        counts = [max(len(target) for target in one.targets) for one in inputs]
        scored = [hidden_BTD[i, len(one.tokens) - counts[i] : len(one.tokens)] for i, one in enumerate(inputs)]
        hidden_ND = torch.cat(scored)
        entries = list(_scored_tokens(inputs, counts))
        likelihood_E = torch.empty(len(entries), dtype=torch.float32)
        greedy_E = torch.empty(len(entries), dtype=torch.bool)
        position_E, token_E = (torch.tensor(column) for column in zip(*entries, strict=True))
        for start in range(0, len(hidden_ND), LOGIT_POSITIONS):
            logits = self.model.logits(hidden_ND[start : start + LOGIT_POSITIONS])
            chosen = (position_E >= start) & (position_E < start + LOGIT_POSITIONS)
            positions, tokens = (position_E[chosen] - start).to(logits.device), token_E[chosen].to(logits.device)
            likelihood_E[chosen] = (logits[positions, tokens] - logits.logsumexp(-1)[positions]).float().cpu()
            greedy_E[chosen] = (logits.argmax(-1)[positions] == tokens).cpu()
        return _sum_over_targets(inputs, likelihood_E, greedy_E)


def _scored_tokens(inputs: list[ScoringInput], counts: list[int]) -> Iterator[tuple[int, int]]:
    """(scored position, token) of every token of every target. `counts`: scored positions of each input."""
    first = 0
    for one, count in zip(inputs, counts, strict=True):
        for target in one.targets:
            for number, token in enumerate(target):
                yield first + count - len(target) + number, token
        first += count


def _sum_over_targets(inputs: list[ScoringInput], likelihood_E: Tensor, greedy_E: Tensor) -> list[list[Score]]:
    sizes = [len(target) for one in inputs for target in one.targets]
    by_target = zip(likelihood_E.split(sizes), greedy_E.split(sizes), strict=True)
    scores = [Score(float(likelihood.sum()), bool(greedy.all())) for likelihood, greedy in by_target]
    ends = torch.tensor([len(one.targets) for one in inputs]).cumsum(0).tolist()
    return [scores[end - len(one.targets) : end] for one, end in zip(inputs, ends, strict=True)]


class EngineScorer:
    """Scores with the network, tables and ranks of a training run. Nothing is gathered or copied.

    A batch goes through the same plan, fetch and forward pass as a batch of validation, on any engine and tensor
    degree, and the head keeps the log-likelihood of each token. Every rank of the data axis must make the same number
    of calls; those that share sequences get the same inputs.
    """

    def __init__(self, config: Config, engine: Engine, lookup: Lookup):
        self._config, self._engine, self._lookup = config, engine, lookup
        self._head: VocabParallelHead | None = engine.model.head
        """None: another stage of the pipeline has it."""
        self._context = engine.model.context
        # Sequences must be long enough to be cut over the ranks.
        sequence = engine.model.axis.sequence_axis.size
        self._multiple = math.lcm(self._context.divisor, self._context.size * sequence)
        self.warmup = 1.0
        """The injection's warm-up factor at the current step."""

    @torch.no_grad()
    def score(self, inputs: list[ScoringInput]) -> list[list[Score]]:
        # The network takes its labels from its tokens: one sequence for each target, with the token that follows.
        sequences = [one.tokens + target[-1:] for one in inputs for target in one.targets]
        tokens_BT = pad_right(sequences, self._multiple, self._context.shortest)
        device = self._engine.device
        working = self._lookup.fetch(self._lookup.plan(tokens_BT, whole=True).result()[0], training=False)
        warmup = torch.tensor(self.warmup, device=device, dtype=torch.float64)
        likelihood_BT, greedy_BT = torch.zeros(tokens_BT.shape), torch.zeros(tokens_BT.shape, dtype=torch.uint8)
        if self._head is not None:
            self._head.keeps_scores = True
        try:
            self._engine.loss(tokens_BT.to(device, non_blocking=True), working.slots, working.values, warmup)
            if self._head is not None:
                assert self._head.scores is not None
                likelihood_BT, is_likeliest_BT = map(self._context.gather_sequence, self._head.scores)
                likelihood_BT, greedy_BT = likelihood_BT.cpu(), is_likeliest_BT.to(torch.uint8).cpu()
        finally:
            if self._head is not None:
                self._head.keeps_scores, self._head.scores = False, None
        for values in (likelihood_BT, greedy_BT):  # of the last stage
            self._engine.mesh.pipeline.host.all_reduce_sum(values)
        scores, sequence = [], 0
        for one in inputs:
            of_input = []
            for target in one.targets:
                span = slice(len(one.tokens) - len(target), len(one.tokens))
                of_input.append(
                    Score(float(likelihood_BT[sequence, span].sum()), bool(greedy_BT[sequence, span].all()))
                )
                sequence += 1
            scores.append(of_input)
        return scores
