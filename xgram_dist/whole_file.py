"""Text files that are there whole or not at all."""

from pathlib import Path

from xgram_dist.errors import UserError


def write_whole(path: Path, text: str) -> None:
    """Written aside and renamed, with the folders it needs."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".{path.name}.part")
        aside.write_text(text, encoding="utf-8")
        aside.rename(path)
    except OSError as error:
        raise UserError(f"cannot write '{path}': {error.strerror}; choose another place") from error
