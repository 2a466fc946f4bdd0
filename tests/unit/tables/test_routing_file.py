"""The routing file: what is saved comes back, and a file with anything wrong in it is refused in one sentence."""

import io
import json
import os
import zipfile

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from xgram_dist.errors import UserError
from xgram_dist.tables.routing import RoutingSettings
from xgram_dist.tables.routing_build import build_routing
from xgram_dist.tables.routing_io import load_routing, save_routing


@pytest.fixture
def routing(zipf):
    return build_routing(zipf, RoutingSettings(vip=5, buckets=4), views=2)


@pytest.fixture
def arrays(routing, tmp_path):
    """The arrays of a good routing file, to be spoilt."""
    save_routing(routing, tmp_path / "good.npz")
    with np.load(tmp_path / "good.npz", allow_pickle=False) as file:
        return {name: file[name].copy() for name in file.files}


def reload(arrays, tmp_path):
    np.savez(tmp_path / "spoilt.npz", **arrays)
    return load_routing(tmp_path / "spoilt.npz")


def test_what_is_saved_comes_back(routing, tmp_path):
    save_routing(routing, tmp_path / "r.npz")
    loaded = load_routing(tmp_path / "r.npz")
    assert loaded.sha256() == routing.sha256()
    assert loaded.settings == routing.settings
    assert (loaded.vocabulary, loaded.num_rows, loaded.vip_rows) == (400, 200, 20)
    assert (loaded.gated, loaded.source) == (True, "frequencies")
    for before, after in zip(routing.views, loaded.views, strict=True):
        for part in ("offsets", "rows", "coefficients"):
            assert getattr(before, part).dtype == getattr(after, part).dtype
            np.testing.assert_array_equal(getattr(before, part), getattr(after, part))
    assert os.listdir(tmp_path) == ["r.npz"]  # nothing left aside


def test_the_plain_table_comes_back(zipf, tmp_path):
    save_routing(build_routing(zipf, RoutingSettings(compression=1), 1), tmp_path / "r.npz")
    assert not load_routing(tmp_path / "r.npz").gated


def test_names_in_the_file(arrays):
    views = {f"{part}_{m}" for part in ("offsets", "rows", "coefficients") for m in (0, 1)}
    assert set(arrays) == views | {"num_rows", "vip_rows", "bucket_start", "bucket_rows", "bucket_sparse", "config"}
    assert json.loads(str(arrays["config"]))["settings"]["compression"] == 0.5


def test_saving_twice_gives_the_same_bytes(routing, tmp_path):
    save_routing(routing, tmp_path / "a.npz")
    save_routing(routing, tmp_path / "b.npz")
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()


def test_the_hash_is_of_the_map_and_not_of_its_making(zipf):
    chosen = RoutingSettings(vip=5, buckets=4)
    other = zipf.copy()
    other[other.argmax()] += 1  # the same order, the same buckets
    assert build_routing(zipf, chosen, 2).sha256() == build_routing(other, chosen, 2).sha256()
    assert build_routing(zipf, chosen, 2).sha256() != build_routing(zipf, chosen, 1).sha256()
    assert build_routing(zipf, chosen, 2).sha256() != build_routing(zipf[::-1].copy(), chosen, 2).sha256()


def test_arrays_cannot_be_changed(routing):
    with pytest.raises(ValueError, match="read-only"):
        routing.views[0].rows[0] = 1


def changed(array, place, value):
    array[place] = value


CONFIG = "config"
SPOILT = {
    "a row beyond the table": (lambda a: changed(a["rows_1"], 3, 200), "'rows_1' holds row 200; rows go from 0 to 199"),
    "a negative row": (lambda a: changed(a["rows_0"], 3, -1), "'rows_0' holds row -1"),
    "offsets that fall": (lambda a: changed(a["offsets_0"], 5, 0), "'offsets_0' must start at 0 and rise"),
    "offsets beyond the rows": (lambda a: changed(a["offsets_0"], -1, 10**9), "'rows_0' has .* values; it must have"),
    "short offsets": (
        lambda a: a.update(offsets_0=a["offsets_0"][:-1]),
        "'offsets_0' has 400 values; it must have 401",
    ),
    "float rows": (lambda a: a.update(rows_0=a["rows_0"].astype(float)), "'rows_0' has type float64"),
    "NaN": (
        lambda a: changed(a["coefficients_0"], 2, np.nan),
        "'coefficients_0' holds nan at 2; every value must be finite",
    ),
    "negative coefficient": (
        lambda a: changed(a["coefficients_0"], 2, -1),
        "'coefficients_0' holds -1.0; they must be",
    ),
    "coefficients that do not sum": (lambda a: changed(a["coefficients_0"], 0, 0.01), "sum to .*; the sum must be 2"),
    "a missing array": (lambda a: a.pop("vip_rows"), "array 'vip_rows' is missing"),
    "an unknown array": (lambda a: a.update(extra=np.zeros(1)), "array 'extra' is unknown"),
    "no config": (lambda a: a.pop(CONFIG), "is not a routing file .*: it has no 'config' text"),
    "config of something else": (lambda a: a.update(config=np.array("{}")), "'config' is not that of a routing"),
    "config that is not JSON": (lambda a: a.update(config=np.array("[" * 9000)), "'config' is not that of a routing"),
    "regions that overlap": (lambda a: changed(a["bucket_start"], 1, 30), "must follow one another"),
    "regions that wrap around": (lambda a: changed(a["bucket_rows"], 3, 2**63 - 1), "must follow one another"),
    "region length": (
        lambda a: a.update(bucket_rows=a["bucket_rows"][:3]),
        "'bucket_rows' has 3 values; it must have 4",
    ),
    "sparse as numbers": (lambda a: a.update(bucket_sparse=np.ones(4)), "'bucket_sparse' must hold one truth value"),
    "more VIP rows than rows": (lambda a: a.update(vip_rows=np.array(201)), "'vip_rows' is 201; it must be from 0 to"),
    "no rows": (lambda a: a.update(num_rows=np.array(0)), "'num_rows' is 0; it must be from 1"),
    "another map": (lambda a: changed(a["bucket_sparse"], 3, True), "does not match the sha256"),
}


@pytest.mark.parametrize("case", SPOILT)
def test_a_spoilt_file_is_refused(case, arrays, tmp_path):
    spoil, sentence = SPOILT[case]
    spoil(arrays)
    with pytest.raises(UserError, match=sentence):
        reload(arrays, tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("version", 2, "routing version is 2; this program reads 1"),
        ("vocabulary", "400", "config 'vocabulary' is '400'; it must be of type int"),
        ("vocabulary", 0, "config 'vocabulary' is 0; it must be from 1"),
        ("views", 10**9, "config 'views' is 1000000000, but the file has 12 arrays"),
        ("views", 3, "array 'coefficients_2' is missing"),
        ("gated", 1, "config 'gated' is 1; it must be of type bool"),
        ("gated", False, "'coefficients_0' holds|is not token -> row"),
        ("settings", {}, "routing setting 'alpha' is missing"),
    ],
)
def test_a_spoilt_config_is_refused(key, value, sentence, arrays, tmp_path):
    config = json.loads(str(arrays["config"]))
    arrays["config"] = np.array(json.dumps({**config, key: value}))
    with pytest.raises(UserError, match=sentence):
        reload(arrays, tmp_path)


def test_a_row_named_twice_is_refused(arrays, tmp_path):
    token = int(np.flatnonzero(np.diff(arrays["offsets_0"]) >= 2)[0])
    first = arrays["offsets_0"][token]
    arrays["rows_0"][first + 1] = arrays["rows_0"][first]
    with pytest.raises(UserError, match=f"names a row of token {token} twice"):
        reload(arrays, tmp_path)


def test_a_missing_file_a_folder_and_a_text_file_are_named(tmp_path):
    with pytest.raises(UserError, match=r"there is no file .*none\.npz; give the path of a routing file"):
        load_routing(tmp_path / "none.npz")
    with pytest.raises(UserError, match="is not a file"):
        load_routing(tmp_path)
    (tmp_path / "text.npz").write_text("hello")
    with pytest.raises(UserError, match=r"is not a routing file .*: it is not a readable .npz archive"):
        load_routing(tmp_path / "text.npz")


def test_pickled_objects_are_never_loaded(tmp_path):
    np.savez(tmp_path / "objects.npz", config=np.array([{"a": 1}], dtype=object))
    with pytest.raises(UserError, match="has type object"):
        load_routing(tmp_path / "objects.npz")


def test_a_header_that_promises_more_than_is_there_allocates_nothing(tmp_path):
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<i8", "fortran_order": False, "shape": (10**15,)})
    with zipfile.ZipFile(tmp_path / "bomb.npz", "w") as archive:
        archive.writestr("config.npy", header.getvalue())
    with pytest.raises(UserError, match=r"array 'config\.npy' is cut short or too long"):
        load_routing(tmp_path / "bomb.npz")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_flipped_and_cut_bytes_never_raise_anything_but_a_user_error(routing, tmp_path, data):
    path = tmp_path / "damaged.npz"
    save_routing(routing, path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(len(content) // 2, len(content)))])
    try:
        loaded = load_routing(path)
    except UserError:
        return
    assert loaded.sha256() == routing.sha256()


def test_an_unwritable_place_is_named(routing, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot write .*; choose another path"):
        save_routing(routing, tmp_path / "file" / "r.npz")
