"""Errors that a user can cause.

Everything a person can get wrong ends here: one sentence that names what was wrong, its value and the way
out. The command line prints that sentence and exits with code 2; no traceback. A bug is an `assert`.
"""


class UserError(Exception):
    """One sentence for the person at the keyboard."""

    exit_code = 2
    """A job that ends with 2 is not started again: it would end so again."""


def nearest(name: str, valid: list[str], prefix: str = "") -> str:
    """`; did you mean 'x'?` for the closest valid name, `prefix` before it, else the valid names themselves."""
    import difflib

    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    if close:
        return f"; did you mean '{prefix}{close[0]}'?"
    return f"; valid: {', '.join(valid)}" if valid else ""
