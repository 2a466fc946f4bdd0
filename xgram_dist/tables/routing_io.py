"""The routing file: one `.npz` with the access lists of every view, the regions, and a JSON text `config`.

A file is fully checked when it is read: anything wrong with it is a `UserError` that names the array and the value.
"""

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xgram_dist.errors import BadFileError, UserError
from xgram_dist.files import Arrays, float_array, int_array, int_scalar, read_npz, write_npz
from xgram_dist.tables.routing import FORMAT, MAX_ROWS, OUTSIDE, VERSION, Routing, RoutingSettings, View, region_of_rows
from xgram_dist.untrusted import shown

FILE_KIND = "a routing file (`xgram-dist route` makes one)"
COEFFICIENT_TOLERANCE = 1e-3
"""The coefficients of a token sum to the number of paths; float32 rounding stays far below this."""
MAX_CONFIG_CHARACTERS = 65536


def save_routing(routing: Routing, path: str | Path) -> None:
    """Write the file atomically."""
    config = {
        "format": FORMAT,
        "version": VERSION,
        "vocabulary": routing.vocabulary,
        "views": routing.num_views,
        "gated": routing.gated,
        "source": routing.source,
        "settings": asdict(routing.settings),
        "sha256": routing.sha256(),
    }
    arrays: dict[str, NDArray[Any]] = {
        "num_rows": np.array(routing.num_rows, dtype=np.int64),
        "vip_rows": np.array(routing.vip_rows, dtype=np.int64),
        "bucket_start": routing.bucket_start,
        "bucket_rows": routing.bucket_rows,
        "bucket_sparse": routing.bucket_sparse,
        "config": np.array(json.dumps(config)),
    }
    for number, view in enumerate(routing.views):
        arrays[f"offsets_{number}"] = view.offsets
        arrays[f"rows_{number}"] = view.rows
        arrays[f"coefficients_{number}"] = view.coefficients
    write_npz(path, arrays)


def load_routing(path: str | Path) -> Routing:
    """Read a routing file; anything wrong with it is a `UserError`."""
    arrays = read_npz(path, FILE_KIND)
    config, settings = _read_config(arrays, path)
    vocabulary, num_views = config["vocabulary"], config["views"]
    view_names = [f"{part}_{m}" for m in range(num_views) for part in ("offsets", "rows", "coefficients")]
    expected = {"num_rows", "vip_rows", "bucket_start", "bucket_rows", "bucket_sparse", "config", *view_names}
    for name in sorted(expected ^ set(arrays)):
        raise BadFileError(f"{path}: array '{name}' is {'missing' if name in expected else 'unknown'} in {FILE_KIND}")
    num_rows, vip_rows = int_scalar(arrays, "num_rows", path), int_scalar(arrays, "vip_rows", path)
    starts, sizes, sparse = _read_layout(arrays, path, num_rows, vip_rows)
    paths = settings.paths if config["gated"] else 1
    routing = Routing(
        vocabulary=vocabulary,
        num_rows=num_rows,
        views=tuple(_read_view(arrays, m, path, vocabulary, num_rows, paths) for m in range(num_views)),
        vip_rows=vip_rows,
        bucket_start=starts,
        bucket_rows=sizes,
        bucket_sparse=sparse,
        settings=settings,
        gated=config["gated"],
        source=config["source"],
    )
    _check_regions(routing, path)
    if config.get("sha256", routing.sha256()) != routing.sha256():
        raise BadFileError(f"{path}: its content does not match the sha256 in its config; make or copy the file again")
    return routing


def _read_config(arrays: Arrays, path: str | Path) -> tuple[dict[str, Any], RoutingSettings]:
    if "config" not in arrays or arrays["config"].dtype.kind != "U" or arrays["config"].size != 1:
        raise BadFileError(f"{path} is not {FILE_KIND}: it has no 'config' text")
    text = str(arrays["config"].reshape(-1)[0])
    try:
        config = json.loads(text) if len(text) <= MAX_CONFIG_CHARACTERS else None
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise BadFileError(f"{path} is not {FILE_KIND}: its 'config' is not that of a routing")
    if config.get("version") != VERSION:
        raise BadFileError(f"{path}: routing version is {shown(config.get('version'))}; this program reads {VERSION}")
    wanted = {"vocabulary": int, "views": int, "gated": bool, "source": str, "settings": dict}
    for name, kind in wanted.items():
        if type(config.get(name)) is not kind:
            raise BadFileError(
                f"{path}: config '{name}' is {shown(config.get(name))}; it must be of type {kind.__name__}"
            )
    for name in ("vocabulary", "views"):
        if not 1 <= config[name] <= MAX_ROWS:
            raise BadFileError(f"{path}: config '{name}' is {shown(config[name])}; it must be from 1 to {MAX_ROWS:,}")
    # Every view has three arrays: a number of views that the file cannot hold is not worth listing.
    if config["views"] > len(arrays):
        raise BadFileError(f"{path}: config 'views' is {config['views']}, but the file has {len(arrays)} arrays")
    names = {field.name for field in fields(RoutingSettings)}
    for name in sorted(names ^ set(config["settings"])):
        raise BadFileError(f"{path}: routing setting '{name}' is {'missing' if name in names else 'unknown'}")
    try:
        return config, RoutingSettings(**config["settings"])
    except UserError as error:
        raise BadFileError(f"{path}: {error}") from error


def _read_layout(
    arrays: Arrays, path: str | Path, num_rows: int, vip_rows: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    if not 1 <= num_rows <= MAX_ROWS:
        raise BadFileError(f"{path}: 'num_rows' is {num_rows}; it must be from 1 to {MAX_ROWS:,}")
    if not 0 <= vip_rows <= num_rows:
        raise BadFileError(f"{path}: 'vip_rows' is {vip_rows}; it must be from 0 to the table's {num_rows:,} rows")
    starts = int_array(arrays, "bucket_start", path)
    sizes = int_array(arrays, "bucket_rows", path, len(starts))
    sparse = arrays["bucket_sparse"]
    if sparse.dtype.kind != "b" or sparse.shape != starts.shape:
        raise BadFileError(f"{path}: 'bucket_sparse' must hold one truth value for each of the {len(starts)} buckets")
    if len(starts):
        in_range = (starts >= vip_rows) & (starts <= num_rows) & (sizes >= 1) & (sizes <= num_rows)
        # Ends are only added up once both parts are known to be small, so that the sum cannot wrap around.
        if not in_range.all() or (starts + sizes).max() > num_rows or (starts[1:] < (starts + sizes)[:-1]).any():
            raise BadFileError(
                f"{path}: the regions of 'bucket_start' and 'bucket_rows' must follow one another between row "
                f"{vip_rows:,} and row {num_rows:,}"
            )
    return starts, sizes, sparse.copy()


def _read_view(arrays: Arrays, number: int, path: str | Path, vocabulary: int, num_rows: int, paths: int) -> View:
    name = f"offsets_{number}"
    offsets = int_array(arrays, name, path, vocabulary + 1)
    if offsets[0] != 0 or (offsets[1:] <= offsets[:-1]).any():
        raise BadFileError(
            f"{path}: '{name}' must start at 0 and rise at every token; every token reads at least one row"
        )
    rows = int_array(arrays, f"rows_{number}", path, int(offsets[-1]))
    coefficients = float_array(arrays, f"coefficients_{number}", path, int(offsets[-1]))
    if rows.min() < 0 or rows.max() >= num_rows:
        worst = rows.min() if rows.min() < 0 else rows.max()
        raise BadFileError(f"{path}: 'rows_{number}' holds row {worst}; rows go from 0 to {num_rows - 1}")
    if coefficients.min() <= 0 or coefficients.max() > paths * (1 + COEFFICIENT_TOLERANCE):
        worst = coefficients.min() if coefficients.min() <= 0 else coefficients.max()
        raise BadFileError(f"{path}: 'coefficients_{number}' holds {worst}; they must be above 0 and at most {paths}")
    view = View(offsets, rows.astype(np.int32), coefficients.astype(np.float32))
    sums = np.add.reduceat(coefficients, offsets[:-1])
    wrong = np.flatnonzero(np.abs(sums - paths) > COEFFICIENT_TOLERANCE * paths)
    if len(wrong):
        raise BadFileError(
            f"{path}: the 'coefficients_{number}' of token {wrong[0]} sum to {sums[wrong[0]]:.6g}; "
            f"the sum must be {paths}"
        )
    keys = np.sort(view.tokens() * num_rows + rows)
    if (keys[1:] == keys[:-1]).any():
        token = int(keys[1:][keys[1:] == keys[:-1]][0]) // num_rows
        raise BadFileError(
            f"{path}: 'rows_{number}' names a row of token {token} twice; equal rows must be merged into one"
        )
    return view


def _check_regions(routing: Routing, path: str | Path) -> None:
    """Every access lies in the VIP region or a bucket's region; without gates, row = token id."""
    for number, view in enumerate(routing.views):
        if not routing.gated:
            if len(view.rows) != routing.vocabulary or (view.rows != np.arange(routing.vocabulary)).any():
                raise BadFileError(
                    f"{path}: 'rows_{number}' is not token -> row of the same number, as without gates it must be"
                )
        elif (outside := region_of_rows(routing, view.rows) == OUTSIDE).any():
            row = view.rows[outside][0]
            raise BadFileError(f"{path}: 'rows_{number}' holds row {row}, which lies in no region of the layout")
