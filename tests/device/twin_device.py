"""Tensors on cuda:0 with values: each has a twin in host memory, which every operation works on.

    twin = TwinDevice(ledger)
    with twin.entered(): ...     what is created on cuda:0 has values; the results are those of the CPU

As on a GPU, an operation on tensors of both devices is refused, and host memory is reached by copies alone. A
collective that was started and not waited for has not happened: its buffer holds NaN, and what it sends is read when it
is waited for. So a read before the wait, or a send buffer that is overwritten too early, changes the loss. Memory that
FSDP frees holds NaN.
"""

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from fake_device import apply_by_replacing
from stub_cuda import Ledger, stub_torch_cuda
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_param as fsdp_param
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

aten = torch.ops.aten


class TwinTensor(Tensor):
    """Says that it is on cuda:0; `host` has the values."""

    host: Tensor

    @staticmethod
    def __new__(cls: Any, host: Tensor, twin: "TwinDevice") -> Any:
        layout = {"strides": host.stride(), "storage_offset": host.storage_offset(), "dtype": host.dtype}
        return Tensor._make_wrapper_subclass(cls, host.shape, device="cuda:0", requires_grad=False, **layout)  # type: ignore[attr-defined]

    def __init__(self, host: Tensor, twin: "TwinDevice"):
        self.host, self.twin = host, twin

    def __repr__(self) -> str:  # type: ignore[override]
        return f"TwinTensor({self.host})"

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        return self.detach()

    @data.setter
    def data(self, other: Tensor) -> None:
        """As DeepSpeed makes parameters views of its flat arrays."""
        Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        self.host = other.host if isinstance(other, TwinTensor) else other

    def set_(self, source: Tensor) -> Tensor:  # type: ignore[override]
        """As fields of records become those of other records."""
        self.data = source
        return self

    def tolist(self) -> Any:
        self.twin.ledger.wait("reads numbers")
        return self.host.tolist()

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        twin = next(leaf.twin for leaf in tensors_of((args, kwargs)) if isinstance(leaf, TwinTensor))
        return twin.run(func, args, kwargs or {})


def host_of(value: Any) -> Any:
    return value.host if isinstance(value, TwinTensor) else value


def map_leaves(function: Any, tree: Any) -> Any:
    """torch's `tree_map` for the arguments and results of operations; a third of a run's time would go to that."""
    if isinstance(tree, list | tuple):
        return type(tree)([map_leaves(function, one) for one in tree])
    if isinstance(tree, dict):
        return {key: map_leaves(function, one) for key, one in tree.items()}
    return function(tree)


def tensors_of(tree: Any) -> list[Tensor]:
    if isinstance(tree, list | tuple):
        return [tensor for one in tree for tensor in tensors_of(one)]
    if isinstance(tree, dict):
        return tensors_of(list(tree.values()))
    return [tree] if isinstance(tree, Tensor) else []


class DeviceMismatchError(RuntimeError):
    pass


class _Mode(TorchDispatchMode):
    def __init__(self, twin: "TwinDevice"):
        super().__init__()
        self.twin = twin

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.twin.run(func, args, kwargs or {})


class _Factories(TorchFunctionMode):
    """`torch.tensor(..., device=)` copies before any operation is dispatched."""

    def __init__(self, twin: "TwinDevice"):
        super().__init__()
        self.twin = twin

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor) and _is_device(kwargs.get("device")):
            self.twin.ledger.wait(f"torch.{func.__name__}(..., device): a blocking copy")
            return TwinTensor(func(*args, **{k: v for k, v in kwargs.items() if k != "device"}), self.twin)
        return func(*args, **kwargs)


def _is_device(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


class TwinDevice:
    def __init__(self, ledger: Ledger):
        self.ledger = ledger
        self._on = False
        self._gloo: set[str] = set()
        self._pending: dict[int, Tensor] = {}
        stub_torch_cuda(ledger)
        self._patch_torch()
        self._patch_fsdp()
        self._patch_collectives()

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        was_on, self._on = self._on, True  # a thread enters while another one is within
        with _Mode(self), _Factories(self):
            yield
        self._on = was_on

    # Operations

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        leaves = tensors_of((args, kwargs))
        twins = [leaf for leaf in leaves if isinstance(leaf, TwinTensor)]
        to_device = bool(twins) if kwargs.get("device") is None else _is_device(kwargs["device"])
        if func in (aten._to_copy.default, aten.copy_.default):
            to_device = self._note_copy(func, args, kwargs, to_device)
        elif func is aten._local_scalar_dense.default and twins:
            self.ledger.wait("reads numbers")
        elif twins:
            strangers = [leaf for leaf in leaves if not isinstance(leaf, TwinTensor) and leaf.dim()]
            if strangers:
                raise DeviceMismatchError(f"{func}: cuda:0 and cpu {[tuple(leaf.shape) for leaf in strangers]}")
            if func in SIZED_BY_VALUES:
                self.ledger.wait(f"size of the result of {func}")
        host_args, host_kwargs = map_leaves(host_of, args), map_leaves(host_of, kwargs)
        if host_kwargs.pop("pin_memory", False):
            pinned = func(*host_args, **host_kwargs)
            pinned.stub_pinned = True
            return pinned
        if kwargs.get("device") is not None:
            host_kwargs |= {"device": torch.device("cpu")}
        if twins and func.namespace == "_c10d_functional":
            return self._functional_collective(func, host_args, host_kwargs)
        out = func(*host_args, **host_kwargs)
        if not to_device:
            return out
        wrapped = map_leaves(lambda leaf: TwinTensor(leaf, self) if isinstance(leaf, Tensor) else leaf, out)
        return return_and_correct_aliasing(func, args, kwargs, wrapped) if twins else wrapped

    def _note_copy(self, func: Any, args: Any, kwargs: Any, to_device: bool) -> bool:
        """Whether the result is on the device."""
        in_place = func is aten.copy_.default
        source = args[1] if in_place else args[0]
        if in_place:
            to_device = isinstance(args[0], TwinTensor)
        if to_device != isinstance(source, TwinTensor) and source.numel():
            host = source if to_device else args[0]
            non_blocking = kwargs.get("non_blocking", in_place and len(args) > 2 and args[2])
            whole = host if host._base is None else host._base
            is_pinned = not isinstance(host, TwinTensor) and getattr(whole, "stub_pinned", False)
            self.ledger.copy(to_device=to_device, non_blocking=bool(non_blocking), pinned=is_pinned)
        return to_device

    def _functional_collective(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        if func is torch.ops._c10d_functional.wait_tensor.default:
            args[0].copy_(self._pending.pop(args[0].data_ptr()))
            return TwinTensor(args[0], self)
        result = torch.ops._c10d_functional.wait_tensor(func(*args, **kwargs))
        buffer = torch.full_like(result, float("nan"))
        self._pending[buffer.data_ptr()] = result
        return TwinTensor(buffer, self)

    # Calls that do not arrive as operations

    def _patch_torch(self) -> None:
        torch.nn.Module._apply = apply_by_replacing  # type: ignore[method-assign]
        move = Tensor.to

        def pin_memory(tensor: Tensor, *args: Any) -> Tensor:
            if isinstance(tensor, TwinTensor):
                raise RuntimeError("cannot pin a tensor on cuda:0")
            pinned = tensor.clone()
            pinned.stub_pinned = True  # type: ignore[attr-defined]
            return pinned

        def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            target = next((a for a in (*args, kwargs.get("device")) if isinstance(a, torch.device | str)), None)
            if isinstance(tensor, TwinTensor) or not _is_device(target):
                return move(tensor, *args, **kwargs)
            with _Mode(self):  # a planning thread is outside of the modes
                return move(tensor, *args, **kwargs)

        Tensor.pin_memory = pin_memory  # type: ignore[method-assign]
        Tensor.to = to  # type: ignore[method-assign]

    def _patch_fsdp(self) -> None:
        """What it does with the memory of tensors, which a twin does not have."""

        def free_storage(tensor: Tensor) -> None:
            if tensor.is_floating_point():
                host_of(tensor).detach().fill_(float("nan"))

        reset = fsdp_param.FSDPParam.reset_sharded_param

        def reset_sharded_param(parameter: Any) -> None:
            # It knows unchanged parameters by the address of their memory, and would copy twins.
            if not isinstance(parameter._sharded_param_data, TwinTensor):
                reset(parameter)

        fsdp_param.free_storage = free_storage  # type: ignore[assignment]
        fsdp_param.alloc_storage = lambda tensor: None  # type: ignore[assignment]
        fsdp_param.FSDPParam.reset_sharded_param = reset_sharded_param  # type: ignore[method-assign]

    def _patch_collectives(self) -> None:
        new_group, get_backend, init = dist.new_group, dist.get_backend, dist.init_process_group

        def init_process_group(backend: Any = None, device_id: Any = None, **kwargs: Any) -> None:
            init("gloo" if self._on else backend, **kwargs)  # an engine on one rank makes its own world

        def new_named_group(*args: Any, backend: Any = None, **kwargs: Any) -> Any:
            group = new_group(*args, backend=backend, **kwargs)
            if backend == "gloo" and hasattr(group, "group_name"):
                self._gloo.add(group.group_name)
            return group

        dist.new_group, dist.init_process_group = new_named_group, init_process_group
        dist.get_backend = lambda group=None: self._backend(group) if self._on else get_backend(group)
        for name in COLLECTIVES:
            setattr(dist, name, self._collective(name, getattr(dist, name)))

        self._in_message = False
        # torch checks operations by these names where they are defined.
        for name in MESSAGES:
            message = self._message(name, getattr(dist, name))
            setattr(dist, name, message)
            setattr(dist.distributed_c10d, name, message)
        batch = dist.batch_isend_irecv
        dist.batch_isend_irecv = lambda ops: [_start(one) for one in ops] if self._on else batch(ops)

    def _message(self, name: str, function: Any) -> Any:
        """A send, or a receive, whose buffer is NaN until it has come."""
        signature = inspect.signature(function)

        def call(*positional: Any, **named: Any) -> Any:
            arguments = dict(signature.bind(*positional, **named).arguments)
            if not self._on or self._in_message:
                return function(**arguments)
            self.ledger.collective(self._backend(arguments.get("group")), name, tensors_of(arguments))
            arguments = map_leaves(host_of, arguments)
            if name.endswith("recv") and arguments["tensor"].is_floating_point():
                arguments["tensor"].fill_(float("nan"))
            self._in_message = True  # torch calls it once more, by name, with the same tensors
            try:
                return function(**arguments)
            finally:
                self._in_message = False

        return call

    def _backend(self, group: Any) -> str:
        return "gloo" if (group or dist.group.WORLD).group_name in self._gloo else "nccl"

    def _collective(self, name: str, function: Any) -> Any:
        signature = inspect.signature(function)
        filled = next(iter(signature.parameters))

        def call(*positional: Any, **named: Any) -> Any:
            if not self._on:
                return function(*positional, **named)
            arguments = signature.bind(*positional, **named).arguments
            backend = self._backend(arguments.get("group"))
            self.ledger.collective(backend, name, tensors_of(dict(arguments)))
            arguments = map_leaves(host_of, dict(arguments))
            if backend == "gloo" or not arguments.pop("async_op", False):
                return function(**arguments)
            for key, value in arguments.items():  # an all-gather may send a part of what it fills
                if key != filled and isinstance(value, Tensor) and _share_memory(value, arguments[filled]):
                    arguments[key] = value.clone()
            return StartedWork(lambda: function(**arguments), arguments[filled])

        return call


def _start(one: dist.P2POp) -> Any:
    """A message of a batch."""
    peer = {"group_dst" if one.op is dist.isend else "group_src": one.group_peer}
    return one.op(one.tensor, group=one.group, tag=one.tag, **peer)


def _share_memory(tensor: Tensor, others: Any) -> bool:
    address = tensor.untyped_storage().data_ptr()
    return any(other.untyped_storage().data_ptr() == address for other in tensors_of(others))


class StartedWork:
    """A collective on a stream of its own, seen at its latest: it happens when it is waited for."""

    def __init__(self, complete: Any, buffers: Any):
        self._complete = complete
        for buffer in tensors_of(buffers):
            if buffer.is_floating_point():
                buffer.fill_(float("nan"))

    def wait(self) -> None:
        self._complete()


MESSAGES = ("send", "recv", "isend", "irecv")
COLLECTIVES = (
    "all_reduce",
    "all_to_all_single",
    "all_gather",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "broadcast",
    "reduce",
)
"""The first argument is what they fill."""

SIZED_BY_VALUES = (
    aten.nonzero.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.masked_select.default,
)
