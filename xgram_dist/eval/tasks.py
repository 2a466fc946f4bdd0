"""lm-eval task files: its own definitions, with the paper's shots, reading local parquet files where these are given.

    DIR/<task>/<split>.parquet      split: train, validation, test, dev; mmlu has a column `subject`

A generated file includes the one of lm-eval, so that prompts, choices and metrics are its, and changes the number of
shots and where the data comes from. A task is evaluated on its test split, or on validation where the folder (or the
task) has no test split; examples of a prompt come from the split that lm-eval takes them from.
"""

import contextlib
import functools
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from xgram_dist.errors import UserError, nearest
from xgram_dist.eval.suite import PAPER, Benchmark


@dataclass(frozen=True)
class Tasks:
    """Ready to run: their data is read."""

    names: list[str]
    loaded: Any
    """What lm-eval's TaskManager gives."""


def load_tasks(wanted: list[str], data: Path | None, folder: Path, shots: int | None = None) -> Tasks:
    """`folder`: where task files and what `datasets` makes of the data are written. All that can be wrong with names
    and data is said here, before a model is loaded."""
    known = {one.task: one for one in PAPER if one.averaged or not one.shots}
    # What is in the suite is asked with the suite's shots, though it be named once more.
    chosen: list[Benchmark] = list(PAPER) if "paper" in wanted else []
    others: list[str] = []
    for name in dict.fromkeys(wanted):
        if name in known and "paper" not in wanted:
            chosen.append(Benchmark(name, name, shots or 0, known[name].file))
        elif name != "paper" and name not in known:
            others.append(name)
    if data is not None and not data.is_dir():
        raise UserError(f"--data '{data}' is not a folder; it should hold <task>/<split>.parquet")
    _check_names(others)
    _quiet()
    from lm_eval import tasks as library

    root = Path(library.__file__).parent
    out = folder / "tasks"
    out.mkdir(parents=True)
    for one in chosen:
        write = _write_mmlu if one.task == "mmlu" else _write_task
        write(one, root, data, out, folder)
    names = [one.name for one in chosen]
    for name in others:
        _write_other(name, _all_tasks(), data, out, folder, shots)
    try:
        with _said(f"reading the data of {len(names) + len(others)} task(s)"):
            manager = library.TaskManager(include_path=str(out), include_defaults=bool(others))
            loaded = manager.load([*names, *others])
    except UserError:
        raise
    except Exception as error:  # whatever lm-eval, datasets and the network throw
        raise _not_loaded(error, data) from error
    return Tasks([*names, *others], loaded)


def _write_task(one: Benchmark, root: Path, data: Path | None, out: Path, cache: Path) -> None:
    from lm_eval.tasks._yaml_loader import load_yaml

    file = root / one.file
    tree: dict[str, Any] = {"include": str(file), "task": one.name, "num_fewshot": one.shots}
    if data is not None:
        config = load_yaml(file, resolve_func=False)
        tree |= _local(config, data / one.task, one.task, one.shots, cache)
    _dump(tree, out / f"{one.name}.yaml")


def _write_other(name: str, index: Any, data: Path | None, out: Path, cache: Path, shots: int | None) -> None:
    """A task that is not of the suite: lm-eval's own, changed only where something was asked for."""
    entry = index[name]
    if data is None and shots is None:
        return
    if entry.yaml_path is None or entry.kind.name != "TASK":
        raise UserError(f"task '{name}' is a group; with --data or --shots name its tasks one by one")
    tree: dict[str, Any] = {"include": str(entry.yaml_path), "task": name}
    if shots is not None:
        tree["num_fewshot"] = shots
    if data is not None:
        tree |= _local(entry.cfg, data / name, name, shots or entry.cfg.get("num_fewshot") or 0, cache)
    _dump(tree, out / f"{name}.yaml")


def _write_mmlu(one: Benchmark, root: Path, data: Path | None, out: Path, cache: Path) -> None:
    """A task a subject, each with its own rows, under one group: the mean over all questions."""
    subjects = sorted(file.stem.removeprefix("mmlu_") for file in (root / one.file).glob("mmlu_*.yaml"))
    local = None if data is None else _split_subjects(data / one.task, one.shots, subjects, cache / "mmlu")
    for subject in subjects:
        tree: dict[str, Any] = {
            "include": str(root / one.file / f"mmlu_{subject}.yaml"),
            "task": f"mmlu_{subject}",
            "num_fewshot": one.shots,
        }
        if local is not None:
            tree["fewshot_split"] = "dev" if one.shots else None
            tree |= _source({split: folder / f"{subject}.parquet" for split, folder in local.items()}, cache)
        _dump(tree, out / f"mmlu_{subject}.yaml")
    group = {
        "group": one.name,
        "task": [f"mmlu_{subject}" for subject in subjects],
        "aggregate_metric_list": [{"metric": "acc", "weight_by_size": True}],
        "metadata": {"version": 2},
    }
    _dump(group, out / "mmlu.yaml")


def _split_subjects(folder: Path, shots: int, subjects: list[str], out: Path) -> dict[str, Path]:
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    found = {}
    for split in ("test", "dev") if shots else ("test",):
        table = pq.read_table(_file(folder, split, "mmlu"))
        if "subject" not in table.column_names:
            raise UserError(f"'{folder / f'{split}.parquet'}' has no column 'subject'")
        found[split] = out / split
        found[split].mkdir(parents=True)
        for subject in subjects:
            part = table.filter(pc.equal(table["subject"], subject))
            if not len(part):
                raise UserError(f"'{folder / f'{split}.parquet'}' has no row of the subject '{subject}'")
            pq.write_table(part, found[split] / f"{subject}.parquet")
    return found


def _local(config: dict[str, Any], folder: Path, task: str, shots: int, cache: Path) -> dict[str, Any]:
    """The keys that make a task read parquet files: the split it is evaluated on, and the one examples come from."""

    def there(*keys: str) -> str | None:
        splits = [config[key] for key in keys if config.get(key) is not None]
        found = next((split for split in splits if (folder / f"{split}.parquet").is_file()), None)
        if found is None:
            _file(folder, splits[0] if splits else "validation", task)
        return found

    scored = there("test_split", "validation_split")
    examples = there("fewshot_split", "training_split", "validation_split") if shots else None
    files = {split: _file(folder, split, task) for split in (scored, examples) if split is not None}
    changed = {"test_split": scored, "validation_split": None, "training_split": None, "fewshot_split": examples}
    return changed | _source(files, cache)


def _source(files: dict[str, Path], cache: Path) -> dict[str, Any]:
    return {
        "dataset_path": "parquet",
        "dataset_name": None,
        "dataset_kwargs": {
            "data_files": {split: str(file.resolve()) for split, file in files.items()},
            "cache_dir": str(cache / "datasets"),
        },
    }


def _file(folder: Path, split: str, task: str) -> Path:
    file = folder / f"{split}.parquet"
    if not file.is_file():
        raise UserError(f"the data of task '{task}' is missing: there is no '{file}'")
    return file


def _check_names(names: list[str]) -> None:
    if not names:
        return
    valid = [*sorted({"paper", *(one.task for one in PAPER)})]
    for name in names:
        if not _looks_like_a_task(name):
            raise UserError(f"'{name}' is no name of a task{nearest(name, valid)}")
    index = _all_tasks()
    for name in names:
        if name not in index:
            raise UserError(f"unknown task '{name}'{_close(name, [*valid, *index])}")


def _looks_like_a_task(name: str) -> bool:
    return bool(name) and all(letter.isalnum() or letter in "_-.+:" for letter in name)


def _close(name: str, valid: list[str]) -> str:
    import difflib

    close = difflib.get_close_matches(name, valid, n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(repr(one) for one in close)}?" if close else "; `lm-eval ls tasks` lists them"


@functools.cache
def _all_tasks() -> Any:
    """lm-eval's own index; reading all its definitions takes half a minute."""
    _quiet()
    from lm_eval.tasks import TaskManager

    with _said("reading lm-eval's definitions of tasks"):
        return TaskManager().task_index


def _not_loaded(error: Exception, data: Path | None) -> UserError:
    cause = " ".join(str(error).split())[:300] or type(error).__name__
    if data is not None:
        return UserError(f"the data in '{data}' cannot be used: {cause}")
    return UserError(
        f"the benchmarks cannot be fetched from the Hugging Face hub ({cause}); give local parquet files with --data "
        f"DIR, or run once where there is a network"
    )


def _dump(tree: dict[str, Any], path: Path) -> None:
    path.write_text(yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")


def _quiet() -> None:
    """lm-eval and datasets speak at every step; what matters of it is said by us."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Without a network each look at the hub would be tried for minutes.
    os.environ.setdefault("HF_HUB_ETAG_TIMEOUT", "5")
    import datasets

    datasets.disable_progress_bars()
    for name in ("lm_eval", "datasets", "huggingface_hub", "httpx"):
        logging.getLogger(name).setLevel(logging.ERROR)


@contextlib.contextmanager
def _said(what: str) -> Iterator[None]:
    import sys

    print(f"{what} ...", file=sys.stderr, flush=True)
    yield
