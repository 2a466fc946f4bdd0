"""A command as its module describes it, and what several commands share."""

import argparse
import errno
import os
import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from xgram_dist.errors import UserError, is_out_of_memory, one_line

if TYPE_CHECKING:
    from xgram_dist.parallel.process_group import ProcessGroup

MACHINE_FAULTS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ENOMEM}
    | {errno.EMFILE, errno.ENFILE, errno.ENAMETOOLONG, errno.ELOOP, errno.ESTALE}
)
"""Errors of the system that no code of ours causes: one sentence, without a traceback."""
MAX_SENTENCE, MAX_NAME = 1000, 300
"""Characters of a `UserError` and of a file's name as they are printed; names may have come from anywhere."""
MOST_RANKS_HERE = 1024
GRACE_SECONDS = 1.0
"""Between a `UserError` and the exit of a rank. Others may still be in the collective after which all raise it."""


@dataclass(frozen=True)
class Command:
    examples: str
    """Command lines, one a line, shown by --help."""
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    """Arguments in, exit code out."""


def starts_ranks(args: argparse.Namespace) -> bool:
    """Whether this process is to start `--ranks` ranks; a rank itself, or a single process, is not."""
    from xgram_dist.cluster.slurm.commands import set_rank_environment
    from xgram_dist.environment import read_place

    set_rank_environment()
    size = read_place().size
    if size > 1 and args.ranks not in (1, size):
        raise UserError(f"--ranks {args.ranks} is not WORLD_SIZE = {size} of the environment; leave out one of the two")
    return size == 1 and args.ranks > 1


def launch_ranks(args: argparse.Namespace) -> int:
    """Run this same command line on `--ranks` ranks of this machine; their exit code."""
    from xgram_dist.parallel.launch import launch

    return launch(args.command_line, args.ranks)


@contextmanager
def close_ranks(command: str, ranks: "ProcessGroup") -> Iterator[ExitStack]:
    """Close the process groups at a clean end. An error on one of several ranks is printed, and the process exits.

    The other ranks wait in a collective then, and destroying an NCCL group would wait for them. What was entered into
    the stack, such as the lease of a run folder, is released before the process exits.
    """
    with ExitStack() as held:
        try:
            yield held
        except BaseException as error:
            if ranks.size == 1:
                raise
            exit_code = 1
            try:
                exit_code = report_error(command, error, rank=ranks.rank)
                held.close()
                if isinstance(error, UserError):
                    time.sleep(GRACE_SECONDS)
            finally:
                os._exit(exit_code)
    ranks.close()


def report_error(command: str, error: BaseException, rank: int | None = None) -> int:
    """Print the error that ended a command, as one sentence or with its traceback; its exit code.

    Several ranks write to one log. `rank` stands before each line of a traceback, in the form torchrun's users know, so
    that the error that came first is told from those that follow from it.
    """
    with suppress(OSError):
        sys.stdout.flush()
    exit_code = 1
    name = f"xgram-dist {command}".strip()
    if isinstance(error, UserError):
        print(f"{name}: {one_line(str(error), MAX_SENTENCE)}", file=sys.stderr)
        exit_code = error.exit_code
    elif isinstance(error, KeyboardInterrupt):
        print(f"{name}: stopped by Ctrl-C", file=sys.stderr)
        exit_code = 130
    elif isinstance(error, BrokenPipeError):  # `xgram-dist plan ... | head`
        exit_code = 141
    elif isinstance(error, OSError) and error.errno in MACHINE_FAULTS:
        where = f"'{one_line(str(error.filename), MAX_NAME)}': " if error.filename else ""
        print(f"{name}: {where}{error.strerror}", file=sys.stderr)
    elif is_out_of_memory(error):
        print(f"{name}: out of memory ({one_line(_first_line(error), 200)})", file=sys.stderr)
    else:
        label = "" if rank is None else f"[rank{rank}]: "
        sys.stderr.write(textwrap.indent("".join(traceback.format_exception(error)), label, lambda line: True))
    sys.stderr.flush()
    if isinstance(error, OSError):  # what stdout still holds would fail again when the interpreter ends
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return exit_code


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or ["no more to be had"])[0]


def require_text(option: str, value: str) -> None:
    """Refuse bytes that are not UTF-8, which Python passes on as halves of surrogate pairs."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"{option}: character {error.start + 1} is not UTF-8; give it as UTF-8 text") from None


def require_at_least(args: argparse.Namespace, least: int, *options: str) -> None:
    """Refuse a number below `least`; an option that was not given (None) passes."""
    for option in options:
        value, name = getattr(args, option), f"--{option.replace('_', '-')}"
        if value is not None and value < least:
            raise UserError(f"{name} {value} is not at least {least}")
        if option == "ranks" and value is not None and value > MOST_RANKS_HERE:
            raise UserError(f"{name} {one_line(str(value), 40)}: at most {MOST_RANKS_HERE} ranks start on one machine")
