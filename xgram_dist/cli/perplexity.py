"""`xgram-dist perplexity`."""

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xgram_dist.data.dataset import PreparedData
    from xgram_dist.inference.open import Checkpoint

EXAMPLES = """
  xgram-dist perplexity runs/tiny-xgram data/demo
  xgram-dist perplexity runs/tiny-vanilla data/demo --routing runs/tiny-xgram/routing.npz --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", help="checkpoint folder, or a run folder (its newest)")
    parser.add_argument("data", help="folder of `xgram-dist prepare`, made with the checkpoint's tokenizer")
    parser.add_argument("--split", choices=["train", "validation"], default="validation", help="(default validation)")
    parser.add_argument("--sequences", type=int, default=256, help="at most so many of each source (default 256)")
    parser.add_argument("--batch", type=int, default=8, help="sequences of a forward pass (default 8)")
    parser.add_argument(
        "--routing", metavar="FILE", help="whose VIP tokens and buckets to go by (default: the run's own)"
    )
    parser.add_argument("--dtype", choices=["fp32", "bf16"], help="of the computation (default: the run's)")
    parser.add_argument("--tokenizer", metavar="FILE", help="instead of the one saved with the checkpoint")
    parser.add_argument("--json", action="store_true", help="print as JSON, bucket by bucket")


def run(args: argparse.Namespace) -> int:
    from xgram_dist.errors import UserError

    if args.sequences < 1 or args.batch < 1:
        raise UserError(f"--sequences {args.sequences} and --batch {args.batch} must be at least 1")
    from xgram_dist.data.dataset import PreparedData
    from xgram_dist.eval.perplexity import bands_of, measure
    from xgram_dist.inference.open import Checkpoint
    from xgram_dist.parallel.device import choose_device

    checkpoint = Checkpoint.find(args.checkpoint, args.tokenizer)
    data = PreparedData.open(args.data, args.split)
    theirs = data.manifest.tokenizer_sha256
    if theirs != checkpoint.tokenizer.sha256:
        raise UserError(
            f"'{args.data}' was made with another tokenizer (sha256 {theirs[:12]}) than the checkpoint was trained "
            f"with ({checkpoint.tokenizer.sha256[:12]}); prepare the documents with the checkpoint's"
        )
    routing, of = _routing(args, checkpoint, data)
    bands = None if routing is None else bands_of(routing)
    model = checkpoint.load(choose_device(), args.dtype)
    figures = {"checkpoint": checkpoint.name, "split": args.split, "bands_of": of}
    figures |= measure(model, data, bands, args.sequences, args.batch)
    if args.json:
        import json

        print(json.dumps(figures, indent=2))
        return 0
    _show(figures)
    return 0


def _routing(args: argparse.Namespace, checkpoint: "Checkpoint", data: "PreparedData") -> tuple[Any, str | None]:
    """The given one, the run's own, or one built of the data's token counts with the paper's settings."""
    from pathlib import Path

    import numpy as np

    from xgram_dist.errors import UserError
    from xgram_dist.memory.layout import routing_settings
    from xgram_dist.memory.routing.build import build_routing
    from xgram_dist.memory.routing.frequencies import load_frequencies
    from xgram_dist.memory.routing.routing import Routing

    vocabulary = checkpoint.config.model.vocabulary
    if args.routing is not None:
        found = Routing.load(Path(args.routing))
        if found.vocabulary != vocabulary:
            raise UserError(
                f"--routing '{args.routing}' is for {found.vocabulary:,} tokens, the model has {vocabulary:,}"
            )
        return found, args.routing
    own = checkpoint.routing()
    if own is not None:
        return own, "the run's routing"
    counts = Path(args.data) / "counts.npz"
    if not counts.exists():
        return None, None
    memory = checkpoint.config.memory
    halved = checkpoint.config.model_copy(update={"memory": memory.model_copy(update={"compression": 0.5})})
    try:
        frequencies = np.asarray(load_frequencies(counts, vocabulary=vocabulary))
        return build_routing(frequencies, routing_settings(halved), 1), "the data's token counts"
    except UserError:
        return None, None  # a vocabulary too small for the paper's VIP region: no bands


def _show(figures: dict[str, Any]) -> None:
    from xgram_dist.progress import table

    def cells(one: dict[str, Any]) -> list[str]:
        return [f"{one['tokens']:,}", "-" if one["perplexity"] is None else f"{one['perplexity']:.2f}"]

    rows = [[name, *cells(one)] for name, one in figures["sources"].items()]
    table([figures["checkpoint"], "tokens", "perplexity"], [*rows, ["all", *cells(figures["all"])]])
    if "bands" not in figures:
        print("\nno bands: without a routing, give one with --routing FILE")
        return
    print()
    kinds = [one["kind"] for one in figures["buckets"]]
    rows = []
    for kind, one in figures["bands"].items():
        name = "VIP tokens" if kind == "vip" else f"{kind} buckets ({kinds.count(kind)})"
        rows.append([name, *cells(one["of"]), *cells(one["after"])])
    table([f"bands of {figures['bands_of']}", "tokens", "perplexity of", "tokens", "perplexity after"], rows)
