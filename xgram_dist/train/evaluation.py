"""Benchmarks in the course of training, through the run's own engine, tables and ranks.

Nothing is gathered or copied: a batch of benchmark rows goes through the same plan, fetch and forward pass as a batch
of validation, whatever the engine and the tensor degree; the head leaves the log-likelihood of each token behind.
"""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from xgram_dist.config import Config
from xgram_dist.data.dataset import PreparedData
from xgram_dist.data.tokenizer import load_tokenizer
from xgram_dist.engine.protocol import Engine
from xgram_dist.errors import UserError
from xgram_dist.memory.working_set import Lookup
from xgram_dist.model.loss import Head
from xgram_dist.parallel.mesh import Mesh

if TYPE_CHECKING:
    from xgram_dist.eval.scoring import Row, Score


def build_evaluation(
    config: Config, mesh: Mesh, engine: Engine, lookup: Lookup, data: PreparedData
) -> "Evaluation | None":
    return Evaluation(config, mesh, engine, lookup, data) if config.eval.every else None


class EngineScorer:
    """Implements `Scorer` (eval/scoring.py). Every rank of the data axis must call it the same number of times."""

    def __init__(self, config: Config, engine: Engine, lookup: Lookup):
        self._config, self._engine, self._lookup = config, engine, lookup
        head = engine.model.head  # type: ignore[attr-defined]
        assert isinstance(head, Head)
        self._head, self.warmup = head, 1.0

    @torch.no_grad()
    def score(self, rows: "list[Row]") -> "list[list[Score]]":
        from xgram_dist.eval.scoring import Score, padded

        # The network makes its labels of its tokens: a row a target, with what follows.
        parallel = self._config.parallel
        whole = [row.tokens + target[-1:] for row in rows for target in row.targets]
        tokens_BT = padded(whole, parallel.tensor if parallel.sequence_parallel else 1)
        device = self._engine.device
        working = self._lookup.fetch(self._lookup.plan(tokens_BT, whole=True).result()[0], training=False)
        warmup = torch.tensor(self.warmup, device=device, dtype=torch.float64)
        self._head.keeps_scores = True
        try:
            self._engine.loss(tokens_BT.to(device, non_blocking=True), working.slots, working.values, warmup)
            assert self._head.scores is not None
            likelihood_BT, likeliest_BT = (found.cpu() for found in self._head.scores)
        finally:
            self._head.keeps_scores, self._head.scores = False, None
        found, number = [], 0
        for row in rows:
            scores = []
            for target in row.targets:
                span = slice(len(row.tokens) - len(target), len(row.tokens))
                scores.append(Score(float(likelihood_BT[number, span].sum()), bool(likeliest_BT[number, span].all())))
                number += 1
            found.append(scores)
        return found


class Evaluation:
    def __init__(self, config: Config, mesh: Mesh, engine: Engine, lookup: Lookup, data: PreparedData):
        """Tasks and their data are read here: what is wrong with them is said before training starts."""
        from xgram_dist.eval.harness import HarnessModel
        from xgram_dist.eval.tasks import load_tasks

        files = data.tokenizer_files()
        if not files:
            raise UserError(
                f"eval.every = {config.eval.every} needs the tokenizer, but '{data.folder}' does not have it"
            )
        tokenizer = load_tokenizer(files[0], data.manifest.end_of_text_name)
        self._limit, self._first = config.eval.limit, mesh.world.first
        self._scorer = EngineScorer(config, engine, lookup)
        tokens = config.train.micro_batch * config.model.sequence_length
        # The last token of a continuation is given to the network too: one less is left for the rest.
        self._model = HarnessModel(self._scorer, tokenizer, config.model.sequence_length - 1, tokens, mesh)
        self._scratch = tempfile.TemporaryDirectory(prefix="xgram-dist-eval-")
        folder = None if config.eval.data is None else Path(config.eval.data)
        self._tasks = load_tasks(list(config.eval.tasks), folder, Path(self._scratch.name)) if self._first else None

    def run(self, warmup: float) -> tuple[dict[str, Any], str]:
        """(scores by task, a sentence), on the first rank; `warmup` is the injection's factor now."""
        from xgram_dist.eval.results import benchmark_scores, run_harness

        self._scorer.warmup = warmup
        if not self._first:
            self._model.crew.follow()
            return {}, ""
        assert self._tasks is not None
        scores = benchmark_scores(run_harness(self._model, self._tasks, self._limit))
        return scores, "  ".join(f"{name} {value:.1f}" for name, value in scores.items())

    def close(self) -> None:
        self._scratch.cleanup()
