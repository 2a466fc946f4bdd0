"""`xgram-dist generate`, `export`: a checkpoint in use."""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from xgram_dist.cli.command import Command, require_text
from xgram_dist.errors import UserError, one_line

if TYPE_CHECKING:
    from xgram_dist.inference.model import Checkpoint

MAX_TEMPERATURE = 1000.0

GENERATE_EXAMPLES = """
  xgram-dist generate runs/tiny-xgram --prompt "The with statement"
  xgram-dist generate runs/tiny-xgram/checkpoints/step-00000180 --prompt "import" --temperature 0.8 --top-p 0.9 --seed 1
"""
EXPORT_EXAMPLES = """
  xgram-dist export runs/tiny-xgram --to hf exported
  xgram-dist export runs/tiny-xgram/checkpoints/step-00000180 --to hf exported --dtype bf16
  xgram-dist export runs/tiny-xgram --to hf exported --tables int8
  xgram-dist export runs/ple --to gemma3n per-layer-embeddings
"""


def add_generate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", help="checkpoint folder, or a run folder (its newest checkpoint)")
    parser.add_argument("--prompt", required=True, action="append", help="text to continue; several form one batch")
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N", help="most new tokens (default 128)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token (default 0)")
    parser.add_argument("--top-p", type=float, default=1.0, help="nucleus sampling (default 1: all tokens)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling (default 0)")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], help="dtype of the computation (default: the run's)")
    parser.add_argument("--tokenizer", metavar="FILE", help="instead of the one saved with the checkpoint")


def run_generate(args: argparse.Namespace) -> int:
    if args.max_tokens < 1 or not 0 <= args.temperature <= MAX_TEMPERATURE or not 0 < args.top_p <= 1:
        raise UserError(
            f"--max-tokens {args.max_tokens} must be at least 1, --temperature {args.temperature} from 0 to "
            f"{MAX_TEMPERATURE:g} and --top-p {args.top_p} above 0 and at most 1"
        )
    if not 0 <= args.seed < 1 << 63:
        raise UserError(f"--seed {one_line(str(args.seed), 40)} is not from 0 to 2^63 - 1")
    for prompt in args.prompt:
        require_text("--prompt", prompt)
    import torch

    from xgram_dist.inference.generate import Sampling, TextStream, check_prompt, generate
    from xgram_dist.inference.model import Checkpoint
    from xgram_dist.parallel.device import choose_device

    checkpoint = Checkpoint.find(args.checkpoint, args.tokenizer)
    tokenizer = checkpoint.tokenizer
    # An empty prompt stands for the start of a document.
    prompts = [ids.tolist() or [tokenizer.end_of_text] for ids in tokenizer.encode_batch(args.prompt)]
    for prompt in prompts:
        check_prompt(len(prompt), checkpoint.config.model.sequence_length)
    device = choose_device()
    model = checkpoint.load(device, args.dtype)
    generator = torch.Generator(device).manual_seed(args.seed)
    streams = [TextStream(tokenizer) for _ in prompts]
    texts = [""] * len(prompts)
    unfinished = set(range(len(prompts)))
    start, steps = time.monotonic(), 0
    for tokens in generate(model, prompts, args.max_tokens, Sampling(args.temperature, args.top_p), generator):
        steps += 1
        unfinished -= {index for index in unfinished if tokens[index] == tokenizer.end_of_text}
        for index in unfinished:
            text = streams[index].add(tokens[index])
            texts[index] += text
            if len(prompts) == 1:
                print(text, end="", flush=True)
        if not unfinished:
            break
    for given, text in zip(args.prompt, texts, strict=True) if len(prompts) > 1 else ():
        print(f"{given}{text}\n")
    seconds = time.monotonic() - start
    print()
    print(f"{checkpoint.name}: {steps} tokens, {1000 * seconds / max(1, steps):.1f} ms a token", file=sys.stderr)
    return 0


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", help="checkpoint folder, or a run folder (its newest checkpoint)")
    parser.add_argument(
        "--to",
        choices=["hf", "gemma3n"],
        required=True,
        help="hf: a folder that transformers loads; gemma3n: the tables of PLE as Gemma's per-layer embeddings",
    )
    parser.add_argument("folder", help="where it is written; must be empty or missing")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="dtype of the weights (default fp32)")
    parser.add_argument(
        "--tables",
        choices=["fp32", "bf16", "fp8", "int8", "int4"],
        help="dtype of table rows; fp8 and int8 with a scale a row, int4 with one for 32 values (default: --dtype)",
    )
    parser.add_argument("--tokenizer", metavar="FILE", help="instead of the one saved with the checkpoint")
    parser.add_argument("--json", action="store_true", help="print as JSON")


def run_export(args: argparse.Namespace) -> int:
    from xgram_dist.inference.export import export_hf
    from xgram_dist.inference.model import Checkpoint

    checkpoint = Checkpoint.find(args.checkpoint, args.tokenizer)
    if args.to == "gemma3n":
        return _export_gemma3n(checkpoint, args)
    figures = export_hf(checkpoint, Path(args.folder), args.dtype, args.tables)
    if args.json:
        print(json.dumps(figures, indent=2))
        return 0
    reason = figures["remote_code"]
    code = "no remote code" if reason is None else f"with remote code, since {reason}"
    print(f"{figures['folder']}: {figures['architecture']}, {figures['bytes'] / 1e6:,.1f} MB, {args.dtype}, {code}")
    if not figures["tokenizer"]:
        print("the sentencepiece tokenizer is copied as tokenizer.model, which AutoTokenizer does not read")
    return 0


def _export_gemma3n(checkpoint: "Checkpoint", args: argparse.Namespace) -> int:
    from xgram_dist.inference.interchange import write_gemma3n

    if args.tables is not None:
        raise UserError(f"--tables {args.tables} is for --to hf; rows of Gemma's layout have the --dtype")
    figures = write_gemma3n(checkpoint, Path(args.folder), args.dtype)
    if args.json:
        print(json.dumps(figures, indent=2))
    else:
        megabytes = figures["bytes"] / 1e6
        print(f"{figures['folder']}: {figures['layers']} vectors of {figures['width']} a token, {megabytes:,.1f} MB")
    return 0


COMMANDS = {
    "generate": Command(GENERATE_EXAMPLES, add_generate_arguments, run_generate),
    "export": Command(EXPORT_EXAMPLES, add_export_arguments, run_export),
}
