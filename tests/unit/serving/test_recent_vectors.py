"""Vectors that are kept are those of the tables, however full the buffer gets."""

import pytest
import torch
import torch.nn.functional as F

from xgram_dist.inference.hf.decoder_layers import CONV_EPS
from xgram_dist.inference.hf.decoder_tables import Tables
from xgram_dist.parallel.device import CopyStream
from xgram_dist.serving import mapped_rows, recent_vectors
from xgram_dist.serving.mapped_rows import RowReader
from xgram_dist.serving.recent_vectors import RecentVectors

VOCABULARY, WIDTHS = 50, (4, 8)


class InMemory:
    """In place of a mapped file."""

    def read_ahead(self, rows: torch.Tensor) -> None:
        assert len(rows) >= mapped_rows.MANY


@pytest.fixture
def tables() -> Tables:
    described = [{"name": f"layers.{n}.v.0", "rows": VOCABULARY, "width": w, "view": n} for n, w in enumerate(WIDTHS)]
    made = Tables(described, [], VOCABULARY, "fp32")
    for view in made.views:
        torch.nn.init.normal_(view.rows)
    return made


@pytest.mark.parametrize("room", [2, 9, 20, 1000])
@torch.no_grad()
def test_each_position_finds_the_vectors_of_its_tokens(
    tables: Tables, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    """`room`: vectors that fit; a batch below has up to 12 tokens."""
    monkeypatch.setattr(recent_vectors, "BUFFER_BYTES", room * 4 * sum(WIDTHS))
    monkeypatch.setattr(mapped_rows, "PIECE_BYTES", 5 * 4 * sum(WIDTHS))
    reader = RowReader(tables, [InMemory() for _ in WIDTHS], CopyStream(torch.device("cpu")))
    recent = RecentVectors(reader, VOCABULARY, True)
    random = torch.Generator().manual_seed(0)
    whole = F.pad(tables(torch.arange(VOCABULARY)), (0, 0, 0, 1))  # the last is of token -1
    reads = 0
    read_into = tables.read_into
    for positions in (1, 4, 4, 1, 4, 4, 4, 1):
        asked = torch.randint(-1, VOCABULARY, (positions, 3), generator=random)
        counted = []
        tables.read_into = lambda keys, into, counted=counted: (counted.append(len(keys)), read_into(keys, into))
        rows, vectors, scales = recent.find(asked.numpy())
        assert torch.equal(vectors[rows], whole[asked])
        for table, part in enumerate(vectors[rows].split(WIDTHS, -1)):
            real = asked >= 0
            expected = torch.rsqrt(part.square().mean(-1) + CONV_EPS)
            torch.testing.assert_close(scales[rows][..., table][real], expected[real])
        rows, vectors, _ = recent.find(asked.numpy())  # again
        assert torch.equal(vectors[rows], whole[asked])
        reads += sum(counted)
    if room == 1000:
        assert reads <= VOCABULARY, "a token is read once"
