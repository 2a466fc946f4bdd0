"""The training loop.

    for each step:  batch -> fetch -> forward and backward of each micro-batch -> return gradients -> clip -> update

Parts of the exchange run beside the compute (`memory.overlap`): the next step's fetch begins between the updates of
tables and backbone.

Every rank runs the same loop. After each step one small all-reduce over the world agrees on whether to stop (any rank
received a signal) and whether to save (the first rank decides). The first rank prints and writes records. Ctrl-C,
SIGTERM and SIGUSR1 end a run after the current step, with a checkpoint and metrics written.
"""

import math
import sys
import time
from pathlib import Path
from typing import Any

import torch

from xgram_dist.checkpoint.lease import Lease
from xgram_dist.checkpoint.save import SaveResult
from xgram_dist.config import Config
from xgram_dist.config.validate import accumulation
from xgram_dist.data.dataset import PreparedData
from xgram_dist.data.from_config import build_loader, open_data, open_training_data
from xgram_dist.data.loader import validation_batches
from xgram_dist.engine import build_engine
from xgram_dist.errors import UserError
from xgram_dist.model.build import build_lookup, build_model
from xgram_dist.model.methods.base import check_files, check_method
from xgram_dist.optim.schedule import learning_rate
from xgram_dist.parallel.device import choose_device, make_deterministic, synchronize
from xgram_dist.parallel.mesh import build_mesh, new_host_group
from xgram_dist.parallel.process_group import ProcessGroup
from xgram_dist.tables.exchange import shards_of
from xgram_dist.tables.optimizers.build import choose_optimizer
from xgram_dist.tables.routing_io import save_routing
from xgram_dist.tables.working_set import WorkingSet
from xgram_dist.train.callbacks import Callback, Validation, build_callbacks
from xgram_dist.train.checkpointing import RunCheckpoints, StartCheckpoint, TrainState
from xgram_dist.train.inputs import KEYS_FILE, check_agreement, resolve_keys, resolve_routing, touched_share
from xgram_dist.train.memory import footprint
from xgram_dist.train.metrics import Metrics, perplexity, status_line
from xgram_dist.train.prefetch import PrefetchedStep, StepPrefetcher
from xgram_dist.train.profiling import ProfilerTrace, Throughput, Utilization, exchange_figures
from xgram_dist.train.run_dir import ROUTING, TRACE, WATCHDOG, check_run_folder, open_run_folder
from xgram_dist.train.signals import StopRequest
from xgram_dist.train.step import JointOptimizer, StepResult, train_step

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
        start_from: StartCheckpoint | None = None,
        accept_data_change: bool = False,
    ):
        """`fresh`: clear an earlier run in the folder. `start_from`: for a run without a checkpoint of its own.
        `accept_data_change`: a run that resumes may read other data from there on."""
        check_method(config)
        check_files(config)
        self.config, self.folder, self.ranks = config, folder, ranks or ProcessGroup()
        self.mesh = build_mesh(config, self.ranks)
        self.agreement = new_host_group(self.ranks)  # not the device's group: agreeing would wait for the whole step
        accumulation(config, self.mesh.data.size)
        if self.ranks.first:
            check_run_folder(folder, config, fresh)
        self.device = _set_up_process(config, self.ranks, folder)
        # Data, and what is derived from it
        self.data, batches = _open_data(config)
        self.loader = build_loader(config, self.data, self.mesh.data.rank, self.mesh.data.size)
        end_of_text = self.data.manifest.end_of_text
        self.routing = resolve_routing(config, self.data)
        check_agreement(self.ranks, config, self.routing, self.data.fingerprint)
        # Backbone, tables, optimizer
        model = build_model(config, self.device, end_of_text, self.mesh.tensor)
        self.engine = build_engine(config, model, self.mesh, self.device)
        self.keys, keys_summary = resolve_keys(config, self.data, self.ranks)
        kind = choose_optimizer(config, touched_share(config, self.data, self.routing))
        self.lookup = build_lookup(config, self.routing, self.device, self.mesh, self.keys, end_of_text, kind)
        self.optimizer = JointOptimizer(config, self.engine, self.lookup, self.mesh)
        # What runs beside the steps
        self.validation = Validation(config, self.mesh, self.engine, self.lookup, batches)
        self.callbacks = build_callbacks(config, self.mesh, self.engine, self.lookup, self.data, self.validation)
        # Where the run starts
        inputs = self.data, self.loader, self.routing, self.keys
        self.checkpoints = RunCheckpoints(
            config, folder, self.mesh, self.optimizer, *inputs, lease, self._say, accept_data_change
        )
        resumed = None if fresh else self.checkpoints.resume()
        self.resumed, self.state = resumed is not None, resumed or TrainState()
        if start_from is not None and not self.resumed:
            self.state = self.checkpoints.start_from(start_from)
        self.start = self.state.step
        # What it measures and reports
        self.metrics = self._open_folder(keys_summary) if self.ranks.first else None
        if self.loader.change is not None:
            self._record("data_change", self.start, **self.loader.change)
            self._say(f"the data changes after step {self.start}, at position {self.loader.change['position']:,}")
        self.throughput = Throughput(config.train.steps, self.start)
        self.utilization = Utilization(config, self.ranks.size, self.device)
        self.trace = ProfilerTrace(config.train.profile_from, config.train.profile_steps, str(folder / TRACE))
        remaining = config.train.steps - self.start
        self.next_working: WorkingSet | None = None
        """Of the next step's first window, if the last step has fetched it."""
        self.batches = StepPrefetcher(self.loader, self.lookup, steps=remaining, ahead=config.memory.plan_ahead)

    def run(self) -> int:
        """Train to the last step. Exit code: 0; 130 if a signal stopped the run; 1 if its last save failed."""
        last, stopped, finished = self.config.train.steps, False, False
        try:
            with StopRequest() as request, self.loader:
                for step in range(self.start + 1, last + 1):
                    stopped = self._run_step(step, request)
                    if stopped:
                        break
                exit_code = self._finish(stopped)
            finished = True
            return exit_code
        finally:
            self._close(failed=not finished)

    # ---- a step

    def _run_step(self, step: int, request: StopRequest) -> bool:
        """Train, report, agree with the other ranks, save, run callbacks. True if a signal ends the run here."""
        last = self.config.train.steps
        batch, result = self._train(step)
        self._check_skipped(step, result)
        self.throughput.add(batch.tokens_ABT.numel() * self.mesh.data.size)
        if step % self.config.train.log_every == 0 or step in (self.start + 1, last):
            self._report_step(step, batch, result)
        self._report_saves(self.checkpoints.finished())
        stop, save = self._agree(step, request)
        if stop and step < last:
            return True
        if save and step < last:
            self._save(wait=False)
        for callback in self.callbacks:
            if callback.due(step):
                self._run_callback(callback, step)
        return False

    def _train(self, step: int) -> tuple[PrefetchedStep, StepResult]:
        if self.ranks.first:
            self.trace.before_step(step)
        with self.ranks.phases("data"):
            batch = self.batches.take()
        # What runs after this step reads the tables: then the next step's rows are read after it, as without overlap.
        ahead = self.lookup.overlap and not any(callback.due(step) for callback in self.callbacks)
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

    def _check_skipped(self, step: int, result: StepResult) -> None:
        """Count a step that was skipped because it was not finite; end the run after too many in a row."""
        if result.applied:
            self.state.skipped_in_a_row = 0
            return
        loss, norm, limit = float(result.loss), float(result.gradient_norm), self.config.train.max_skipped
        self.state.skipped += 1
        self.state.skipped_in_a_row += 1
        spike = math.isfinite(loss) and math.isfinite(norm)
        why = f"a spike of more than {self.config.train.spike_sigmas:g} sigmas" if spike else "not finite"
        self._say(f"step {step}: skipped ({why}), gradient norm {norm}, loss {loss}")
        self._record("skipped", step, loss=loss, gradient_norm=norm)
        if self.state.skipped_in_a_row > limit:
            self._save_and_record_end(complete=False)
            raise UserError(
                f"loss or gradient was {'a spike or ' if spike else ''}not finite in {self.state.skipped_in_a_row} "
                f"steps in a row, up to step {step} (train.max_skipped = {limit}); lower optimizer.learning_rate or "
                f"memory.learning_rate.multiplier, or look at the data of these steps; the weights before them are in "
                f"the checkpoint of step {step}"
            )

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

    def _run_callback(self, callback: Callback, step: int) -> dict[str, Any]:
        start = time.monotonic()
        values, sentence = callback.run(step)
        self._record(callback.kind, step, **values)
        if sentence:
            self._say(f"step {step}: {sentence}")
        self.throughput.exclude(time.monotonic() - start)
        return values

    def _finish(self, stopped: bool) -> int:
        step = self.state.step
        loss = None if stopped else self._run_callback(self.validation, step)["loss"]
        saved = self._save_and_record_end(complete=not stopped, validation_loss=loss)
        self._say(f"{'stopped' if stopped else 'done'} after step {step}: {self.folder}")
        return 130 if stopped else 0 if saved else 1

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
        for callback in self.callbacks:
            callback.close()
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
        open_run_folder(self.folder, self.config, self.mesh.data.size, self.start if self.resumed else 0)
        print(self.mesh, flush=True)
        if self.routing is not None:
            save_routing(self.routing, self.folder / ROUTING)
        if self.keys is not None:
            self.keys.save(self.folder / KEYS_FILE)
            print(keys_summary, flush=True)
        return Metrics(self.folder)

    def _report_step(self, step: int, batch: PrefetchedStep, result: StepResult) -> None:
        synchronize(self.device)
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
            **exchange_figures(self.config, batch.windows, self.mesh.data.rank),
            **self.ranks.phases.take(),
            "skipped": self.state.skipped,
        }
        self._record("train", step, **values)
        if step == self.start + 1:  # after a whole step everything is allocated
            held = footprint(self.engine, self.lookup, batch.windows)
            for rank, parts in enumerate(self.ranks.all_gather_object(held)):
                self._record("memory", step, rank=rank, **parts)
        self._say(status_line(step, self.config.train.steps, values, seconds_left))

    def _report_saves(self, saves: list[SaveResult]) -> bool:
        """Print and record how saves ended, a failed one on stderr; whether the last succeeded."""
        for save in saves:
            if self.ranks.first:
                print(save, file=sys.stdout if save.error is None else sys.stderr, flush=True)
            figures = {"bytes": save.bytes, "seconds_saving": save.seconds, "seconds_blocked": save.blocked}
            self._record("checkpoint", save.step, written=save.error is None, **figures)
        return not saves or saves[-1].error is None

    def _say(self, text: str) -> None:
        if self.ranks.first:
            print(text, flush=True)

    def _record(self, kind: str, step: int, **values: Any) -> None:
        if self.metrics is not None:
            self.metrics.write(kind, step, **values)


def _set_up_process(config: Config, ranks: ProcessGroup, folder: Path) -> torch.device:
    """Determinism, the seed, the device, and the watchdog over collectives."""
    make_deterministic(config.train.deterministic)
    torch.manual_seed(config.train.seed + ranks.rank)
    device = choose_device()
    ranks.phases.device = device
    if ranks.size > 1:
        ranks.phases.watch(config.train.collective_timeout, folder / WATCHDOG)
    return device


def _open_data(config: Config) -> tuple[PreparedData, list[torch.Tensor]]:
    """(the training split, the batches of the validation)"""
    data = open_training_data(config)
    validation = open_data(config, "validation", config.data.path, config.data.remote)
    batches = validation_batches(
        validation, config.model.sequence_length, config.train.micro_batch, config.train.validation_sequences
    )
    return data, batches
