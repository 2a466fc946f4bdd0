"""A command as its module describes it, and what several commands share."""

import argparse
import os
import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from xgram_dist.errors import UserError

if TYPE_CHECKING:
    from xgram_dist.parallel.process_group import ProcessGroup

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
    return args.ranks > 1 and "RANK" not in os.environ


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
    if isinstance(error, UserError):
        print(f"xgram-dist {command}: {error}", file=sys.stderr)
        exit_code = error.exit_code
    elif isinstance(error, KeyboardInterrupt):
        print(f"xgram-dist {command}: stopped by Ctrl-C", file=sys.stderr)
        exit_code = 130
    elif isinstance(error, BrokenPipeError):  # `xgram-dist plan ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        exit_code = 141
    else:
        label = "" if rank is None else f"[rank{rank}]: "
        sys.stderr.write(textwrap.indent("".join(traceback.format_exception(error)), label, lambda line: True))
    sys.stderr.flush()
    return exit_code


def require_at_least(args: argparse.Namespace, least: int, *options: str) -> None:
    """Refuse a number below `least`; an option that was not given (None) passes."""
    for option in options:
        value = getattr(args, option)
        if value is not None and value < least:
            raise UserError(f"--{option.replace('_', '-')} {value} is not at least {least}")
