"""What torch.compile would run on an H100: inductor's code for cuda:0, and its Triton kernels built for sm_90.

    code = compile_for_cuda(graph, inputs)          inductor's Python for a graph of fake tensors; nothing is run
    forward, backward = compile_training(f, inputs) the same for a function and its backward pass, as torch.compile does
    code.kernels, code.launches                     names of its Triton kernels; how often any of them is launched
    code.fallbacks                                  operations of torch that it calls instead of a kernel of its own
    code.traffic                                    bytes that each kernel and operation reads and writes
    code.build()                                    Triton and ptxas compile every kernel: bytes of each

Needs triton (a Linux wheel; no driver and no GPU). Only in a process that ends with the test.
"""

import copy
import importlib.util
import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from stub_cuda import H100, Ledger, stub_torch_cuda
from torch import Tensor

BLOCKS = {"XBLOCK": 128, "YBLOCK": 8, "RBLOCK": 512, "R0_BLOCK": 512, "R1_BLOCK": 8, "RSPLIT": 1}
"""Block sizes to build with; on a GPU, inductor would try several."""
KERNEL = re.compile(r"^(triton_\w+) = async_compile\.triton\('\w+', '''(.*?)''', device_str", re.MULTILINE | re.DOTALL)
LAUNCH = re.compile(r"^\s+triton_\w+\.run\(", re.MULTILINE)
FALLBACK = re.compile(r"(?:torch\.ops\.)?aten\.(\w+)|extern_kernels\.(\w+)")
DECORATORS = ("pointwise", "reduction", "persistent_reduction", "cooperative_reduction", "foreach", "split_scan")


class _CodeIsThereError(Exception):
    """Ends the compilation once inductor has written its code."""

    def __init__(self, code: "CudaCode"):
        super().__init__()
        self.code = code


@dataclass
class CudaCode:
    text: str
    traffic: list[tuple[str, int]]
    """(operation, bytes) of each kernel, in order; "fused" for those that inductor writes itself. As its scheduler
    counts: each buffer once and whole, whatever a gather reads of it, and at most 1e9 elements."""

    @property
    def _sources(self) -> list[tuple[str, str]]:
        return KERNEL.findall(self.text)

    @property
    def kernels(self) -> list[str]:
        return [name for name, _ in self._sources]

    @property
    def launches(self) -> int:
        """Of Triton kernels; a kernel may be launched more than once."""
        return len(LAUNCH.findall(self.text))

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
        text, _ = graph.codegen()
        traffic = [(_operation(node), int(node.get_read_write_buffers_sizes())) for node in graph.scheduler.nodes]
        raise _CodeIsThereError(CudaCode(str(getattr(text, "value", text)), traffic))

    GraphLowering.compile_to_module = stop_with_code  # type: ignore[method-assign]


def compile_for_cuda(graph: torch.fx.GraphModule, inputs: list[Any]) -> CudaCode:
    from torch._inductor.compile_fx import compile_fx

    return _code_of(lambda: compile_fx(graph, inputs))


def compile_training(function: Callable[..., Tensor], inputs: list[Tensor]) -> tuple[CudaCode, CudaCode]:
    """Forward and backward pass of `function(*inputs)`, cut where torch.compile cuts them. In fake mode."""
    from torch._functorch.aot_autograd import aot_function, make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table

    found = []

    def keep_code(is_backward: bool) -> Callable[..., Any]:
        def compile_graph(graph: torch.fx.GraphModule, examples: list[Any]) -> Any:
            copied = torch.fx.GraphModule(graph, copy.deepcopy(graph.graph))  # inductor changes it
            found.append(_code_of(lambda: compile_fx_inner(copied, examples, is_backward=is_backward)))
            return make_boxed_func(graph.forward)  # to go on with fake tensors

        return compile_graph

    compiled = aot_function(
        function,
        fw_compiler=keep_code(False),
        bw_compiler=keep_code(True),
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    out = compiled(*inputs)
    out.backward(torch.empty_like(out))
    forward, backward = found
    return forward, backward


def _code_of(compile_graph: Callable[[], Any]) -> CudaCode:
    try:
        with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder):
            compile_graph()
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, _CodeIsThereError):
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            raise
        return cause.code
    raise AssertionError("inductor compiled nothing")


def _operation(node: Any) -> str:
    name = getattr(node.node, "python_kernel_name", None) if node.is_extern() else None
    return (name or "extern").split(".default")[0].split(".")[-1] if node.is_extern() else "fused"


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
