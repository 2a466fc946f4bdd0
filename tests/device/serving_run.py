"""Rows read for batches of a served model, on the CPU and on a device of twins."""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from stub_cuda import Ledger, stops_the_host
from torch import Tensor
from twin_device import TwinDevice, host_of

from xgram_dist.inference.hf.decoder_tables import Tables
from xgram_dist.parallel.device import CopyStream
from xgram_dist.serving import mapped_rows, recent_vectors
from xgram_dist.serving.history import Slots, StateTaps
from xgram_dist.serving.mapped_rows import RowReader
from xgram_dist.serving.recent_vectors import RecentVectors

VOCABULARY, WIDTHS, BATCHES, REACH = 50, (4, 8), 12, 2


class InMemory:
    """In place of a mapped file."""

    def read_ahead(self, rows: Tensor) -> None: ...


class LateCopies(CopyStream):
    """A copy that was started has not happened until it is waited for."""

    def __init__(self, defect: str):
        super().__init__(torch.device("cuda", 0))
        self._started: list[tuple[Tensor, Tensor]] = []
        self._done, self._defect = 0, defect

    def copy(self, target: Tensor, source: Tensor, after: Any = None) -> int:
        self._started.append((target, source))
        return len(self._started)

    def compute_after(self, point: Any) -> None:
        if self._defect != "the network does not wait":
            self._reach(point)

    def wait_on_host(self, point: Any) -> None:
        self._reach(point)
        torch.cuda.Event().synchronize()

    def _reach(self, point: int) -> None:
        for target, source in self._started[self._done : point]:
            super().copy(target, source)
        self._done = point


def build_tables() -> Tables:
    described = [{"name": f"layers.{n}.v.0", "rows": VOCABULARY, "width": w, "view": n} for n, w in enumerate(WIDTHS)]
    tables = Tables(described, [], VOCABULARY, "int8")
    random = torch.Generator().manual_seed(0)
    for view in tables.views:
        rows = torch.randn(VOCABULARY, view.row_format.width, generator=random)
        view.rows.copy_(view.row_format.encode(rows))
    return tables


def serve(tables: Tables, copies: CopyStream) -> list[Tensor]:
    """What the network reads in each batch."""
    device, reader = copies.device, RowReader(tables, [InMemory() for _ in WIDTHS], copies)
    recent, states, read = RecentVectors(reader, VOCABULARY, True), StateTaps(), []
    random = torch.Generator().manual_seed(1)
    for number in range(BATCHES):
        copies.follow()
        drawn = torch.randint(0, VOCABULARY, (12 if number % 3 == 0 else 2, 1 + REACH), generator=random)
        # As vLLM has them on the device.
        tokens, positions = (x.pin_memory().to(device, non_blocking=True) for x in (drawn, torch.arange(len(drawn))))
        tokens_TK, positions_T = copies.read_on_host(tokens, positions)
        slots_TK, vectors, scales = recent.find(tokens_TK)
        read += [F.embedding(slots_TK, vectors), F.embedding(slots_TK, scales)]
        keys = torch.from_numpy(np.unique(tokens_TK))
        keyed = torch.empty(len(keys), tables.width, device=device)
        reader.read(keys, keyed)
        read.append(keyed.clone())
        slots = Slots.find(positions_T, np.array([0, len(drawn)]), np.array([[0]]), positions_T, REACH, 16)
        states.begin(slots, slots.exists_TK, 16, device)
        read.append(states.extend("states", read[-3][:, :1], REACH).clone())
    return [host_of(one) for one in read]


@torch.no_grad()
def run_serving(defect: str = "") -> dict[str, Any]:
    mapped_rows.PIECE_BYTES = 5 * 4 * sum(WIDTHS)
    recent_vectors.BUFFER_BYTES = 20 * 4 * sum(WIDTHS)
    tables = build_tables()
    torch.Tensor.pin_memory = lambda tensor: tensor  # type: ignore[method-assign]
    expected = serve(tables, CopyStream(torch.device("cpu")))
    ledger = Ledger(phase="step")
    with TwinDevice(ledger).entered():
        found = serve(tables, LateCopies(defect))
    noted = ledger.of("step")
    return {
        "same": len(found) == len(expected)
        and all(torch.equal(one, other) for one, other in zip(found, expected, strict=True)),
        "copies": sum(noted["copies"].values()),
        "stopping": [what for _, what in noted["copies"] if stops_the_host(what)],
        "waits": sum(noted["waits"].values()),
    }
