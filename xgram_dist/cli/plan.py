"""`xgram-dist plan`."""

import argparse
import json

EXAMPLES = """
  xgram-dist plan recipes/0.73b/xgram-1x-50.yaml
  xgram-dist plan recipes/0.73b/xgram-1x-50.yaml memory.compression=0.25 --json
"""

MEANINGS = {
    "backbone_parameters": "backbone parameters",
    "table_parameters": "table parameters",
    "gate_parameters": "row gates",
    "extractor_parameters": "convolutions and gains",
    "tables": "tables",
    "rows_per_table": "rows a table",
    "activation_width": "retrieved width a token",
    "backbone_flops_per_token": "backbone FLOPs a token, forward",
    "extra_flops_per_token": "added FLOPs a token, forward",
    "tokens_per_step": "tokens a step",
    "training_tokens": "tokens in all",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help="YAML file")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="change keys of the recipe")
    parser.add_argument("--json", action="store_true", help="print as JSON")


def run(args: argparse.Namespace) -> int:
    from xgram_dist.config import load_config
    from xgram_dist.plan.budget import plan_budget
    from xgram_dist.progress import table

    config = load_config(args.recipe, args.overrides)
    figures = plan_budget(config).as_dict()
    if args.json:
        print(json.dumps({"name": config.name, "method": config.memory.method, **figures}, indent=2))
        return 0
    rows = [[meaning, f"{figures[key]:,}"] for key, meaning in MEANINGS.items()]
    rows.append(["relative FLOPs", f"{figures['relative_flops']:.4f}x"])
    table([config.name, "count"], rows)
    return 0
