"""Looking into a forward pass: what goes in, what each part of each block gives, what is injected.

Hooks on the training network, put on for a while and taken off again; they know blocks with `attention`, `ffn` and
`sites`, whatever the memory method, and pass by what a block does not have. Compiled blocks run as written meanwhile.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

See = Callable[[str, int, str, Tensor], None]
"""(what, layer, name, value). What: input, attention, ffn and hidden [B,T,D]; of the site `name` extracted (a call for
each view, in order) and injected [B,T,W]."""

PARTS = ("attention", "ffn")
CHANGING = ("ngram", "ffn")
"""Sites that are given what they change and give it back changed: what they inject is the difference."""
REPLACING = ("up",)
"""Sites that give a factor, to which nothing is added."""
CUT = ("q", "k", "v", "qk", "up")
"""Sites whose columns are spread over a tensor axis; at the others every rank has them all."""


@contextmanager
def watching(model: nn.Module, see: See) -> Iterator[None]:
    blocks: list[nn.Module] = list(model.blocks)  # type: ignore[arg-type]
    compiled = [block._compiled_call_impl for block in blocks]
    handles: list[Any] = [blocks[0].register_forward_pre_hook(lambda _, given: see("input", 0, "", given[0]))]
    for layer, block in enumerate(blocks):
        block._compiled_call_impl = None
        for part in PARTS:
            if isinstance(getattr(block, part, None), nn.Module):
                handles.append(_hook(getattr(block, part), see, part, layer, ""))
        for site, module in _sites(block).items():
            for extractor in getattr(module, "extractors", ()):
                handles.append(_hook(extractor, see, "extracted", layer, site))
            handles.append(_hook(module, see, "injected", layer, site, changing=site in CHANGING))
        handles.append(_hook(block, see, "hidden", layer, ""))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for block, call in zip(blocks, compiled, strict=True):
            block._compiled_call_impl = call


def injecting_sites(model: nn.Module) -> dict[str, list[int]]:
    """The layers of each site at which something is injected."""
    found: dict[str, list[int]] = {}
    for layer, block in enumerate(model.blocks):  # type: ignore[arg-type]
        for site in _sites(block):
            found.setdefault(site, []).append(layer)
    return found


def _sites(block: nn.Module) -> dict[str, nn.Module]:
    sites = getattr(block, "sites", None)
    named = sites.items() if isinstance(sites, nn.ModuleDict) else ()
    return {site: module for site, module in named if site not in REPLACING}


def _hook(module: nn.Module, see: See, what: str, layer: int, name: str, *, changing: bool = False) -> Any:
    def after(_: nn.Module, given: Any, made: Any) -> None:
        value = made[0] if isinstance(made, tuple) else made  # beside it, a loss of its own
        see(what, layer, name, value - given[0] if changing else value)

    return module.register_forward_hook(after)
