"""Benchmark tasks of lm-eval, with the paper's shots, from the Hugging Face hub or from local parquet files:

    DIR/<task>/<split>.parquet      split: train, validation, test, dev; mmlu has a column `subject`

A generated task file includes lm-eval's own definition, so prompts and choices are lm-eval's. It changes the number of
shots, the source of the data and, for the suite `paper`, split and metric. Otherwise a task is evaluated on its test
split, or on validation if the folder (or the task) has no test split; few-shot examples come from the split lm-eval
takes them from.
"""

import contextlib
import difflib
import functools
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from xgram_dist.errors import UserError, nearest, optional_package
from xgram_dist.eval.paper_suite import CATEGORIES, PAPER, SUITES, Benchmark


@dataclass(frozen=True)
class Tasks:
    """Ready to run: their data has been read."""

    names: list[str]
    loaded: Any
    """From lm-eval's TaskManager."""


def load_tasks(wanted: list[str], data: Path | None, folder: Path, shots: int | None = None) -> Tasks:
    """`wanted`: names of tasks and at most one of SUITES. `folder`: for task files and the cache of `datasets`.

    Mistakes in names and data are found here, before a model is loaded.
    """
    in_suite = {one.task: one for one in PAPER if one.averaged or not one.shots}
    # Tasks of the suite keep the suite's shots even if they are also named one by one.
    suites = [name for name in SUITES if name in wanted]
    if len(suites) > 1:
        raise UserError(
            f"--tasks {','.join(suites)}: both suites have the same tasks; evaluate them one after the other"
        )
    chosen: list[Benchmark] = list(SUITES[suites[0]]) if suites else []
    others: list[str] = []
    for name in dict.fromkeys(wanted):
        if name in in_suite and not suites:
            chosen.append(Benchmark(name, name, shots or 0, in_suite[name].file))
        elif name not in SUITES and name not in in_suite:
            others.append(name)
    if data is not None and not data.is_dir():
        raise UserError(f"--data '{data}' is not a folder; it should hold <task>/<split>.parquet")
    _check_names(others)
    _silence_libraries()
    from lm_eval import tasks as lm_eval_tasks

    root = Path(lm_eval_tasks.__file__).parent
    out = folder / "tasks"
    out.mkdir(parents=True)
    for one in chosen:
        write = _write_mmlu if one.task == "mmlu" else _write_suite_task
        write(one, root, data, out, folder)
    names = [one.name for one in chosen]
    for name in others:
        _write_other_task(name, _task_index(), data, out, folder, shots)
    try:
        with _announced(f"reading the data of {len(names) + len(others)} task(s)"):
            manager = lm_eval_tasks.TaskManager(include_path=str(out), include_defaults=bool(others))
            loaded = manager.load([*names, *others])
    except UserError:
        raise
    except Exception as error:  # lm-eval, datasets and the network raise many types
        raise _load_error(error, data) from error
    return Tasks([*names, *others], loaded)


def _write_suite_task(one: Benchmark, root: Path, data: Path | None, out: Path, cache: Path) -> None:
    from lm_eval.tasks._yaml_loader import load_yaml

    file = root / one.file
    tree: dict[str, Any] = {"include": str(file), "task": one.name, "num_fewshot": one.shots}
    split = {} if one.split is None else {"test_split": one.split}
    if one.metric is not None:
        tree["metric_list"] = [{"metric": one.metric, "aggregation": "mean", "higher_is_better": True}]
    if data is not None:
        config = load_yaml(file, resolve_func=False)
        tree |= _local_data({**config, **split}, data / one.task, one.task, one.shots, cache)
    _dump({**tree, **split}, out / f"{one.name}.yaml")


def _write_other_task(name: str, index: Any, data: Path | None, out: Path, cache: Path, shots: int | None) -> None:
    """A task outside the suite. Without --data or --shots it is lm-eval's own, and needs no file."""
    entry = index[name]
    if data is None and shots is None:
        return
    if entry.yaml_path is None or entry.kind.name != "TASK":
        raise UserError(f"task '{name}' is a group; with --data or --shots name its tasks one by one")
    tree: dict[str, Any] = {"include": str(entry.yaml_path), "task": name}
    if shots is not None:
        tree["num_fewshot"] = shots
    if data is not None:
        tree |= _local_data(entry.cfg, data / name, name, shots or entry.cfg.get("num_fewshot") or 0, cache)
    _dump(tree, out / f"{name}.yaml")


def _write_mmlu(one: Benchmark, root: Path, data: Path | None, out: Path, cache: Path) -> None:
    """One task for each subject, with its own data. A group's score is the mean over all its questions; with
    `by_category` the subjects are in four groups, of whose scores `results.benchmark_scores` takes the mean."""
    from lm_eval.tasks._yaml_loader import load_yaml

    split = one.split or "test"
    subjects = sorted(file.stem.removeprefix("mmlu_") for file in (root / one.file).glob("mmlu_*.yaml"))
    local = None if data is None else _split_subjects(data / one.task, split, one.shots, subjects, cache / "mmlu")
    for subject in subjects:
        tree: dict[str, Any] = {
            "include": str(root / one.file / f"mmlu_{subject}.yaml"),
            "task": f"mmlu_{subject}",
            "num_fewshot": one.shots,
            "test_split": split,
        }
        if local is not None:
            tree["fewshot_split"] = "dev" if one.shots else None
            tree |= _parquet_source({name: folder / f"{subject}.parquet" for name, folder in local.items()}, cache)
        _dump(tree, out / f"mmlu_{subject}.yaml")
    groups = {one.name: [f"mmlu_{subject}" for subject in subjects]}
    if one.by_category:
        category = {name: load_yaml(root / one.file / f"{name}.yaml")["tag"] for name in groups[one.name]}
        groups |= {group: [name for name, tag in category.items() if tag == f"{group}_tasks"] for group in CATEGORIES}
        groups = {group: members for group, members in groups.items() if members}
        groups[one.name] = [group for group in CATEGORIES if group in groups]
    for group, members in groups.items():
        tree = {
            "group": group,
            "task": members,
            "aggregate_metric_list": [{"metric": "acc", "weight_by_size": True}],
            "metadata": {"version": 2},
        }
        _dump(tree, out / f"{group}.yaml")


def _split_subjects(folder: Path, scored: str, shots: int, subjects: list[str], out: Path) -> dict[str, Path]:
    """Write a parquet file for each split and subject; the folder of each split."""
    with optional_package("the data of a benchmark in Parquet", "eval"):
        import pyarrow.compute as pc
        import pyarrow.parquet as pq

    folders = {}
    for split in (scored, "dev") if shots else (scored,):
        table = pq.read_table(_parquet_file(folder, split, "mmlu"))
        if "subject" not in table.column_names:
            raise UserError(f"'{folder / f'{split}.parquet'}' has no column 'subject'")
        folders[split] = out / split
        folders[split].mkdir(parents=True)
        for subject in subjects:
            questions = table.filter(pc.equal(table["subject"], subject))
            if not len(questions):
                raise UserError(f"'{folder / f'{split}.parquet'}' has no row of the subject '{subject}'")
            pq.write_table(questions, folders[split] / f"{subject}.parquet")
    return folders


def _local_data(config: dict[str, Any], folder: Path, task: str, shots: int, cache: Path) -> dict[str, Any]:
    """Keys that make a task read parquet files: the split it is evaluated on, and the split of its examples."""

    def available_split(*keys: str) -> str | None:
        splits = [config[key] for key in keys if config.get(key) is not None]
        available = next((split for split in splits if (folder / f"{split}.parquet").is_file()), None)
        if available is None:
            _parquet_file(folder, splits[0] if splits else "validation", task)  # raises
        return available

    scored = available_split("test_split", "validation_split")
    examples = available_split("fewshot_split", "training_split", "validation_split") if shots else None
    files = {split: _parquet_file(folder, split, task) for split in (scored, examples) if split is not None}
    splits = {"test_split": scored, "validation_split": None, "training_split": None, "fewshot_split": examples}
    return splits | _parquet_source(files, cache)


def _parquet_source(files: dict[str, Path], cache: Path) -> dict[str, Any]:
    return {
        "dataset_path": "parquet",
        "dataset_name": None,
        "dataset_kwargs": {
            "data_files": {split: str(file.resolve()) for split, file in files.items()},
            "cache_dir": str(cache / "datasets"),
        },
    }


def _parquet_file(folder: Path, split: str, task: str) -> Path:
    file = folder / f"{split}.parquet"
    if not file.is_file():
        raise UserError(f"the data of task '{task}' is missing: there is no '{file}'")
    return file


def _check_names(names: list[str]) -> None:
    if not names:
        return
    suite = sorted({*SUITES, *(one.task for one in PAPER)})
    for name in names:
        if not _is_task_name(name):
            raise UserError(f"'{name}' is not a task name{nearest(name, suite)}")
    index = _task_index()
    for name in names:
        if name not in index:
            raise UserError(f"unknown task '{name}'{_suggestions(name, [*suite, *index])}")


def _is_task_name(name: str) -> bool:
    return bool(name) and all(letter.isalnum() or letter in "_-.+:" for letter in name)


def _suggestions(name: str, valid: list[str]) -> str:
    close = difflib.get_close_matches(name, valid, n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(repr(one) for one in close)}?" if close else "; `lm-eval ls tasks` lists them"


@functools.cache
def _task_index() -> Any:
    """lm-eval's own; reading all its definitions takes half a minute."""
    _silence_libraries()
    from lm_eval.tasks import TaskManager

    with _announced("reading lm-eval's task definitions"):
        return TaskManager().task_index


def _load_error(error: Exception, data: Path | None) -> UserError:
    cause = " ".join(str(error).split())[:300] or type(error).__name__
    if data is not None:
        return UserError(f"the data in '{data}' cannot be used: {cause}")
    return UserError(
        f"the benchmarks cannot be fetched from the Hugging Face hub ({cause}); give local parquet files with --data "
        f"DIR, or run once on a machine with a network"
    )


def _dump(tree: dict[str, Any], path: Path) -> None:
    path.write_text(yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")


def _silence_libraries() -> None:
    """Only errors of lm-eval and datasets are shown."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Without a network every request to the hub would be retried for minutes.
    os.environ.setdefault("HF_HUB_ETAG_TIMEOUT", "5")
    import datasets

    datasets.disable_progress_bars()
    for name in ("lm_eval", "datasets", "huggingface_hub", "httpx"):
        logging.getLogger(name).setLevel(logging.ERROR)


@contextlib.contextmanager
def _announced(work: str) -> Iterator[None]:
    print(f"{work} ...", file=sys.stderr, flush=True)
    yield
