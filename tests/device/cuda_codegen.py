"""What torch.compile would run on an H100: inductor's code for cuda:0, and its Triton kernels built for sm_90.

    code = compile_for_cuda(graph, inputs)     inductor's Python for a graph of fake tensors; nothing is run
    code.kernels                               names of its Triton kernels
    code.fallbacks                             operations of torch that it calls instead of a kernel of its own
    code.build()                               Triton and ptxas compile every kernel: bytes of each

Needs triton (a Linux wheel; no driver and no GPU). Only in a process that ends with the test.
"""

import importlib.util
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from stub_cuda import H100, Ledger, stub_torch_cuda

BLOCKS = {"XBLOCK": 128, "YBLOCK": 8, "RBLOCK": 512, "R0_BLOCK": 512, "R1_BLOCK": 8, "RSPLIT": 1}
"""Block sizes to build with; on a GPU, inductor would try several."""
KERNEL = re.compile(r"^(triton_\w+) = async_compile\.triton\('\w+', '''(.*?)''', device_str", re.MULTILINE | re.DOTALL)
FALLBACK = re.compile(r"(?:torch\.ops\.)?aten\.(\w+)|extern_kernels\.(\w+)")
DECORATORS = ("pointwise", "reduction", "persistent_reduction", "cooperative_reduction", "foreach", "split_scan")


class _CodeIsThereError(Exception):
    """Ends the compilation once inductor has written its code."""


@dataclass
class CudaCode:
    text: str

    @property
    def _sources(self) -> list[tuple[str, str]]:
        return KERNEL.findall(self.text)

    @property
    def kernels(self) -> list[str]:
        return [name for name, _ in self._sources]

    @property
    def fallbacks(self) -> list[str]:
        """With repetition, in order."""
        body = self.text[self.text.index("def call") :]
        code = "\n".join(line for line in body.splitlines() if not line.lstrip().startswith("#"))
        return [first or second for first, second in FALLBACK.findall(code)]

    @property
    def atomics(self) -> list[str]:
        """Kernels whose sums depend on the order in which threads arrive."""
        return [name for name, source in self._sources if "tl.atomic_add" in source]

    def build(self) -> dict[str, int]:
        """Bytes of each kernel's machine code."""
        return {name: _build_kernel(name, source) for name, source in self._sources}


def set_up_inductor() -> None:
    """Makes inductor believe in an H100, and stop after its code is written."""
    stub_torch_cuda(Ledger())
    import torch._dynamo.device_interface as device_interface
    import torch._inductor.config as config
    import torch._inductor.fx_passes.joint_graph as joint_graph
    from torch._inductor.graph import GraphLowering
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    interface: Any = device_interface.CudaInterface
    answers = {
        "is_available": True,
        "is_triton_capable": True,
        "raise_if_triton_unavailable": None,
        "current_device": 0,
        "maybe_exchange_device": 0,
        "get_raw_stream": 0,
        "get_compute_capability": 90,
        "get_device_properties": H100,
    }
    for name, answer in answers.items():
        setattr(interface, name, staticmethod(lambda *_, answer=answer, **__: answer))
    interface.Worker.get_device_properties = staticmethod(lambda *_: H100)
    torch.version.cuda = "13.0"
    config.fx_graph_cache = False
    config.force_disable_caches = True
    config.compile_threads = 1
    config.joint_graph_constant_folding = False
    joint_graph.lazy_init = lambda *_, **__: None  # its patterns are traced with real tensors on the device

    class TargetOnly:
        """A Triton driver that knows its target, and runs nothing."""

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self) -> int:
            return 0

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cuda", 0)

    driver.set_active(TargetOnly())

    def stop_with_code(graph: Any) -> Any:
        code, _ = graph.codegen()
        raise _CodeIsThereError(getattr(code, "value", code))

    GraphLowering.compile_to_module = stop_with_code  # type: ignore[method-assign]


def compile_for_cuda(graph: torch.fx.GraphModule, inputs: list[Any]) -> CudaCode:
    from torch._inductor.compile_fx import compile_fx

    try:
        compile_fx(graph, inputs)
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, _CodeIsThereError):
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            raise
        return CudaCode(str(cause.args[0]))
    raise AssertionError("inductor compiled nothing")


def _build_kernel(name: str, source: str) -> int:
    import triton
    from torch._inductor.runtime import triton_heuristics
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    seen: dict[str, Any] = {}

    def keep(*_: Any, **settings: Any) -> Any:
        seen.update(settings)

        def decorate(function: Any) -> Any:
            seen["function"] = function
            return function

        return decorate

    originals = {word: getattr(triton_heuristics, word) for word in DECORATORS if hasattr(triton_heuristics, word)}
    for word in originals:  # they would look for a GPU to tune on
        setattr(triton_heuristics, word, keep)
    try:
        path = Path(tempfile.mkdtemp()) / "kernel.py"
        path.write_text(source.replace("triton_helpers.set_driver_to_gpu()", ""), encoding="utf-8")
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    finally:
        for word, original in originals.items():
            setattr(triton_heuristics, word, original)
    function, meta = seen["function"], seen["triton_meta"]
    constants, signature = dict(meta["constants"]), dict(meta["signature"])
    for argument in function.arg_names:
        if argument in BLOCKS and argument not in constants:
            constants[argument], signature[argument] = 1 if "_per_" in name else BLOCKS[argument], "constexpr"
    constexprs = {(function.arg_names.index(argument),): value for argument, value in constants.items()}
    attributes = meta["configs"][0] if meta.get("configs") else {}
    described = ASTSource(fn=function, signature=signature, constexprs=constexprs, attrs=attributes)
    built = triton.compile(described, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    return len(built.asm["cubin"])
