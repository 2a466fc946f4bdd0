"""Steps on staged records, on the CPU and on a device of twins."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from stub_cuda import Ledger, stops_the_host
from torch import Tensor
from twin_device import TwinDevice, host_of

from xgram_dist.tables.storage.memory import HostStorage
from xgram_dist.tables.storage.staging import RowStaging

SLOTS, WIDTH, STEPS = 200, 6, 30
CPU, DEVICE = torch.device("cpu"), torch.device("cuda", 0)


class TwinThread(ThreadPoolExecutor):
    """Operations of the thread reach the twins, as those of a thread reach a GPU."""

    def __init__(self, twin: TwinDevice):
        super().__init__(1)
        self.twin = twin

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **_: Any) -> "Future[Any]":
        def run() -> Any:
            with self.twin.entered():
                return function(*arguments)

        return super().submit(run)


class ThreadLedger(Ledger):
    """Counts the waits of the training thread alone."""

    def wait(self, what: str) -> None:
        if threading.current_thread() is threading.main_thread():
            super().wait(what)


def train(staging: RowStaging) -> list[Tensor]:
    """What the steps read."""
    random = np.random.default_rng(0)
    drawn = [np.sort(random.choice(SLOTS, 60, replace=False)) for _ in range(STEPS)]
    read, following = [], staging.stage(lambda: drawn[0])
    for number in range(STEPS):
        step = following
        records = staging.records(step)
        if number + 1 < STEPS:
            following = staging.stage(lambda number=number: drawn[number + 1])  # type: ignore[misc]
        read.append(host_of(records.clone()))
        records.mul_(1.1).add_(0.3).sin_()
        staging.end(step)
    staging.drain()
    staging.close()
    return read


def filled() -> HostStorage:
    storage = HostStorage(WIDTH, SLOTS)
    storage.records[:] = torch.randn(SLOTS, WIDTH, generator=torch.Generator().manual_seed(0))
    return storage


def run_staging() -> dict[str, Any]:
    expected = filled()
    reference = train(RowStaging(expected, CPU))
    ledger = ThreadLedger(phase="step")
    twin = TwinDevice(ledger)
    storage = filled()
    staging = RowStaging(storage, DEVICE)
    staging._thread = TwinThread(twin)
    with twin.entered():
        read = train(staging)
    found = ledger.of("step")
    return {
        "same": all(torch.equal(one, other) for one, other in zip(read, reference, strict=True)),
        "written": torch.equal(storage.records, expected.records),
        "copies": sum(found["copies"].values()),
        "stopping": [what for _, what in found["copies"] if stops_the_host(what)],
        "waits": [what for _, what in found["waits"]],
    }
