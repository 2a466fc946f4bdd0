"""`--from PATH`: a new run that starts from the checkpoint of another."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xgram_dist.checkpoint.folder import checkpoints_at
from xgram_dist.checkpoint.manifest import Manifest
from xgram_dist.checkpoint.raw import DamagedFileError
from xgram_dist.config import parse_config
from xgram_dist.errors import UserError


@dataclass(frozen=True)
class Source:
    checkpoint: Path
    weights_only: bool
    """Otherwise the whole state: optimizer, step and data position too."""

    @staticmethod
    def find(path: Path, folder: Path, *, weights_only: bool, fresh: bool) -> "Source":
        """The newest complete checkpoint at a path. `folder`: of the new run, which `fresh` clears."""
        if fresh and path.resolve().is_relative_to(folder.resolve()):
            raise UserError(f"--from {path} lies in '{folder}', which --fresh clears; choose another --folder")
        found = checkpoints_at(path)
        complaint: DamagedFileError | None = None
        for checkpoint in reversed(found):
            try:
                Manifest.read(checkpoint)
                return Source(checkpoint, weights_only)
            except DamagedFileError as error:
                complaint = complaint or error
        assert complaint is not None
        raise complaint

    def facts(self, checkpoint: Path, saved: dict[str, Any]) -> dict[str, Any]:
        """For the checkpoints of the new run: where it came from."""
        return {
            "checkpoint": str(checkpoint),
            "name": parse_config(saved["config"]).name,
            "step": saved["step"],
            "weights_only": self.weights_only,
        }
