"""What a run does every so many steps beside training: validation, diagnosis, evaluation.

Each goes through the run's own engine, tables and ranks; nothing is gathered, on any engine and tensor degree. All
ranks call `run` at the same steps. Batches are dealt to the ranks of the batch axis in turn; a rank without a batch in
the last round repeats another and discards the result, because every rank must take part in the collectives.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from xgram_dist.config import Config
from xgram_dist.data.dataset import PreparedData
from xgram_dist.data.tokenizer import load_tokenizer
from xgram_dist.engine.base import Engine
from xgram_dist.errors import UserError, optional_package
from xgram_dist.eval.activations import (
    COSINE_PARTS,
    TENSOR_PARALLEL_SITES,
    LayerCosines,
    RunningSums,
    SiteNorms,
    ViewCosines,
    layer_cosines,
    mean_of,
    observe_forward,
    view_cosines,
)
from xgram_dist.optim.schedule import warmup_factor
from xgram_dist.parallel.mesh import Mesh, new_host_group
from xgram_dist.parallel.process_group import ProcessGroup
from xgram_dist.tables.exchange import shards_of
from xgram_dist.tables.working_set import Lookup, WorkingSet
from xgram_dist.train.metrics import perplexity

DIAGNOSED_BATCHES = 4
"""The first of the validation."""


class Callback(Protocol):
    kind: str
    """Of its records in metrics.jsonl."""

    def due(self, step: int) -> bool: ...

    def run(self, step: int) -> tuple[dict[str, Any], str]:
        """(values of the record, a sentence for the screen or ""); meaningful on the first rank. All ranks call it."""

    def close(self) -> None: ...


def build_callbacks(
    config: Config, mesh: Mesh, engine: Engine, lookup: Lookup, data: PreparedData, validation: "Validation"
) -> list[Callback]:
    """Those the recipe asks for, in the order in which they run."""
    evaluation = [Evaluation(config, mesh, engine, lookup, data)] if config.eval.every else []
    diagnosis = [Diagnosis(config, mesh, engine, lookup, validation.batches)] if config.train.diagnose_every else []
    return [validation, *diagnosis, *evaluation]


class Validation:
    """Mean cross-entropy over a fixed list of batches of equal shape."""

    kind = "validation"

    def __init__(self, config: Config, mesh: Mesh, engine: Engine, lookup: Lookup, batches: list[Tensor]):
        self.batches = batches
        self._config, self._mesh, self._engine, self._lookup = config, mesh, engine, lookup

    def due(self, step: int) -> bool:
        """Not at the last step: the end of a run always validates."""
        train = self._config.train
        return bool(train.validate_every) and step % train.validate_every == 0 and step < train.steps

    def run(self, step: int) -> tuple[dict[str, Any], str]:
        loss = self.loss(step)
        values = {"loss": loss, "perplexity": perplexity(loss)}
        return values, f"validation loss {loss:.4f}, perplexity {perplexity(loss):.3f}"

    @torch.no_grad()
    def loss(self, step: int) -> float:
        data, device = self._mesh.data, self._engine.device
        total = torch.zeros((), device=device, dtype=torch.float64)
        warmup = _warmup(self._config, step, device)
        for tokens_BT, counts in _deal(self.batches, self._mesh.batch):
            _, cross_entropy = _forward(self._engine, self._lookup, tokens_BT, warmup)
            if counts:
                total += cross_entropy
        # The mean over the ranks that share a sequence is its cross-entropy.
        return float(data.all_reduce_sum(total) / (len(self.batches) * self._mesh.context.size))

    def close(self) -> None:
        pass


class Diagnosis:
    """A few figures of `xgram-dist diagnose`: layer cosines, view cosines, injected norms."""

    kind = "diagnose"

    def __init__(self, config: Config, mesh: Mesh, engine: Engine, lookup: Lookup, batches: list[Tensor]):
        self._config, self._mesh, self._engine, self._lookup = config, mesh, engine, lookup
        self._batches = batches[:DIAGNOSED_BATCHES]
        # The planning thread of the tables uses the mesh's gloo groups at the same time.
        self._group = new_host_group(mesh.world)

    def due(self, step: int) -> bool:
        return step % self._config.train.diagnose_every == 0

    @torch.no_grad()
    def run(self, step: int) -> tuple[dict[str, Any], str]:
        tensor, context = self._mesh.tensor, self._engine.model.context  # type: ignore[attr-defined]
        shards = shards_of(self._lookup)
        tables = [name for shard in shards or () for name in shard.slab.columns()]
        sums = RunningSums()
        views = ViewCosines(sums, tables, TENSOR_PARALLEL_SITES, tensor)
        observers = (LayerCosines(sums), views, SiteNorms(sums, TENSOR_PARALLEL_SITES, tensor))
        warmup = _warmup(self._config, step, self._engine.device)
        with observe_forward(self._engine.model, observers):  # type: ignore[attr-defined]
            for tokens_BT, counts in _deal(self._batches, self._mesh.batch):
                sums.enabled = counts
                working, _ = _forward(self._engine, self._lookup, tokens_BT, warmup)
                views.add_retrieved(working.values, context.without_before(working.slots))
        totals = sums.all_reduce(self._group)
        cosines = layer_cosines(totals, self._config.model.layers)
        figures = {f"cosine_{part}_{layer}": v for part in COSINE_PARTS for layer, v in enumerate(cosines[part])}
        figures |= {f"views_{stage}": one["mean"] for stage, one in view_cosines(totals, views.groups).items()}
        sites = [name for name in totals if name.startswith("site.")]
        figures |= {f"injected_{name.removeprefix('site.')}": mean_of(totals, name) for name in sites}
        return {name: value for name, value in figures.items() if value is not None}, ""

    def close(self) -> None:
        pass


class Evaluation:
    """Benchmarks of lm-evaluation-harness. The first rank runs the harness; all ranks compute log-likelihoods."""

    kind = "eval"

    def __init__(self, config: Config, mesh: Mesh, engine: Engine, lookup: Lookup, data: PreparedData):
        """Reads the tasks and their data, so that a mistake in them is found before training starts."""
        with optional_package(f"eval.every = {config.eval.every}", "eval"):
            from xgram_dist.eval.lm_eval_adapter import HarnessModel
        from xgram_dist.eval.scoring import EngineScorer
        from xgram_dist.eval.tasks import load_tasks

        files = data.tokenizer_files()
        if not files:
            raise UserError(
                f"eval.every = {config.eval.every} needs the tokenizer, but '{data.folder}' does not have it"
            )
        tokenizer = load_tokenizer(files[0], data.manifest.end_of_text_name)
        self._config, self._first = config, mesh.world.first
        self._scorer = EngineScorer(config, engine, lookup)
        tokens = config.train.micro_batch * config.model.sequence_length
        # The network also reads the last token of a continuation, which leaves one less for the rest.
        self._model = HarnessModel(self._scorer, tokenizer, config.model.sequence_length - 1, tokens, mesh)
        self._scratch = tempfile.TemporaryDirectory(prefix="xgram-dist-eval-")
        folder = None if config.eval.data is None else Path(config.eval.data)
        self._tasks = load_tasks(list(config.eval.tasks), folder, Path(self._scratch.name)) if self._first else None

    def due(self, step: int) -> bool:
        return step % self._config.eval.every == 0 or step == self._config.train.steps

    def run(self, step: int) -> tuple[dict[str, Any], str]:
        from xgram_dist.eval.lm_eval_adapter import run_harness
        from xgram_dist.eval.results import benchmark_scores

        self._scorer.warmup = warmup_factor(self._config, step)
        if not self._first:
            self._model.pool.serve()
            return {}, ""
        assert self._tasks is not None
        scores = benchmark_scores(run_harness(self._model, self._tasks, self._config.eval.limit))
        return scores, "  ".join(f"{name} {value:.1f}" for name, value in scores.items())

    def close(self) -> None:
        self._scratch.cleanup()


def _deal(batches: list[Tensor], ranks: ProcessGroup) -> Iterator[tuple[Tensor, bool]]:
    """(batch of this rank, whether its result counts), as often on every rank. `ranks`: those with other sequences."""
    for first in range(0, len(batches), ranks.size):
        mine = first + ranks.rank
        yield (batches[mine], True) if mine < len(batches) else (batches[0], False)


def _forward(engine: Engine, lookup: Lookup, tokens_BT: Tensor, warmup: Tensor) -> tuple[WorkingSet, Tensor]:
    """(the batch's working set, its cross-entropy)"""
    working = lookup.fetch(lookup.plan(tokens_BT, whole=True).result()[0], training=False)
    tokens_BT = tokens_BT.to(engine.device, non_blocking=True)
    return working, engine.loss(tokens_BT, working.slots, working.values, warmup)[1]


def _warmup(config: Config, step: int, device: torch.device) -> Tensor:
    """The injection's warm-up factor at a step."""
    return torch.tensor(warmup_factor(config, step), device=device, dtype=torch.float64)
