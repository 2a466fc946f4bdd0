"""The paper's ablations beside those of a comparison: does the sign of every effect hold?

    xgram-dist compare recipes/ablations/overall/*.yaml --scale recipes/text/scale.yaml --seeds 0,1,2 \
        --baseline overall-full --out runs/ablations-overall
    python tools/paper_ablations.py runs/ablations-*/results.json --json docs/results/ablations.json

An effect is the loss of a variant minus that of the unmodified model, in nats: of the paper the logarithm of the ratio
of its two perplexities, of ours the mean over seeds with its standard error. It counts where it is more than two
standard errors from 0.
"""

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

PAPER = {
    "overall-full": {
        "overall-full": 17.702,
        "overall-no-depth-scaling-and-warmup": 17.703,
        "overall-no-extraction": 18.420,
        "overall-no-gate": 17.920,
        "overall-no-sequence-norm": 18.282,
        "overall-no-view-norm": 17.707,
        "overall-no-lr-scaling": 18.271,
    },
    "hashing-vip-only": {
        "hashing-vip-only": 18.310,
        "hashing-hybrid-1x": 18.419,
        "hashing-no-row-gates": 18.415,
        "hashing-no-copies": 18.337,
        "hashing-hybrid-2x": 17.951,
    },
    "shortconv-kernels-3-5-7-9": {
        "shortconv-kernels-3-5-7-9": 17.924,
        "shortconv-shared-3": 18.031,
        "shortconv-kernels-2-3-4-5": 18.014,
        "shortconv-kernels-2-4-6-8": 17.958,
        "shortconv-kernels-1-3-5-7": 18.054,
        "shortconv-kernels-3-6-9-12": 17.941,
    },
}
"""Perplexities of the paper's three tables, by the unmodified model of each."""
SMALL = 5e-4
"""Nats below which an effect of the paper, which has one seed, is called none."""


def effects(results: dict[str, Any]) -> list[dict[str, Any]]:
    """One entry a variant of a comparison."""
    baseline = results["baseline"]
    paper = PAPER[baseline]
    losses = {
        one["recipe"]: {seed["seed"]: math.log(seed["validation_perplexity"]) for seed in one["seeds"]}
        for one in results["recipes"]
    }
    found = []
    for name, perplexity in paper.items():
        if name == baseline:
            continue
        differences = [losses[name][seed] - losses[baseline][seed] for seed in losses[baseline]]
        mean = statistics.mean(differences)
        error = statistics.stdev(differences) / math.sqrt(len(differences))
        theirs = math.log(perplexity / paper[baseline])
        found.append(
            {
                "variant": name,
                "against": baseline,
                "paper": theirs,
                "measured": mean,
                "standard_error": error,
                "seeds": differences,
                "verdict": verdict(theirs, mean, error),
            }
        )
    return found


def verdict(paper: float, mean: float, error: float) -> str:
    seen = abs(mean) > 2 * error
    if abs(paper) < SMALL:
        return "none in the paper, " + (f"{'worse' if mean > 0 else 'better'} here" if seen else "none here")
    if not seen:
        return "within the error"
    return "holds" if (mean > 0) == (paper > 0) else "opposite"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path, help="results.json of `xgram-dist compare`")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the effects as JSON")
    args = parser.parse_args()
    found = [one for path in args.results for one in effects(json.loads(path.read_text(encoding="utf-8")))]
    print("| variant | against | paper (nats) | measured (nats) | sign |")
    print("|---|---|---:|---:|---|")
    for one in found:
        measured = f"{one['measured']:+.4f} ± {one['standard_error']:.4f}"
        print(f"| {one['variant']} | {one['against']} | {one['paper']:+.4f} | {measured} | {one['verdict']} |")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
