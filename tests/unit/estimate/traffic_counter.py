"""Counts of bytes that operations read and write: each alone, or fused as a compiler would.

The fused count is of the traced graph of a forward and backward pass.

Matrix products, attention and segment sums are kernels of their own. All other operations between them are fused as
far as their order allows: a group reads each tensor from outside once, and writes each tensor that is used outside
once. This is what inductor does, but for reductions that it has to split.
"""

import math

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

KERNELS = ("mm", "bmm", "addmm", "_scaled_dot_product", "_embedding_bag")
GATHERS = ("embedding", "index_select")
"""Fused with what follows. They read as much as they return, however large the table is."""
VIEWS = ("view", "_unsafe_view", "expand", "slice", "select", "transpose", "permute", "t", "detach", "unsqueeze",
         "squeeze", "as_strided", "split", "alias", "unbind", "split_with_sizes", "lift_fresh_copy")  # fmt: skip
INDEXED = ("gather", "scatter_add_")
"""They touch a few elements of a large tensor."""
ALLOCATIONS = ("empty", "empty_like", "new_empty", "empty_strided", "resize_")


def count_fused_bytes(function, *inputs, split=False):
    """Bytes of the fused groups of function(*inputs), on fake tensors; split: also those of the segment sums."""
    graph = make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs).graph
    graph.eliminate_dead_code()
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    source = {}  # of a view: the tensor it shows
    for node in graph.nodes:
        viewed = node.op == "call_function" and _name(node) in VIEWS
        source[node] = source[node.args[0]] if viewed else node
    level, group = {}, {}
    sums = 0.0
    parents = {}

    def find(node):
        while parents[node] is not node:
            node = parents[node]
        return node

    for node in graph.nodes:
        inputs_of = {source[one] for one in node.all_input_nodes}
        below = max((level[one] for one in inputs_of), default=0)
        if node not in nodes or _name(node) in VIEWS:
            level[node] = level[source[node]] if source[node] is not node else below
            continue
        if _is_kernel(node):
            level[node] = below + 1
            if _name(node).startswith("_embedding_bag"):
                sums += _bytes(source[node.args[0]])
            continue
        if _name(node) == "getitem":
            level[node] = below
            continue
        level[node] = below
        parents[node] = node
        for one in inputs_of:
            if one in parents and level[one] == below:
                parents[find(one)] = node
    for node in parents:
        group.setdefault(find(node), set()).add(node)
    fused = 0.0
    for members in group.values():
        read = {source[one] for node in members for one in node.all_input_nodes if _name(node) not in GATHERS} - members
        fused += sum(_bytes(node) for node in members if _name(node) in GATHERS)
        written = {node for node in members if any(user not in members for user in _users(node))}
        fused += sum(_bytes(node) for node in read | written)
    return (fused, sums) if split else fused


def _users(node):
    for user in node.users:
        if user.op == "call_function" and _name(user) in VIEWS:
            yield from _users(user)
        else:
            yield user


def _name(node):
    return getattr(node.target, "__name__", str(node.target)).split(".")[0]


def _is_kernel(node):
    return _name(node).startswith(KERNELS)


def _bytes(node):
    found = node.meta.get("val")
    tensors = found if isinstance(found, tuple | list) else [found]
    return sum(math.prod(one.shape) * one.element_size() for one in tensors if isinstance(one, torch.Tensor))


# Each operation alone


class _Counter(TorchDispatchMode):
    def __init__(self, only_numel):
        super().__init__()
        self.bytes, self._only = 0, only_numel

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        name = function._schema.name.split("::")[-1]
        if name in (*VIEWS, *ALLOCATIONS, *INDEXED, *KERNELS[:3]):
            return out
        read, written = self._size((args, kwargs)), self._size(out)
        if name == "copy_":
            read = self._size(args[1])
        elif name in GATHERS:
            read = written
        elif name.startswith("_embedding_bag"):
            written = self._size(out[0])
            read = args[1].numel() * args[0].shape[1] * args[0].element_size()
        self.bytes += read + written
        return out

    def _size(self, tree):
        """Of vectors and larger: flags, indices and numbers by row are small."""
        tensors = [one for one in tree_leaves(tree) if isinstance(one, torch.Tensor) and one.is_floating_point()]
        return sum(t.nbytes for t in tensors if t.dim() > 1 and self._only in (None, t.numel()))


def count_eager_bytes(function, only_numel=None):
    """Bytes that function() reads and writes. `only_numel`: of tensors with so many elements."""
    with _Counter(only_numel) as counter:
        function()
    return counter.bytes
