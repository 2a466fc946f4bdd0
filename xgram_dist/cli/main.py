"""Entry point of `xgram-dist`.

`COMMANDS` lists every command with the module that holds it and its one-line help. The module is imported only when
its command is run, and imports what is heavy (torch, pydantic, streaming) inside `run`, so that `--help` is instant.

To add a command: a line in `COMMANDS` below, and an entry in the `COMMANDS` of its module.

Exit codes: 2 after a `UserError`, which is printed as one sentence on stderr; 1 after any other error, such as a full
disk, want of memory or a bug; 130 after Ctrl-C; 141 when the reader of a pipe closes it.
"""

import argparse
import importlib
import os
import sys
from typing import NamedTuple

from xgram_dist import __version__
from xgram_dist.cli.command import Command, report_error
from xgram_dist.environment import PARENT, whole_number
from xgram_dist.errors import UserError, nearest, one_line


class Entry(NamedTuple):
    module: str
    """Module of `xgram_dist.cli` whose `COMMANDS` holds the command."""
    help: str


COMMANDS = {
    "recipes": Entry("recipes", "list the recipes that come with the package, and copy them"),
    "schema": Entry("recipes", "print the JSON schema of a recipe, for editors"),
    "prepare": Entry("prepare", "tokenize documents into MDS shards, and count the tokens"),
    "data": Entry("data", "show what a data set holds or a batch of a run contains, and verify its hashes"),
    "frequencies": Entry("routing", "write the token counts of a prepared data set as a frequency file"),
    "route": Entry("routing", "build a routing file (token -> table rows) from frequencies, and print its layout"),
    "plan": Entry("plan", "estimate what a recipe costs without building it: parameters, FLOPs, memory, time"),
    "simulate": Entry("simulate", "simulate a training step over all ranks and links, event by event"),
    "doctor": Entry("doctor", "check a new machine or cluster: versions, links, files, parity with the CPU, speed"),
    "train": Entry("train", "train a recipe"),
    "submit": Entry("slurm", "train a recipe, or an array of recipes, as a Slurm job"),
    "status": Entry("slurm", "show the state of a run's Slurm job"),
    "cancel": Entry("slurm", "stop a run's Slurm job, after a checkpoint"),
    "eval": Entry("evaluate", "run benchmarks of lm-evaluation-harness on a checkpoint"),
    "perplexity": Entry(
        "evaluate", "measure a checkpoint's perplexity on prepared data, by source and token frequency"
    ),
    "generate": Entry("inference", "generate text from a checkpoint"),
    "export": Entry("inference", "write a checkpoint as a Hugging Face folder"),
    "inspect": Entry("inspect", "show what a checkpoint contains, and verify its checksums"),
    "checkpoint": Entry("inspect", "pack: copy a checkpoint with all that it needs into a folder of its own"),
    "diagnose": Entry("analysis", "measure what the tables of a checkpoint learned, as in the paper"),
    "compare": Entry("analysis", "train recipes on several seeds, and compare them on one page"),
    "report": Entry("analysis", "summarise one or more runs as a table, a picture and a page"),
    "watch": Entry("analysis", "watch runs on the terminal: loss, throughput, phases, memory, checkpoints, jobs"),
    "completion": Entry("completion", "print the script that completes this command in bash, zsh or fish"),
    "bench": Entry("bench", "run a benchmark: checkpoint, data, engine, exchange, step, tiers and others"),
}


def load_command(name: str) -> Command:
    commands: dict[str, Command] = importlib.import_module(f"xgram_dist.cli.{COMMANDS[name].module}").COMMANDS
    return commands[name]


def build_parser(chosen: str | None) -> argparse.ArgumentParser:
    """The parser of all commands, with the arguments of the `chosen` one."""
    parser = argparse.ArgumentParser(
        prog="xgram-dist",
        description="Train language models whose capacity lives in token-indexed tables.",
        epilog="Each command has --help with examples. First steps: make demo, or without a clone xgram-dist recipes",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"xgram-dist {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, entry in COMMANDS.items():
        if name != chosen:
            subparsers.add_parser(name, help=entry.help)
            continue
        command = load_command(name)
        subparser = subparsers.add_parser(
            name,
            help=entry.help,
            description=entry.help[0].upper() + entry.help[1:] + ".",
            epilog="example:\n" + command.examples.strip("\n"),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    return parser


def main(arguments: list[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    try:
        if PARENT in os.environ:
            from xgram_dist.parallel.launch import end_with_parent

            end_with_parent(whole_number(os.environ, PARENT))
        exit_code = _run(words)
        sys.stdout.flush()  # a full device is an error while it can still be reported
        return exit_code
    except (UserError, KeyboardInterrupt, OSError, MemoryError, RuntimeError, RecursionError) as error:
        return report_error(next((word for word in words if word in COMMANDS), ""), error)


def _run(words: list[str]) -> int:
    chosen = next((word for word in words if not word.startswith("-")), None)
    if chosen is not None and chosen not in COMMANDS:
        name = one_line(chosen, 60)
        print(f"xgram-dist: unknown command '{name}'{nearest(name, list(COMMANDS))}", file=sys.stderr)
        return 2
    parser = build_parser(chosen)
    args, rest = parser.parse_known_args(words)
    # argparse stops collecting KEY=VALUE at the first option; overrides after it count too.
    if rest and hasattr(args, "overrides") and not any(word.startswith("-") for word in rest):
        args.overrides += rest
    elif rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if args.command is None:
        parser.print_help()
        return 2
    args.command_line = list(words)
    return int(args.run(args))


if __name__ == "__main__":
    sys.exit(main())
