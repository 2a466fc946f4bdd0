"""The readers, each with a real file that the package's own commands have made."""

import contextlib
import functools
import json
import os
import random
import shutil
import socket
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import crc32c
import numpy as np
import torch
import yaml
from fuzz_changes import change_bytes, change_json, change_lines, change_npz, change_tensors, generate, is_json

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "tables"))  # for the maker of a token map
sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "train"))

from test_routing_imported import make_map
from train_helpers import small_config

from xgram_dist.analysis.compare.runs import ComparisonState
from xgram_dist.analysis.diagnose.figures import read_figures
from xgram_dist.analysis.report.run_page import run_page
from xgram_dist.analysis.report.runs import read_run, summary
from xgram_dist.analysis.watch.screen import watch
from xgram_dist.checkpoint import lease
from xgram_dist.checkpoint.folder import checkpoints_at
from xgram_dist.checkpoint.init_from import init_from_checkpoint
from xgram_dist.checkpoint.load import load_checkpoint
from xgram_dist.checkpoint.manifest import Manifest, manifest_checksum
from xgram_dist.checkpoint.reader import CheckpointReader
from xgram_dist.checkpoint.remote import Index, RemoteCheckpoints, RemoteWriter, make_files
from xgram_dist.checkpoint.row_ids import row_id_digest
from xgram_dist.checkpoint.safetensors_io import RawFile
from xgram_dist.cli.main import _run as command
from xgram_dist.cluster.slurm.attempts import read_attempts
from xgram_dist.cluster.slurm.bad_nodes import excluded_nodes
from xgram_dist.cluster.slurm.site import load_site
from xgram_dist.cluster.slurm.successor import read_jobs
from xgram_dist.config import load_config, parse_config
from xgram_dist.data import manifest, storage
from xgram_dist.data.dataset import PreparedData, read_index
from xgram_dist.data.documents import read_documents
from xgram_dist.data.manifest import read_manifest
from xgram_dist.data.storage import StorageError
from xgram_dist.data.tokenizer import load_tokenizer
from xgram_dist.environment import launcher_variables, read_place
from xgram_dist.errors import UserError
from xgram_dist.eval.results import EvaluationResult, comparison_table, scoring_table
from xgram_dist.files import read_npz
from xgram_dist.inference.hf.decoder_tables import Tables
from xgram_dist.library import TokenTables
from xgram_dist.serving.mapped_rows import map_rows
from xgram_dist.tables.fgrams import Fgrams
from xgram_dist.tables.frequencies import load_frequencies
from xgram_dist.tables.ngrams import Folding
from xgram_dist.tables.routing_import import import_token_map
from xgram_dist.tables.routing_io import load_routing
from xgram_dist.tables.storage import scratch
from xgram_dist.tables.storage.scratch import ScratchFile
from xgram_dist.train.metrics_file import read_metrics
from xgram_dist.train.run_dir import open_run_folder
from xgram_dist.train.trainer import Trainer

RECIPES = Path(__file__).parents[2] / "recipes"
VOCABULARY = 320
Read = Callable[[Path], object]
Repair = Callable[[bytes], bytes]
Change = Callable[[bytes, random.Random], bytes]


class Target:
    """A reader with a real file. `repair` makes a changed file pass the checks that only damage would fail. `cost`:
    its milliseconds for an input, roughly. `change`: the only kind of change."""

    def __init__(
        self,
        name: str,
        file: Path,
        read: Read,
        repair: Repair = bytes,
        cost: float = 0.3,
        change: Change | None = None,
    ):
        self.name, self.file, self.read, self.repair, self.cost = name, file, read, repair, cost
        self.original = file.read_bytes()
        self._only = change
        self._change = change_bytes
        if self.original[:4] == b"PK\3\4":
            self._change = change_npz
        elif is_json(self.original):
            self._change = change_json
        elif file.suffix == ".jsonl":
            self._change = change_lines

    def input(self, chooser: random.Random) -> bytes:
        if self._only is not None:
            return self.repair(self._only(self.original, chooser))
        kind = chooser.random()
        if kind < 0.05:
            return self.repair(generate(chooser))
        change = self._change if kind < 0.75 else change_bytes
        return self.repair(change(self.original, chooser))


def with_checksum(data: bytes) -> bytes:
    try:
        tree = json.loads(data)
        tree["checksum"] = manifest_checksum(tree)
        return json.dumps(tree).encode()
    except (ValueError, RecursionError, TypeError, AttributeError):
        return data


def build_targets(work: Path) -> list[Target]:
    storage.FIRST_PAUSE_SECONDS = 0.0
    lease.DYING_SECONDS = scratch.DYING_SECONDS = 0.0
    data = _make_data(work)
    runs = {
        "xgram": {"optimizer": "catch_up", "sites": {"v": {"views": 2, "kernels": [2]}}, "count_updates": True},
        "engram": {"method": "engram", "compression": 1.0, "sites": {}, "routing": {}, "rows": "touched"}
        | {"engram": {"heads": 1, "rows": 500, "width": 8, "taps": 2, "layers": [0]}},
        "scone": {"method": "scone", "compression": 1.0, "sites": {}, "routing": {}}
        | {"scone": {"grams": 50, "layers": 1, "sequences": 64}},
    }
    trainers = {name: _train(work, data, name, memory) for name, memory in runs.items()}
    return [
        *_data_targets(work, data),
        *_table_targets(work, data),
        *_checkpoint_targets(work, trainers),
        *_run_targets(work),
        *_serving_targets(work),
        *_other_targets(work),
    ]


# ---- data


def _make_data(work: Path) -> Path:
    (work / "raw.jsonl").write_text(
        "".join(json.dumps({"text": f"some words of text {n} " * 20}) + "\n" for n in range(40))
    )
    words = ["--train-bpe", "300", "--chunk-tokens", "128", "--validation", "0.1", "--workers", "1"]
    assert command(["prepare", "--source", f"web={work / 'raw.jsonl'}", *words, "--out", str(work / "data")]) == 0
    return work / "data"


def _data_targets(work: Path, data: Path) -> list[Target]:
    index = data / "train" / "web" / "index.json"
    encoding = json.loads(index.read_text())["shards"][0]["column_encodings"][0]
    documents = []
    text = b"".join((work / "raw.jsonl").read_bytes().splitlines(keepends=True)[:4])
    for name in ("documents.jsonl", "documents.jsonl.gz", "documents.jsonl.zst", "documents.parquet"):
        path = work / name
        _write_documents(path, text)
        documents.append(Target(name, path, lambda path: [None for _ in read_documents(path)]))
    packed = next((data / "train" / "web").glob("*.zstd"))

    def read_data(path: Path) -> None:
        for raw in (data / "train" / "web").glob("*.mds"):
            raw.unlink()
        PreparedData.open(data).chunk(0, 0)

    return [
        Target("dataset.json", data / "dataset.json", lambda path: read_manifest(path.parent), cost=0.2),
        Target("dataset.json opened", data / "dataset.json", read_data, _with_fingerprint, cost=1),
        Target("index.json", index, lambda path: read_index(path, encoding), cost=0.7),
        Target("index.json opened", index, read_data, cost=1),
        Target("shard", packed, read_data, cost=1.5),
        Target("counts", data / "counts.npz", lambda path: read_npz(path, "counts"), cost=0.35),
        Target("tokenizer", data / "tokenizer.json", _read_tokenizer, cost=0.8),
        *documents,
    ]


def _with_fingerprint(data: bytes) -> bytes:
    """The fingerprint is checked last, so the reader itself knows what it has to be."""
    seen: list[manifest.Manifest] = []
    with contextlib.suppress(ValueError, RecursionError):
        tree = json.loads(data)
        with (
            mock.patch.object(manifest, "read_json", return_value=tree),
            mock.patch.object(manifest._Reader, "fault", _give_up),
            mock.patch.object(manifest.Manifest, "fingerprint", property(lambda one: str(seen.append(one)))),
            contextlib.suppress(_GaveUpError, UserError, TypeError, AttributeError, KeyError),
        ):
            read_manifest(Path("x"))
    if not seen:
        return data
    return json.dumps({**tree, "fingerprint": seen[0].fingerprint}).encode()


class _GaveUpError(Exception):
    pass


def _give_up(*_: object) -> None:
    raise _GaveUpError


def _read_tokenizer(path: Path) -> None:
    tokenizer = load_tokenizer(path)
    tokenizer.encode_batch(["some words of text 3\n", "état 数据"])
    tokenizer.decode([0, 1, 5])


def _write_documents(path: Path, text: bytes) -> None:
    import gzip

    import pyarrow
    import pyarrow.parquet
    import zstandard

    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text))
    elif path.suffix == ".zst":
        path.write_bytes(zstandard.ZstdCompressor().compress(text))
    elif path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": ["some text", "more text"] * 20}), path)
    else:
        path.write_bytes(text)


# ---- files of tables


def _table_targets(work: Path, data: Path) -> list[Target]:
    frequencies, routing, token_map = work / "frequencies.npz", work / "routing.npz", work / "map.npz"
    vocabulary = ["--vocabulary", "300"]
    assert command(["frequencies", str(data), *vocabulary, "--out", str(frequencies)]) == 0
    shape = ["--compression", "0.5", "--views", "2", "--vip", "10", "--buckets", "4"]
    assert command(["route", "--frequencies", str(frequencies), *vocabulary, *shape, "--out", str(routing)]) == 0
    np.savez(token_map, **make_map([int(1000 / (1 + (7 * token) % 400)) for token in range(400)]))

    def read_fgrams(path: Path) -> None:
        grams = Fgrams.load(path, VOCABULARY)
        _ = grams.arrays
        grams.match(np.arange(20).reshape(2, 10))

    return [
        Target("frequencies", frequencies, load_frequencies, cost=0.4),
        Target("routing", routing, load_routing, cost=1.7),
        Target("token map", token_map, lambda path: import_token_map(path, 2), cost=2),
        Target("folding", work / "engram" / "keys.npz", lambda path: Folding.load(path, VOCABULARY), cost=0.35),
        Target("f-grams", work / "scone" / "keys.npz", read_fgrams, cost=0.5),
        *_scratch_targets(work),
        _state_target(work),
    ]


def _scratch_targets(work: Path) -> list[Target]:
    folder = work / "scratch"
    held = ScratchFile(folder, "other")
    owner = folder / "other.owner.json"
    content = owner.read_bytes()
    held.close()
    owner.write_bytes(content)
    (folder / "other.records").write_bytes(b"x")

    def open_it(path: Path) -> None:
        for name in ("view-0", "other"):
            ScratchFile(folder, name).close()

    return [Target("scratch owner", owner, open_it, cost=1.1)]


def _state_target(work: Path) -> Target:
    """The library's state, as arrays."""
    made = functools.cache(lambda process: TokenTables({"first": 4, "second": 4}, 40))  # its threads do not fork
    keys = torch.arange(12).reshape(2, 6)
    tables = made(os.getpid())
    rows = tables.fetch(tables.plan(keys))
    sum(value.square().sum() for value in rows.values.values()).backward()
    tables.give_back(rows)
    tables.step(1e-2)
    state = {name: value.numpy() for name, value in tables.state_dict().items()}
    file = work / "state.npz"
    np.savez(file, **state)

    def read(path: Path) -> None:
        try:
            with np.load(path, allow_pickle=False) as archive:
                arrays = {name: torch.from_numpy(archive[name]) for name in archive.files}
        except Exception:
            return  # of numpy's, whose file this is
        tables = made(os.getpid())
        tables.load_state_dict(arrays)
        tables.fetch(tables.plan(keys), training=False)

    return Target("state dict", file, read, cost=2)


# ---- checkpoints


def _train(work: Path, data: Path, name: str, memory: dict[str, Any]) -> Trainer:
    config = small_config(
        data,
        model={"layers": 1, "width": 8, "ffn_width": 8, "heads": 2, "kv_heads": 1, "sequence_length": 16},
        memory=memory,
        train={"steps": 4, "global_batch": 2, "micro_batch": 2, "precision": "fp32", "validation_sequences": 2},
        checkpoint={"every": 2},
    )
    assert Trainer(config, work / name, fresh=False).run() == 0
    return Trainer(config, work / name, fresh=False)


def _checkpoint_targets(work: Path, trainers: dict[str, Trainer]) -> list[Target]:
    plain = checkpoints_at(work / "xgram")[-1]
    tensors = plain / "rank-00000.safetensors"
    data = tensors.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    (work / "header.json").write_bytes(data[8 : 8 + length])

    def read_header(path: Path) -> None:
        text = path.read_bytes()
        (work / "tensors").write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
        for key in (file := RawFile(work / "tensors")).headers:
            file.header(key)

    targets = [
        Target("manifest", plain / "manifest.json", lambda path: Manifest.read(path.parent), with_checksum, cost=3),
        Target("tensor header", work / "header.json", read_header, cost=1),
        Target("tensor file", tensors, RawFile, cost=0.9),
        Target("inspect", plain / "manifest.json", _inspect, with_checksum, cost=8),
        Target("recipe of a checkpoint", _recipe_of(plain), lambda path: _inspect_recipe(plain, path), cost=18),
    ]
    for name, trainer in trainers.items():
        saved = checkpoints_at(work / name)[-1] / "manifest.json"
        numbers = next(saved.parent.glob("rows-*.safetensors"), saved.parent / "rank-00000.safetensors")
        state = saved.parent / "rank-00000.safetensors"
        for file, part in {numbers: "rows", state: "state"}.items():
            reads = _with_their_checksums(_read_weights), _with_their_checksums(_resume_with(trainer))
            targets += [
                Target(f"{part} of {name} in weights", file, reads[0], cost=5, change=change_tensors),
                Target(f"{part} of {name} in resume", file, reads[1], cost=8, change=change_tensors),
            ]
        targets += [
            Target(f"weights of {name}", saved, _read_weights, with_checksum, cost=5),
            Target(f"resume of {name}", saved, _resume_with(trainer), with_checksum, cost=8),
            Target(f"warm start from {name}", saved, _warm_start_of(trainer), with_checksum, cost=10),
        ]
    return [*targets, *_remote_targets(work, plain)]


def _with_their_checksums(read: Read) -> Read:
    """A tensor file that somebody has changed who knows the format: the manifest has its checksums."""

    def read_all(path: Path) -> None:
        file = path.parent / "manifest.json"
        before = file.read_bytes()
        tree, raw = json.loads(before), RawFile(path)
        data = path.read_bytes()
        for entry in tree["tensors"].values():
            for chunk in entry["chunks"]:
                if chunk["file"] == path.name:
                    header = raw.headers[chunk["key"]]
                    content = data[raw.data_start + header.begin : raw.data_start + header.end]
                    chunk["checksum"] = crc32c.crc32c(content)
        for row_ids in tree["row_ids"].values():
            for segment in row_ids["segments"]:
                if segment["tensor"] is not None:
                    (chunk,) = tree["tensors"][segment["tensor"]]["chunks"]
                    if chunk["file"] == path.name:
                        segment["digest"] = row_id_digest(raw.integers(chunk["key"], chunk["checksum"]))
        try:
            file.write_bytes(with_checksum(json.dumps(tree).encode()))
            read(file)
        finally:
            file.write_bytes(before)

    return read_all


def _inspect(path: Path) -> None:
    command(["inspect", str(path.parent), "--verify"])


def _recipe_of(checkpoint: Path) -> Path:
    file = checkpoint.parent / "recipe.yaml"
    file.write_text(json.loads((checkpoint / "manifest.json").read_text())["run"]["config"])
    return file


def _inspect_recipe(checkpoint: Path, recipe: Path) -> None:
    file = checkpoint / "manifest.json"
    before = file.read_bytes()
    tree = json.loads(before)
    tree["run"]["config"] = recipe.read_bytes().decode("utf-8", "replace")
    try:
        file.write_bytes(with_checksum(json.dumps(tree).encode()))
        command(["inspect", str(checkpoint)])
        _ = CheckpointReader(checkpoint).config
    finally:
        file.write_bytes(before)


def _read_weights(path: Path) -> None:
    """As export, generate and analysis do."""
    reader = CheckpointReader(path.parent)
    _ = reader.routing, reader.ngram_keys
    for name in reader.weight_shapes():
        for _ in reader.blocks(name):
            pass


def _resume_with(trainer: Trainer) -> Read:
    def resume(path: Path) -> None:
        checkpoints = trainer.checkpoints
        load_checkpoint(
            path.parent,
            checkpoints._engine,
            checkpoints._shards,
            checkpoints._routing,
            checkpoints._mesh,
            checkpoints._accept,
        )

    return resume


def _warm_start_of(trainer: Trainer) -> Read:
    def start(path: Path) -> None:
        checkpoints = trainer.checkpoints
        tokenizer = trainer.data.manifest.tokenizer_sha256
        init_from_checkpoint(
            path.parent, checkpoints._engine, checkpoints._shards, checkpoints._routing, checkpoints._mesh, tokenizer
        )

    return start


def _remote_targets(work: Path, checkpoint: Path) -> list[Target]:
    writer = RemoteWriter(str(work / "remote"), "run")
    writer.upload(checkpoint, lambda done, total: None)
    (index,) = (work / "remote" / "run").glob("step-*.json")
    into = work / "fetched"

    def fetch(path: Path) -> None:
        remote = RemoteCheckpoints(str(work / "remote"), "run")
        shutil.rmtree(into, ignore_errors=True)
        into.mkdir()
        for step in remote.steps():
            one = remote.index(step)
            try:
                make_files(one, into)
            except OSError:
                continue  # as in uploads.py: a file that the disk has no room for
            try:
                remote.fetch_pieces(list(one.pieces()), into, lambda count: None)
            except (OSError, FileNotFoundError):
                continue
        assert {path.name for path in into.parent.glob("*") if "passwd" in path.name} == set()

    def parse(path: Path) -> None:
        try:
            index = Index.parse(path.read_bytes())
        except StorageError:
            return
        _ = list(index.pieces()), index.nbytes

    return [
        Target("remote index", index, parse, with_checksum, cost=0.2),
        Target("remote checkpoint", index, fetch, with_checksum, cost=1.7),
    ]


# ---- a run folder


def _run_targets(work: Path) -> list[Target]:
    run = work / "xgram"
    (run / "slurm").mkdir()
    attempt = {"job": "7", "restart": 0, "nodes": ["n1"], "step": 3, "started": 1.0, "ended": 2.0, "outcome": "stopped"}
    (run / "slurm" / "attempts.json").write_text(json.dumps([attempt]))
    (run / "slurm" / "jobs.json").write_text(json.dumps({"train": "12", "eval": "13_4"}))
    with lease.hold(run) as held:
        number = held.number
    held_file = run / "lease" / f"{number:08d}.json"
    held_file.parent.mkdir(exist_ok=True)
    me = {"host": socket.gethostname(), "pid": os.getpid(), "job": None, "token": "x", "since": "2026"}
    held_file.write_text(json.dumps(me))
    stack = run / "stacks" / "rank-0.txt"
    stack.parent.mkdir(exist_ok=True)
    stack.write_text("rank 0 on n1, process 3: step 4\nThread 0x1:\n")
    (run / "eval").mkdir()
    ours = {"name": "run", "backbone_parameters": 10**9, "table_parameters": 3, "scores": {"sciq": 50.0}}
    scores = {"sciq": {"acc,none": 0.5, "acc_norm,none": 0.4}, "piqa": {"acc,none": 0.5}}
    others = {
        "group_subtasks": {"mmlu": ["a"]},
        "groups": {"mmlu": {"acc,none": 0.3}},
        "configs": {"sciq": {"num_fewshot": 0}},
    }
    (run / "eval" / "step-4.json").write_text(json.dumps({"results": scores, "xgram_dist": ours, **others}))
    assert command(["diagnose", str(run), "--sequences", "2", "--json"]) == 0
    figures = next((run / "diagnose").glob("*/*.json"))
    node = {"seconds": 1.0, "median": 0.5, "node": "n1", "rank": 1}
    stragglers = {"kind": "stragglers", "step": 3, "straggler": node, "phases": {"data": node}, "nodes": {"data": node}}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(stragglers) + "\n")
    (work / "comparison").mkdir()
    (work / "comparison" / "compare.json").write_text(
        json.dumps({"folders": {"a": "runs/a"}, "failures": {"a": "why"}})
    )
    config = load_config(run / "config.yaml")
    metrics = run / "metrics.jsonl"
    without_jobs = (run / "slurm" / "jobs.json", work / "jobs.json")

    def status(path: Path) -> None:
        without_jobs[0].rename(without_jobs[1])
        try:
            command(["status", str(run)])
            command(["status", str(run), "--json"])
        finally:
            without_jobs[1].rename(without_jobs[0])

    def report(path: Path) -> None:
        found = read_run(run)
        json.dumps(summary(found))
        run_page([found])
        command(["report", str(run)])

    def compare(path: Path) -> None:
        run = EvaluationResult.read(path)
        comparison_table([run], paper=True)
        scoring_table(run)

    def resume(path: Path) -> None:
        for aside in run.glob("*.unreadable-*"):
            aside.unlink()
        open_run_folder(run, config, 1, resumed=2)

    def state(path: Path) -> None:
        found = ComparisonState(path.parent)
        one = type("Planned", (), {"key": "a"})()
        found.folder(one), found.failure(one), found.read(one)

    def print_stacks(path: Path) -> None:
        from xgram_dist.parallel.stacks import read_stacks

        for text in read_stacks(path.parent).values():
            text.encode()

    start, nodes = run / "starts" / "0001.json", run / "slurm" / "nodes.jsonl"
    event = {"node": "n1", "time": 1e9, "kind": "failed", "why": "Killed"}
    nodes.write_text("".join(json.dumps({**event, "time": 1e9 + number}) + "\n" for number in range(3)))
    return [
        Target("metrics", metrics, read_metrics, cost=0.35),
        Target("metrics at a resume", metrics, resume, cost=4),
        Target("metrics in a report", metrics, report, cost=36),
        Target("metrics in status", metrics, status, cost=8),
        Target("metrics in watch", metrics, lambda path: watch([run], 1.0, once=True), cost=20),
        Target("starts in a report", start, report, cost=36),
        Target("starts in status", start, status, cost=8),
        Target("config of a run", run / "config.yaml", lambda path: parse_config(path.read_text()), _as_text, cost=20),
        Target("lease", held_file, lambda path: lease.check_free(run), cost=1),
        Target("attempts", run / "slurm" / "attempts.json", lambda path: read_attempts(run), cost=0.2),
        Target("attempts in status", run / "slurm" / "attempts.json", status, cost=8),
        Target("nodes", nodes, lambda path: excluded_nodes(run, 1e9 + 9), cost=0.2),
        Target("jobs", run / "slurm" / "jobs.json", lambda path: read_jobs(run), cost=0.2),
        Target("stacks", stack, print_stacks, cost=0.2),
        Target("evaluation", run / "eval" / "step-4.json", compare, cost=0.8),
        Target("evaluation in a report", run / "eval" / "step-4.json", report, cost=36),
        Target("figures", figures, lambda path: read_figures(path), cost=2.8),
        Target("figures in a report", figures, report, cost=36),
        Target("comparison", work / "comparison" / "compare.json", state, cost=0.2),
    ]


def _as_text(data: bytes) -> bytes:
    return data.decode("utf-8", "replace").encode()


# ---- an exported folder


def _serving_targets(work: Path) -> list[Target]:
    folder = work / "exported"
    assert command(["export", str(work / "xgram"), "--to", "hf", str(folder), "--tables", "int8"]) == 0
    config = json.loads((folder / "config.json").read_text())
    index = folder / "model.safetensors.index.json"
    file = folder / json.loads(index.read_text())["weight_map"]["tables.views.0.rows"]
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    (work / "exported-header.json").write_bytes(data[8 : 8 + length])

    def serve(path: Path) -> None:
        with torch.device("meta"):
            tables = Tables(config["tables"], config["accesses"], config["spec"]["vocabulary"], config["row_format"])
        map_rows(folder, tables)

    def with_header(path: Path) -> None:
        text = path.read_bytes()
        file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
        try:
            serve(path)
        finally:
            file.write_bytes(data)

    return [
        Target("index of an export", index, serve, cost=1),
        Target("table header of an export", work / "exported-header.json", with_header, cost=1),
        Target("table file of an export", file, serve, cost=1),
    ]


# ---- recipes, environment


def _other_targets(work: Path) -> list[Target]:
    recipe, site, environment = work / "recipe.yaml", work / "site.yaml", work / "environment.json"
    recipe.write_text((RECIPES / "tiny" / "base.yaml").read_text() + "name: recipe\n")
    site.write_text(yaml.safe_dump({"gpus_per_node": 8, "cpus_per_node": 64, "partition": "p", "setup": ["a"]}))
    two = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    slurm = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "1"}
    mpi = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    environment.write_text(json.dumps({**two, **slurm, **mpi, "TORCHELASTIC_RESTART_COUNT": "0"}))

    def read_environment(path: Path) -> None:
        try:
            tree = json.loads(path.read_bytes())
            variables = {k: v for k, v in tree.items() if isinstance(v, str) and "\0" not in v}
        except (ValueError, AttributeError, RecursionError):
            return
        read_place(variables)
        launcher_variables({key: value for key, value in variables.items() if key != "RANK"})

    return [
        Target("recipe", recipe, load_config, cost=2),
        Target("override", recipe, _override, cost=6),
        Target("site", site, lambda path: load_site(str(path)), cost=6),
        Target("environment", environment, read_environment, cost=0.2),
    ]


def _override(path: Path) -> None:
    text = path.read_bytes()[:200].decode("utf-8", "replace")
    load_config(RECIPES / "tiny" / "xgram.yaml", [f"model.layers={text}"])
