"""What a rank says of itself at the roll call: where it is, and what it would train."""

import hashlib
import socket
from pathlib import Path

import xgram_dist
from xgram_dist.config import Config, dump_config
from xgram_dist.data.manifest import MANIFEST

COMPARED = ("code", "config", "data", "routing")


def rank_facts(config: Config) -> dict[str, str]:
    """Hashes of the package's source, the config, and the files that say what data and routing are."""
    routing = config.memory.routing
    return {
        "node": socket.gethostname(),
        "code": code_hash(Path(xgram_dist.__file__).parent),
        "config": _hash(dump_config(config).encode()),
        "data": _file_hash(None if config.data.path is None else Path(config.data.path) / MANIFEST),
        "routing": _file_hash(Path(routing.file) if routing.file is not None else None),
    }


def code_hash(package: Path) -> str:
    """Of every Python file, by its place in the package."""
    whole = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        content = path.read_bytes()
        whole.update(f"{path.relative_to(package)} {len(content)}\n".encode() + content)
    return whole.hexdigest()[:16]


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _file_hash(path: Path | None) -> str:
    if path is None:
        return "none"
    try:
        return _hash(path.read_bytes())
    except OSError as error:
        return f"cannot be read: {error.strerror}"
