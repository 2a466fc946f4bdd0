"""Where figures are kept: RUN/diagnose/STEP/figures.json, beside their pictures."""

import json
from pathlib import Path
from typing import Any

from xgram_dist.checkpoint.folder import FOLDER as CHECKPOINTS
from xgram_dist.errors import UserError

FOLDER, FILE = "diagnose", "figures.json"


def default_folder(checkpoint: Path) -> Path:
    """Beside the checkpoints of its run; for a checkpoint elsewhere, the working folder's."""
    above = checkpoint.parent if checkpoint.parent.name == CHECKPOINTS else checkpoint.resolve().parent
    return (above.parent if above.name == CHECKPOINTS else Path()) / FOLDER / checkpoint.name


def write_figures(tree: dict[str, Any], folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        aside = folder / f".{FILE}.part"
        aside.write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")
        return aside.rename(folder / FILE)
    except OSError as error:
        raise UserError(f"cannot write '{folder}': {error.strerror}; choose another place with --out") from None


def read_figures(path: Path) -> dict[str, Any]:
    """A file, its folder, or a run folder: its newest."""
    if path.is_dir() and not (path / FILE).is_file():
        found = newest_figures(path)
        if found is None:
            raise UserError(f"'{path}' has no figures; make them with `xgram-dist diagnose {path}`")
        path = found
    path = path / FILE if path.is_dir() else path
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        complete = {"run", "method", "step", "positions"} <= tree.keys() and isinstance(tree["figures"]["layers"], dict)
    except OSError as error:
        raise UserError(f"cannot read '{path}': {error.strerror}; give a file of `xgram-dist diagnose`") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        complete = False
    if not complete:
        raise UserError(f"'{path}' is not a file of `xgram-dist diagnose`")
    return dict(tree)


def newest_figures(run: Path) -> Path | None:
    files = sorted((run / FOLDER).glob(f"*/{FILE}"))
    return files[-1] if files else None
