"""Checkpoints of a run: what is saved, when, and what a run starts from.

A run starts from the newest intact checkpoint of its own folder or object storage; else from the checkpoint named by
`--from` (`StartCheckpoint`); else from initial values. It saves every `checkpoint.every` steps or `checkpoint.minutes`,
and at its end. All ranks call `resume`, `start_from` and `save`.
"""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torch import Tensor

from xgram_dist.checkpoint.chain import Chain, touched_sets
from xgram_dist.checkpoint.folder import FOLDER, checkpoints_at, name_of
from xgram_dist.checkpoint.init_from import init_from_checkpoint, summary_rows
from xgram_dist.checkpoint.lease import Lease
from xgram_dist.checkpoint.load import damage_if_refused, load_checkpoint, load_newest, stage_layers
from xgram_dist.checkpoint.manifest import Manifest
from xgram_dist.checkpoint.safetensors_io import DamagedFileError
from xgram_dist.checkpoint.save import Saver, SaveResult
from xgram_dist.checkpoint.sharded_tensor import table_state, training_state
from xgram_dist.checkpoint.tensor_file import DTYPE_NAMES
from xgram_dist.checkpoint.uploads import UploadResult, Uploads, fetch_newer, newest_on_disk
from xgram_dist.config import Config, dump_config, parse_config
from xgram_dist.console import print_table
from xgram_dist.data.dataset import PreparedData
from xgram_dist.data.loader import Loader
from xgram_dist.errors import UserError
from xgram_dist.model.methods.base import Keys
from xgram_dist.parallel.mesh import Mesh
from xgram_dist.tables.routing import Routing
from xgram_dist.tables.storage.system import memory_limit
from xgram_dist.train.inputs import KEYS_FILE, check_init_from, check_keys
from xgram_dist.train.run_dir import ROUTING
from xgram_dist.train.step import JointOptimizer
from xgram_dist.untrusted import read_file

COPY_SHARE = 1 / 8
"""Of memory: what records on disk may take to be copied, so that a save of all rows goes on in the background."""


@dataclass
class TrainState:
    """Progress of a run, beside the weights and the optimizer."""

    step: int = 0
    """The last step that was done."""
    position: int = 0
    """Global sequences trained on."""
    skipped: int = 0
    """Steps whose loss or gradient was not finite."""
    skipped_in_a_row: int = 0
    loss: Tensor | float | None = None
    """Of the last step."""
    started_from: dict[str, Any] | None = None
    """The checkpoint of another run that this one started from."""
    run_id: str | None = None
    """On the first rank: of the run in its loggers (run_dir.py)."""


@dataclass(frozen=True)
class StartCheckpoint:
    """`--from PATH`: the checkpoint of another run that a new run starts from."""

    path: Path
    weights_only: bool
    """False: the whole state, with optimizer, step and data position."""

    @staticmethod
    def find(path: Path, folder: Path, *, weights_only: bool, fresh: bool) -> "StartCheckpoint":
        """The newest intact checkpoint at a path. `folder`: of the new run, which `fresh` clears."""
        if fresh and path.resolve().is_relative_to(folder.resolve()):
            raise UserError(f"--from {path} lies in '{folder}', which --fresh clears; choose another --folder")
        damage: DamagedFileError | None = None
        for checkpoint in reversed(checkpoints_at(path)):
            try:
                Manifest.read(checkpoint)
                return StartCheckpoint(checkpoint, weights_only)
            except DamagedFileError as error:
                damage = damage or error
        assert damage is not None
        raise damage


@dataclass(frozen=True)
class StartFromHf:
    """`--from-hf DIR`: the Hugging Face folder that the backbone of a new run starts from."""

    path: Path


class RunCheckpoints:
    def __init__(
        self,
        config: Config,
        folder: Path,
        mesh: Mesh,
        optimizer: JointOptimizer,
        data: PreparedData,
        loader: Loader,
        routing: Routing | None,
        keys: Keys | None,
        lease: Lease | None,
        say: Callable[[str], None],
        accept_data_change: bool = False,
        fresh: bool = False,
    ):
        """`say` prints a line on the first rank. `fresh`: nothing is resumed, and the run's checkpoints on object
        storage are removed."""
        self._accept_data_change = accept_data_change
        self._config, self._folder, self._mesh, self._say = config, folder, mesh, say
        self._engine, self._shards = optimizer.engine, optimizer.shards
        self._data, self._loader, self._routing, self._keys = data, loader, routing, keys
        self._saver = Saver(folder, config.checkpoint, mesh.world, lease)
        self._chain: Chain | None = None
        """What a save of changed rows would extend."""
        self._lease = lease
        self._uploads: Uploads | None = None
        if config.checkpoint.remote is not None and mesh.world.first:
            self._uploads = Uploads(folder, config.checkpoint)
            problem = self._uploads.take(fresh=fresh)
            if problem is not None and not newest_on_disk(folder):
                raise UserError(problem)
            if problem is not None:
                say(f"{problem}; the run goes on from its checkpoints on disk")

    # ---- starting

    def resume(self) -> TrainState | None:
        """Load the newest intact checkpoint of the run folder or of the object storage; None if there is no
        checkpoint."""
        self._fetch_newer(self._newest_on_disk())
        facts, complaints = self._load_newest()
        if complaints and self._fetch_newer(0 if facts is None else facts["step"]):
            facts, _ = self._load_newest()
        if facts is None:
            if complaints:
                raise UserError(f"'{self._folder}' has no checkpoint to resume from; start over with --fresh")
            return None
        self._say(f"resuming after step {facts['step']}")
        if self._uploads is not None:
            self._uploads.want(facts["step"])  # if it is there already, this costs a look at each piece
        self._chain = self._chain_at(self._folder / FOLDER / name_of(facts["step"]))
        return self._state_of(facts)

    def _load_newest(self) -> tuple[dict[str, Any] | None, list[str]]:
        """(facts, complaints), which it prints."""
        facts, complaints = load_newest(
            self._folder, self._engine, self._shards, self._routing, self._mesh, self._accept
        )
        for complaint in complaints:
            self._say(complaint)
        return facts, complaints

    def _newest_on_disk(self) -> int:
        return int(self._mesh.world.all_gather_object(newest_on_disk(self._folder))[0])

    def _fetch_newer(self, than: int) -> bool:
        """Bring the newest checkpoint after a step from the object storage to the run folder."""
        settings = self._config.checkpoint
        if settings.remote is None:
            return False
        try:
            fetched, complaints = fetch_newer(self._folder, settings, than, self._mesh.world, self._lease)
        except UserError as error:
            if not self._newest_on_disk():
                raise
            fetched, complaints = False, [f"{error}; the run goes on from its checkpoints on disk"]
        for complaint in complaints:
            self._say(complaint)
        if complaints and not fetched and not self._newest_on_disk():
            raise UserError(f"{complaints[0]}; run the same command again, or start over with --fresh")
        return fetched

    def start_from(self, start: StartCheckpoint | StartFromHf) -> TrainState:
        """Load the state, or the weights alone, of another run; or the backbone of a Hugging Face folder."""
        if isinstance(start, StartFromHf):
            return self._start_from_hf(start.path)
        # The other run may save meanwhile, so that ranks see different newest checkpoints: all take the first rank's.
        folder = Path(self._mesh.world.all_gather_object(str(start.path))[0])
        if start.weights_only:
            tokenizer = self._data.manifest.tokenizer_sha256
            check_init_from(folder, Manifest.read(folder).run, self._config, self._keys)
            facts, summaries = init_from_checkpoint(
                folder, self._engine, self._shards, self._routing, self._mesh, tokenizer
            )
            self._say(f"weights of {folder}, step {facts['step']:,}:")
            print_table(["part", "taken", "of", ""], summary_rows(summaries), self._say, left=(0, 3))
            state = TrainState()
        else:
            facts = load_checkpoint(folder, self._engine, self._shards, self._routing, self._mesh, self._accept)
            state = replace(self._state_of(facts), run_id=None)  # another run's
            self._say(f"state of {folder}: resuming after step {state.step}")
        state.started_from = {
            "checkpoint": str(folder),
            "name": parse_config(facts["config"]).name,
            "step": facts["step"],
            "weights_only": start.weights_only,
        }
        return state

    def _start_from_hf(self, folder: Path) -> TrainState:
        from xgram_dist.checkpoint.from_hf import init_from_hf  # it needs a package of an extra

        tokenizer = folder / "tokenizer.json"
        if not tokenizer.is_file():
            self._say(f"'{folder}' has no tokenizer.json: token ids of the data are taken to be those of the model")
        elif hashlib.sha256(read_file(tokenizer, follow=True)).hexdigest() != self._data.manifest.tokenizer_sha256:
            raise UserError(
                f"data.path was prepared with another tokenizer than that of '{folder}', so token ids have other "
                f"meanings; prepare the data with --tokenizer {tokenizer}"
            )
        summaries = init_from_hf(folder, self._engine, self._mesh)
        self._say(f"backbone of {folder}:")
        print_table(["part", "taken", "of", ""], summary_rows(summaries), self._say, left=(0, 3))
        source = {"checkpoint": str(folder), "name": folder.resolve().name, "step": 0, "weights_only": True}
        return TrainState(started_from=source)

    def _accept(self, facts: dict[str, Any]) -> None:
        check_keys(facts.get("keys"), self._keys)
        with damage_if_refused(self._folder, "loader"):
            self._loader.load_state_dict(facts["loader"], self._accept_data_change)
        self._engine.spike_guard.recent.clear()
        self._engine.spike_guard.recent.extend(_recent_steps(facts))

    def _state_of(self, facts: dict[str, Any]) -> TrainState:
        return TrainState(
            step=facts["step"],
            position=self._loader.position,
            skipped=facts["skipped"],
            loss=facts["loss"],
            started_from=facts["started_from"],
            run_id=facts.get("run_id"),
        )

    # ---- saving

    def due(self, step: int) -> bool:
        """Whether it is time to save. The clocks of ranks differ: the first rank decides."""
        return self._mesh.world.first and self._saver.due(step)

    def save(self, state: TrainState, *, wait: bool) -> list[SaveResult]:
        """Save in the background, or `wait`. Returns the saves that ended meanwhile. Of touched rows, those that were
        written since the last save are saved, unless the chain has become long."""
        results = self._noted(self._saver.finished_saves(wait=True))
        chain = self._extended_chain()
        tensors = training_state(self._engine, self._shards, self._mesh, changed_rows=chain.parts > 1)
        base = self._chain.newest if self._chain is not None and chain.parts > 1 else None
        if self._shards is not None:
            # A copy of all rows of a disk may take more than the memory: they are written from where they lie.
            wait = wait or (chain.parts == 1 and self._shards.disk_bytes() > COPY_SHARE * memory_limit())
            self._shards.mark_saved()
        self._chain = replace(chain, newest=self._folder / FOLDER / name_of(state.step))
        return results + self._noted(self._saver.save(tensors, self._facts(state), self._files(), wait=wait, base=base))

    def finished(self, *, wait: bool = False) -> list[SaveResult]:
        """A background save that has ended since the last call; with `wait`, one under way, too."""
        return self._noted(self._saver.finished_saves(wait=wait))

    def _noted(self, results: list[SaveResult]) -> list[SaveResult]:
        if any(result.error is not None for result in results):
            self._chain = None  # rows that were to be saved are no longer known as changed: the next save has all
        elif results and self._uploads is not None:
            self._uploads.want(results[-1].step)
        return results

    def uploads(self, *, wait: bool = False) -> list[UploadResult]:
        """Uploads that have ended since the last call, on the first rank; with `wait`, all of them."""
        return [] if self._uploads is None else self._uploads.results(wait=wait)

    def _extended_chain(self) -> Chain:
        """With the rows of a save now; of one part if it has to be all rows. The same on all ranks."""
        if self._shards is None or not self._shards.touched:
            return Chain(self._folder, 1, 0)
        counts = self._saver.all_gather((self._shards.num_changed(), self._shards.num_created()))
        changed, created = (sum(of_ranks) for of_ranks in zip(*counts, strict=True))
        if self._chain is not None:
            longer = Chain(self._chain.newest, self._chain.parts + 1, self._chain.rows + changed)
            if longer.is_short(created):
                return longer
        return Chain(self._folder, 1, created)

    def _chain_at(self, checkpoint: Path) -> Chain | None:
        """Of a checkpoint that was loaded; None: it cannot be extended."""
        if self._shards is None or not self._shards.touched:
            return None
        manifest = Manifest.read(checkpoint)
        sets = touched_sets(manifest)
        state = table_state(self._shards, self._mesh)
        for name, tensor in state.row_tensors().items():  # the parts of a tensor have one type
            entry = manifest.tensors.get(name)
            if entry is None or entry.row_ids not in sets or entry.dtype != DTYPE_NAMES[tensor.dtype]:
                return None
        self._shards.mark_saved()
        # Ranks of a tensor group, and stages of a pipeline, keep the same rows.
        holders = self._mesh.world.size // (self._shards.sharding.ranks * self._mesh.replicas.size)
        rows = sum(one.num_rows for one in sets.values()) * holders
        return Chain(checkpoint, max(len(one.parts or [1]) for one in sets.values()), rows)

    def wait(self, seconds: float) -> None:
        """Until the save under way has ended, if it ends in time."""
        self._saver.wait(seconds)

    def close(self) -> None:
        self._saver.close()

    def _facts(self, state: TrainState) -> dict[str, Any]:
        mesh, shards = self._mesh, self._shards
        return {
            "step": state.step,
            "updates": self._engine.step_count,
            "skipped": state.skipped,
            "recent_steps": list(self._engine.spike_guard.recent),
            "loss": _finite(state.loss),
            "saved": datetime.now(UTC).isoformat(timespec="seconds"),
            "started_from": state.started_from,
            "run_id": state.run_id,
            "loader": {**self._loader.state_dict(), "position": state.position},
            "ranks": mesh.world.size,
            "data_ranks": mesh.data.size,
            "table_ranks": mesh.rows.size,
            "stages": stage_layers(self._engine),
            "tensor": mesh.tensor.size,
            "engine": self._config.parallel.engine,
            "row_sharding": None if shards is None else shards.sharding.policy,
            "table_optimizer": None if shards is None else shards.settings.kind,
            "routing": None if self._routing is None else self._routing.sha256(),
            "keys": None if self._keys is None else self._keys.sha256(),
            "tokenizer": self._data.tokenizer_facts(),
            "config": dump_config(self._config),
        }

    def _files(self) -> list[Path]:
        files = [self._folder / ROUTING] if self._routing is not None else []
        files += [self._folder / KEYS_FILE] if self._keys is not None else []
        return files + self._data.tokenizer_files()


def _recent_steps(facts: dict[str, Any]) -> list[tuple[float, float]]:
    """Loss and gradient norm of the steps before the checkpoint; earlier releases did not save them."""
    try:
        return [(float(loss), float(norm)) for loss, norm in facts.get("recent_steps", [])]
    except (TypeError, ValueError):
        raise DamagedFileError("the checkpoint's 'recent_steps' is not a list of pairs of numbers") from None


def _finite(loss: Tensor | float | None) -> float | None:
    """As JSON can hold it: null unless it is finite."""
    return float(loss) if loss is not None and math.isfinite(float(loss)) else None
