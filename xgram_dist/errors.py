"""Errors that a user can cause.

A mistake of the user ends as a `UserError`: one sentence that names the key or file, its value and the way out. The
command line prints the sentence without a traceback and exits with code 2. A bug is an `assert`.
"""


class UserError(Exception):
    """One sentence for the user."""

    exit_code = 2
    """A Slurm job that exits with 2 is not requeued, because it would fail the same way."""


def nearest(name: str, valid: list[str], prefix: str = "") -> str:
    """`; did you mean 'x'?` with the closest valid name (after `prefix`), or else the list of valid names."""
    import difflib

    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    if close:
        return f"; did you mean '{prefix}{close[0]}'?"
    return f"; valid: {', '.join(valid)}" if valid else ""
