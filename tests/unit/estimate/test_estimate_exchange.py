"""The exchange of a step, against every possible step of a tiny text, against draws, and with the real frequencies."""

import copy
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from xgram_dist.cli.main import main
from xgram_dist.config import build_config, load_config
from xgram_dist.errors import UserError
from xgram_dist.estimate.exchange import default_ranks, plan_balance, plan_exchange
from xgram_dist.estimate.traffic import TokenDraw
from xgram_dist.model.methods.base import table_layout
from xgram_dist.tables.frequencies import chance_seen, expected_touched_share, load_frequencies, row_probabilities
from xgram_dist.tables.layout import routing_settings
from xgram_dist.tables.routing import RoutingSettings
from xgram_dist.tables.routing_build import build_routing
from xgram_dist.tables.routing_io import save_routing
from xgram_dist.tables.row_sharding import POLICIES, plan_row_sharding

RECIPES = Path(__file__).resolve().parents[3] / "recipes"
VANILLA = str(RECIPES / "tiny" / "vanilla.yaml")

# 8 tokens on 5 rows: 2 of one token, 3 that the others share. Micro-batches of 2 tokens. Slabs of 3 x 4 + 3 x 8 and of
# 3 x 4 columns.
TINY = {
    "name": "tiny",
    "model": {
        "vocabulary": 8,
        "layers": 3,
        "width": 8,
        "ffn_width": 8,
        "heads": 2,
        "kv_heads": 1,
        "sequence_length": 2,
    },
    "memory": {
        "method": "xgram",
        "compression": 0.625,
        "sites": {"v": {"views": 2}, "h": {"views": 1}},
        "routing": {"vip": 1, "buckets": 1, "copies": 1},
    },
    "train": {"global_batch": 4, "micro_batch": 1},
}
FREQUENCIES = np.array([0.02, 0.3, 0.0, 0.18, 0.05, 0.25, 0.12, 0.08])

# 400 tokens; steps of 2048 tokens.
SMALL = {
    "model": {"vocabulary": 400, "sequence_length": 64},
    "memory": {"compression": 0.5, "routing": {"vip": 5, "buckets": 4, "copies": 3}},
    "train": {"global_batch": 32, "micro_batch": 4},
}


def tree(*changes):
    made = copy.deepcopy(TINY)
    for change in changes:
        for section, values in change.items():
            made[section].update(values)
    return made


def recipe(*changes):
    return build_config(tree(*changes))


def routing_of(config, frequencies):
    if config.memory.compression == 1:
        return None
    return build_routing(frequencies, routing_settings(config), table_layout(config).num_views)


def rows_of(routing, view, token):
    return [token] if routing is None else routing.views[view].of_token(token)[0].tolist()


def zipf(vocabulary=400, unseen=40):
    counts = np.zeros(vocabulary, dtype=np.int64)
    seen = vocabulary - unseen
    counts[(np.arange(seen) * 7) % vocabulary] = 100_000 // (np.arange(seen) + 1)
    return counts


class Counted:
    """One step of one rank, counted token by token."""

    def __init__(self, config, routing, ranks, tokens):
        slabs = table_layout(config).slabs
        owner = plan_row_sharding(routing, slabs[0].rows, ranks).owner
        self.distinct = len(set(tokens))
        self.rows = [len({row for t in set(tokens) for row in rows_of(routing, slab.view, t)}) for slab in slabs]
        self.loads = np.zeros(ranks)
        self.sent = self.least = 0.0  # numbers that cross the wire, mean over the rank that asks
        for slab in slabs:
            for token in set(tokens):
                owners = {int(owner[row]) for row in rows_of(routing, slab.view, token)}
                for rank in owners:
                    self.loads[rank] += 1
                for rank in range(ranks):
                    elsewhere = len(owners - {rank})
                    self.sent += elsewhere * slab.width / ranks
                    self.least += (elsewhere > 0) * slab.width / ranks


@pytest.mark.parametrize("compression", [0.625, 1.0])
def test_expectations_are_the_sums_over_all_possible_steps(compression):
    config = recipe({"memory": {"compression": compression}, "train": {"global_batch": 6}})
    routing = routing_of(config, FREQUENCIES)
    found = plan_exchange(config, FREQUENCIES, routing, ranks=3, host_bandwidth=2.0)
    totals = dict.fromkeys(("chance", "distinct", "micro", "micro_vectors", "sent", "least"), 0.0)
    loads, rows, touched = np.zeros(3), np.zeros(len(table_layout(config).slabs)), 0.0
    for tokens in itertools.product(np.flatnonzero(FREQUENCIES).tolist(), repeat=4):
        chance = float(np.prod(FREQUENCIES[list(tokens)]))
        step, micro = Counted(config, routing, 3, tokens), Counted(config, routing, 3, tokens[:2])
        totals["chance"] += chance
        totals["distinct"] += chance * step.distinct
        totals["micro"] += chance * micro.distinct
        totals["micro_vectors"] += chance * micro.loads.sum()
        totals["sent"] += chance * step.sent
        totals["least"] += chance * step.least
        loads += chance * step.loads
        rows += chance * np.array(step.rows)
    assert totals["chance"] == pytest.approx(1)
    assert found.distinct_tokens == pytest.approx(totals["distinct"])
    assert found.distinct_tokens_per_micro_batch == pytest.approx(totals["micro"])
    assert found.distinct_tokens_step_over_micro_batches == pytest.approx(totals["distinct"] / (2 * totals["micro"]))
    assert found.vectors_step_over_micro_batches == pytest.approx(loads.sum() / (2 * totals["micro_vectors"]))
    assert found.vectors == pytest.approx(loads.sum())
    assert found.vectors_per_token == pytest.approx(loads.sum() / (len(rows) * totals["distinct"]))
    assert found.imbalance_expected == pytest.approx(loads.max() / loads.mean())
    assert found.wire_bytes == pytest.approx({"fp32": 4 * totals["sent"], "bf16": 2 * totals["sent"]})
    assert found.lower_bound_bytes == pytest.approx({"fp32": 4 * totals["least"], "bf16": 2 * totals["least"]})
    assert found.wire_over_lower_bound == pytest.approx(totals["sent"] / totals["least"])
    assert (found.wire_over_lower_bound > 1.05) == (compression < 1)  # there are tokens with two owners
    assert found.id_bytes == pytest.approx(4 * loads.sum() * 2 / 3)
    widths = [slab.width for slab in table_layout(config).slabs]
    assert widths == ([36, 12] if compression < 1 else [48])
    assert found.distinct_rows == pytest.approx(rows.mean())
    assert found.prefetch_bytes["bf16"] == pytest.approx(2 * rows @ widths)
    assert found.prefetch_seconds["fp32"] == pytest.approx(4 * rows @ widths / 2e9)
    # A step of all ranks, from the chances of the rows; each is a sum over the texts that miss all its readers.
    for view in range(table_layout(config).num_views):
        for row in range(table_layout(config).num_rows):
            readers = [t for t in range(8) if row in rows_of(routing, view, t)]
            touched += 1 - (1 - FREQUENCIES[readers].sum()) ** 12
    assert found.touched_share == pytest.approx(
        touched / (table_layout(config).num_views * table_layout(config).num_rows)
    )


def test_rows_and_bytes_held_are_those_of_the_placement():
    config = recipe()
    routing = routing_of(config, FREQUENCIES)
    found = plan_exchange(config, FREQUENCIES, routing, ranks=4, host_bandwidth=25.0)
    held = [len(plan_row_sharding(routing, 5, 4).rows_of(rank)) for rank in range(4)]
    assert sum(held) == 5
    numbers = 48 + 9  # columns of all tables, and a gate for each of the 9 tables
    assert found.table_bytes["sparse"] == {"mean": 5 / 4 * numbers * 4 * 3, "largest": max(held) * numbers * 4 * 3}
    assert found.table_bytes["dense"] == {"mean": 5 / 4 * numbers * 4 * 4, "largest": max(held) * numbers * 4 * 4}
    plain = recipe({"memory": {"compression": 1.0}})
    assert plan_exchange(plain, FREQUENCIES, None, 4, 25.0).table_bytes["sparse"]["mean"] == 8 / 4 * 48 * 4 * 3
    ungated = recipe({"memory": {"row_gates": False}})
    assert plan_exchange(ungated, FREQUENCIES, routing, 4, 25.0).table_bytes["sparse"]["mean"] == 5 / 4 * 48 * 4 * 3


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_expectations_are_the_means_of_draws(ranks):
    config = recipe(SMALL)
    counts = zipf()
    routing = routing_of(config, counts)
    found = plan_exchange(config, counts, routing, ranks, host_bandwidth=25.0)
    assert found.tokens_per_rank_step == 2048 // ranks
    random = np.random.default_rng(3)
    steps = [
        Counted(config, routing, ranks, random.choice(400, size=2048 // ranks, p=counts / counts.sum()).tolist())
        for _ in range(60)
    ]

    def near(expected, drawn):
        assert abs(np.mean(drawn) - expected) <= 4 * np.std(drawn) / np.sqrt(len(drawn)) + 1e-9

    near(found.distinct_tokens, [step.distinct for step in steps])
    near(found.distinct_rows, [np.mean(step.rows) for step in steps])
    near(found.vectors, [step.loads.sum() for step in steps])
    near(found.wire_bytes["fp32"], [4 * step.sent for step in steps])
    near(found.lower_bound_bytes["fp32"], [4 * step.least for step in steps])
    mean = np.mean([step.loads for step in steps], axis=0)
    assert found.imbalance_expected == pytest.approx(mean.max() / mean.mean(), rel=0.02)
    each = [step.loads.max() / step.loads.mean() for step in steps]
    assert min(each) - 0.02 <= found.imbalance_sampled <= max(each) + 0.02


@pytest.mark.parametrize(("window", "expected"), [(1, [1, 1]), (2, [2]), ("step", [2]), ("1KB", [1, 1])])
def test_windows_of_the_recipe_decide_what_travels(window, expected):
    config = recipe({"memory": {"window": window}, "train": {"global_batch": 6}})
    routing = routing_of(config, FREQUENCIES)
    found = plan_exchange(config, FREQUENCIES, routing, ranks=3, host_bandwidth=2.0)
    assert found.windows == expected
    part = recipe({"train": {"global_batch": 3 * expected[0]}})  # a step of one such window
    alone = plan_exchange(part, FREQUENCIES, routing, ranks=3, host_bandwidth=2.0)
    for name in ("vectors", "id_bytes", "wire_bytes", "lower_bound_bytes", "prefetch_bytes", "prefetch_seconds"):
        one, all_of_them = getattr(alone, name), getattr(found, name)
        if isinstance(one, dict):
            assert all_of_them == pytest.approx({key: len(expected) * value for key, value in one.items()})
        else:
            assert all_of_them == pytest.approx(len(expected) * one)
    whole = plan_exchange(recipe({"train": {"global_batch": 6}}), FREQUENCIES, routing, ranks=3, host_bandwidth=2.0)
    for name in ("distinct_tokens", "distinct_rows", "imbalance_expected", "vectors_step_over_micro_batches"):
        assert getattr(found, name) == pytest.approx(getattr(whole, name))


def test_one_rank_sends_nothing():
    config = recipe(SMALL)
    found = plan_exchange(config, zipf(), routing_of(config, zipf()), 1, 25.0)
    assert found.wire_bytes == found.lower_bound_bytes == {"fp32": 0, "bf16": 0}
    assert found.wire_over_lower_bound is None
    assert found.vectors_per_token == pytest.approx(1)
    assert found.imbalance_expected == found.imbalance_sampled == 1


def test_the_same_figures_every_time():
    config = recipe(SMALL)
    made = [plan_exchange(config, zipf(), routing_of(config, zipf()), 4, 25.0) for _ in range(2)]
    assert made[0] == made[1]


def test_a_sample_holds_only_tokens_that_occur():
    # What rounding leaves over of so many draws must not fall to the last token, which never occurs.
    counts = np.concatenate(([10**13], np.ones(1000), np.zeros(5)))
    sample = TokenDraw(counts, 10**17).sample
    assert sample.tolist() == (counts > 0).astype(float).tolist()


@pytest.mark.parametrize(("batch", "micro", "ranks"), [(1024, 8, 16), (16, 16, 1), (24, 4, 6), (38, 2, 1), (48, 4, 12)])
def test_the_number_of_ranks_follows_the_batch(batch, micro, ranks):
    assert default_ranks(recipe({"train": {"global_batch": batch, "micro_batch": micro}})) == ranks


def test_chances_keep_the_smallest_probabilities_and_certainty():
    chances = chance_seen(np.array([0.0, 1e-30, 1e-12, 0.5, 1.0, 1.0 + 1e-15]), 1000)
    assert chances == pytest.approx([0, 1e-27, 1e-9 * (1 - 999 / 2 * 1e-12), 1 - 0.5**1000, 1, 1], rel=1e-12, abs=0)


def test_touched_rows_are_those_any_reader_of_which_occurs():
    assert expected_touched_share(np.array([3, 1, 0]), None, 3, 2) == pytest.approx((15 / 16 + 7 / 16 + 0) / 3)
    counts = zipf()
    routing = build_routing(counts, RoutingSettings(vip=5, buckets=4), views=2)
    random, shares = np.random.default_rng(5), []
    for _ in range(200):
        tokens = set(random.choice(400, size=300, p=counts / counts.sum()).tolist())
        shares += [len({row for t in tokens for row in rows_of(routing, view, t)}) / 200 for view in (0, 1)]
    # The two views of one draw are not independent: 200 draws, not 400.
    expected = expected_touched_share(counts, routing, 200, 300)
    assert abs(np.mean(shares) - expected) < 4 * np.std(shares) / np.sqrt(200)
    assert row_probabilities(counts, routing, 0, 200).sum() > 1  # tokens with several rows
    with pytest.raises(UserError, match="the frequencies are of 399 tokens, the routing of 400"):
        expected_touched_share(counts[:-1], routing, 200, 300)


# What the paper's recipes come to.


@pytest.mark.parametrize(("ranks", "limit"), [(4, 1.3), (16, 1.3), (64, 1.5)])
@pytest.mark.parametrize("share", [50, 100])
def test_paper_recipes_with_the_real_frequencies(real_frequencies_file, share, ranks, limit):
    config = load_config(RECIPES / "0.73b" / f"xgram-1x-{share}.yaml")
    frequencies = load_frequencies(real_frequencies_file, config.model.vocabulary)
    routing = routing_of(config, frequencies)
    found = plan_exchange(config, frequencies, routing, ranks, host_bandwidth=25.0)
    assert found.tokens_per_rank_step == 8_388_608 // ranks
    assert 1 <= found.imbalance_expected <= limit
    assert 1 <= found.imbalance_sampled <= limit
    tokens = np.random.default_rng(0).choice(len(frequencies), size=8_388_608 // ranks, p=frequencies)
    assert found.distinct_tokens == pytest.approx(len(np.unique(tokens)), rel=0.01)
    micro = [len(np.unique(part)) for part in tokens.reshape(-1, 65_536)]
    assert found.distinct_tokens_per_micro_batch == pytest.approx(np.mean(micro), rel=0.01)
    occurs = np.bincount(tokens, minlength=len(frequencies)) > 0
    placement, asked = plan_row_sharding(routing, table_layout(config).num_rows, ranks), 0
    for slab in table_layout(config).slabs:
        if routing is None:
            asked += int(occurs.sum())
            continue
        lists = routing.views[slab.view]
        pairs = lists.tokens() * ranks + placement.owner[lists.rows]
        asked += len(np.unique(pairs[np.repeat(occurs, np.diff(lists.offsets))]))
    assert found.vectors == pytest.approx(asked, rel=0.01)
    if ranks == 16:
        assert (found.accumulation, found.tokens_per_micro_batch) == (8, 65_536)
        assert found.distinct_tokens == pytest.approx(36_000, rel=0.01)
        assert found.distinct_tokens_step_over_micro_batches == pytest.approx(0.37, abs=0.005)
        assert found.vectors_step_over_micro_batches == pytest.approx(0.37, abs=0.005)
        assert found.touched_share == pytest.approx(0.927 if share == 50 else 0.457, abs=0.002)


@pytest.mark.parametrize(
    ("policy", "vectors", "worst"),
    [("bucket", 1.41, 1.25), ("token", 1.41, 1.1), ("strided", 2, 1.1), ("contiguous", 1.7, 1.6)],
)
def test_placements_with_the_real_frequencies(real_frequencies_file, policy, vectors, worst):
    config = load_config(RECIPES / "0.73b" / "xgram-1x-50.yaml")
    frequencies = load_frequencies(real_frequencies_file, config.model.vocabulary)
    routing, draw = routing_of(config, frequencies), TokenDraw(frequencies, 524_288)
    found = [plan_balance(config, draw, routing, ranks, policy) for ranks in (4, 16, 64)]
    assert vectors - 0.1 < found[-1].vectors_per_token < vectors
    assert worst - 0.1 < max(balance.imbalance_sampled for balance in found) < worst
    expected = {"bucket": [1, 1, 1.41], "token": [1.31, 1.39, 1.41]}
    if policy in expected:
        assert [balance.vectors_per_token for balance in found] == pytest.approx(expected[policy], abs=0.005)


# The command.


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a recipe of the small text and its frequencies, in which the command runs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tree(SMALL)), encoding="utf-8")
    np.savez(tmp_path / "frequencies.npz", counts=zipf())
    return tmp_path


def planned(capsys, *words):
    assert main(["plan", "recipe.yaml", "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_has_the_exchange(folder, capsys):
    figures = planned(capsys, "--ranks", "4", "--frequencies", "frequencies.npz", "--host-bandwidth", "50")
    config = recipe(SMALL)
    expected = plan_exchange(config, zipf(), routing_of(config, zipf()), 4, 50.0).as_dict()
    assert figures["exchange"] == {**expected, "frequencies": "frequencies.npz", "routing": "frequencies.npz"}
    assert figures["tokens_per_step"] == 2048


def test_the_text_has_the_same_figures(folder, capsys):
    words = ["--ranks", "4", "--frequencies", "frequencies.npz", "--policies"]
    exchange = planned(capsys, *words)["exchange"]
    assert main(["plan", "recipe.yaml", *words]) == 0
    text = capsys.readouterr().out
    assert "exchange of a step on 4 ranks" in text
    for key, layout in {
        "tokens_per_rank_step": "{:,}",
        "distinct_tokens": "{:,.0f}",
        "distinct_rows": "{:,.0f}",
        "vectors": "{:,.0f}",
        "vectors_per_token": "{:.3f}",
        "imbalance_expected": "{:.3f}",
        "imbalance_sampled": "{:.3f}",
        "wire_over_lower_bound": "{:.3f}",
    }.items():
        assert f" {layout.format(exchange[key])}" in text, key
    assert f"{exchange['touched_share']:.1%}".replace("%", " %") in text
    assert f"{exchange['wire_bytes']['fp32'] / 1000:.3g} kB" in text
    assert "at 25 GB/s" in text
    assert [(p["policy"], p["ranks"]) for p in exchange["policies"]] == [(p, n) for p in POLICIES for n in (4, 16, 64)]
    for balance in exchange["policies"]:
        line = next(
            line for line in text.splitlines() if line.split()[:2] == [balance["policy"], str(balance["ranks"])]
        )
        figures = [balance[key] for key in ("vectors_per_token", "imbalance_expected", "imbalance_sampled")]
        assert line.split()[2:] == [f"{figure:.3f}" for figure in figures]


def test_frequencies_come_from_the_recipe_or_its_data_too(folder, capsys):
    given = planned(capsys, "--frequencies", "frequencies.npz")["exchange"]
    assert given["ranks"] == 8
    (folder / "data").mkdir()
    np.savez(folder / "data" / "counts.npz", counts=zipf())
    for words in ("memory.routing.frequencies=frequencies.npz", "data.path=data"):
        found = planned(capsys, words)["exchange"]
        assert {key: value for key, value in found.items() if key not in ("frequencies", "routing")} == {
            key: value for key, value in given.items() if key not in ("frequencies", "routing")
        }
    # What is given goes before what the recipe says.
    np.savez(folder / "even.npz", counts=np.ones(400, dtype=np.int64))
    even = planned(capsys, "data.path=data", "--frequencies", "even.npz")["exchange"]
    assert even["distinct_tokens"] > given["distinct_tokens"]


def test_the_routing_file_is_the_routing(folder, capsys):
    other = build_routing(zipf()[::-1].copy(), RoutingSettings(vip=5, buckets=4), views=2)
    save_routing(other, folder / "routing.npz")
    words = ["--ranks", "4", "--frequencies", "frequencies.npz", "memory.routing.file=routing.npz"]
    found = planned(capsys, *words)["exchange"]
    expected = plan_exchange(recipe(SMALL), zipf(), other, 4, 25.0).as_dict()
    assert found == {**expected, "frequencies": "frequencies.npz", "routing": "routing.npz"}
    assert main(["plan", "recipe.yaml", *words]) == 0
    assert "frequencies.npz, routing of routing.npz" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "way"),
    [
        ([], "give --frequencies FILE.npz ('xgram-dist frequencies' makes one)"),
        (["data.path=gone"], "give --frequencies FILE.npz"),
        (["memory.routing.frequencies=gone.npz"], "memory.routing.frequencies = 'gone.npz' does not exist"),
        (
            ["memory.routing.frequencies=frequencies.npz", "memory.routing.file=gone.npz"],
            "memory.routing.file = 'gone.npz' does not exist; make it with 'xgram-dist route'",
        ),
    ],
)
def test_without_the_files_the_other_figures_and_the_way_to_these(words, way, folder, capsys):
    assert planned(capsys, *words)["exchange"] is None
    assert main(["plan", "recipe.yaml", "--policies", *words]) == 0
    text = capsys.readouterr().out
    assert "table parameters" in text
    assert text.splitlines()[-1].startswith(f"for the exchange of a step: {way}")
    assert "distinct" not in text


def test_vanilla_has_no_exchange(folder, capsys):
    words = ["plan", VANILLA, "--frequencies", "frequencies.npz"]
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["exchange"] is None
    assert main(words) == 0
    assert "no tables, so nothing is exchanged" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--ranks", "3"], "train.global_batch = 32 is not a whole multiple of train.micro_batch = 4 x 3 ranks"),
        (["--ranks", "16"], "train.global_batch = 32 is not a whole multiple of train.micro_batch = 4 x 16 ranks"),
        (["--ranks", "0"], "--ranks 0 is not from 1 to 16384"),
        (["--ranks", "-2"], "--ranks -2 is not from 1 to 16384"),
        (["--bandwidth", "0"], "--bandwidth 0 is not a number of GB/s above 0"),
        (["--bandwidth", "nan"], "--bandwidth nan is not a number of GB/s above 0"),
        (["--frequencies", "gone.npz"], "there is no file gone.npz; give the path of a frequency file"),
        (["--frequencies", "recipe.yaml"], "recipe.yaml is not a frequency file"),
        (["--frequencies", "frequencies.npz", "model.vocabulary=300"], "vocabulary is 300, but frequencies.npz holds"),
        (
            ["--frequencies", "frequencies.npz", "memory.routing.file=gone.npz"],
            "memory.routing.file = 'gone.npz' does not exist; make it with 'xgram-dist route'",
        ),
        (
            ["--frequencies", "frequencies.npz", "memory.routing.file=other.npz"],
            "'other.npz' is for 400 tokens, 200 rows and 1 view, the recipe for 400 tokens, 200 rows and 2 views",
        ),
        (
            ["--frequencies", "frequencies.npz", "memory.routing.file=other.npz", "model.vocabulary=500"],
            "'other.npz' is for 400 tokens, 200 rows and 1 view, the recipe for 500 tokens, 250 rows and 2 views",
        ),
    ],
)
def test_mistakes_are_one_sentence_and_exit_code_two(words, sentence, folder, capsys):
    save_routing(build_routing(zipf(), RoutingSettings(vip=5, buckets=4), views=1), folder / "other.npz")
    assert main(["plan", "recipe.yaml", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert sentence in captured.err
    assert captured.err.count("\n") == 1
