"""`xgram-dist generate`."""

import argparse

EXAMPLES = """
  xgram-dist generate runs/tiny-xgram --prompt "The with statement"
  xgram-dist generate runs/tiny-xgram/checkpoints/step-00000180 --prompt "import" --temperature 0.8 --top-p 0.9 --seed 1
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", help="checkpoint folder, or a run folder (its newest)")
    parser.add_argument("--prompt", required=True, action="append", help="text to go on from; several: as one batch")
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N", help="tokens to add (default 128)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token (default 0)")
    parser.add_argument("--top-p", type=float, default=1.0, help="sample among the likeliest (default 1: among all)")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling (default 0)")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], help="of the computation (default: the run's)")
    parser.add_argument("--tokenizer", metavar="FILE", help="instead of the one saved with the checkpoint")


def run(args: argparse.Namespace) -> int:
    from xgram_dist.errors import UserError

    if args.max_tokens < 1 or args.temperature < 0 or not 0 < args.top_p <= 1:
        raise UserError(
            f"--max-tokens {args.max_tokens} must be at least 1, --temperature {args.temperature} at least 0 and "
            f"--top-p {args.top_p} above 0 and at most 1"
        )
    import sys
    import time

    import torch

    from xgram_dist.inference.generate import Sampling, TextStream, check_prompt, generate
    from xgram_dist.inference.open import Checkpoint
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
    open_rows = set(range(len(prompts)))
    start, steps = time.monotonic(), 0
    for tokens in generate(model, prompts, args.max_tokens, Sampling(args.temperature, args.top_p), generator):
        steps += 1
        open_rows -= {row for row in open_rows if tokens[row] == tokenizer.end_of_text}
        for row in open_rows:
            piece = streams[row].add(tokens[row])
            texts[row] += piece
            if len(prompts) == 1:
                print(piece, end="", flush=True)
        if not open_rows:
            break
    for prompt, text in zip(args.prompt, texts, strict=True) if len(prompts) > 1 else ():
        print(f"{prompt}{text}\n")
    seconds = time.monotonic() - start
    print()
    print(f"{checkpoint.name}: {steps} tokens, {1000 * seconds / max(1, steps):.1f} ms a token", file=sys.stderr)
    return 0
