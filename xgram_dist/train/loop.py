"""Training: the loop, and what it is made of.

    for each step:  batch -> fetch -> forward and backward of each micro-batch -> give back -> clip -> update

Ctrl-C (or SIGTERM, SIGUSR1) ends after the current step, with a checkpoint and metrics written.
"""

import math
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from xgram_dist.checkpoint.boxes import Spread
from xgram_dist.checkpoint.lease import Lease
from xgram_dist.checkpoint.load import load_checkpoint, load_newest
from xgram_dist.checkpoint.manifest import Manifest
from xgram_dist.checkpoint.save import Saved, Saver
from xgram_dist.checkpoint.state import backbone_state, table_state
from xgram_dist.checkpoint.warm import account_rows, take_weights
from xgram_dist.config import Config, dump_config
from xgram_dist.config.check import accumulation, check_files
from xgram_dist.data.dataset import PreparedData
from xgram_dist.data.loader import Loader, validation_batches
from xgram_dist.engine import build_engine
from xgram_dist.errors import UserError
from xgram_dist.memory.tables import store_of
from xgram_dist.model.build import build_lookup, build_model
from xgram_dist.optim.schedule import learning_rate, warmup_factor
from xgram_dist.optim.update import Optimizer
from xgram_dist.parallel.device import choose_device, make_deterministic, synchronize
from xgram_dist.parallel.mesh import build_mesh
from xgram_dist.parallel.ranks import Ranks
from xgram_dist.progress import table
from xgram_dist.train.agree import check_agreement
from xgram_dist.train.ahead import Planned, PlannedSteps
from xgram_dist.train.diagnosis import build_diagnosis
from xgram_dist.train.evaluation import build_evaluation
from xgram_dist.train.exchange import exchange_figures
from xgram_dist.train.folder import ROUTING, TRACE, check_run_folder, open_run_folder
from xgram_dist.train.footprint import footprint
from xgram_dist.train.interval import Interval, Rates
from xgram_dist.train.keys import FILE as KEYS
from xgram_dist.train.keys import check_keys, check_taken, resolve_keys
from xgram_dist.train.metrics import Metrics, perplexity, status_line
from xgram_dist.train.routing import resolve_routing, touched_share
from xgram_dist.train.start import Source
from xgram_dist.train.step import StepResult, train_step
from xgram_dist.train.stop import Stop
from xgram_dist.train.trace import TraceWindow
from xgram_dist.train.validate import validate


class Trainer:
    """Everything a rank of a run holds. `run` is the loop; the first rank speaks and writes."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        fresh: bool,
        ranks: Ranks | None = None,
        lease: Lease | None = None,
        source: Source | None = None,
    ):
        """`source`: what a run starts from that has no checkpoint of its own."""
        check_files(config)
        self.ranks = ranks or Ranks()
        self.mesh = build_mesh(config, self.ranks)
        accumulation(config, self.mesh.data.size)
        if self.ranks.first:
            check_run_folder(folder, config, fresh)
        make_deterministic(config.train.deterministic)
        torch.manual_seed(config.train.seed + self.ranks.rank)
        self.config, self.folder, self.device = config, folder, choose_device()
        self.ranks.phases.device = self.device
        if self.ranks.size > 1:
            self.ranks.phases.watch(config.train.collective_timeout)
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
            rank=self.mesh.data.rank,
            ranks=self.mesh.data.size,
            prefetch=config.data.prefetch,
            vocabulary=config.model.vocabulary,
        )
        routing = resolve_routing(config, self.data)
        check_agreement(self.ranks, config, routing, self.data.fingerprint)
        model = build_model(config, self.device, self.data.manifest.end_of_text, self.mesh.tensor)
        self.engine = build_engine(config, model, self.mesh, self.device)
        self.keys, of_keys = resolve_keys(config, self.data, self.ranks)
        end_of_text = self.data.manifest.end_of_text
        self.lookup = build_lookup(config, routing, self.device, self.mesh, self.keys, end_of_text)
        share = touched_share(config, self.data, routing)
        self.optimizer = Optimizer(config, self.engine, self.lookup, self.mesh, share)
        self.routing = routing
        self.evaluation = build_evaluation(config, self.mesh, self.engine, self.lookup, self.data)
        self.diagnosis = build_diagnosis(config, self.mesh, self.engine, self.lookup, self.validation)
        self.saver = Saver(folder, config.checkpoint, self.ranks, lease)
        self.position = self.start = self.skipped = self.skipped_in_a_row = 0  # position: global sequences trained on
        self.loss: Any = None  # of the last step
        self.started_from: dict[str, Any] | None = None
        self.resumed = not fresh and self._resume()
        if source is not None and not self.resumed:
            self._start_from(source)
        self.metrics: Metrics | None = None
        if self.ranks.first:
            open_run_folder(folder, config, self.mesh.data.size, self.start if self.resumed else 0)
            print(self.mesh, flush=True)
            if routing is not None:
                routing.save(folder / ROUTING)
            if self.keys is not None:
                self.keys.save(folder / KEYS)
                print(of_keys, flush=True)
            self.metrics = Metrics(folder)
        self.interval = Interval(config.train.steps, self.start)
        self.rates = Rates(config, self.ranks.size, self.device)
        self.trace = TraceWindow(config.train.profile_from, config.train.profile_steps, str(folder / TRACE))
        left = config.train.steps - self.start
        self.steps = PlannedSteps(self.loader, self.lookup, steps=left, ahead=config.memory.plan_ahead)

    def run(self) -> int:
        """Train to the end; exit code 0, 130 when stopped by a signal, 1 when the end could not be saved."""
        train, step, stopped = self.config.train, self.start, False
        try:
            with Stop() as stop, self.loader:
                for step in range(self.start + 1, train.steps + 1):
                    if self.ranks.first:
                        self.trace.before(step)
                    with self.ranks.phases("data"):
                        planned = self.steps.take()
                    result = train_step(self.config, self.lookup, self.optimizer, *planned.work, step)
                    self.position, self.loss = planned.position, result.loss
                    if self.trace.after(step):
                        self._say(f"step {step}: trace in {self.trace.path}")
                    self._count_skipped(step, result)
                    self.interval.add(planned.work[0].numel() * self.mesh.data.size)
                    if step % train.log_every == 0 or step in (self.start + 1, train.steps):
                        self._report(step, result, planned)
                    self._tell(self.saver.outcome())
                    with self.ranks.phases("agree"):
                        asked, due = self.ranks.sum_integers(
                            int(stop.signal is not None), int(self.ranks.first and self.saver.due(step)), self.device
                        )
                    stopped = asked > 0 and step < train.steps
                    if stopped:
                        break
                    if due and step < train.steps:
                        self._save(step, wait=False)
                    if train.validate_every and step % train.validate_every == 0 and step < train.steps:
                        self._validate(step)
                    if self.diagnosis is not None and step % train.diagnose_every == 0:
                        self._diagnose(step)
                    if self.evaluation is not None and (step % self.config.eval.every == 0 or step == train.steps):
                        self._evaluate(step)
                return self._finish(step, stopped)
        finally:
            self.steps.finish()
            if self.evaluation is not None:
                self.evaluation.close()
            self.saver.close()
            self.lookup.close()
            self.engine.close()
            self.ranks.phases.close()
            if self.metrics is not None:
                self.metrics.close()

    def _say(self, text: str) -> None:
        if self.ranks.first:
            print(text, flush=True)

    def _record(self, kind: str, step: int, **values: Any) -> None:
        if self.metrics is not None:
            self.metrics.write(kind, step, **values)

    def _report(self, step: int, result: StepResult, planned: Planned) -> None:
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
            **self.rates.of(figures["tokens_per_second"]),
            **exchange_figures(self.config, planned.work[1], self.mesh.data.rank),
            **self.ranks.phases.take(),
            "skipped": self.skipped,
        }
        self._record("train", step, **values)
        if step == self.start + 1:
            self._record_memory(step, planned)
        self._say(status_line(step, self.config.train.steps, values, left))

    def _resume(self) -> bool:
        """Go on from the newest checkpoint of the run folder that is whole; False where there is none."""
        tables = self.optimizer.table_optimizer
        facts, complaints = load_newest(self.folder, self.engine, tables, self.routing, self.mesh, self._accept)
        for complaint in complaints:
            self._say(complaint)
        if facts is None:
            if complaints:
                raise UserError(f"'{self.folder}' has no checkpoint to go on from; start over with --fresh")
            return False
        self._go_on(facts)
        self._say(f"going on after step {self.start}")
        return True

    def _accept(self, facts: dict[str, Any]) -> None:
        check_keys(facts.get("keys"), self.keys)
        self.loader.load_state_dict(facts["loader"])

    def _go_on(self, facts: dict[str, Any]) -> None:
        self.start, self.position, self.skipped = facts["step"], facts["loader"]["position"], facts["skipped"]
        self.loss, self.started_from = facts["loss"], facts["started_from"]

    def _start_from(self, source: Source) -> None:
        tables = self.optimizer.table_optimizer
        folder = Path(self.ranks.gather_objects(str(source.checkpoint))[0])  # a run may save while ranks look for it
        if source.weights_only:
            store = None if tables is None else tables.store
            tokenizer = self.data.manifest.tokenizer_sha256
            check_taken(folder, Manifest.read(folder).run, self.config, self.keys)
            facts, accounts = take_weights(folder, self.engine, store, self.routing, self.mesh, tokenizer)
            self._say(f"weights of {folder}, step {facts['step']:,}:")
            table(["part", "taken", "of", ""], account_rows(accounts), self._say, left=(0, 3))
        else:
            facts = load_checkpoint(folder, self.engine, tables, self.routing, self.mesh, self._accept)
            self._go_on(facts)
            self._say(f"state of {folder}: going on after step {self.start}")
        self.started_from = source.facts(folder, facts)

    def _save(self, step: int, *, wait: bool) -> bool:
        """False: it was waited for, and failed."""
        tables = self.optimizer.table_optimizer
        state = backbone_state(self.engine, self.mesh)
        if tables is not None:
            rows, whole = table_state(tables, self.mesh)
            state |= rows | whole
        state[f"rng.rank-{self.ranks.rank}"] = Spread.whole(torch.get_rng_state())
        facts = {
            "step": step,
            "updates": self.engine.step_count,
            "skipped": self.skipped,
            "loss": _finite(self.loss),
            "saved": datetime.now(UTC).isoformat(timespec="seconds"),
            "started_from": self.started_from,
            "loader": {**self.loader.state_dict(), "position": self.position},
            "ranks": self.ranks.size,
            "data_ranks": self.mesh.data.size,
            "tensor": self.mesh.tensor.size,
            "engine": self.config.parallel.engine,
            "placement": "token" if tables is None else tables.store.placement.policy,
            "table_optimizer": None if tables is None else tables.kind,
            "routing": None if self.routing is None else self.routing.sha256(),
            "keys": None if self.keys is None else self.keys.sha256(),
            "tokenizer": self.data.tokenizer_facts(),
            "config": dump_config(self.config),
        }
        files = [self.folder / ROUTING] if self.routing is not None else []
        files += [self.folder / KEYS] if self.keys is not None else []
        files += self.data.tokenizer_files()
        return self._tell(self.saver.save(state, facts, files, wait=wait))

    def _tell(self, ended: list[Saved]) -> bool:
        """Say how saves ended, a failed one loudly; whether the last was good."""
        for one in ended:
            if self.ranks.first:
                print(one, file=sys.stdout if one.error is None else sys.stderr, flush=True)
            figures = {"bytes": one.bytes, "seconds_saving": one.seconds, "seconds_blocked": one.blocked}
            self._record("checkpoint", one.step, written=one.error is None, **figures)
        return not ended or ended[-1].error is None

    def _record_memory(self, step: int, planned: Planned) -> None:
        """Once, of every rank: after a whole step everything there is has been made."""
        mine = footprint(self.engine, self.lookup, self.optimizer, planned.work[1])
        for rank, parts in enumerate(self.ranks.gather_objects(mine)):
            self._record("memory", step, rank=rank, **parts)

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
            self._end(step, complete=False)
            raise UserError(
                f"loss or gradient was not finite in {self.skipped_in_a_row} steps in a row, up to step {step} "
                f"(train.max_skipped = {self.config.train.max_skipped}); lower optimizer.learning_rate or "
                f"memory.learning_rate.multiplier, or look at the data of these steps; the weights before them are in "
                f"the checkpoint of step {step}"
            )

    def _validate(self, step: int) -> float:
        start = time.monotonic()
        warmup = warmup_factor(self.config, step)
        entropy = validate(self.engine, self.lookup, self.validation, warmup, self.mesh, self.device)
        self._record("validation", step, loss=entropy, perplexity=perplexity(entropy))
        self._say(f"step {step}: validation loss {entropy:.4f}, perplexity {perplexity(entropy):.3f}")
        self.interval.pause(time.monotonic() - start)
        return entropy

    def _diagnose(self, step: int) -> None:
        assert self.diagnosis is not None
        start = time.monotonic()
        self._record("diagnose", step, **self.diagnosis.run(warmup_factor(self.config, step)))
        self.interval.pause(time.monotonic() - start)

    def _evaluate(self, step: int) -> None:
        assert self.evaluation is not None
        start = time.monotonic()
        scores, sentence = self.evaluation.run(warmup_factor(self.config, step))
        self._record("eval", step, **scores)
        self._say(f"step {step}: {sentence}")
        self.interval.pause(time.monotonic() - start)

    def _finish(self, step: int, stopped: bool) -> int:
        entropy = None if stopped else self._validate(step)
        saved = self._end(step, complete=not stopped, entropy=entropy)
        self._say(f"{'stopped' if stopped else 'done'} after step {step}: {self.folder}")
        return 130 if stopped else 0 if saved else 1

    def _end(self, step: int, *, complete: bool, entropy: float | None = None) -> bool:
        """The last checkpoint and the last record; whether the checkpoint is there."""
        rate = self.interval.overall()  # without the writing, which is not training
        saved = (self.resumed and step == self.start) or self._save(step, wait=True)
        tables = store_of(self.lookup)
        hit, rows = self.ranks.sum_integers(*(tables.rows_hit() if tables is not None else (0, 0)), self.device)
        self._record(
            "end",
            step,
            complete=saved and complete,
            validation_loss=entropy,
            validation_perplexity=None if entropy is None else perplexity(entropy),
            tokens=self.position * self.config.model.sequence_length,
            tokens_per_second=rate,
            skipped=self.skipped,
            rows_hit=hit,
            rows=rows,
        )
        return saved


def _finite(loss: Any) -> float | None:
    """Of a number, a tensor or nothing; JSON knows no other numbers."""
    return float(loss) if loss is not None and math.isfinite(float(loss)) else None
