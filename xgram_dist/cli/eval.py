"""`xgram-dist eval`."""

import argparse
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xgram_dist.inference.open import Checkpoint
    from xgram_dist.parallel.ranks import Ranks

EXAMPLES = """
  xgram-dist eval runs/tiny-xgram --tasks paper --data benchmarks --limit 100
  xgram-dist eval runs/tiny-xgram/checkpoints/step-00000180 --tasks sciq,piqa --ranks 2 --json
  xgram-dist eval --compare runs/tiny-vanilla runs/tiny-xgram
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", nargs="?", help="checkpoint folder, or a run folder (its newest)")
    parser.add_argument(
        "--tasks", default="paper", help="names of lm-eval tasks, with commas; paper: the paper's suite"
    )
    parser.add_argument("--data", metavar="DIR", help="read <task>/<split>.parquet from here instead of the network")
    parser.add_argument("--limit", type=int, metavar="N", help="documents of each task (default: all)")
    parser.add_argument(
        "--shots", type=int, metavar="N", help="examples in the prompt, of tasks that are named one by one"
    )
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="start N ranks on this machine (default 1)")
    parser.add_argument("--batch-tokens", type=int, default=8192, help="tokens of a forward pass (default 8192)")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], help="of the computation (default: the run's)")
    parser.add_argument("--tokenizer", metavar="FILE", help="instead of the one saved with the checkpoint")
    parser.add_argument(
        "--compare", nargs="+", metavar="RUN", help="put runs (their last evaluation) and the paper beside"
    )
    parser.add_argument("--out", metavar="FILE", help="results as JSON (default: RUN/eval/STEP.json)")
    parser.add_argument("--json", action="store_true", help="print lm-eval's results as JSON")


def run(args: argparse.Namespace) -> int:
    from xgram_dist.errors import UserError

    if args.checkpoint is None and not args.compare:
        raise UserError("give a checkpoint to evaluate, or finished runs with --compare RUN...")
    for option in ("limit", "ranks", "batch_tokens"):
        value = getattr(args, option)
        if value is not None and value < 1:
            raise UserError(f"--{option.replace('_', '-')} {value} is not at least 1")
    if args.shots is not None and args.shots < 0:
        raise UserError(f"--shots {args.shots} is not at least 0")
    from pathlib import Path

    from xgram_dist.eval.results import Evaluated

    others = [Evaluated.read(Path(path)) for path in args.compare or ()]
    if args.checkpoint is None:
        return _show(others, args)
    from xgram_dist.inference.open import Checkpoint

    checkpoint = Checkpoint.find(args.checkpoint, args.tokenizer)
    if args.ranks > 1 and "RANK" not in os.environ:
        from xgram_dist.parallel.launch import launch

        return launch(_again(args), args.ranks)
    from xgram_dist.parallel.device import choose_device
    from xgram_dist.parallel.ranks import join_ranks

    ranks = join_ranks(choose_device())
    try:
        found = _evaluate(args, checkpoint, ranks)
    finally:
        ranks.close()
    return 0 if found is None else _show([found, *others], args)


def _evaluate(args: argparse.Namespace, checkpoint: "Checkpoint", ranks: "Ranks") -> Any:
    """The results, on the first rank."""
    import tempfile
    from pathlib import Path

    from xgram_dist.checkpoint.folder import FOLDER as CHECKPOINTS
    from xgram_dist.eval.harness import HarnessModel
    from xgram_dist.eval.results import FOLDER, Evaluated, run_harness
    from xgram_dist.eval.scoring import CheckpointScorer
    from xgram_dist.eval.tasks import load_tasks
    from xgram_dist.parallel.device import choose_device
    from xgram_dist.parallel.mesh import single_mesh
    from xgram_dist.plan.budget import plan_budget

    with tempfile.TemporaryDirectory(prefix="xgram-dist-eval-") as scratch:
        tasks = None
        if ranks.first:
            wanted = [name for name in args.tasks.split(",") if name]
            data = None if args.data is None else Path(args.data)
            tasks = load_tasks(wanted, data, Path(scratch), args.shots)
        model = checkpoint.load(choose_device(), args.dtype)
        scorer = CheckpointScorer(model)
        harness = HarnessModel(
            scorer, checkpoint.tokenizer, model.context, args.batch_tokens, single_mesh(ranks), model
        )
        if tasks is None:
            harness.crew.follow()
            return None
        results = run_harness(harness, tasks, args.limit)
    budget = plan_budget(checkpoint.config)
    found = Evaluated(checkpoint.name, budget.backbone_parameters, budget.table_parameters, results)
    above = checkpoint.folder.resolve().parent
    if args.out is not None:
        found.write(Path(args.out))
    elif above.name == CHECKPOINTS:
        found.write(above.parent / FOLDER / f"{checkpoint.folder.name}.json")
    return found


def _show(runs: list[Any], args: argparse.Namespace) -> int:
    import json

    from xgram_dist.eval.results import comparison
    from xgram_dist.progress import table

    if args.json:
        from lm_eval.utils import handle_non_serializable

        tree = [{"name": run.name, "scores": run.scores, **run.results} for run in runs]
        print(json.dumps(tree if len(tree) > 1 else tree[0], indent=1, default=handle_non_serializable))
        return 0
    table(*comparison(runs, paper=bool(args.compare)))
    return 0


def _again(args: argparse.Namespace) -> list[str]:
    """The same command, for the ranks."""
    words = ["eval", args.checkpoint, "--tasks", args.tasks, "--batch-tokens", str(args.batch_tokens)]
    for option in ("data", "limit", "shots", "dtype", "tokenizer", "out"):
        value = getattr(args, option)
        words += [f"--{option}", str(value)] if value is not None else []
    words += ["--compare", *args.compare] if args.compare else []
    return words + (["--json"] if args.json else [])
