"""Tensors on cuda:0 without memory or values, for runs of the full size: torch's fake tensors, and watchers of them.

    device = FakeDevice(ledger, num_ranks)
    with device.entered(): ...     what is created inside is fake; a real tensor that meets a fake one becomes fake

`Watcher` sees every operation. It answers those that need values (a loss of 1, nothing is true) and notes in the ledger
that the host waited for them. It checks what collectives are given; they do nothing.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from stub_cuda import Ledger
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from traffic import TrafficCounter

from xgram_dist.model import document_attention

aten = torch.ops.aten
FAKE_DISTINCT = 7
"""Results of an operation whose number depends on values."""


def is_on_device(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "cuda"


def pinned(tensor: Tensor) -> bool:
    return getattr(tensor, "stub_pinned", False)


class Watcher(TorchDispatchMode):
    """Notes what would make the host wait, and answers what a fake tensor cannot."""

    def __init__(self, ledger: Ledger, groups: "FakeProcessGroups", traffic: TrafficCounter):
        super().__init__()
        self.ledger, self.groups, self.traffic = ledger, groups, traffic

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = self._run(func, args, kwargs or {})
        self.traffic.note(func, args, kwargs or {}, out)
        return out

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is aten._local_scalar_dense.default:
            return self._scalar(args[0])
        for argument in args:  # a fake tensor made from a number remembers it, which in-place operations would break
            if isinstance(argument, FakeTensor) and argument.constant is not None:
                argument.constant = None
        if func.namespace in ("c10d", "_c10d_functional"):
            self._note_collective(func, args)
        if func in VALUE_DEPENDENT and is_on_device(args[0]):
            self.ledger.wait(f"size of the result of {func}")
            return VALUE_DEPENDENT[func](args[0])
        if func is aten._to_copy.default:
            target = args[0].device if kwargs.get("device") is None else torch.device(kwargs["device"])
            self._note_copy(args[0], args[0].device, target, kwargs.get("non_blocking", False))
        elif func is aten.copy_.default:
            non_blocking = kwargs.get("non_blocking", len(args) > 2 and args[2])
            host = args[1] if is_on_device(args[0]) else args[0]
            self._note_copy(host, args[1].device, args[0].device, non_blocking)
        return func(*args, **kwargs)

    def _note_copy(self, host: Tensor, source: torch.device, target: torch.device, non_blocking: bool) -> None:
        if source.type != target.type and host.numel():
            is_pinned = pinned(host)
            self.ledger.copy(to_device=target.type == "cuda", non_blocking=non_blocking, pinned=is_pinned)

    def _note_collective(self, func: Any, args: Any) -> None:
        leaves = torch.utils._pytree.tree_leaves(args)
        if func.namespace == "c10d":
            name = next(dist.ProcessGroup.unbox(a) for a in leaves if isinstance(a, torch.ScriptObject)).group_name
        elif isinstance(leaves[-1], str):  # functional collectives end with the name of the group
            name = leaves[-1]
        else:
            return  # wait_tensor
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self.ledger.collective(self.groups.backend_of_name(name), func._opname.strip("_"), tensors)

    def _scalar(self, tensor: Tensor) -> Any:
        if isinstance(tensor, FakeTensor) and tensor.constant is not None:
            return tensor.constant.item()
        if is_on_device(tensor):
            self.ledger.wait("reads numbers")
        return stand_in(tensor)


def stand_in(tensor: Tensor) -> Any:
    return False if tensor.dtype == torch.bool else 1.0 if tensor.is_floating_point() else 0


def _nonzero(tensor: Tensor) -> Tensor:
    return torch.empty(FAKE_DISTINCT, tensor.dim(), dtype=torch.int64, device=tensor.device)


def _unique(tensor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    indices = torch.empty(FAKE_DISTINCT, dtype=torch.int64, device=tensor.device)
    return indices.to(tensor.dtype), torch.empty_like(tensor, dtype=torch.int64), indices


VALUE_DEPENDENT = {
    aten.nonzero.default: _nonzero,
    aten._unique2.default: _unique,
    aten.unique_dim.default: _unique,
    aten.masked_select.default: lambda tensor: tensor.new_empty(FAKE_DISTINCT),
}


class Factories(TorchFunctionMode):
    """Calls that reach no operation on a fake tensor."""

    def __init__(self, ledger: Ledger, traffic: TrafficCounter):
        super().__init__()
        self.ledger, self.traffic = ledger, traffic

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if func in (torch.tensor, torch.as_tensor) and device is not None and torch.device(device).type == "cuda":
            if is_on_device(args[0]):
                return args[0]
            self.ledger.wait(f"torch.{func.__name__}(..., device): a blocking copy")
            host = func(*args, **{key: value for key, value in kwargs.items() if key != "device"})
            return torch.empty(host.shape, dtype=host.dtype, device=device)
        out = func(*args, **kwargs)
        self.traffic.mark(out)
        return out


def _nested(tensor: Tensor, shape: tuple[int, ...]) -> Any:
    return [_nested(tensor, shape[1:]) for _ in range(shape[0])] if shape else stand_in(tensor)


class FakeDevice:
    def __init__(self, ledger: Ledger, num_ranks: int):
        """The process becomes rank 0 of `num_ranks`."""
        self.ledger, self.traffic = ledger, TrafficCounter()
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._groups = FakeProcessGroups(num_ranks)
        self._patch_torch()

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """What is created inside is fake, and watched."""
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            yield
            return
        watcher, factories = Watcher(self.ledger, self._groups, self.traffic), Factories(self.ledger, self.traffic)
        with self.mode, watcher, factories:
            yield

    def host_tensor(self, tensor: Tensor) -> Tensor:
        """A real tensor in host memory as a fake one."""
        fake = self.mode.from_tensor(tensor)
        fake.stub_pinned = pinned(tensor)
        return fake

    def _patch_torch(self) -> None:
        """Methods that fake tensors do not have: pinning, moving a module, a real tensor's way to the device."""
        torch.nn.Module._apply = apply_by_replacing  # type: ignore[method-assign]
        F.scaled_dot_product_attention = flash_attention  # type: ignore[assignment]
        document_attention._compiled_flex_attention = lambda: flex_attention  # type: ignore[assignment]
        move = torch.Tensor.to

        def pin_memory(tensor: Tensor, *_: Any) -> Tensor:
            tensor.stub_pinned = True
            return tensor

        def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            target = next((a for a in (*args, kwargs.get("device")) if isinstance(a, torch.device | str)), None)
            if isinstance(tensor, FakeTensor) or target is None or torch.device(target).type != "cuda":
                return move(tensor, *args, **kwargs)
            with self.entered():  # a planning thread is outside of the modes
                return move(self.host_tensor(tensor), *args, **kwargs)

        def tolist(tensor: Tensor) -> Any:
            if is_on_device(tensor):
                self.ledger.wait("reads numbers")
            return _nested(tensor, tuple(tensor.shape))

        FakeTensor.tolist = tolist
        torch.Tensor.pin_memory = pin_memory  # type: ignore[method-assign]
        torch.Tensor.to = to  # type: ignore[method-assign]


def flash_attention(q: Tensor, k: Tensor, v: Tensor, *, attn_mask: None, is_causal: bool, enable_gqa: bool) -> Tensor:
    """What torch takes on an H100 for bf16 without a mask; a build without CUDA takes matrix products."""
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]


def flex_attention(q: Tensor, k: Tensor, v: Tensor, *, block_mask: Any, enable_gqa: bool) -> Tensor:
    """Of the same shapes and what is kept for the backward pass; which blocks are computed does not show."""
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, False)[0]


def apply_by_replacing(module: torch.nn.Module, function: Any, recurse: bool = True) -> torch.nn.Module:
    """`Module._apply` for fake tensors, whose device cannot change in place."""
    for child in module.children():
        child._apply(function)
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        with torch.no_grad():
            new = function(parameter.detach())
        if new.device == parameter.device:
            parameter.data = new
            continue
        replaced = torch.nn.Parameter(new, parameter.requires_grad)
        for key, value in vars(parameter).items():  # marks, as of tensor parallelism
            vars(replaced).setdefault(key, value)
        module._parameters[name] = replaced
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = function(buffer)
    return module


class FakeProcessGroups:
    """torch.distributed as rank 0 of `size` sees it. All groups are of torch's fake backend; those that would be gloo's
    are known by name."""

    def __init__(self, size: int):
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
        self._gloo: set[str] = set()
        new_group = dist.new_group

        def new_fake_group(ranks: Any = None, timeout: Any = None, backend: Any = None, **kwargs: Any) -> Any:
            kwargs.pop("device_id", None)
            group = new_group(ranks, backend="fake", **kwargs)
            if backend == "gloo":
                self._gloo.add(group.group_name)
            return group

        dist.new_group = new_fake_group
        dist.get_backend = self.backend_of
        dist.all_gather_object = _gather_object

    def backend_of(self, group: Any = None) -> str:
        return self.backend_of_name((group or dist.group.WORLD).group_name)

    def backend_of_name(self, name: str) -> str:
        return "gloo" if name in self._gloo else "nccl"


def _gather_object(found: list[Any], value: Any, group: Any = None) -> None:
    found[:] = [value] * len(found)
