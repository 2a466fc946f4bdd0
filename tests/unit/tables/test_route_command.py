"""`xgram-dist route` from the command line."""

import json

import numpy as np
import pytest

from xgram_dist.cli.main import main
from xgram_dist.tables.routing_io import load_routing

SMALL = ["--vip", "5", "--buckets", "4"]


@pytest.fixture
def counts(zipf, tmp_path):
    np.savez(tmp_path / "counts.npz", counts=zipf)
    return str(tmp_path / "counts.npz")


def test_writes_the_file_and_prints_the_layout(counts, tmp_path, capsys):
    out = str(tmp_path / "r.npz")
    assert main(["route", "--frequencies", counts, *SMALL, "--vocabulary", "420", "--views", "3", "--out", out]) == 0
    routing = load_routing(out)
    assert (routing.vocabulary, routing.num_rows, routing.num_views) == (420, 210, 3)
    text = capsys.readouterr().out
    for words in (
        "420 tokens -> 210 rows, 3 views",
        "VIP",
        "sparse bucket",
        "dense bucket",
        "hottest rows",
        "0.1 %",
        out,
    ):
        assert words in text


def test_json_figures(counts, capsys):
    assert main(["route", "--frequencies", counts, *SMALL, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert list(figures["row_hits"]) == ["0.001", "0.01", "0.1"]
    assert 0 < figures["row_hits"]["0.001"] <= figures["row_hits"]["0.1"] < 1
    assert sum(figures["bucket_sizes"]) == 395
    assert figures["region_rows"] == 45
    assert [b["tokens"] > 45 for b in figures["buckets"]] == [not b["sparse"] for b in figures["buckets"]]
    assert [b["tokens_per_row"] for b in figures["buckets"]] == [size / 45 for size in figures["bucket_sizes"]]
    assert sorted(figures["sparse_buckets"] + figures["dense_buckets"]) == [0, 1, 2, 3]


def test_the_plain_table(counts, capsys):
    assert main(["route", "--frequencies", counts, "--compression", "1"]) == 0
    assert "row = token" in capsys.readouterr().out
    assert main(["route", "--frequencies", counts, "--compression", "1", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert not figures["gated"]
    assert figures["bucket_sizes"] == []


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "nothing to route; give --frequencies FILE or --import FILE"),
        (["--frequencies", "none.npz"], "there is no file none.npz"),
        (["--import", "none.npz"], "there is no file none.npz; give the path of a token map"),
        (["--import", "none.npz", "--vip", "3"], "--vip is 3, but a token map sets it"),
        (["--frequencies", "COUNTS", "--compression", "1.5"], "compression is 1.5"),
        (["--frequencies", "COUNTS", "--vocabulary", "10"], "vocabulary is 10"),
        (["--frequencies", "COUNTS"], "vip is 200, which with copies 3 needs 800 rows"),
        (["--import", "COUNTS"], "array 'format_version' is missing"),
        (["--frequencies", "COUNTS", *SMALL, "--views", "0"], "views is 0"),
    ],
)
def test_mistakes_are_one_sentence_and_exit_code_two(words, sentence, counts, capsys):
    assert main(["route", *(counts if word == "COUNTS" else word for word in words)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert sentence in captured.err
    assert captured.err.count("\n") == 1


def test_import_needs_no_frequencies(real_token_map, capsys):
    assert main(["route", "--import", str(real_token_map), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["row_hits"] is None
    assert figures["sparse_buckets"] == list(range(20))
    assert main(["route", "--import", str(real_token_map), "--vocabulary", "151935"]) == 2
    assert "--vocabulary is 151,935" in capsys.readouterr().err
