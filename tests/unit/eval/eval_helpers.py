"""Benchmarks of a few rows, in the form of the real ones."""

import random
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from train_helpers import WORDS

_chooser = random.Random(3)


def words(least: int, most: int) -> str:
    return " ".join(_chooser.choices(WORDS, k=_chooser.randint(least, most)))


def write(folder: Path, task: str, split: str, rows: list[dict[str, Any]]) -> None:
    (folder / task).mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), folder / task / f"{split}.parquet")


def make_benchmarks(folder: Path, count: int = 18) -> Path:
    for task, splits in {"sciq": ["validation"], "piqa": ["train", "validation"]}.items():
        for split in splits:
            write(folder, task, split, [_row(task, number) for number in range(count)])
    for task in ("arc_challenge", "boolq"):
        for split in ("train", "validation", "test") if task == "arc_challenge" else ("validation",):
            write(folder, task, split, [_row(task, number) for number in range(count)])
    return folder


def _row(task: str, number: int) -> dict[str, Any]:
    if task == "sciq":
        wrong = {f"distractor{n}": words(1, 3) for n in (1, 2, 3)}
        return {"question": words(3, 8), "support": words(0, 9), "correct_answer": words(1, 3), **wrong}
    if task == "piqa":
        return {"goal": words(2, 9), "sol1": words(2, 6), "sol2": words(2, 6), "label": number % 2}
    if task == "arc_challenge":
        choices = {"text": [words(1, 4) for _ in range(4)], "label": list("ABCD")}
        return {"id": str(number), "question": words(2, 9), "choices": choices, "answerKey": "ABCD"[number % 4]}
    return {"question": words(2, 5), "passage": words(5, 30), "idx": number, "label": number % 2}


@contextmanager
def accelerate_stand_in() -> Iterator[None]:
    """lm-eval's Hugging Face model asks for `accelerate` when it is imported; in one process it makes no use of it."""
    try:
        import accelerate  # noqa: F401

        yield
        return
    except ImportError:
        pass

    class Accelerator:
        num_processes, device = 1, torch.device("cpu")

        def __init__(self, **_: Any) -> None:
            pass

    made = types.ModuleType("accelerate")
    made.Accelerator, made.InitProcessGroupKwargs = Accelerator, lambda **_: None  # type: ignore[attr-defined]
    made.find_executable_batch_size = lambda *a, **k: None  # type: ignore[attr-defined]
    utils = types.ModuleType("accelerate.utils")
    utils.get_max_memory = lambda *a, **k: {}  # type: ignore[attr-defined]
    sys.modules["accelerate"], sys.modules["accelerate.utils"] = made, utils
    try:
        yield
    finally:
        del sys.modules["accelerate"], sys.modules["accelerate.utils"]
