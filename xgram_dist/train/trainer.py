"""The training loop.

    for each step:  batch -> fetch -> forward and backward of each micro-batch -> return gradients -> clip -> update

Parts of the exchange run beside the compute (`memory.overlap`): the next step's fetch begins between the updates of
tables and backbone.

Every rank runs the same loop. After each step one small all-reduce over the world agrees on whether to stop (any rank
received a signal) and whether to save (the first rank decides). The first rank prints and writes records. Ctrl-C,
SIGTERM and SIGUSR1 end a run after the current step, with a checkpoint and metrics written.
"""

import gc
import math
import os
import socket
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from xgram_dist.checkpoint.folder import list_steps
from xgram_dist.checkpoint.lease import Lease
from xgram_dist.checkpoint.save import SaveResult
from xgram_dist.config import Config
from xgram_dist.config.validate import accumulation
from xgram_dist.data.dataset import PreparedData
from xgram_dist.data.from_config import build_loader, open_data, open_training_data
from xgram_dist.data.loader import validation_batches
from xgram_dist.engine import build_engine
from xgram_dist.environment import STOP_FILE
from xgram_dist.errors import UserError
from xgram_dist.model.build import build_lookup, build_model
from xgram_dist.model.methods.base import check_files, check_method
from xgram_dist.model.pipeline_stages import layers_of
from xgram_dist.optim.schedule import learning_rate
from xgram_dist.parallel.device import choose_device, make_deterministic, synchronize
from xgram_dist.parallel.mesh import build_mesh, new_host_group
from xgram_dist.parallel.process_group import ProcessGroup
from xgram_dist.parallel.stacks import StackDumps
from xgram_dist.tables.exchange import shards_of
from xgram_dist.tables.optimizers.build import choose_optimizer
from xgram_dist.tables.routing_io import save_routing
from xgram_dist.tables.working_set import WorkingSet
from xgram_dist.train.callbacks import Callback, Validation, build_callbacks
from xgram_dist.train.checkpointing import RunCheckpoints, StartCheckpoint, StartFromHf, TrainState
from xgram_dist.train.due_work import DueWork
from xgram_dist.train.finite import UNKNOWN, FiniteWatch, Suspect, verdict
from xgram_dist.train.inputs import KEYS_FILE, check_agreement, resolve_keys, resolve_routing, touched_share
from xgram_dist.train.memory import footprint
from xgram_dist.train.metrics import Metrics, perplexity, status_line
from xgram_dist.train.prefetch import PrefetchedStep, StepPrefetcher
from xgram_dist.train.profiling import ProfilerTrace, Throughput, Utilization, exchange_figures
from xgram_dist.train.run_dir import (
    ROUTING,
    STACKS,
    TRACE,
    WATCHDOG,
    check_run_folder,
    open_run_folder,
    records_at,
    settle_run_id,
    unrecorded_checkpoints,
)
from xgram_dist.train.signals import StopRequest
from xgram_dist.train.spikes import Spikes
from xgram_dist.train.starts import StartClock, StartRecord
from xgram_dist.train.step import JointOptimizer, StepResult, train_step
from xgram_dist.train.stragglers import straggler_report

SAVE_GRACE_SECONDS = 10.0
"""How long a rank that fails lets a save under way end."""


class Trainer:
    """One rank of a run. `run` is the loop."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        fresh: bool,
        ranks: ProcessGroup | None = None,
        lease: Lease | None = None,
        start_from: StartCheckpoint | StartFromHf | None = None,
        accept_data_change: bool = False,
        clock: StartClock | None = None,
        suspect: Suspect | None = None,
    ):
        """`fresh`: clear an earlier run in the folder. `start_from`: for a run without a checkpoint of its own.
        `accept_data_change`: a run that resumes may read other data from there on. `clock`: of this start so far.
        `suspect`: a step that this start does again (`train_run`)."""
        self.clock = clock or StartClock(time.time())
        check_method(config)
        check_files(config)
        self.config, self.folder, self.fresh, self.ranks = config, folder, fresh, ranks or ProcessGroup()
        self.mesh = build_mesh(config, self.ranks)
        self.agreement = new_host_group(self.ranks)  # not the device's group: agreeing would wait for the whole step
        accumulation(config, self.mesh.data.size)
        if self.ranks.first:
            check_run_folder(folder, config, fresh)
        self.device = _set_up_process(config, self.ranks, folder)
        # Data, and what is derived from it
        self.data, batches = _open_data(config)
        self.loader = build_loader(config, self.data, self.mesh.batch.rank, self.mesh.batch.size)
        end_of_text = self.data.manifest.end_of_text
        self.routing = resolve_routing(config, self.data)
        check_agreement(self.ranks, config, self.routing, self.data.fingerprint)
        # Backbone, tables, optimizer
        model = build_model(config, self.device, end_of_text, self.mesh)
        self.engine = build_engine(config, model, self.mesh, self.device)
        self.keys, keys_summary = resolve_keys(config, self.data, self.ranks)
        kind = choose_optimizer(config, touched_share(config, self.data, self.routing))
        self.lookup = build_lookup(config, self.routing, self.device, self.mesh, self.keys, end_of_text, kind)
        self.optimizer = JointOptimizer(config, self.engine, self.lookup, self.mesh)
        self.finite = FiniteWatch(model, self.device) if config.train.check_finite == "layers" else None
        self.done_again = suspect
        self.suspect: Suspect | None = None
        """A step that another start is to do again: this one ends."""
        # What runs beside the steps
        self.validation = Validation(config, self.mesh, self.engine, self.lookup, batches)
        callbacks = build_callbacks(config, self.mesh, self.engine, self.lookup, self.data, self.validation)
        self.due_work = DueWork(callbacks, self.agreement, self._report_callback)
        # Where the run starts
        inputs = self.data, self.loader, self.routing, self.keys
        self.checkpoints = RunCheckpoints(
            config, folder, self.mesh, self.optimizer, *inputs, lease, self._say, accept_data_change, fresh
        )
        self.clock.mark("build")
        try:
            resumed = None if fresh else self.checkpoints.resume()
        except BaseException:
            if self.ranks.size == 1:  # the process may go on: it tries again
                self.checkpoints.close()
                self.lookup.close()
            raise
        self.resumed, self.state = resumed is not None, resumed or TrainState()
        if start_from is not None and not self.resumed:
            self.state = self.checkpoints.start_from(start_from)
        self.start = self.state.step
        self.clock.mark("load")
        # What it measures and reports
        self.metrics = self._open_folder(keys_summary) if self.ranks.first else None
        nodes = self.agreement.all_gather_object(socket.gethostname())
        self.start_record = StartRecord(folder if self.ranks.first else None, self.clock, nodes, self.start)
        self.recorded = records_at(folder, self.start) if self.resumed and self.ranks.first else {}
        """By kind: the records of the step that the run resumes after."""
        for step in unrecorded_checkpoints(folder) if self.resumed and self.ranks.first else ():
            self._record("checkpoint", step, written=True, bytes=None, seconds_saving=None, seconds_blocked=None)
        if self.loader.change is not None and "data_change" not in self.recorded:
            self._record("data_change", self.start, **self.loader.change)
            self._say(f"the data changes after step {self.start}, at position {self.loader.change['position']:,}")
        self.spikes = Spikes(folder, self.data, self.loader, self.agreement)
        self.throughput = Throughput(config.train.steps, self.start)
        self.utilization = Utilization(config, self.ranks.size, self.device)
        self.trace = ProfilerTrace(config.train.profile_from, config.train.profile_steps, str(folder / TRACE))
        remaining = config.train.steps - self.start
        self.next_working: WorkingSet | None = None
        """Of the next step's first window, if the last step has fetched it."""
        self.batches = StepPrefetcher(self.loader, self.lookup, steps=remaining, ahead=config.memory.plan_ahead)
        self.clock.mark("build")

    def run(self) -> int:
        """Train to the last step. Exit code: 0; 130: stopped by a signal; 1: the last save or upload failed. Where
        `suspect` is set afterwards, the run has not ended (`train_run`)."""
        last, stopped, finished = self.config.train.steps, False, False
        exit_code = 0
        try:
            with StopRequest(os.environ.get(STOP_FILE) if self.ranks.first else None) as request, self.loader:
                self.start_record.begin_loop()
                if self.resumed:
                    self.due_work.run_missing(self.start, set(self.recorded))
                for step in range(self.start + 1, last + 1):
                    stopped = self._run_step(step, request)
                    if stopped or self.suspect is not None:
                        break
                if self.suspect is None:
                    exit_code = self._finish(stopped)
                else:
                    self._report_uploads(wait=True)  # the next start takes their place
                    self.start_record.write(self.state.step, "ended to do a step again")
            finished = True
            return exit_code
        finally:
            self._close(failed=not finished)

    # ---- a step

    def _run_step(self, step: int, request: StopRequest) -> bool:
        """Train, report, agree with the other ranks, run callbacks, save. True if a signal ends the run here."""
        last, position = self.config.train.steps, self.state.position
        batch, result = self._train(step)
        self._check_finite(step, result)
        if self.suspect is not None:
            return False
        self._check_skipped(step, position, result)
        self.throughput.add(batch.tokens_ABT.numel() * self.mesh.batch.size)
        if step == self.start + 1:
            self.clock.mark("first_step")
        if step % self.config.train.log_every == 0 or step in (self.start + 1, last):
            self._report_step(step, batch, result)
        self._report_saves(self.checkpoints.finished())
        self._report_uploads()
        stop, save = self._agree(step, request)
        if stop and step < last:
            self.due_work.run_before_stop(step)
            return True
        self.due_work.run(step)
        if save and step < last:
            self._save(wait=False)
        return False

    def _train(self, step: int) -> tuple[PrefetchedStep, StepResult]:
        if self.ranks.first:
            self.trace.before_step(step)
        with self.ranks.phases("data"):
            batch = self.batches.take()
        # What runs after this step reads the tables: then the next step's rows are read after it, as without overlap.
        ahead = self.lookup.overlap and not self.due_work.due(step)
        with nullcontext() if self.finite is None else self.finite.step():
            result = train_step(
                self.config,
                self.lookup,
                self.optimizer,
                batch.tokens_ABT,
                batch.windows,
                step,
                working=self.next_working,
                upcoming=self.batches.upcoming if ahead else None,
            )
        self.next_working = result.next_working
        self.state.step, self.state.position, self.state.loss = step, batch.position, result.loss
        if self.trace.after_step(step):
            self._say(f"step {step}: trace in {self.trace.path}")
        return batch, result

    def _check_finite(self, step: int, result: StepResult) -> None:
        """With `train.check_finite = layers`: name the first module that is not finite, and have the step done again
        from the newest checkpoint (`suspect`), once; after that, say what it was."""
        before = self.done_again
        is_again = before is not None and before.step == step
        finite = result.applied or math.isfinite(result.host_loss + float(result.gradient_norm))
        if self.finite is None or (finite and not is_again):
            return
        finding = None if finite else self.finite.first(self.agreement)
        if before is not None and is_again:
            cause, sentence = verdict(before, finding)
            self._say(sentence)
            facts = {"cause": cause, "checkpoint": before.checkpoint, "repeats": not finite}
            self._record("not_finite", step, **facts, **before.finding.as_record())
            return
        assert finding is not None
        self._say(f"step {step}: {finding}")
        self._report_saves(self.checkpoints.finished(wait=True))
        newest = self.agreement.all_gather_object(max(list_steps(self.folder), default=0))[0]
        if newest > (0 if before is None else before.checkpoint):
            self._say(f"step {step}: is done again from the checkpoint of step {newest}, to tell a device from data")
            self.suspect = Suspect(step, finding, newest)
            return
        self._say(f"step {step}: is not done again: there is no checkpoint, or it was the start of another such step")
        self._record("not_finite", step, cause=UNKNOWN, checkpoint=None, repeats=None, **finding.as_record())

    def _check_skipped(self, step: int, position: int, result: StepResult) -> None:
        """Record a spike, with the documents of the batch that began at `position`. Count a step that was skipped; end
        the run after too many in a row."""
        if result.applied:
            self.state.skipped_in_a_row = 0
            if not self.spikes.is_spike(result.host_loss):
                return
        loss, norm, limit = float(result.loss), float(result.gradient_norm), self.config.train.max_skipped
        losses = self._micro_losses(result)
        kind = "spike" if result.applied else "skipped"
        facts = {"loss": loss, "gradient_norm": norm, "position": position}
        documents = self.spikes.write(step, {"kind": kind, **facts}, losses)
        self._record(kind, step, **facts, documents=documents)
        if result.applied:
            where = "" if documents is None else f"; {documents} has its documents"
            self._say(f"step {step}: loss {loss:.4f} is far above those before{where}")
            return
        self.state.skipped += 1
        self.state.skipped_in_a_row += 1
        spike = math.isfinite(loss) and math.isfinite(norm)
        why = f"a spike of more than {self.config.train.spike_sigmas:g} sigmas" if spike else "not finite"
        self._say(f"step {step}: skipped ({why}), gradient norm {norm}, loss {loss}")
        if self.state.skipped_in_a_row > limit:
            self._save_and_record_end(complete=False)
            raise UserError(
                f"loss or gradient was {'a spike or ' if spike else ''}not finite in {self.state.skipped_in_a_row} "
                f"steps in a row, up to step {step} (train.max_skipped = {limit}); lower optimizer.learning_rate or "
                f"memory.learning_rate.multiplier, or look at the data of these steps; the weights before them are in "
                f"the checkpoint of step {step}"
            )

    def _micro_losses(self, result: StepResult) -> list[float]:
        """Of this rank's micro-batches. The ranks that share sequences have a part of each loss; the first of them gets
        the losses, the others none."""
        context = self.mesh.context
        losses = torch.stack(result.micro_losses)
        context.all_reduce_mean([losses])
        return losses.tolist() if context.first else []

    def _agree(self, step: int, request: StopRequest) -> tuple[bool, bool]:
        """(stop, save), the same on all ranks."""
        with self.ranks.phases("agree"):
            stop, save = self.agreement.all_reduce_integers(
                int(request.signal is not None), int(self.checkpoints.due(step))
            )
        return stop > 0, save > 0

    # ---- between steps, and at the end

    def _save(self, *, wait: bool) -> bool:
        """False if the save was waited for and failed."""
        return self._report_saves(self.checkpoints.save(self.state, wait=wait))

    def _finish(self, stopped: bool) -> int:
        step = self.state.step
        loss = None if stopped else self._last_validation(step)
        saved = self._save_and_record_end(complete=not stopped, validation_loss=loss)
        saved = self._report_uploads(wait=True) and saved
        self.start_record.write(step, "stopped" if stopped else "complete" if saved else "not saved")
        self._say(f"{'stopped' if stopped else 'done'} after step {step}: {self.folder}")
        return 130 if stopped else 0 if saved else 1

    def _last_validation(self, step: int) -> float:
        """Loss; of its record if the run had made it and was killed before its end was recorded."""
        made = self.recorded.get(self.validation.kind) if step == self.start else None
        loss = self.agreement.all_gather_object(made and made.get("loss"))[0]
        return self.due_work.make(self.validation, step)["loss"] if loss is None else loss

    def _save_and_record_end(self, *, complete: bool, validation_loss: float | None = None) -> bool:
        """The last checkpoint and the last record. False if the checkpoint could not be written."""
        step = self.state.step
        rate = self.throughput.overall()  # before saving, which is not training
        saved = (self.resumed and step == self.start) or self._save(wait=True)
        tables = shards_of(self.lookup)
        hit, rows = self.agreement.all_reduce_integers(*(tables.rows_hit() if tables is not None else (0, 0)))
        self._record(
            "end",
            step,
            complete=saved and complete,
            validation_loss=validation_loss,
            validation_perplexity=None if validation_loss is None else perplexity(validation_loss),
            tokens=self.loader.tokens_before(self.state.position),
            tokens_per_second=rate,
            skipped=self.state.skipped,
            rows_hit=hit,
            rows=rows,
        )
        return saved

    def _close(self, *, failed: bool) -> None:
        self.due_work.close()
        if self.metrics is not None:
            self.metrics.close()
        if failed and self.ranks.size > 1:
            # The threads may be in collectives that wait for ranks that never join: the process has to exit. A save
            # under way needs the other ranks' threads alone, so it can still end.
            self.checkpoints.wait(SAVE_GRACE_SECONDS)
            return
        self.batches.drain()
        if self.next_working is not None:
            self.next_working.wait()  # it communicates, and the other ranks complete it too
        self.checkpoints.close()
        self.lookup.close()
        self.engine.close()
        self.ranks.phases.close()

    # ---- reports

    def _open_folder(self, keys_summary: str | None) -> Metrics:
        """On the first rank: the run folder with the run's inputs."""
        for sentence in open_run_folder(
            self.folder, self.config, self.mesh.data.size, self.start if self.resumed else 0
        ):
            print(sentence, file=sys.stderr, flush=True)
        print(self.mesh, flush=True)
        if self.routing is not None:
            save_routing(self.routing, self.folder / ROUTING)
        if self.keys is not None:
            self.keys.save(self.folder / KEYS_FILE)
            print(keys_summary, flush=True)
        self.state.run_id = settle_run_id(self.folder, self.state.run_id, self.fresh)
        return Metrics(self.folder, self.config, self.state.run_id)

    def _report_step(self, step: int, batch: PrefetchedStep, result: StepResult) -> None:
        synchronize(self.device)
        phases = self.ranks.phases.take()
        rates, seconds_left = self.throughput.end_interval(step)
        cross_entropy = float(result.cross_entropy)
        values = {
            "loss": float(result.loss),
            "cross_entropy": cross_entropy,
            "perplexity": perplexity(cross_entropy),
            "learning_rate": learning_rate(self.config, step),
            "gradient_norm": float(result.gradient_norm),
            **rates,
            **self.utilization.figures(rates["tokens_per_second"]),
            **self._exchange_figures(batch),
            **phases,
            "skipped": self.state.skipped,
        }
        if step % self.config.train.log_every == 0 or step in (1, self.config.train.steps):
            self._record("train", step, **values)
        self._report_stragglers(step, phases)
        if step == self.start + 1:  # after a whole step everything is allocated
            held = footprint(self.engine, self.lookup, batch.windows)
            for rank, parts in enumerate(self.ranks.all_gather_object(held)):
                self._record("memory", step, rank=rank, **parts)
        self.start_record.write(step)
        self._say(status_line(step, self.config.train.steps, values, seconds_left))

    def _exchange_figures(self, batch: PrefetchedStep) -> dict[str, Any]:
        tables, layers = shards_of(self.lookup), layers_of(self.engine.model.stages)
        rank = 0 if tables is None else tables.rank
        return exchange_figures(self.config, batch.windows, rank, self.mesh.replicas.size, layers)

    def _report_stragglers(self, step: int, phases: dict[str, float]) -> None:
        """One small all-gather over gloo: seconds by phase of every rank."""
        if self.ranks.size == 1:
            return
        everyone = self.agreement.all_gather_object((socket.gethostname(), phases))
        if self.ranks.first and step % self.config.train.log_every == 0:
            self._record("stragglers", step, **straggler_report(everyone))

    def _report_callback(self, callback: Callback, step: int, values: dict[str, Any], text: str, took: float) -> None:
        self._record(callback.kind, step, **values)
        if text:
            self._say(f"step {step}: {text}")
        self.throughput.exclude(took)
        self.start_record.add_evaluating(took)

    def _report_saves(self, saves: list[SaveResult]) -> bool:
        """Print and record how saves ended, a failed one on stderr; whether the last succeeded."""
        for save in saves:
            if self.ranks.first:
                print(save, file=sys.stdout if save.error is None else sys.stderr, flush=True)
            figures = {"bytes": save.bytes, "seconds_saving": save.seconds, "seconds_blocked": save.blocked}
            self._record("checkpoint", save.step, written=save.error is None, **figures)
            self.start_record.add_saving(save.blocked)
            self.start_record.write(self.state.step)
        return not saves or saves[-1].error is None

    def _report_uploads(self, *, wait: bool = False) -> bool:
        """As `_report_saves`. `wait` until none is under way; the same on all ranks then."""
        uploads = self.checkpoints.uploads(wait=wait)
        for one in uploads:
            print(one, file=sys.stdout if one.error is None else sys.stderr, flush=True)
            figures = {"bytes": one.bytes, "new_bytes": one.new_bytes, "seconds": one.seconds}
            self._record("upload", one.step, uploaded=one.error is None, **figures)
        failed = bool(uploads) and uploads[-1].error is not None
        if wait and self.config.checkpoint.remote is not None:
            failed = self.agreement.all_reduce_integers(int(failed), 0)[0] > 0
        return not failed

    def _say(self, text: str) -> None:
        if self.ranks.first:
            print(text, flush=True)

    def _record(self, kind: str, step: int, **values: Any) -> None:
        if self.metrics is not None:
            self.metrics.write(kind, step, **values)


def train_run(config: Config, folder: Path, fresh: bool, **options: Any) -> int:
    """Train to the end: a `Trainer`, and after a step that is to be done again another one, which resumes from the
    newest checkpoint. `options`: of `Trainer`. Exit code."""
    trainer = Trainer(config, folder, fresh, **options)
    while True:
        exit_code, suspect = trainer.run(), trainer.suspect
        if suspect is None:
            return exit_code
        del trainer  # with hooks that lead back to it, before the next takes as much memory
        gc.collect()
        trainer = Trainer(config, folder, fresh=False, **{**options, "clock": None, "suspect": suspect})


def _set_up_process(config: Config, ranks: ProcessGroup, folder: Path) -> torch.device:
    """Determinism, the seed, the device, and the watchdog over collectives."""
    make_deterministic(config.train.deterministic)
    torch.manual_seed(config.train.seed + ranks.rank)
    device = choose_device()
    ranks.phases.device = device
    # A single rank waits for nobody: its watchdog answers requests for stacks alone.
    limit = config.train.collective_timeout if ranks.size > 1 else math.inf
    ranks.phases.watch(limit, folder / WATCHDOG, StackDumps(folder / STACKS, ranks.rank))
    return device


def _open_data(config: Config) -> tuple[PreparedData, list[torch.Tensor]]:
    """(the training split, the batches of the validation)"""
    data = open_training_data(config)
    validation = open_data(config, "validation", config.data.path, config.data.remote)
    batches = validation_batches(
        validation, config.model.sequence_length, config.train.micro_batch, config.train.validation_sequences
    )
    return data, batches
