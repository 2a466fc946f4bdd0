"""Recipes that cannot be: one sentence that names the key, its value, and the limit or the way out."""

from pathlib import Path
from typing import Any

import pytest
import torch
from config_helpers import small_tree, write_recipe

from xgram_dist.config import build_config, load_config
from xgram_dist.config.validate import accumulation
from xgram_dist.errors import UserError
from xgram_dist.model.methods.base import check_files, check_method
from xgram_dist.tables.optimizers.build import choose_optimizer, keeps_touched_rows, stages_records


def changed(changes: dict[str, Any]) -> dict[str, Any]:
    tree = small_tree()
    for dotted, value in changes.items():
        *parents, last = dotted.split(".")
        place = tree
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    return tree


def refusal(changes: dict[str, Any]) -> str:
    with pytest.raises(UserError) as error:
        check_method(build_config(changed(changes)))
    sentence = str(error.value)
    assert "\n" not in sentence
    return sentence


@pytest.mark.parametrize(
    ("key", "value", "limit"),
    [
        ("train.steps", "5", "a whole number"),
        ("train.steps", True, "a whole number"),
        ("train.steps", 5.5, "a whole number"),
        ("train.steps", 0, "greater than 0"),
        ("train.steps", None, "a whole number"),
        ("train.compile", 1, "true or false"),
        ("train.compile", "yes", "true or false"),
        ("train.precision", "fp16", "'fp32' or 'bf16'"),
        ("train.seed", -1, "greater than or equal to 0"),
        ("train", 3, "a group of keys"),
        ("optimizer.learning_rate", "1e-3", "a number"),
        ("optimizer.learning_rate", True, "a number"),
        ("optimizer.learning_rate", 0.0, "greater than 0"),
        ("optimizer.learning_rate", float("nan"), "a finite number"),
        ("optimizer.learning_rate", float("inf"), "a finite number"),
        ("optimizer.warmup_share", 1.5, "less than or equal to 1"),
        ("optimizer.betas", [0.9, 0.9, 0.9], "at most 2 items"),
        ("name", "a b", "must match pattern"),
        ("name", "", "at least 1 character"),
        ("name", "../up", "must match pattern"),
        ("model.sequence_length", 1, "greater than or equal to 2"),
        ("memory.method", "ngram", "'vanilla', 'xgram', 'ple'"),
        ("memory.compression", 0, "greater than 0"),
        ("memory.compression", -0.5, "greater than 0"),
        ("memory.compression", 1.01, "less than or equal to 1"),
        ("memory.routing.paths", 9, "less than or equal to 8"),
        ("memory.routing.copies", 17, "less than or equal to 16"),
        ("memory.routing.decay", 0, "greater than 0"),
        ("memory.sites.v.kernels", [], "at least 1 item"),
        ("memory.sites.v.kernels", 3, "a list"),
        ("memory.sites.v.views", 0, "greater than 0"),
        ("memory.sites.v.layers", "some", "'all' or a list"),
        ("memory.learning_rate.multiplier", "sqrt", "'sqrt_vocabulary' or 'sqrt_rows' or a number"),
        ("memory.learning_rate.multiplier", -2, "or greater than 0"),
    ],
)
def test_a_value_out_of_its_type_or_limit_is_named(key: str, value: Any, limit: str) -> None:
    sentence = refusal({key: value})
    assert sentence.startswith(f"{key} = {value!r}: must ")
    assert limit in sentence


@pytest.mark.parametrize(
    ("changes", "start"),
    [
        ({"memory.sites.v.kernels": [3, 0]}, "memory.sites.v.kernels.1 = 0: must be greater than 0"),
        ({"memory.sites.v.layers": [0, -1]}, "memory.sites.v.layers.1 = -1: must be greater than or equal to 0"),
        ({"optimizer.betas": [0.9, 1.0]}, "optimizer.betas.1 = 1.0: must be less than 1"),
        ({"data.weights": {"web": -1}}, "data.weights.web = -1: must be greater than or equal to 0"),
    ],
)
def test_a_value_inside_a_list_or_mapping_is_named_by_its_place(changes: dict[str, Any], start: str) -> None:
    assert refusal(changes) == start


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("modle", "did you mean 'model'?"),
        ("train.step", "did you mean 'train.steps'?"),
        ("optimizer.lr", "valid: learning_rate, betas, eps"),  # nothing is near
        ("memory.routng", "did you mean 'memory.routing'?"),
        ("memory.routing.vips", "did you mean 'memory.routing.vip'?"),
        ("memory.sites.v.kernel", "did you mean 'memory.sites.v.kernels'?"),
        ("memory.learning_rate.multiplyer", "did you mean 'memory.learning_rate.multiplier'?"),
    ],
)
def test_an_unknown_key_comes_with_the_nearest_valid_one(key: str, nearest: str) -> None:
    sentence = refusal({key: 1})
    assert sentence.startswith(f"unknown key '{key}'; ")
    assert nearest in sentence


def test_an_unknown_site_comes_with_the_valid_ones() -> None:
    sentence = refusal({"memory.sites.x": {"views": 1}})
    assert sentence == "unknown key 'memory.sites.x': must be one of 'h', 'q', 'k', 'v', 'o' or 'qk'"


def test_an_unknown_key_is_said_before_the_missing_one_it_stands_for() -> None:
    tree = small_tree()
    tree["model"]["layer"] = tree["model"].pop("layers")
    with pytest.raises(UserError) as error:
        build_config(tree)
    assert str(error.value) == "unknown key 'model.layer'; did you mean 'model.layers'? (and 1 more problem)"


def test_a_missing_key_is_named() -> None:
    tree = small_tree()
    del tree["model"]["heads"]
    with pytest.raises(UserError, match=r"^missing key 'model\.heads'$"):
        build_config(tree)


def test_text_that_is_no_unicode_is_refused() -> None:
    assert "cannot be read" in refusal({"name": "\ud800"})


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"model.width": 66}, ["model.width = 66", "not divisible", "model.heads = 4"]),
        ({"model.width": 36}, ["model.width = 36", "model.heads = 4", "9", "odd", "even"]),
        ({"model.kv_heads": 3}, ["model.heads = 4", "not divisible", "model.kv_heads = 3"]),
        ({"model.kv_heads": 8}, ["model.heads = 4", "model.kv_heads = 8"]),
        ({"train.micro_batch": 3}, ["train.global_batch = 16", "train.micro_batch = 3", "multiple", "1 rank,"]),
        ({"train.micro_batch": 32}, ["train.global_batch = 16", "train.micro_batch = 32"]),
        ({"memory.sites.v.layers": [0, 4]}, ["memory.sites.v.layers", "4", "model.layers = 4", "0 to 3"]),
        ({"memory.sites.v.layers": [1, 2, 1]}, ["memory.sites.v.layers = [1, 2, 1]", "each once"]),
        ({"memory.sites.v.layers": []}, ["memory.sites.v.layers = []", "at least one layer"]),
        ({"memory.sites": {}}, ["memory.method = xgram", "memory.sites", "memory.sites.v.views=2"]),
        (
            {"memory.sites.qk": {"views": 1}, "memory.sites.q": {"views": 1}},
            ["memory.sites.qk", "cannot stand beside", "memory.sites.q"],
        ),
        ({"memory.sites.qk": {"views": 1}, "memory.sites.k": {"views": 1}}, ["memory.sites.qk", "cannot stand beside"]),
        (
            {"memory.extraction.shared": True},
            ["memory.extraction.shared", "one kernel size", "memory.sites.v.kernels = [3, 5]"],
        ),
        (
            {"memory.compression": 0.08},  # 80 rows: all of them the VIP region's
            ["memory.compression = 0.08", "80 rows", "memory.routing.vip = 20", "copies 3", "8 buckets", "raise"],
        ),
        ({"memory.compression": 0.087}, ["87 rows"]),
        ({"memory.routing.vip": 124}, ["500 rows", "memory.routing.vip = 124"]),
        ({"memory.routing.vip": 1001, "memory.routing.copies": 0}, ["memory.routing.vip = 1001"]),
        (
            {"parallel.context": 2, "model.sequence_length": 30},
            ["model.sequence_length = 30", "2 x parallel.context = 4", "multiple of 4", "smaller degree"],
        ),
        (
            {
                "parallel.context": 2,
                "model.sequence_length": 64,
                "data.stages": [{"from_tokens": 0, "sequence_length": 2}],
            },
            ["data.stages[0].sequence_length = 2", "2 x parallel.context = 4"],
        ),
        (
            {
                "parallel.context": 2,
                "parallel.tensor": 4,
                "parallel.sequence_parallel": True,
                "model.sequence_length": 36,
            },
            ["model.sequence_length = 36", "parallel.context x parallel.tensor = 8", "multiple of 8"],
        ),
        (
            {"parallel.context": 8, "model.sequence_length": 32},
            ["parallel.context = 8", "32 tokens into chunks of 2", "memory.method = xgram reads 4", "smaller degree"],
        ),
    ],
)
def test_keys_that_cannot_stand_together_are_named_with_their_values(changes: dict[str, Any], parts: list[str]) -> None:
    sentence = refusal(changes)
    for part in parts:
        assert part in sentence


@pytest.mark.parametrize(
    "changes",
    [
        {"memory.compression": 0.088},  # 80 VIP rows and one for each of 8 buckets: just enough
        {"memory.compression": 1, "memory.routing.vip": 500},  # nothing is hashed, so nothing needs room
        {"memory.extraction.shared": True, "memory.sites.v.kernels": [3, 3]},
        {"memory.sites.qk": {"views": 1}},
        {"memory.sites.q": {"views": 1}, "memory.sites.k": {"views": 1}},
        {"memory.sites.v.layers": [3]},
        {"memory.sites.v.kernels": [1]},
        {"memory.method": "vanilla", "memory.sites": {}},
        {"train.micro_batch": 16},
        {"model.kv_heads": 4},
        {"optimizer.betas": [0, 0.5]},
    ],
)
def test_what_is_just_within_the_limits_is_taken(changes: dict[str, Any]) -> None:
    check_method(build_config(changed(changes)))


@pytest.mark.parametrize(("ranks", "expected"), [(1, 4), (2, 2), (4, 1)])
def test_accumulation_is_the_share_of_a_rank(ranks: int, expected: int) -> None:
    assert accumulation(build_config(small_tree()), ranks) == expected


def test_ranks_that_share_a_sequence_count_once() -> None:
    config = build_config(changed({"parallel.context": 2, "model.sequence_length": 64}))
    assert [accumulation(config, ranks) for ranks in (2, 4, 8)] == [4, 2, 1]
    with pytest.raises(UserError, match=r"x 8 ranks \(of 16, parallel\.context = 2 share a sequence\)"):
        accumulation(config, 16)
    with pytest.raises(UserError, match=r"parallel\.context = 2 does not divide the 3 rank"):
        accumulation(config, 3)


@pytest.mark.parametrize("ranks", [3, 8])
def test_ranks_that_do_not_divide_the_batch_are_refused(ranks: int) -> None:
    with pytest.raises(UserError, match=rf"train\.global_batch = 16 .*train\.micro_batch = 4 x {ranks} ranks"):
        accumulation(build_config(small_tree()), ranks)


@pytest.mark.parametrize(
    ("key", "command"),
    [
        ("data.path", "xgram-dist prepare"),
        ("memory.routing.file", "xgram-dist route"),
        ("memory.routing.frequencies", "xgram-dist frequencies"),
    ],
)
def test_a_file_that_is_not_there_is_named_by_its_key_with_the_command_that_makes_it(
    tmp_path: Path, key: str, command: str
) -> None:
    gone = str(tmp_path / "gone")
    config = build_config(changed({"data.path": str(tmp_path), key: gone}))  # the recipe alone is fine
    with pytest.raises(UserError) as error:
        check_files(config)
    for part in (f"{key} = '{gone}'", command, f"{key}=PATH"):
        assert part in str(error.value)


@pytest.mark.parametrize("data", [{}, {"path": ".", "remote": "s3://bucket/mix"}])
def test_data_must_come_from_exactly_one_place(data: dict[str, str]) -> None:
    config = build_config(changed({"data": data}))
    with pytest.raises(UserError, match=r"exactly one of data\.path .* and data\.remote"):
        check_files(config)


@pytest.mark.parametrize("key", ["data.remote", "checkpoint.remote"])
def test_an_address_with_credentials_is_refused_before_anything_is_written_and_not_shown(key: str) -> None:
    for secret in ("AKIA:secret@bucket", "AKIA:sec/ret@bucket"):
        with pytest.raises(UserError, match="must not hold credentials") as error:
            build_config(changed({key: f"s3://{secret}/mix"}))
        assert "AKIA" not in str(error.value)


def test_files_that_are_there_are_taken(tmp_path: Path) -> None:
    check_files(build_config(changed({"data.path": str(tmp_path)})))
    check_files(build_config(changed({"data.remote": "s3://bucket/mix"})))


def test_a_recipe_is_refused_the_same_from_a_file(tmp_path: Path) -> None:
    path = write_recipe(tmp_path / "r.yaml", changed({"model.width": 66}))
    with pytest.raises(UserError, match=r"model\.width = 66"):
        load_config(path)


@pytest.mark.parametrize(
    ("memory", "parts"),
    [
        ({"method": "retoken"}, ["memory.method = retoken", "memory.compression = 0.5", "memory.compression=1"]),
        ({"method": "retoken", "compression": 1.0, "sites": {"v": {}}}, ["memory.sites", "xgram or ple", "retoken"]),
        (
            {"method": "ple", "compression": 1.0, "sites": {"v": {}}, "extraction": {"gate": False}},
            ["memory.extraction"],
        ),
        ({"method": "ple", "compression": 1.0}, ["memory.method = ple", "memory.sites.v.views=2"]),
        ({"method": "stem", "compression": 1.0, "row_gates": False}, ["memory.row_gates", "stem"]),
        ({"method": "stem", "compression": 1.0, "stem": {"layers": [4]}}, ["memory.stem.layers", "4", "0 to 3"]),
        ({"method": "stem", "compression": 1.0, "mort": {"views": 3}}, ["memory.mort", "stem"]),
        (
            {"method": "mort", "compression": 1.0, "mort": {"views": 1}},
            ["memory.mort.top = 2", "memory.mort.views = 1"],
        ),
        ({"method": "engram", "compression": 1.0, "engram": {"heads": 7}}, ["memory.engram.width = 64", "heads = 7"]),
        ({"method": "engram", "compression": 1.0, "engram": {"orders": [2, 2]}}, ["memory.engram.orders", "once"]),
        ({"method": "mole", "placement": "host"}, ["memory.placement", "mole"]),
        ({"method": "scone", "learning_rate": {"multiplier": 2.0}}, ["memory.learning_rate", "scone"]),
        (
            {"method": "retoken", "compression": 1.0, "learning_rate": {"vip_multiplier": 2.0}},
            ["memory.learning_rate.vip_multiplier", "retoken", "no VIP rows"],
        ),
        (
            {"method": "engram", "compression": 1.0, "learning_rate": {"scales": "tables"}},
            ["memory.learning_rate.scales", "retoken or mort", "engram"],
        ),
    ],
)
def test_what_a_method_does_not_read_is_refused_by_name(memory: dict[str, Any], parts: list[str]) -> None:
    tree = small_tree()
    tree["memory"] = memory
    with pytest.raises(UserError) as refused:
        check_method(build_config(tree))
    for part in parts:
        assert part in str(refused.value)


@pytest.mark.parametrize("method", ["retoken", "mort", "stem", "engram", "mole", "scone"])
def test_sequence_parallelism_is_refused_by_the_methods_name(method: str) -> None:
    tree = small_tree()
    tree["memory"] = {"method": method, "compression": 1.0}
    tree["parallel"] = {"tensor": 2, "sequence_parallel": True}
    with pytest.raises(UserError, match=f"sequence_parallel is not offered with memory.method = {method}"):
        check_method(build_config(tree))


def test_a_disk_tier_needs_a_folder_and_an_optimizer_that_touches_few_rows() -> None:
    disk = {"memory.placement": "disk", "memory.folder": "/scratch"}
    assert "disk needs memory.folder" in refusal({"memory.placement": "disk"})
    assert "is of memory.placement = disk, but the recipe has host" in refusal({**disk, "memory.placement": "host"})
    assert "set memory.optimizer=catch_up" in refusal({**disk, "memory.optimizer": "dense"})
    check_method(build_config(changed({**disk, "memory.optimizer": "catch_up"})))


def test_a_place_of_the_update_needs_records_to_choose_for() -> None:
    assert "memory.update = host is of memory.placement = host and disk" in refusal({"memory.update": "host"})
    device = {"memory.placement": "host", "memory.update": "device"}
    assert "which memory.rows = all does not keep" in refusal({**device, "memory.rows": "all"})
    assert "which memory.optimizer = dense does not keep" in refusal({**device, "memory.optimizer": "dense"})
    config = build_config(changed({**device, "memory.optimizer": "auto"}))
    assert choose_optimizer(config, 0.5) == "catch_up"
    assert keeps_touched_rows(config, 100, "catch_up")
    assert stages_records(config, "catch_up", torch.device("cpu"))
    places = {place: build_config(changed({**device, "memory.update": place})) for place in ("auto", "host")}
    assert [stages_records(places["auto"], "catch_up", torch.device(kind)) for kind in ("cpu", "cuda")] == [False, True]
    assert not stages_records(places["host"], "catch_up", torch.device("cuda"))


def test_the_disk_tier_never_chooses_the_dense_sweep() -> None:
    disk = {"memory.placement": "disk", "memory.folder": "/scratch", "memory.optimizer": "auto"}
    assert choose_optimizer(build_config(changed(disk)), 0.5) == "catch_up"
