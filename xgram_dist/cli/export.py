"""`xgram-dist export`."""

import argparse

EXAMPLES = """
  xgram-dist export runs/tiny-xgram --to hf exported
  xgram-dist export runs/tiny-xgram/checkpoints/step-00000180 --to hf exported --dtype bf16
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", help="checkpoint folder, or a run folder (its newest)")
    parser.add_argument("--to", choices=["hf"], required=True, help="hf: a folder that transformers loads")
    parser.add_argument("folder", help="where it is written; empty or not there")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="of matrices and rows (default fp32)")
    parser.add_argument("--tokenizer", metavar="FILE", help="instead of the one saved with the checkpoint")
    parser.add_argument("--json", action="store_true", help="print as JSON")


def run(args: argparse.Namespace) -> int:
    import json
    from pathlib import Path

    from xgram_dist.export.hf import export_hf
    from xgram_dist.inference.open import Checkpoint

    figures = export_hf(Checkpoint.find(args.checkpoint, args.tokenizer), Path(args.folder), args.dtype)
    if args.json:
        print(json.dumps(figures, indent=2))
        return 0
    code = "no code of its own" if figures["remote_code"] is None else f"with its code, since {figures['remote_code']}"
    print(f"{figures['folder']}: {figures['architecture']}, {figures['bytes'] / 1e6:,.1f} MB, {args.dtype}, {code}")
    if not figures["tokenizer"]:
        print("the tokenizer is a sentencepiece model, handed on as tokenizer.model: AutoTokenizer does not read it")
    return 0
