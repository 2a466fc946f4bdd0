"""lm-evaluation-harness on our networks: its model API, and a run of its evaluator.

`HarnessModel` implements loglikelihood, loglikelihood_rolling and generate_until. Texts are encoded, split and
truncated as the harness's Hugging Face model does, so that scores are comparable. This module imports lm_eval when it
is imported; import it where it is used. tasks.py is the other module that uses lm_eval.
"""

import contextlib
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from lm_eval import evaluate
from lm_eval.api import model as lm_eval_model
from lm_eval.api import task as lm_eval_task
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, handle_non_serializable, make_disjoint_window

from xgram_dist.data.tokenizer import Tokenizer
from xgram_dist.errors import UserError
from xgram_dist.eval.rank_pool import RankPool
from xgram_dist.eval.scoring import Continuations, Scorer, batch_inputs
from xgram_dist.inference.generate import Sampling, generate
from xgram_dist.inference.model import Model
from xgram_dist.parallel.mesh import Mesh

MAX_GENERATED = 256
"""Tokens, for tasks that set no limit."""
BOOTSTRAP_ITERATIONS = 1000
"""For the standard errors of metrics without a formula for them."""
FEWSHOT_SEED = 1234
"""lm-eval's own default."""


class GenerationRequest(NamedTuple):
    max_tokens: int
    temperature: float
    top_p: float
    prompt: list[int]
    until: list[str]
    number: int
    """Index of the request in lm-eval's list."""

    @property
    def settings(self) -> tuple[int, float, float]:
        """Requests of a batch share these."""
        return self.max_tokens, self.temperature, self.top_p


class HarnessModel(TemplateLM):  # type: ignore[misc]
    def __init__(
        self,
        scorer: Scorer,
        tokenizer: Tokenizer,
        context: int,
        batch_tokens: int,
        mesh: Mesh,
        model: Model | None = None,
    ):
        """`batch_tokens`: of a forward pass, padding included. `model`: for tasks that generate."""
        super().__init__()
        self._tokenizer, self._context, self._batch_tokens, self._model = tokenizer, context, batch_tokens, model
        self.pool = RankPool(mesh, {"score": scorer.score, "generate": self._generate})

    @property
    def eot_token_id(self) -> int:
        return self._tokenizer.end_of_text

    @property
    def max_length(self) -> int:
        return self._context

    @property
    def tokenizer_name(self) -> str:
        return self._tokenizer.sha256

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        ids: list[int] = self._tokenizer.encode_batch([string])[0].tolist()
        return ids

    def _loglikelihood_tokens(self, requests: list[Any], **kwargs: Any) -> list[tuple[float, bool]]:
        continuations = Continuations([(before, after) for _, before, after in requests], self._context)
        batches = batch_inputs(continuations.inputs, self._batch_tokens)
        results = self.pool.run("score", batches, "log-likelihoods")
        scores = [score for batch in results for score in batch]
        return [tuple(score) for score in continuations.unpack(scores)]  # type: ignore[misc]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        windows, counts = [], []
        for (text,) in [request.args for request in requests]:
            rolling = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.eot_token_id,
                max_seq_len=self._context,
                context_len=1,
            )
            of_text = [(None, *make_disjoint_window(pair)) for pair in rolling]
            windows += of_text
            counts.append(len(of_text))
        scores = iter(self._loglikelihood_tokens(windows))
        return [sum(next(scores)[0] for _ in range(count)) for count in counts]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        if self._model is None:
            raise UserError("tasks that generate text run on a checkpoint (`xgram-dist eval`), not during training")
        queue = [self._generation_request(number, *request.args) for number, request in enumerate(requests)]
        queue.sort(key=lambda one: (one.settings, -len(one.prompt)))
        batches: list[list[GenerationRequest]] = []
        for one in queue:
            if batches and self._fits_batch(batches[-1], one):
                batches[-1].append(one)
            else:
                batches.append([one])
        results = self.pool.run("generate", batches, "generated texts")
        texts = {
            one.number: text
            for batch, generated in zip(batches, results, strict=True)
            for one, text in zip(batch, generated, strict=True)
        }
        return [texts[number] for number in range(len(requests))]

    def _generation_request(self, number: int, text: str, kwargs: dict[str, Any]) -> GenerationRequest:
        settings: dict[str, Any] = dict(normalize_gen_kwargs(kwargs, MAX_GENERATED))
        max_tokens = min(int(settings["max_gen_toks"]), self._context - 1)
        return GenerationRequest(
            max_tokens=max_tokens,
            temperature=float(settings.get("temperature", 0.0)),
            top_p=float(settings.get("top_p", 1.0)),
            prompt=self.tok_encode(text)[-(self._context - max_tokens) :] or [self.eot_token_id],
            until=handle_stop_sequences(settings["until"], eos=self._tokenizer.decode([self.eot_token_id])),
            number=number,
        )

    def _fits_batch(self, batch: list[GenerationRequest], one: GenerationRequest) -> bool:
        longest = len(batch[0].prompt) + one.max_tokens
        return batch[0].settings == one.settings and longest * len(batch) < self._batch_tokens

    def _generate(self, batch: list[GenerationRequest]) -> list[str]:
        """Generates until every sequence has met one of its stop strings or the limit."""
        assert self._model is not None
        max_tokens, temperature, top_p = batch[0].settings
        prompts, stops = [one.prompt for one in batch], [one.until for one in batch]
        generated: list[list[int]] = [[] for _ in batch]
        texts = [""] * len(batch)
        running = set(range(len(batch)))
        generator = torch.Generator(self._model.device).manual_seed(0)
        for tokens in generate(self._model, prompts, max_tokens, Sampling(temperature, top_p), generator):
            for sequence in list(running):
                generated[sequence].append(tokens[sequence])
                texts[sequence] = self._tokenizer.decode(generated[sequence])
                ended = tokens[sequence] == self.eot_token_id
                if ended or any(stop and stop in texts[sequence] for stop in stops[sequence]):
                    running.discard(sequence)
            if not running:
                break
        return [postprocess_generated_text(text, stop, None) for text, stop in zip(texts, stops, strict=True)]


def run_harness(model: Any, tasks: Any, limit: int | None) -> dict[str, Any]:
    """lm-eval's results, on the first rank; the other ranks serve the model's pool. No global random state is used.

    After an error the pool is not shut down: the other ranks may be in collectives of a batch. The process has to exit.
    """
    for task in tasks.loaded["tasks"].values():
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=FEWSHOT_SEED)
    with _without_progress_bars():
        results = evaluate(
            lm=model, task_dict=tasks.loaded, limit=limit, log_samples=False, bootstrap_iters=BOOTSTRAP_ITERATIONS
        )
    model.pool.shut_down()
    assert results is not None
    return dict(results)


@contextlib.contextmanager
def _without_progress_bars() -> Iterator[None]:
    """lm-eval shows a bar for each task; the pool's shows the whole."""
    saved = lm_eval_model.tqdm, lm_eval_task.tqdm
    lm_eval_model.tqdm = lm_eval_task.tqdm = lambda items, **_: items
    try:
        yield
    finally:
        lm_eval_model.tqdm, lm_eval_task.tqdm = saved


def results_json(tree: Any) -> str:
    """lm-eval's results, which hold more than plain values, as JSON."""
    return json.dumps(tree, indent=1, default=handle_non_serializable)
