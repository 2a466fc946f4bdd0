"""lm-evaluation-harness's model API on ours: loglikelihood, loglikelihood_rolling, generate_until.

Texts are encoded, split and cut as its Hugging Face model does it, so that numbers can be compared.
"""

from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from xgram_dist.data.tokenizer import Tokenizer
from xgram_dist.errors import UserError
from xgram_dist.eval.crew import Crew
from xgram_dist.eval.scoring import Rows, Scorer, batches
from xgram_dist.inference.generate import Sampling, generate
from xgram_dist.inference.open import Model
from xgram_dist.parallel.mesh import Mesh

MAX_GENERATED = 256


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
        self.crew = Crew(mesh, {"score": scorer.score, "generate": self._generate})

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
        made = Rows([(before, after) for _, before, after in requests], self._context)
        work = batches(made.rows, self._batch_tokens)
        found = self.crew.run("score", work, "log-likelihoods")
        return [tuple(score) for score in made.gather([one for batch in found for one in batch])]  # type: ignore[misc]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        windows, sizes = [], []
        for (text,) in [request.args for request in requests]:
            cut = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.eot_token_id,
                max_seq_len=self._context,
                context_len=1,
            )
            of_text = [(None, *make_disjoint_window(pair)) for pair in cut]
            windows += of_text
            sizes.append(len(of_text))
        scores = iter(self._loglikelihood_tokens(windows))
        return [sum(next(scores)[0] for _ in range(size)) for size in sizes]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        if self._model is None:
            raise UserError("tasks that generate text run on a checkpoint (`xgram-dist eval`), not during training")
        asked = []
        for number, (text, given) in enumerate(request.args for request in requests):
            settings: dict[str, Any] = dict(normalize_gen_kwargs(given, MAX_GENERATED))
            most = min(int(settings["max_gen_toks"]), self._context - 1)
            until = handle_stop_sequences(settings["until"], eos=self._tokenizer.decode([self.eot_token_id]))
            prompt = self.tok_encode(text)[-(self._context - most) :] or [self.eot_token_id]
            asked.append(
                (
                    most,
                    float(settings.get("temperature", 0.0)),
                    float(settings.get("top_p", 1.0)),
                    prompt,
                    until,
                    number,
                )
            )
        # Alike settings together, long prompts first.
        asked.sort(key=lambda one: (one[:3], -len(one[3])))
        work: list[list[Any]] = []
        for one in asked:
            if (
                work
                and work[-1][0][:3] == one[:3]
                and (len(work[-1][0][3]) + one[0]) * len(work[-1]) < self._batch_tokens
            ):
                work[-1].append(one)
            else:
                work.append([one])
        found = self.crew.run("generate", work, "generated texts")
        texts = {
            one[-1]: text
            for batch, made in zip(work, found, strict=True)
            for one, text in zip(batch, made, strict=True)
        }
        return [texts[number] for number in range(len(requests))]

    def _generate(self, batch: list[Any]) -> list[str]:
        assert self._model is not None
        most, temperature, top_p = batch[0][:3]
        stops = [until for *_, until, _ in batch]
        made: list[list[int]] = [[] for _ in batch]
        texts = [""] * len(batch)
        running = set(range(len(batch)))
        generator = torch.Generator(self._model.device).manual_seed(0)
        for tokens in generate(self._model, [one[3] for one in batch], most, Sampling(temperature, top_p), generator):
            for row in list(running):
                made[row].append(tokens[row])
                texts[row] = self._tokenizer.decode(made[row])
                if tokens[row] == self.eot_token_id or any(stop and stop in texts[row] for stop in stops[row]):
                    running.discard(row)
            if not running:
                break
        return [postprocess_generated_text(text, stop, None) for text, stop in zip(texts, stops, strict=True)]
