"""Training: the loop, and what it is made of.

    for each step:  batch -> fetch -> forward and backward of each micro-batch -> give back -> clip -> update

Ctrl-C (or SIGTERM) ends after the current step, with weights and metrics written.
"""

import os
import signal
import time
from pathlib import Path
from types import FrameType
from typing import Any

from xgram_dist.config import Config
from xgram_dist.config.check import check_files
from xgram_dist.data.dataset import PreparedData
from xgram_dist.data.loader import Loader, validation_batches
from xgram_dist.errors import UserError
from xgram_dist.memory.local_tables import LocalTables
from xgram_dist.optim.schedule import learning_rate, warmup_factor
from xgram_dist.optim.update import Optimizer
from xgram_dist.parallel.device import choose_device, make_deterministic, synchronize
from xgram_dist.train.build import build_lookup, build_model
from xgram_dist.train.folder import ROUTING, check_run_folder, open_run_folder, save_weights
from xgram_dist.train.metrics import Metrics, perplexity, status_line
from xgram_dist.train.routing import resolve_routing
from xgram_dist.train.step import StepResult, train_step
from xgram_dist.train.validate import validate


class Stop:
    """Remembers that someone asked the run to end; the second time it ends at once."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Stop":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._asked)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _asked(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = number
        # Not print: this may interrupt one, and a stream does not let itself be written to twice at a time.
        os.write(2, b"stopping after this step (once more: at once)\n")


class Trainer:
    """Everything a run holds. `run` is the loop."""

    def __init__(self, config: Config, folder: Path, fresh: bool):
        check_files(config)
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
            prefetch=config.data.prefetch,
            vocabulary=config.model.vocabulary,
        )
        routing = resolve_routing(config, self.data)
        self.model = build_model(config, self.device, self.data.manifest.end_of_text)
        self.lookup = build_lookup(config, routing, self.device)
        self.optimizer = Optimizer(config, self.model, self.lookup)
        open_run_folder(folder, config)
        if routing is not None:
            routing.save(folder / ROUTING)
        self.metrics = Metrics(folder, config.train.steps)
        self.skipped = self.skipped_in_a_row = 0

    def run(self) -> int:
        """Train to the end; exit code 0, or 130 when stopped by a signal."""
        train, step = self.config.train, 0
        self._interval = Interval(self)
        try:
            with Stop() as stop, self.loader:
                for step in range(1, train.steps + 1):
                    batch = next(self.loader)
                    result = train_step(self.config, self.model, self.lookup, self.optimizer, batch.tokens, step)
                    self._count_skipped(step, result)
                    self._interval.add(batch.tokens.numel(), result.distinct)
                    if step % train.log_every == 0 or step in (1, train.steps):
                        self._interval.report(step, result)
                    if train.validate_every and step % train.validate_every == 0 and step < train.steps:
                        self._validate(step)
                    if stop.signal is not None:
                        break
                return self._finish(step, stop.signal)
        finally:
            self.metrics.close()

    def _count_skipped(self, step: int, result: StepResult) -> None:
        if result.counted:
            self.skipped_in_a_row = 0
            return
        loss, norm = float(result.loss), float(result.gradient_norm)
        self.skipped += 1
        self.skipped_in_a_row += 1
        print(f"step {step}: skipped, gradient norm {norm}, loss {loss}", flush=True)
        self.metrics.write("skipped", step, loss=loss, gradient_norm=norm)
        if self.skipped_in_a_row > self.config.train.max_skipped:
            raise UserError(
                f"loss or gradient was not finite in {self.skipped_in_a_row} steps in a row, up to step {step} "
                f"(train.max_skipped = {self.config.train.max_skipped}); lower optimizer.learning_rate or "
                f"memory.learning_rate.multiplier, or look at the data of these steps"
            )

    def _validate(self, step: int) -> float:
        start = time.monotonic()
        entropy = validate(self.model, self.lookup, self.validation, warmup_factor(self.config, step))
        self.metrics.write("validation", step, loss=entropy, perplexity=perplexity(entropy))
        print(f"step {step}: validation loss {entropy:.4f}, perplexity {perplexity(entropy):.3f}", flush=True)
        self._interval.pause(time.monotonic() - start)
        return entropy

    def _finish(self, step: int, stopped: int | None) -> int:
        rate = self._interval.overall()  # before the weights are written, which is not training
        entropy = self._validate(step) if stopped is None else None
        weights = save_weights(self.folder, self.model, self.lookup, step)
        hit, rows = self.lookup.rows_hit() if isinstance(self.lookup, LocalTables) else (0, 0)
        self.metrics.write(
            "end",
            step,
            complete=stopped is None,
            validation_loss=entropy,
            validation_perplexity=None if entropy is None else perplexity(entropy),
            tokens=self.loader.position * self.config.model.sequence_length,
            tokens_per_second=rate,
            skipped=self.skipped,
            rows_hit=hit,
            rows=rows,
        )
        print(f"{'stopped' if stopped else 'done'} after step {step}: {weights}", flush=True)
        return 0 if stopped is None else 130


class Interval:
    """Tokens, time and loss since the last report."""

    def __init__(self, trainer: Trainer):
        self._trainer = trainer
        self._begin = self._since = time.monotonic()
        self._first: float | None = None  # the first step compiles and allocates; it says nothing of the rate
        self._tokens = self._all_tokens = self._distinct = 0
        self._step = 0

    def add(self, tokens: int, distinct: int) -> None:
        self._tokens += tokens
        self._distinct = distinct
        if self._first is None:
            self._first = time.monotonic()
        else:
            self._all_tokens += tokens

    def pause(self, seconds: float) -> None:
        """Time that was not training."""
        self._since += seconds
        if self._first is not None:
            self._first += seconds

    def overall(self) -> float:
        """Tokens a second over the run, without the first step."""
        elapsed = time.monotonic() - (self._first or self._begin)
        return self._all_tokens / elapsed if self._all_tokens else 0.0

    def report(self, step: int, result: Any) -> None:
        config = self._trainer.config
        synchronize(self._trainer.device)
        now = time.monotonic()
        seconds = now - self._since
        entropy = float(result.cross_entropy)
        values = {
            "loss": float(result.loss),
            "cross_entropy": entropy,
            "perplexity": perplexity(entropy),
            "learning_rate": learning_rate(config, step),
            "gradient_norm": float(result.gradient_norm),
            "tokens_per_second": self._tokens / seconds,
            "step_seconds": seconds / (step - self._step),
            "distinct_tokens": self._distinct,
            "skipped": self._trainer.skipped,
        }
        left = (config.train.steps - step) * (self._all_left(step, now))
        self._trainer.metrics.write("train", step, **values)
        print(status_line(step, config.train.steps, values, left), flush=True)
        self._tokens, self._since, self._step = 0, now, step

    def _all_left(self, step: int, now: float) -> float:
        """Seconds a step, over the run so far without the first step."""
        if self._first is None or step < 2:
            return now - self._begin
        return (now - self._first) / (step - 1)
