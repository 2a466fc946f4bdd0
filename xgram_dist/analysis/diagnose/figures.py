"""Figures of a checkpoint after they are measured: RUN/diagnose/STEP/figures.json, a summary in lines, and pictures.

The tree of figures is what `measure.measure` returns. A figure is either a dictionary of its values or
{"not_applicable": reason}.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NotRequired

from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from xgram_dist.checkpoint.folder import FOLDER as CHECKPOINTS
from xgram_dist.errors import BadFileError, UserError, optional_package
from xgram_dist.untrusted import read_json

FOLDER, FILE = "diagnose", "figures.json"

Tree = dict[str, Any]

# ---- the file

_Number = Annotated[float, Field(strict=True, ge=-1e100, le=1e100)]
_Share = Annotated[float, Field(strict=True, ge=0, le=1e100)]
_Count = Annotated[int, Field(strict=True, ge=0, le=10**18)]
_PerLayer = Annotated[list[_Number | None], Field(min_length=1)]


class _NotApplicable(TypedDict):
    not_applicable: str


_Band = TypedDict("_Band", {"from": _Share, "to": _Share, "magnitude": _Number})


class _Activation(TypedDict):
    bands: list[_Band]
    correlation: _Number | None


class _Layers(TypedDict):
    attention: _PerLayer
    ffn: _PerLayer
    hidden: _PerLayer
    first_state: _PerLayer


class _Mean(TypedDict):
    mean: _Number


_Site = Annotated[str, Field(pattern=r"^layers\.([0-9]{1,6}|all)\.\w+$")]


class _Stage(TypedDict):
    mean: _Number
    sites: dict[_Site, _Mean]


class _Views(TypedDict):
    retrieved: _Stage
    extracted: NotRequired[_Stage]


_Hottest = TypedDict("_Hottest", {"0.001": _Number, "0.01": _Number, "0.1": _Number})


class _RowHits(TypedDict):
    hottest: _Hottest


class _Updates(TypedDict):
    more_than: dict[Annotated[str, Field(pattern="^[0-9]{1,18}$")], _Number]


class _Spread(TypedDict):
    p25: _Number
    p50: _Number
    p75: _Number


class _Movement(TypedDict):
    tables: dict[str, _Spread]
    cv: _Number | None
    gap: _Number | None


class _Figures(TypedDict):
    layers: _Layers
    activation: NotRequired[_NotApplicable | _Activation]
    views: NotRequired[_NotApplicable | _Views]
    row_hits: NotRequired[_NotApplicable | _RowHits]
    updates: NotRequired[_NotApplicable | _Updates]
    movement: NotRequired[_NotApplicable | _Movement]


class _File(TypedDict):
    """What summaries, pages and pictures read."""

    run: str
    method: str
    step: _Count
    positions: _Count
    figures: _Figures


def default_folder(checkpoint: Path) -> Path:
    """In the run folder of the checkpoint; in the working folder for a checkpoint that is in no run."""
    parent = checkpoint.parent if checkpoint.parent.name == CHECKPOINTS else checkpoint.resolve().parent
    return (parent.parent if parent.name == CHECKPOINTS else Path()) / FOLDER / checkpoint.name


def write_figures(tree: dict[str, Any], folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f".{FILE}.part"
        temporary.write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")
        return temporary.rename(folder / FILE)
    except OSError as error:
        raise UserError(f"cannot write '{folder}': {error.strerror}; choose another folder with --out") from None


def read_figures(path: Path) -> dict[str, Any]:
    """From a file, its folder, or a run folder (its newest)."""
    if path.is_dir() and not (path / FILE).is_file():
        newest = newest_figures(path)
        if newest is None:
            raise UserError(f"'{path}' has no figures; make them with `xgram-dist diagnose {path}`")
        path = newest
    path = path / FILE if path.is_dir() else path
    try:
        tree = read_json(path, follow=True)
        TypeAdapter(_File).validate_python(tree)
    except OSError as error:
        raise UserError(f"cannot read '{path}': {error.strerror}; give a file of `xgram-dist diagnose`") from None
    except (BadFileError, ValidationError):
        raise BadFileError(f"'{path}' is not a file of `xgram-dist diagnose`") from None
    return dict(tree)


def newest_figures(run: Path) -> Path | None:
    files = sorted((run / FOLDER).glob(f"*/{FILE}"))
    return files[-1] if files else None


# ---- a summary in lines, for a terminal and for tables of several runs


def format_number(value: float) -> str:
    return f"{value:.3f}"


def format_share(value: float) -> str:
    return f"{100 * value:.2f} %"


@dataclass(frozen=True)
class SummaryLine:
    name: str
    values: list[float | None]
    """One value, or those of the first and the last layer or band."""
    format: Callable[[float], str] = format_number
    reason: str | None = None
    """Why the figure does not apply."""

    def __str__(self) -> str:
        if self.reason is not None:
            return f"not applicable: {self.reason}"
        return " ... ".join("-" if value is None else self.format(value) for value in self.values)


LAYER_LINES = {
    "attention": "cosine of attention outputs with the input, first ... last layer",
    "ffn": "cosine of feed-forward outputs with the input",
    "hidden": "cosine of hidden states with the input",
    "first_state": "cosine of hidden states with the first layer's",
}
UPDATES = "rows with more than {} updates"
ANY_UPDATES = UPDATES.format("N")
"""The one line of a method to which no threshold applies."""
HOTTEST = ("0.001", "0.01", "0.1")


def summary_lines(tree: Tree) -> list[SummaryLine]:
    figures, lines = tree["figures"], []

    def add(key: str, name: str, values: Callable[[Any], list[float | None]], form: Callable[[float], str]) -> None:
        figure = figures.get(key)
        if figure is None:
            lines.append(SummaryLine(name, [None]))
        elif "not_applicable" in figure:
            lines.append(SummaryLine(name, [], form, figure["not_applicable"]))
        else:
            lines.append(SummaryLine(name, values(figure), form))

    add("activation", "activation magnitude, rarest ... most frequent tokens", _first_and_last_band, format_number)
    add("activation", "correlation of magnitude and log frequency", lambda one: [one["correlation"]], format_number)
    for part, name in LAYER_LINES.items():
        add("layers", name, lambda one, part=part: [one[part][0], one[part][-1]], format_number)  # type: ignore[misc]
    add("views", "pairwise cosine of views, retrieved", lambda one: [one["retrieved"]["mean"]], format_number)
    if "retrieved" in figures.get("views", {}) and "extracted" not in figures["views"]:
        name = "pairwise cosine of views, extracted"
        lines.append(SummaryLine(name, [], format_number, "the views have no extractors"))
    else:
        add("views", "pairwise cosine of views, extracted", lambda one: [one["extracted"]["mean"]], format_number)
    for part in HOTTEST:
        name = f"hits of the hottest {100 * float(part):g} % of rows"
        add("row_hits", name, lambda one, part=part: [one["hottest"][part]], format_share)  # type: ignore[misc]
    for n in figures.get("updates", {}).get("more_than", ("N",)):
        add("updates", UPDATES.format(n), lambda one, n=n: [one["more_than"][n]], format_share)  # type: ignore[misc]
    add("movement", "row movement, CV (median of tables)", lambda one: [one["cv"]], format_number)
    add("movement", "row movement, p75 / p25 (median of tables)", lambda one: [one["gap"]], format_number)
    return lines


def _first_and_last_band(activation: dict[str, Any]) -> list[float | None]:
    bands = activation["bands"]
    return [bands[0]["magnitude"], bands[-1]["magnitude"]] if bands else [None]


# ---- pictures in the paper's form, one file a figure


def draw_figures(trees: list[Tree], folder: Path) -> list[Path]:
    """Draw one or several checkpoints; the files that were written. A figure that applies to none has no file."""
    with optional_package("a picture of diagnostics", "plots"):
        import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    files = []
    for name, drawer in DRAWERS.items():
        applicable = [tree for tree in trees if _applies(tree, name)]
        if not applicable:
            continue
        figure, axes = plt.subplots(figsize=(6, 4), dpi=130)
        try:
            drawer(axes, applicable)
            axes.grid(alpha=0.3)
            axes.set_axisbelow(True)
            if axes.get_legend_handles_labels()[1]:
                axes.legend(frameon=False, fontsize=8)
            figure.tight_layout()
            file = folder / f"{name.replace('.', '-')}.png"
            figure.savefig(file)
            files.append(file)
        except OSError as error:
            raise UserError(f"cannot write '{folder}': {error.strerror}; choose another folder with --out") from None
        finally:
            plt.close(figure)
    return files


def _applies(tree: Tree, name: str) -> bool:
    return "not_applicable" not in tree["figures"].get(name.split(".")[0], {"not_applicable": ""})


def _label(tree: Tree) -> str:
    return f"{tree['run']} at step {tree['step']:,}"


def _activation(axes: Any, trees: list[Tree]) -> None:
    for tree in trees:
        bands = tree["figures"]["activation"]["bands"]
        middle = [(band["from"] * band["to"]) ** 0.5 for band in bands]
        axes.plot(middle, [band["magnitude"] for band in bands], marker="o", label=_label(tree))
    axes.set_xscale("log")
    axes.set_xlabel("token frequency (share of the text)")
    axes.set_ylabel("activation magnitude (mean L2 norm)")
    axes.set_title("Activation magnitude against frequency")


def _layers(axes: Any, trees: list[Tree]) -> None:
    styles = {"attention": "-", "ffn": "--", "hidden": ":"}
    for number, tree in enumerate(trees):
        for part, style in styles.items():
            name = part if len(trees) == 1 else f"{tree['run']}: {part}"
            axes.plot(tree["figures"]["layers"][part], f"C{number}{style}", marker="o", ms=4, label=name)
    _by_layer(axes)
    axes.set_ylabel("cosine with the input embedding")
    axes.set_title("Similarity to the input token, by layer and component")


def _by_layer(axes: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("layer")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _first_state(axes: Any, trees: list[Tree]) -> None:
    for tree in trees:
        axes.plot(tree["figures"]["layers"]["first_state"], marker="o", label=_label(tree))
    _by_layer(axes)
    axes.set_ylabel("cosine with the first layer's state")
    axes.set_title("Hidden states and the first layer's")


def _views(axes: Any, trees: list[Tree]) -> None:
    for number, tree in enumerate(trees):
        for stage, style in (("retrieved", "-o"), ("extracted", "--s")):
            sites = tree["figures"]["views"].get(stage, {}).get("sites", {})
            for site in dict.fromkeys(group.rsplit(".", 1)[1] for group in sites):
                points = [(int(g.split(".")[1]), one["mean"]) for g, one in sites.items() if g.endswith(f".{site}")]
                points.sort()
                axes.plot(
                    *zip(*points, strict=True), f"C{number}{style}", ms=4, label=f"{tree['run']}: {site}, {stage}"
                )
    _by_layer(axes)
    axes.set_ylabel("pairwise cosine of views")
    axes.set_title("Similarity of parallel views")


def _row_hits(axes: Any, trees: list[Tree]) -> None:
    for number, tree in enumerate(trees):
        hottest = tree["figures"]["row_hits"]["hottest"]
        width = 0.8 / len(trees)
        at = [group + number * width for group in range(len(hottest))]
        axes.bar(at, [100 * value for value in hottest.values()], width, label=_label(tree))
    axes.set_xticks(range(len(hottest)), [f"{100 * float(part):g} %" for part in hottest])
    axes.set_xlabel("hottest rows")
    axes.set_ylabel("share of hits (%)")
    axes.set_title("Row-hit concentration")


def _updates(axes: Any, trees: list[Tree]) -> None:
    for tree in trees:
        shares = tree["figures"]["updates"]["more_than"]
        axes.plot([int(n) for n in shares], [100 * v for v in shares.values()], marker="o", label=_label(tree))
    axes.set_xscale("log")
    counted = all(tree["figures"]["updates"].get("counted") for tree in trees)
    axes.set_xlabel("updates N" if counted else "updates N (expected)")
    axes.set_ylabel("rows with more than N (%)")
    axes.set_title("Rows with more than N updates")


def _movement(axes: Any, trees: list[Tree]) -> None:
    for number, tree in enumerate(trees):
        tables = tree["figures"]["movement"]["tables"]
        at = [position + 0.8 * number / len(trees) for position in range(len(tables))]
        middle = [one["p50"] for one in tables.values()]
        error_bars = [
            [one["p50"] - one["p25"] for one in tables.values()],
            [one["p75"] - one["p50"] for one in tables.values()],
        ]
        axes.errorbar(
            at, middle, error_bars, fmt=f"C{number}o", capsize=3, ms=4, label=f"{_label(tree)}: p25, median, p75"
        )
        axes.set_xticks(range(len(tables)), list(tables), rotation=90, fontsize=6)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("movement relative to initialisation")
    axes.set_title("Row movement, by table")


DRAWERS = {
    "activation": _activation,
    "layers": _layers,
    "layers.first_state": _first_state,
    "views": _views,
    "row_hits": _row_hits,
    "updates": _updates,
    "movement": _movement,
}
