"""Training: the loop, and what it is made of.

    for each step:  batch -> fetch -> forward and backward of each micro-batch -> give back -> clip -> update

Ctrl-C (or SIGTERM) ends after the current step, with weights and metrics written.
"""

import time
from pathlib import Path
from typing import Any

from xgram_dist.config import Config
from xgram_dist.config.check import accumulation, check_files
from xgram_dist.data.dataset import PreparedData
from xgram_dist.data.loader import Loader, validation_batches
from xgram_dist.errors import UserError
from xgram_dist.memory.sharded_tables import owned_tables
from xgram_dist.optim.schedule import learning_rate, warmup_factor
from xgram_dist.optim.update import Optimizer
from xgram_dist.parallel.device import choose_device, make_deterministic, synchronize
from xgram_dist.parallel.ranks import Ranks
from xgram_dist.train.agree import check_agreement
from xgram_dist.train.build import build_lookup, build_model
from xgram_dist.train.folder import ROUTING, check_run_folder, open_run_folder, save_weights
from xgram_dist.train.interval import Interval
from xgram_dist.train.metrics import Metrics, perplexity, status_line
from xgram_dist.train.routing import resolve_routing
from xgram_dist.train.step import StepResult, train_step
from xgram_dist.train.stop import Stop
from xgram_dist.train.validate import validate


class Trainer:
    """Everything a rank of a run holds. `run` is the loop; the first rank speaks and writes."""

    def __init__(self, config: Config, folder: Path, fresh: bool, ranks: Ranks | None = None):
        check_files(config)
        self.ranks = ranks or Ranks()
        accumulation(config, self.ranks.size)
        if self.ranks.first:
            check_run_folder(folder, fresh)
        make_deterministic(config.train.deterministic)
        self.config, self.folder, self.device = config, folder, choose_device()
        where: dict[str, Any] = {"remote": config.data.remote, "cache": config.data.cache}
        self.data = PreparedData.open(config.data.path, "train", cache_limit=config.data.cache_limit, **where)
        self.validation = validation_batches(
            PreparedData.open(config.data.path, "validation", **where),
            config.model.sequence_length,
            config.train.micro_batch,
            config.train.validation_sequences,
        )
        self.loader = Loader(
            self.data,
            sequence_length=config.model.sequence_length,
            global_batch=config.train.global_batch,
            micro_batch=config.train.micro_batch,
            seed=config.train.seed,
            weights=config.data.weights,
            rank=self.ranks.rank,
            ranks=self.ranks.size,
            prefetch=config.data.prefetch,
            vocabulary=config.model.vocabulary,
        )
        routing = resolve_routing(config, self.data)
        check_agreement(self.ranks, config, routing, self.data.fingerprint)
        self.model = build_model(config, self.device, self.data.manifest.end_of_text)
        self.lookup = build_lookup(config, routing, self.device, self.ranks)
        self.optimizer = Optimizer(config, self.model, self.lookup, self.ranks)
        self.metrics: Metrics | None = None
        if self.ranks.first:
            open_run_folder(folder, config)
            if routing is not None:
                routing.save(folder / ROUTING)
            self.metrics = Metrics(folder)
        self.interval = Interval(config.train.steps)
        self.skipped = self.skipped_in_a_row = 0

    def run(self) -> int:
        """Train to the end; exit code 0, or 130 when stopped by a signal."""
        train, step, stopped = self.config.train, 0, False
        try:
            with Stop() as stop, self.loader:
                for step in range(1, train.steps + 1):
                    batch = next(self.loader)
                    result = train_step(self.config, self.model, self.lookup, self.optimizer, batch.tokens, step)
                    self._count_skipped(step, result)
                    self.interval.add(batch.tokens.numel() * self.ranks.size)
                    if step % train.log_every == 0 or step in (1, train.steps):
                        self._report(step, result)
                    stopped = self.ranks.any(stop.signal is not None, self.device) and step < train.steps
                    if stopped:
                        break
                    if train.validate_every and step % train.validate_every == 0 and step < train.steps:
                        self._validate(step)
                return self._finish(step, stopped)
        finally:
            if self.metrics is not None:
                self.metrics.close()

    def _say(self, text: str) -> None:
        if self.ranks.first:
            print(text, flush=True)

    def _record(self, kind: str, step: int, **values: Any) -> None:
        if self.metrics is not None:
            self.metrics.write(kind, step, **values)

    def _report(self, step: int, result: StepResult) -> None:
        synchronize(self.device)
        figures, left = self.interval.close(step)
        entropy = float(result.cross_entropy)
        values = {
            "loss": float(result.loss),
            "cross_entropy": entropy,
            "perplexity": perplexity(entropy),
            "learning_rate": learning_rate(self.config, step),
            "gradient_norm": float(result.gradient_norm),
            **figures,
            "distinct_tokens": result.distinct,
            "skipped": self.skipped,
        }
        self._record("train", step, **values)
        self._say(status_line(step, self.config.train.steps, values, left))

    def _count_skipped(self, step: int, result: StepResult) -> None:
        if result.counted:
            self.skipped_in_a_row = 0
            return
        loss, norm = float(result.loss), float(result.gradient_norm)
        self.skipped += 1
        self.skipped_in_a_row += 1
        self._say(f"step {step}: skipped, gradient norm {norm}, loss {loss}")
        self._record("skipped", step, loss=loss, gradient_norm=norm)
        if self.skipped_in_a_row > self.config.train.max_skipped:
            save_weights(self.folder, self.model, self.lookup, step, self.ranks)
            raise UserError(
                f"loss or gradient was not finite in {self.skipped_in_a_row} steps in a row, up to step {step} "
                f"(train.max_skipped = {self.config.train.max_skipped}); lower optimizer.learning_rate or "
                f"memory.learning_rate.multiplier, or look at the data of these steps; the weights before them are in "
                f"'{self.folder}'"
            )

    def _validate(self, step: int) -> float:
        start = time.monotonic()
        entropy = validate(self.model, self.lookup, self.validation, warmup_factor(self.config, step), self.ranks)
        self._record("validation", step, loss=entropy, perplexity=perplexity(entropy))
        self._say(f"step {step}: validation loss {entropy:.4f}, perplexity {perplexity(entropy):.3f}")
        self.interval.pause(time.monotonic() - start)
        return entropy

    def _finish(self, step: int, stopped: bool) -> int:
        rate = self.interval.overall()  # before the weights are written, which is not training
        entropy = None if stopped else self._validate(step)
        weights = save_weights(self.folder, self.model, self.lookup, step, self.ranks)
        tables = owned_tables(self.lookup)
        hit, rows = self.ranks.sum_integers(*(tables.rows_hit() if tables is not None else (0, 0)), self.device)
        self._record(
            "end",
            step,
            complete=not stopped,
            validation_loss=entropy,
            validation_perplexity=None if entropy is None else perplexity(entropy),
            tokens=self.loader.position * self.config.model.sequence_length,
            tokens_per_second=rate,
            skipped=self.skipped,
            rows_hit=hit,
            rows=rows,
        )
        self._say(f"{'stopped' if stopped else 'done'} after step {step}: {weights}")
        return 130 if stopped else 0
