"""Errors that a user can cause.

A mistake of the user ends as a `UserError`: one sentence that names the key or file, its value and the way out. The
command line prints the sentence without a traceback and exits with code 2. A bug is an `assert`.
"""

from collections.abc import Iterator
from contextlib import contextmanager


class UserError(Exception):
    """One sentence for the user."""

    exit_code = 2
    """A Slurm job that exits with 2 is not requeued, because it would fail the same way."""


GO_BACK = 75
"""Exit code of a run that lost state which its last checkpoint has: it is to be started again, and resumes there. (As
EX_TEMPFAIL of sysexits.h.)"""
MAX_MESSAGE = 370
"""Characters of a message about a file from elsewhere; with the name of the command, a line of less than 400."""


class BadFileError(UserError):
    """A file is not what it should be. Its names and values may be anybody's: the message is one line and bounded."""

    def __init__(self, message: str):
        super().__init__(one_line(message, MAX_MESSAGE))


def one_line(text: str, limit: int) -> str:
    """Text with control characters escaped, cut in the middle to `limit` characters."""
    cut = text if len(text) <= limit else text[: limit * 2 // 3] + " ... " + text[len(text) - limit // 3 :]
    if not cut.isprintable():
        cut = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in cut)
    return cut if len(cut) <= limit else cut[: limit * 2 // 3 - 5] + " ... " + cut[len(cut) - limit // 3 :]


@contextmanager
def optional_package(use: str, extra: str) -> Iterator[None]:
    """Around the import of a package that is installed with an extra alone. `use`: what needs it."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        raise UserError(
            f"{use} needs the package {package}, which is not installed: pip install 'xgram-dist[{extra}]'"
        ) from None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the host or a device had no memory left. By name, because torch may not have been imported."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)  # torch's, of the host


def nearest(name: str, valid: list[str], prefix: str = "") -> str:
    """`; did you mean 'x'?` with the closest valid name (after `prefix`), or else the list of valid names."""
    import difflib

    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    if close:
        return f"; did you mean '{prefix}{close[0]}'?"
    return f"; valid: {', '.join(valid)}" if valid else ""
