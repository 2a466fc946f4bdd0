"""`xgram-dist eval`, `perplexity`: how good a checkpoint is."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xgram_dist.cli.command import Command, close_ranks, launch_ranks, require_at_least, starts_ranks
from xgram_dist.errors import UserError, optional_package

ROW_FORMATS = ["fp32", "bf16", "fp8", "int8", "int4"]

if TYPE_CHECKING:
    from xgram_dist.data.dataset import PreparedData
    from xgram_dist.eval.results import EvaluationResult
    from xgram_dist.inference.model import Checkpoint
    from xgram_dist.parallel.process_group import ProcessGroup
    from xgram_dist.tables.routing import Routing

EVAL_EXAMPLES = """
  xgram-dist eval runs/tiny-xgram --tasks paper --data benchmarks --limit 100
  xgram-dist eval runs/tiny-xgram/checkpoints/step-00000180 --tasks sciq,piqa --ranks 2 --json
  xgram-dist eval runs/tiny-xgram --tasks sciq,piqa --data benchmarks --tables int8
  xgram-dist eval --compare runs/tiny-vanilla runs/tiny-xgram
"""
PERPLEXITY_EXAMPLES = """
  xgram-dist perplexity runs/tiny-xgram data/demo
  xgram-dist perplexity runs/tiny-vanilla data/demo --routing runs/tiny-xgram/routing.npz --json
  xgram-dist perplexity runs/tiny-xgram data/demo --tables fp32 bf16 fp8 int8 int4
"""


def add_eval_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", nargs="?", help="checkpoint folder, or a run folder (its newest checkpoint)")
    parser.add_argument(
        "--tasks",
        default="paper",
        help="comma-separated lm-eval tasks; paper: the paper's suite as its authors score it (the default); "
        "paper-lm-eval: the same benchmarks with lm-eval's splits and metrics",
    )
    parser.add_argument("--data", metavar="DIR", help="read <task>/<split>.parquet from DIR instead of the network")
    parser.add_argument("--limit", type=int, metavar="N", help="documents of each task (default: all)")
    parser.add_argument("--shots", type=int, metavar="N", help="examples in the prompt, for tasks that are named")
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="start N ranks on this machine (default 1)")
    parser.add_argument("--batch-tokens", type=int, default=8192, help="tokens in a forward pass (default 8192)")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], help="dtype of the computation (default: the run's)")
    parser.add_argument(
        "--tables",
        choices=ROW_FORMATS,
        default="fp32",
        help="table rows as `export --tables` stores them (default fp32)",
    )
    parser.add_argument("--tokenizer", metavar="FILE", help="instead of the one saved with the checkpoint")
    parser.add_argument(
        "--compare", nargs="+", metavar="RUN", help="show other runs (their last evaluation) and the paper's figures"
    )
    parser.add_argument(
        "--out", metavar="FILE", help="write the results as JSON (default: RUN/eval/STEP.json, STEP-int8.json)"
    )
    parser.add_argument("--json", action="store_true", help="print lm-eval's results as JSON")


def run_eval(args: argparse.Namespace) -> int:
    if args.checkpoint is None and not args.compare:
        raise UserError("give a checkpoint to evaluate, or finished runs with --compare RUN...")
    require_at_least(args, 1, "limit", "ranks", "batch_tokens")
    require_at_least(args, 0, "shots")
    names = [name.strip() for name in args.tasks.split(",")]
    if args.checkpoint is not None and not all(names):
        raise UserError(f"--tasks '{args.tasks}' names no task; give tasks of lm-eval with a comma between, or paper")
    from xgram_dist.eval.results import EvaluationResult

    others = [EvaluationResult.read(Path(path)) for path in args.compare or ()]
    if args.checkpoint is None:
        return _show_scores(others, args)
    from xgram_dist.inference.model import Checkpoint

    checkpoint = Checkpoint.find(args.checkpoint, args.tokenizer)
    if starts_ranks(args):
        return launch_ranks(args)
    from xgram_dist.parallel.device import choose_device
    from xgram_dist.parallel.mesh import init_world

    ranks = init_world(choose_device())
    with close_ranks(args.command, ranks):
        evaluated = _evaluate(args, checkpoint, ranks)
    return 0 if evaluated is None else _show_scores([evaluated, *others], args)


def _evaluate(args: argparse.Namespace, checkpoint: "Checkpoint", ranks: "ProcessGroup") -> "EvaluationResult | None":
    """The results on rank 0, which drives the harness; None on the other ranks, which score what it sends."""
    import tempfile

    from xgram_dist.checkpoint.folder import FOLDER as CHECKPOINTS
    from xgram_dist.estimate.flops import plan_budget

    with optional_package("`xgram-dist eval`", "eval"):
        from xgram_dist.eval.lm_eval_adapter import HarnessModel, run_harness
    from xgram_dist.eval.results import FOLDER, EvaluationResult
    from xgram_dist.eval.scoring import CheckpointScorer
    from xgram_dist.eval.tasks import load_tasks
    from xgram_dist.parallel.device import choose_device
    from xgram_dist.parallel.mesh import single_mesh

    with tempfile.TemporaryDirectory(prefix="xgram-dist-eval-") as scratch:
        tasks = None
        if ranks.first:
            names = [name.strip() for name in args.tasks.split(",")]
            data = None if args.data is None else Path(args.data)
            tasks = load_tasks(names, data, Path(scratch), args.shots)
        model = checkpoint.load(choose_device(), args.dtype, args.tables)
        scorer = CheckpointScorer(model)
        harness = HarnessModel(
            scorer, checkpoint.tokenizer, model.context, args.batch_tokens, single_mesh(ranks), model
        )
        if tasks is None:
            harness.pool.serve()
            return None
        results = run_harness(harness, tasks, args.limit)
    budget = plan_budget(checkpoint.config)
    stored = "" if args.tables == "fp32" else f"-{args.tables}"
    name = checkpoint.name + (f", {args.tables} tables" if stored else "")
    evaluated = EvaluationResult(name, budget.backbone_parameters, budget.table_parameters, results)
    parent = checkpoint.folder.resolve().parent
    if args.out is not None:
        evaluated.write(Path(args.out))
    elif parent.name == CHECKPOINTS:
        evaluated.write(parent.parent / FOLDER / f"{checkpoint.folder.name}{stored}.json")
    return evaluated


def _show_scores(runs: "list[EvaluationResult]", args: argparse.Namespace) -> int:
    from xgram_dist.console import print_table
    from xgram_dist.eval.results import comparison_table, scoring_table

    if args.json:
        from xgram_dist.eval.lm_eval_adapter import results_json

        tree = [{"name": run.name, "scores": run.scores, **run.results} for run in runs]
        print(results_json(tree if len(tree) > 1 else tree[0]))
        return 0
    print_table(*comparison_table(runs, paper=bool(args.compare)))
    header, rows = scoring_table(runs[0])
    if rows:
        print()
        print_table(header, rows, left=(0, 4))
    return 0


def add_perplexity_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", help="checkpoint folder, or a run folder (its newest checkpoint)")
    parser.add_argument("data", help="folder of `xgram-dist prepare`, made with the checkpoint's tokenizer")
    parser.add_argument("--split", choices=["train", "validation"], default="validation", help="(default validation)")
    parser.add_argument("--sequences", type=int, default=256, help="most sequences of each source (default 256)")
    parser.add_argument("--batch", type=int, default=8, help="sequences in a forward pass (default 8)")
    parser.add_argument(
        "--routing", metavar="FILE", help="routing file that defines the frequency bands (default: the run's own)"
    )
    parser.add_argument("--dtype", choices=["fp32", "bf16"], help="dtype of the computation (default: the run's)")
    parser.add_argument(
        "--tables",
        choices=ROW_FORMATS,
        nargs="+",
        default=["fp32"],
        help="table rows as `export --tables` stores them (default fp32); several are compared with the first",
    )
    parser.add_argument("--tokenizer", metavar="FILE", help="instead of the one saved with the checkpoint")
    parser.add_argument("--json", action="store_true", help="print as JSON, bucket by bucket")


def run_perplexity(args: argparse.Namespace) -> int:
    if args.sequences < 1 or args.batch < 1:
        raise UserError(f"--sequences {args.sequences} and --batch {args.batch} must be at least 1")
    from xgram_dist.data.dataset import PreparedData
    from xgram_dist.eval.perplexity import bands_of, measure
    from xgram_dist.inference.model import Checkpoint
    from xgram_dist.parallel.device import choose_device

    checkpoint = Checkpoint.find(args.checkpoint, args.tokenizer)
    data = PreparedData.open(args.data, args.split)
    sha256 = data.manifest.tokenizer_sha256
    if sha256 != checkpoint.tokenizer.sha256:
        raise UserError(
            f"'{args.data}' was made with another tokenizer (sha256 {sha256[:12]}) than the checkpoint was trained "
            f"with ({checkpoint.tokenizer.sha256[:12]}); prepare the documents with the checkpoint's"
        )
    routing, origin = _band_routing(args, checkpoint, data)
    bands = None if routing is None else bands_of(routing)
    found = {}
    for row_format in dict.fromkeys(args.tables):
        model = checkpoint.load(choose_device(), args.dtype, row_format)
        found[row_format] = measure(model, data, bands, args.sequences, args.batch)
    figures: dict[str, Any] = {"checkpoint": checkpoint.name, "split": args.split, "bands_of": origin}
    if len(found) == 1:
        (row_format,) = found
        figures |= {"tables": row_format, **found[row_format]}
        show = _show_perplexity
    else:
        figures["tables"] = {
            row_format: {"table_bytes": checkpoint.table_bytes(row_format), **of_format}
            for row_format, of_format in found.items()
        }
        show = _show_formats
    if args.json:
        print(json.dumps(figures, indent=2))
    else:
        show(figures)
    return 0


def _band_routing(
    args: argparse.Namespace, checkpoint: "Checkpoint", data: "PreparedData"
) -> "tuple[Routing | None, str | None]":
    """The routing that defines the frequency bands, and where it is from.

    In this order: --routing, the run's own, one built from the data's token counts with the paper's settings.
    """
    import numpy as np

    from xgram_dist.tables.frequencies import load_frequencies
    from xgram_dist.tables.layout import routing_settings
    from xgram_dist.tables.routing_build import build_routing
    from xgram_dist.tables.routing_io import load_routing

    vocabulary = checkpoint.config.model.vocabulary
    if args.routing is not None:
        given = load_routing(Path(args.routing))
        if given.vocabulary != vocabulary:
            raise UserError(
                f"--routing '{args.routing}' is for {given.vocabulary:,} tokens, the model has {vocabulary:,}"
            )
        return given, args.routing
    own = checkpoint.reader.routing
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
        return None, None  # the vocabulary is too small for the paper's VIP region: no bands


def _show_perplexity(figures: dict[str, Any]) -> None:
    from xgram_dist.console import print_table

    def cells(entry: dict[str, Any]) -> list[str]:
        return [f"{entry['tokens']:,}", "-" if entry["perplexity"] is None else f"{entry['perplexity']:.2f}"]

    rows = [[name, *cells(entry)] for name, entry in figures["sources"].items()]
    print_table([figures["checkpoint"], "tokens", "perplexity"], [*rows, ["all", *cells(figures["all"])]])
    if "bands" not in figures:
        print("\nno frequency bands without a routing; give one with --routing FILE")
        return
    print()
    kinds = [bucket["kind"] for bucket in figures["buckets"]]
    rows = []
    for kind, band in figures["bands"].items():
        name = "VIP tokens" if kind == "vip" else f"{kind} buckets ({kinds.count(kind)})"
        rows.append([name, *cells(band["of"]), *cells(band["after"])])
    print_table([f"bands of {figures['bands_of']}", "tokens", "perplexity of", "tokens", "perplexity after"], rows)


def _show_formats(figures: dict[str, Any]) -> None:
    """Perplexity with the first row format, and the change with each other one."""
    from xgram_dist.console import print_table

    formats = figures["tables"]
    base = next(iter(formats))

    def groups(of_format: dict[str, Any]) -> dict[str, float | None]:
        bands = {
            "VIP tokens" if kind == "vip" else f"{kind} buckets": band["of"]["perplexity"]
            for kind, band in of_format.get("bands", {}).items()
        }
        return {"all": of_format["all"]["perplexity"], **bands}

    first = groups(formats[base])
    rows = []
    for name, of_format in formats.items():
        row = [name, f"{of_format['table_bytes'] / 1e6:,.1f}"]
        for group, value in groups(of_format).items():
            before = first[group]
            if value is None or before is None:
                row.append("-")
            else:
                row.append(f"{before:.2f}" if name == base else f"{100 * (value / before - 1):+.3f} %")
        rows.append(row)
    print_table([figures["checkpoint"], "MB", *first], rows)
    print(f"\nPerplexity with {base} rows, and its change with others; bands group the predicted tokens.")


COMMANDS = {
    "eval": Command(EVAL_EXAMPLES, add_eval_arguments, run_eval),
    "perplexity": Command(PERPLEXITY_EXAMPLES, add_perplexity_arguments, run_perplexity),
}
