"""The cache of torch.compile in the run folder: a start on another node, or after a reboot, compiles nothing again.

    RUN/compile/KEY/      what inductor has compiled

Inductor executes what it finds there, and a run folder may have come from anybody. So KEY is derived from a secret of
this user, in ~/.config/xgram-dist/compile-key: what others put into a folder has another name and is not looked at.
"""

import hashlib
import hmac
import os
import secrets
from pathlib import Path

FOLDER, VARIABLE = "compile", "TORCHINDUCTOR_CACHE_DIR"
SECRET = Path(".config/xgram-dist/compile-key")
SECRET_BYTES = 32


def keep_compiled(run: Path) -> None:
    """From now on in this process. A cache that the user has chosen stays; so does torch's own where there is no home
    folder for the secret."""
    if VARIABLE in os.environ:
        return
    try:
        os.environ[VARIABLE] = str(compile_folder(run, _secret(Path.home() / SECRET)))
    except (OSError, RuntimeError):
        return


def compile_folder(run: Path, secret: bytes) -> Path:
    """The key depends on the path too, so that a copy of a folder is not one's own either."""
    path = run.resolve()
    return path / FOLDER / hmac.new(secret, os.fsencode(path), hashlib.sha256).hexdigest()[:32]


def _secret(path: Path) -> bytes:
    """Created by the first process that needs it; many may at the same time."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        own = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        descriptor = os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(descriptor, secrets.token_bytes(SECRET_BYTES))
            os.link(own, path)  # whole from the moment that it has its name
        except FileExistsError:
            pass
        finally:
            os.close(descriptor)
            own.unlink()
    facts, secret = path.stat(), path.read_bytes()
    if facts.st_uid != os.getuid() or facts.st_mode & 0o077 or len(secret) != SECRET_BYTES:
        raise OSError(f"'{path}' is not a secret of this user")
    return secret
