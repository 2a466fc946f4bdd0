"""The doctor's device checks on a device of twins."""

import contextlib
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from stub_cuda import Ledger
from twin_device import TwinDevice

from xgram_dist.cluster.doctor import parity, step_watch
from xgram_dist.cluster.doctor.report import Context, Row
from xgram_dist.parallel.process_group import ProcessGroup

DEVICE = torch.device("cuda", 0)


@contextlib.contextmanager
def no_operations(device: torch.device) -> Any:
    """torch's profiler sees no kernels here."""
    yield ["Memcpy HtoD (Pinned -> Device)"]


def _read_number() -> Any:
    agree = ProcessGroup.all_reduce_integers

    def reading(group: ProcessGroup, first: int, second: int) -> tuple[int, int]:
        return agree(group, first + int(torch.zeros((), device=DEVICE)), second)

    return mock.patch.object(ProcessGroup, "all_reduce_integers", reading)


def _wrong_rows() -> Any:
    """The device trains on other rows."""
    fetch = parity.train_step

    def train_other(config: Any, lookup: Any, optimizer: Any, tokens: Any, windows: Any, step: int) -> Any:
        if windows[0].slots.device.type == "cuda":
            tokens = tokens.flip(-1)
        return fetch(config, lookup, optimizer, tokens, windows, step)

    return mock.patch.object(parity, "train_step", train_other)


def run_device_checks() -> dict[str, list[tuple[str, str, str]]]:
    """(check, status, found) of the checks as they are, and with defects."""
    ledger = Ledger(phase="step")
    twin = TwinDevice(ledger)
    context = Context(ProcessGroup(), ["here"], DEVICE, Path(), quick=False, seconds=1.0, recipe=None, overrides=[])
    one = parity.Case("replicated", "fp32", False)
    engines = [one, parity.Case("hsdp", "fp32", False), parity.Case("deepspeed", "fp32", False)]
    tables = [parity.Case("replicated", "fp32", False, name) for name in parity.VARIANTS]

    def rows_of(*checks: Any) -> list[tuple[str, str, str]]:
        rows: list[Row] = [row for check in checks for row in check(context)]
        return [(row.check, row.status, row.found) for row in rows]

    few_steps = mock.patch.object(parity, "STEPS", 3)
    profiler = mock.patch.object(step_watch, "record_device_operations", no_operations)
    with twin.entered(), profiler, few_steps, mock.patch.object(parity, "VARIANT_STEPS", 3):
        with (
            mock.patch.object(parity, "parity_cases", return_value=engines),
            mock.patch.object(step_watch, "watch_cases", return_value=[*engines[1:], *tables]),
        ):
            found = {"sound": rows_of(parity.check_training, parity.check_variants, step_watch.check_step)}
        with mock.patch.object(step_watch, "watch_cases", return_value=[one]), _read_number():
            found["a number is read"] = rows_of(step_watch.check_step)
        with mock.patch.object(parity, "parity_cases", return_value=[one]), _wrong_rows():
            found["other tokens"] = rows_of(parity.check_training)
    return found
