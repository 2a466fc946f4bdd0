"""Entry point of `xgram-dist`.

A command is a module of this folder with `EXAMPLES` (shown by --help), `add_arguments(parser)` and
`run(args) -> exit code`. Command modules import what is heavy (torch, streaming) inside `run`, so that `--help`
is instant. A `UserError` is one sentence on stderr and exit code 2; Ctrl-C is exit code 130.
"""

import argparse
import importlib
import os
import sys

from xgram_dist import __version__
from xgram_dist.errors import UserError, nearest

COMMANDS = {
    "prepare": "documents -> tokenizer -> MDS shards and token counts",
    "frequencies": "token counts of a prepared data set -> frequency file",
    "route": "frequencies -> routing file (token -> table rows), with its layout and row-hit table",
    "plan": "what a recipe costs, without building it: parameters and FLOPs",
    "train": "train a recipe",
    "submit": "train a recipe, or an array of them, as a Slurm job",
    "status": "what the Slurm job of a run is doing",
    "cancel": "end the Slurm job of a run, with a checkpoint",
    "eval": "benchmarks of lm-evaluation-harness on a checkpoint",
    "perplexity": "perplexity of a checkpoint on prepared data, by source and by token frequency",
    "generate": "text from a checkpoint",
    "export": "a checkpoint as a Hugging Face folder",
    "inspect": "what is in a checkpoint, and whether all of it is as it was written",
    "diagnose": "the measurements of the paper on a checkpoint: figures and pictures",
    "compare": "train recipes on several seeds, and put them side by side in a page",
    "report": "table, picture and page of one or more runs",
    "bench": "benchmarks, side by side in one run: checkpoint, data, engine, exchange, generate, step",
}


def build_parser(command: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="xgram-dist",
        description="Train language models whose capacity lives in token-indexed tables.",
        epilog="Each command has --help with an example.  First steps: make demo",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"xgram-dist {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, summary in COMMANDS.items():
        # Only the chosen command's module is imported; the others show their summary.
        if name != command:
            commands.add_parser(name, help=summary)
            continue
        module = importlib.import_module(f"xgram_dist.cli.{name}")
        sub = commands.add_parser(
            name,
            help=summary,
            description=summary[0].upper() + summary[1:] + ".",
            epilog="example:\n" + module.EXAMPLES.strip("\n"),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(sub)
        sub.set_defaults(execute=module.run)
    return parser


def main(arguments: list[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    command = next((word for word in words if not word.startswith("-")), None)
    if command is not None and command not in COMMANDS:
        print(f"xgram-dist: unknown command '{command}'{nearest(command, list(COMMANDS))}", file=sys.stderr)
        return 2
    parser = build_parser(command)
    args, rest = parser.parse_known_args(words)
    # argparse takes KEY=VALUE only up to the next option; what follows it is meant no less.
    if rest and hasattr(args, "overrides") and not any(word.startswith("-") for word in rest):
        args.overrides += rest
    elif rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if args.command is None:
        parser.print_help()
        return 2
    try:
        return int(args.execute(args))
    except UserError as error:
        print(f"xgram-dist {args.command}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"xgram-dist {args.command}: stopped by Ctrl-C", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `xgram-dist plan ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


if __name__ == "__main__":
    sys.exit(main())
