"""Bytes of device memory that a step reads and writes, by part of the step and by file of the package.

    python tests/device/traffic.py [RECIPE] [RANKS] [KEY=VALUE ...]

prints the table for a step of rank 0 on fake tensors: by default the 0.73B recipe on 16 ranks with one micro-batch.
Each operation counts what it reads and writes, alone; views and allocations count nothing, gathers the rows they read.
Matrix products and attention are bound by arithmetic and are counted apart. What torch.compile fuses is counted by
inductor instead, for the same recipe (test_inductor.py), in a second table; there `train.compile` is on.

An operation of the backward pass belongs where its forward operation was called.
"""

import importlib.util
import sys
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from xgram_dist.parallel.call_site import call_site

PARTS = ("head", "blocks", "extraction", "scatter", "exchange", "update")
PART_OF_FILE = {
    "model/loss.py": "head",
    "model/injection.py": "extraction",
    "model/": "blocks",
    "engine/": "update",
    "deepspeed/": "update",
    "optim/": "update",
    "tables/optimizers/": "update",
    "tables/": "exchange",
    "train/": "update",
}
"""By the start of the path; the first that fits."""
GATHER_FILE = "model/gather.py"
"""Reads rows of the working set in the forward pass, and sums their gradients in the backward pass."""

PRODUCTS = ("mm", "bmm", "addmm", "addmm_", "_scaled_dot_product")
GATHERS = ("embedding", "index_select", "gather", "index")
SEGMENT_SUMS = "_embedding_bag"
SCATTERS = {"scatter_add_": 3, "index_add_": 2, "index_copy_": 1, "index_put_": 2}
"""-> the argument with the values."""
WRITE_ONLY = ("copy_", "zero_", "fill_", "normal_", "uniform_", "random_")
NOTHING = ("empty", "new_empty", "_unsafe_view", "_reshape_alias", "detach", "alias", "record_stream", "resize_")
MARK = "xgram_dist_place"


class TrafficCounter:
    """`by_place[part, file]` and `products[part, file]`, in bytes."""

    def __init__(self) -> None:
        self.by_place: Counter[tuple[str, str]] = Counter()
        self.products: Counter[tuple[str, str]] = Counter()
        self.enabled = False
        self.working_set: set[int] = set()
        """Leaves of the working set, by id."""
        self._last = "autograd"

    def clear(self) -> None:
        self.by_place.clear()
        self.products.clear()

    def mark(self, out: Any) -> None:
        """Remembers in the graph of autograd where an operation was called; it may have several nodes."""
        if not self.enabled:
            return
        nodes = [leaf.grad_fn for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        while nodes:
            node = nodes.pop()
            if node is not None and MARK not in node.metadata:
                node.metadata[MARK] = call_site(skip="parallel/")[0]
                nodes += [before for before, _ in node.next_functions]

    def note(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        if not self.enabled or func.is_view or func.namespace == "prim":
            return
        name = func._schema.name.split("::")[-1]
        tensors = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, Tensor)]
        if name.startswith(NOTHING) or not any(tensor.device.type == "cuda" for tensor in tensors):
            return
        counter = self.products if name.startswith(PRODUCTS) else self.by_place
        counter[self._part_and_file()] += _moved(name, func, args, kwargs, out)

    def _part_and_file(self) -> tuple[str, str]:
        file, function = call_site(skip="parallel/")  # collectives and copies belong to who calls them
        node = torch._C._current_autograd_node()
        if file != "autograd":  # called from Python, also where the backward pass recomputes
            backward = file == GATHER_FILE and function in ("backward", "_segment_sum")
            return ("scatter" if backward else _part_of(file)), file
        if node is not None and hasattr(node, "variable"):  # a gradient is added to that of earlier uses
            scatter = id(node.variable) in self.working_set
            return ("scatter" if scatter else _part_of(self._last)), "autograd"
        if node is not None:
            self._last = node.metadata.get(MARK, self._last)
        return _part_of(self._last), self._last


def _part_of(file: str) -> str:
    if file == GATHER_FILE:
        return "extraction"
    return next((part for start, part in PART_OF_FILE.items() if file.startswith(start)), "other")


def _moved(name: str, func: Any, args: Any, kwargs: Any, out: Any) -> int:
    if name.endswith("_like") or name.startswith("new_"):
        return _size(out)
    if name in GATHERS:
        return 2 * _size(out)
    if name.startswith(SEGMENT_SUMS):
        weight, index = args[0], args[1]
        return index.numel() * weight.shape[1] * weight.element_size() + _size(out[0])
    if name in SCATTERS:
        return 3 * _size(args[SCATTERS[name]])
    if name == "_fused_adamw_":
        weights, gradients, first, second = args[:4]
        return _size(gradients) + 2 * _size((weights, first, second))
    total = 0
    for argument, value in zip(func._schema.arguments, args, strict=False):
        written = argument.alias_info is not None and argument.alias_info.is_write
        total += _size(value) * (2 if written and name not in WRITE_ONLY else 1)
    written_into = _size(kwargs.get("out"))
    return (
        total
        + written_into
        + sum(
            _size(value)
            for returned, value in zip(func._schema.returns, out if isinstance(out, tuple) else [out], strict=False)
            if returned.alias_info is None
        )
    )


def _size(tree: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def by_part(found: dict[tuple[str, str], int]) -> dict[str, float]:
    """GB of each part."""
    totals: Counter[str] = Counter()
    for (part, _), size in found.items():
        totals[part] += size
    return {part: size / 1e9 for part, size in totals.items()}


def over_budget(found: dict[tuple[str, str], int], budget: dict[str, float]) -> list[str]:
    """One line for each part that moves more than it may."""
    return [
        f"{part}: {size:.2f} GB, {budget.get(part, 0.0):.2f} allowed"
        for part, size in by_part(found).items()
        if size > budget.get(part, 0.0)
    ]


def main() -> None:
    from budgets import TRAFFIC_GB
    from fake_run import run_traffic
    from isolated import run_isolated

    words = sys.argv[1:]
    overrides = [word for word in words if "=" in word]
    recipe, ranks, *_ = [*(word for word in words if "=" not in word), *DEFAULT[len(words) - len(overrides) :]]
    found = run_isolated(run_traffic, recipe, int(ranks), overrides or DEFAULT_OVERRIDES)
    print(f"GB of device memory in a step of rank 0 of {ranks}: {recipe} {' '.join(overrides or DEFAULT_OVERRIDES)}")
    print(f"{'part':12}{'file':42}{'GB':>9}{'products':>10}{'budget':>9}")
    totals, products = by_part(found["by_place"]), by_part(found["products"])
    for part in (*PARTS, *sorted({*totals, *products} - {*PARTS})):
        budget = TRAFFIC_GB.get(part)
        shown = f"{budget:9.1f}" if budget is not None and not words else ""
        print(f"{part:12}{'':42}{totals.get(part, 0):9.1f}{products.get(part, 0):10.1f}{shown}")
        places = {place for place in (*found["by_place"], *found["products"]) if place[0] == part}
        for place_ in sorted(places, key=lambda one: -found["by_place"].get(one, 0)):
            size, product = (found[kind].get(place_, 0) / 1e9 for kind in ("by_place", "products"))
            print(f"{'':12}{place_[1]:42}{size:9.1f}{product:10.1f}")
    if not words and importlib.util.find_spec("triton") is not None:
        print_compiled()


def fused_gb(traffic: list[tuple[str, int]]) -> float:
    """Of the kernels that inductor wrote: without matrix products, attention and segment sums."""
    return sum(size for operation, size in traffic if operation == "fused") / 1e9


def print_compiled() -> None:
    """Calls in a step of the default recipe: ten blocks, which activation checkpointing runs forward twice; half
    chunks of 4,096 logits."""
    from budgets import COMPILED_TRAFFIC_GB
    from codegen_cases import describe_step
    from isolated import run_isolated

    calls = {"block forward": 20, "block backward": 10, "softmax": 16, "loss_gradient": 16}
    print("\nwith train.compile=true, by inductor's count")
    print(f"{'part':24}{'GB a call':>12}{'calls':>7}{'GB':>9}{'budget':>9}")
    for name, traffic in run_isolated(describe_step).items():
        size = fused_gb(traffic)
        print(f"{name:24}{size:12.2f}{calls[name]:7}{size * calls[name]:9.1f}{COMPILED_TRAFFIC_GB[name]:9.2f}")


DEFAULT = ["0.73b/xgram-1x-50.yaml", "16"]
DEFAULT_OVERRIDES = ["train.global_batch=128"]

if __name__ == "__main__":
    main()
