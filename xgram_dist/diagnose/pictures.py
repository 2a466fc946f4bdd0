"""The figures as pictures, in the paper's form. One file a figure; a figure that does not apply has none."""

from pathlib import Path
from typing import Any

from xgram_dist.errors import UserError

Tree = dict[str, Any]


def draw(trees: list[Tree], folder: Path) -> list[Path]:
    """Of one checkpoint, or of several side by side; the files that were written."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    made = []
    for name, drawer in DRAWERS.items():
        known = [tree for tree in trees if applies(tree, name)]
        if not known:
            continue
        figure, axes = plt.subplots(figsize=(6, 4), dpi=130)
        try:
            drawer(axes, known)
            axes.grid(alpha=0.3)
            axes.set_axisbelow(True)
            if axes.get_legend_handles_labels()[1]:
                axes.legend(frameon=False, fontsize=8)
            figure.tight_layout()
            file = folder / f"{name.replace('.', '-')}.png"
            figure.savefig(file)
            made.append(file)
        except OSError as error:
            raise UserError(f"cannot write '{folder}': {error.strerror}; choose another place with --out") from None
        finally:
            plt.close(figure)
    return made


def applies(tree: Tree, name: str) -> bool:
    return "not_applicable" not in tree["figures"].get(name.split(".")[0], {"not_applicable": ""})


def label(tree: Tree) -> str:
    return f"{tree['run']} at step {tree['step']:,}"


def _activation(axes: Any, trees: list[Tree]) -> None:
    for tree in trees:
        bands = tree["figures"]["activation"]["bands"]
        middle = [(band["from"] * band["to"]) ** 0.5 for band in bands]
        axes.plot(middle, [band["magnitude"] for band in bands], marker="o", label=label(tree))
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
    axes.set_title("What is left of the token: by layer and component")


def _by_layer(axes: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("layer")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _first_state(axes: Any, trees: list[Tree]) -> None:
    for tree in trees:
        axes.plot(tree["figures"]["layers"]["first_state"], marker="o", label=label(tree))
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
        at = [place + number * width for place in range(len(hottest))]
        axes.bar(at, [100 * value for value in hottest.values()], width, label=label(tree))
    axes.set_xticks(range(len(hottest)), [f"{100 * float(part):g} %" for part in hottest])
    axes.set_xlabel("hottest rows")
    axes.set_ylabel("share of hits (%)")
    axes.set_title("Row-hit concentration")


def _updates(axes: Any, trees: list[Tree]) -> None:
    for tree in trees:
        shares = tree["figures"]["updates"]["more_than"]
        axes.plot([int(n) for n in shares], [100 * v for v in shares.values()], marker="o", label=label(tree))
    axes.set_xscale("log")
    axes.set_xlabel("updates N (expected)")
    axes.set_ylabel("rows with more than N (%)")
    axes.set_title("Rows that are trained")


def _movement(axes: Any, trees: list[Tree]) -> None:
    for number, tree in enumerate(trees):
        tables = tree["figures"]["movement"]["tables"]
        at = [place + 0.8 * number / len(trees) for place in range(len(tables))]
        middle = [one["p50"] for one in tables.values()]
        reach = [
            [one["p50"] - one["p25"] for one in tables.values()],
            [one["p75"] - one["p50"] for one in tables.values()],
        ]
        axes.errorbar(at, middle, reach, fmt=f"C{number}o", capsize=3, ms=4, label=f"{label(tree)}: p25, median, p75")
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
