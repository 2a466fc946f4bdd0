"""Autoregressive generation: prompts of any lengths as one batch, padded on the left; streaming text."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from xgram_dist.data.tokenizer import Tokenizer
from xgram_dist.errors import UserError
from xgram_dist.inference.hf.decoder import Cache
from xgram_dist.inference.model import Model

REPLACEMENT = "�"


@dataclass(frozen=True)
class Sampling:
    temperature: float = 0.0
    """0: greedy, always the most likely token."""
    top_p: float = 1.0
    """Sample among the most likely tokens that together reach this probability."""


GREEDY = Sampling()


def generate(
    model: Model,
    prompts: list[list[int]],
    max_tokens: int,
    sampling: Sampling = GREEDY,
    generator: torch.Generator | None = None,
) -> Iterator[list[int]]:
    """Yield the next token of every prompt, step by step, until `max_tokens` or the end of the context."""
    longest = max(len(prompt) for prompt in prompts)
    check_prompt(longest, model.context)
    tokens_BT = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    real = None
    if any(len(prompt) < longest for prompt in prompts):
        missing = torch.tensor([longest - len(prompt) for prompt in prompts])
        real = torch.arange(longest) >= missing[:, None]
    cache = Cache()
    for _ in range(min(max_tokens, model.context - longest)):
        logits_BV = model.logits(model.hidden(tokens_BT, cache, real)[:, -1])
        tokens_BT = sample(logits_BV, sampling, generator)[:, None].cpu()
        yield tokens_BT[:, 0].tolist()
        if real is not None:
            real = torch.nn.functional.pad(real, (0, 1), value=True)


def check_prompt(length: int, context: int) -> None:
    if length < 1:
        raise UserError("the prompt is empty; give at least one token")
    if length >= context:
        raise UserError(
            f"the prompt has {length:,} tokens, but the model's context is {context:,} and has to hold the generated "
            f"tokens too; give at most {context - 1:,}"
        )


def sample(logits_BV: Tensor, sampling: Sampling, generator: torch.Generator | None) -> Tensor:
    """Sample one token for each row [B]."""
    if sampling.temperature == 0:
        return logits_BV.argmax(-1)
    probabilities = torch.softmax(logits_BV / sampling.temperature, -1)
    if sampling.top_p < 1:
        ordered, index = probabilities.sort(-1, descending=True)
        before = ordered.cumsum(-1) - ordered
        ordered[before >= sampling.top_p] = 0  # the most likely token always stays
        probabilities = torch.zeros_like(probabilities).scatter_(-1, index, ordered)
    return torch.multinomial(probabilities, 1, generator=generator)[:, 0]


class TextStream:
    """Tokens in, text out as soon as its characters are complete."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._shown = self._context = 0

    def add(self, token: int) -> str:
        """The text that this token completes. Tokens before it are decoded with it, because spaces depend on them."""
        self._tokens.append(token)
        before = self._tokenizer.decode(self._tokens[self._context : self._shown])
        with_new = self._tokenizer.decode(self._tokens[self._context :])
        if with_new.endswith(REPLACEMENT) or len(with_new) <= len(before):
            return ""
        self._context, self._shown = self._shown, len(self._tokens)
        return with_new[len(before) :]
