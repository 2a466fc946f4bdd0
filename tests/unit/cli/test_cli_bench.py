"""`bench engine`: what it refuses, how it counts, and that its sides compute the same."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from xgram_dist.bench.engine import SentBytes
from xgram_dist.bench.paper_layout import PaperModel, layout_config, layout_frequencies, padded_accesses
from xgram_dist.cli.main import main
from xgram_dist.model.build import build_model
from xgram_dist.model.methods.base import table_layout
from xgram_dist.tables.exchange import ShardedTables
from xgram_dist.tables.layout import routing_settings
from xgram_dist.tables.routing import View
from xgram_dist.tables.routing_build import build_routing


@pytest.mark.parametrize(
    "wrong", [["--rounds", "0"], ["--steps", "0"], ["--ranks", "1"], ["--ranks", "2", "4"]], ids=" ".join
)
def test_numbers_that_measure_nothing_are_refused(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "engine", *wrong]) == 2
    assert "bench engine needs --rounds and --steps" in capsys.readouterr().err


def test_a_vocabulary_beyond_the_frequencies_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "frequencies.npz"
    np.savez(file, counts=np.arange(1, 101))
    assert main(["bench", "engine", "--frequencies", str(file), "--vocabulary", "200"]) == 2
    assert "holds 100 tokens, but --vocabulary is 200" in capsys.readouterr().err


def test_the_most_frequent_tokens_stay_in_the_order_of_their_ids(tmp_path: Path) -> None:
    file = tmp_path / "frequencies.npz"
    np.savez(file, counts=np.array([1, 6, 2, 0, 4]))
    np.testing.assert_allclose(layout_frequencies(file, 3), np.array([6, 2, 4]) / 12)


def test_access_lists_are_filled_up_with_nothing() -> None:
    view = View(np.array([0, 1, 3]), np.array([5, 2, 7], dtype=np.int32), np.array([2, 0.5, 1.5], dtype=np.float32))
    rows, coefficients = padded_accesses(view)
    assert rows.tolist() == [[5, 0], [2, 7]]
    assert coefficients.tolist() == [[2.0, 0.0], [0.5, 1.5]]


def test_dense_tables_in_the_module_give_the_loss_of_the_working_set() -> None:
    chances = layout_frequencies(None, 2048)
    config = layout_config(2048, 1, 4)
    routing = build_routing(chances, routing_settings(config), table_layout(config).num_views)
    tokens = torch.from_numpy(np.random.default_rng(0).choice(2048, size=(1, 2, 16), p=chances))
    warmup = torch.tensor(0.7, dtype=torch.float64)
    tables = ShardedTables(config, table_layout(config), routing, torch.device("cpu"))
    working = tables.fetch(tables.plan(tokens).result()[0], training=False)
    tables.close()
    with torch.no_grad():
        ours, _ = build_model(config, torch.device("cpu")).loss(tokens[0], working.slots[0], working.values, warmup)
        paper = PaperModel(config, routing)(tokens[0], warmup)
    torch.testing.assert_close(paper, ours, rtol=1e-5, atol=1e-5)


def test_bytes_of_collectives_are_those_of_a_ring() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        piece, whole = torch.zeros(10), torch.zeros(10)
        with SentBytes(4) as sent:
            dist.all_reduce(whole)
            assert sent.total == 40 * 2 * 3 / 4
            dist.all_gather([whole], piece)  # of one rank; on four, each piece goes to three others
            assert sent.total == 60 + 40 * 3
            dist.barrier()
            whole + 1
        assert sent.total == 180
    finally:
        dist.destroy_process_group()
