"""How files are changed: values of JSON and arrays replaced by odd ones, bytes flipped, cut out, repeated and inserted;
and files that were never real ones. Everything follows from the `random.Random` that is given."""

import copy
import io
import json
import random
import struct
import warnings
from typing import Any

import numpy as np

ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2, 3, 2**31, 2**62, 2**63, 10**12, 10**18, 10**400, 0.5, 64.0, -0.0, 1e308, "", "x",
    "\n", "\x00", "../../etc/passwd", "/dev/zero", "\ud800", "²", "9" * 5000, "x" * 40_000, [], {}, [[]], [0], {"a": 1},
    [1.5, 2], [-1, 10**15], "tables", "F32", "\x1b[2J",
]  # fmt: skip
TYPES = (np.float16, np.float32, np.float64, np.int8, np.int64, np.uint64, np.complex64, np.bool_)
BYTES = (
    b"\x00",
    b"\xff",
    b"\n",
    b"[" * 5000,
    b'{"a":' * 3000,
    b"\xef\xbb\xbf",
    b"NaN",
    b"1e999",
    b"9" * 5000,
    b"\x1b[2J",
)


def change_json(data: bytes, chooser: random.Random) -> bytes:
    """One to three values replaced, removed, renamed or doubled, anywhere in the tree."""
    try:
        return _change_tree(json.loads(data), chooser)
    except (RecursionError, ValueError, OverflowError):
        return b"[" * 100_000


def _change_tree(tree: Any, chooser: random.Random) -> bytes:
    for _ in range(chooser.randint(1, 3)):
        # A walk from the root: where a list has thousands of values, they do not crowd out the rest.
        node, key = None, None
        below = tree
        while isinstance(below, dict | list) and below and (node is None or chooser.random() < 0.85):
            node = below
            key = chooser.choice(list(below)) if isinstance(below, dict) else chooser.randrange(len(below))
            below = node[key]
        if node is None:
            return json.dumps(chooser.choice(ODD)).encode()
        kind = chooser.randrange(6)
        if kind == 0:
            del node[key]
        elif kind == 1 and isinstance(node, dict):
            node[str(chooser.choice(ODD))[:300]] = node.pop(key)
        elif kind == 2:
            value: Any = copy.deepcopy(chooser.choice(ODD))
            for _ in range(chooser.choice((1, 3, 40, 900))):
                value = [value]
            node[key] = value
        elif kind == 3 and type(node[key]) in (int, float):
            node[key] += chooser.choice((-1, 1, 0.5, 10**6))
        elif kind == 4 and isinstance(node, list):
            node.insert(key, copy.deepcopy(chooser.choice(node)))
        else:
            node[key] = copy.deepcopy(chooser.choice(ODD))
    return json.dumps(tree).encode()


def change_lines(data: bytes, chooser: random.Random) -> bytes:
    """A line of JSON changed."""
    lines = data.splitlines(keepends=True)
    number = chooser.randrange(len(lines))
    lines[number] = change_json(lines[number], chooser) + b"\n"
    return b"".join(lines)


def change_bytes(data: bytes, chooser: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(chooser.choice((1, 1, 2, 8))):
        place = chooser.randrange(len(changed) + 1)
        length = chooser.choice((1, 1, 2, 8, 64, 4096))
        kind = chooser.randrange(6)
        if kind == 0:
            changed[place : place + length] = chooser.randbytes(min(length, len(changed) - place))
        elif kind == 1:
            del changed[place : place + length]
        elif kind == 2:
            changed[place:place] = chooser.randbytes(length)
        elif kind == 3:
            changed[place:place] = changed[place : place + length] * chooser.choice((1, 20))
        elif kind == 4:
            changed[place:place] = chooser.choice(BYTES)
        else:
            del changed[place:]
    return bytes(changed)


def change_npz(data: bytes, chooser: random.Random) -> bytes:
    """An array of an archive removed, renamed, or with another type, shape or values."""
    with np.load(io.BytesIO(data)) as archive:
        arrays = {name: archive[name] for name in archive.files}
    for _ in range(chooser.choice((1, 1, 2))):
        if arrays:
            _change_array(arrays, chooser)
    made = io.BytesIO()
    np.savez(made, **arrays)
    return made.getvalue()


def _change_array(arrays: dict[str, Any], chooser: random.Random) -> None:
    name = chooser.choice(sorted(arrays))
    array = arrays[name]
    kind = chooser.randrange(8)
    if kind == 0:
        del arrays[name]
    elif kind == 1:
        arrays[chooser.choice(("x", "../x", "a" * 300))] = arrays.pop(name)
    elif kind == 2:
        arrays[name] = np.array(chooser.choice((-1, 0, 2**62, 0.5, float("nan"), float("inf"), "text", True)))
    elif kind == 3 and array.dtype.kind != "U":
        with warnings.catch_warnings(action="ignore"):
            arrays[name] = array.astype(chooser.choice(TYPES))
    elif kind == 4:
        arrays[name] = array.reshape(chooser.choice(((1, -1), (-1, 1, 1)))) if array.size else np.zeros((0, 3))
    elif kind == 5:
        arrays[name] = array.reshape(-1)[: chooser.randrange(array.size + 1)]
    elif kind == 6 and array.dtype.kind == "U":
        try:
            arrays[name] = np.array(change_json(str(array).encode(), chooser).decode())
        except ValueError:
            arrays[name] = np.array(chooser.choice(("", "{}", "[]", "x" * 1000)))
    elif array.size and array.dtype.kind in "iuf":
        values = arrays[name] = array.copy()
        where = chooser.randrange(array.size)
        odd = (0, 1, 2, 100, 127) if array.dtype.itemsize == 1 else (0, 1, 2, 127, -1, 1000, 2**31 - 1)
        length = chooser.choice((1, 3, 10**6))
        values.reshape(-1)[where : where + length] = np.array(chooser.choice(odd)).astype(array.dtype)


def change_tensors(data: bytes, chooser: random.Random) -> bytes:
    """Some numbers of one to three tensors of a safetensors file, whose header stays."""
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    changed = bytearray(data)
    for _ in range(chooser.randint(1, 3)):
        begin, end = header[chooser.choice(sorted(header))]["data_offsets"]
        if begin < end:
            first = chooser.randrange(begin, end) // 4 * 4
            last = min(end, first + chooser.choice((4, 8, 64, end - first)))
            pattern = chooser.choice((b"\xff", b"\0", b"\x7f", b"\x01\0\0\0", b"\0\0\x80\x7f", chooser.randbytes(8)))
            changed[8 + length + first : 8 + length + last] = (pattern * (last - first))[: last - first]
    return bytes(changed)


def generate(chooser: random.Random) -> bytes:
    """A file that was never a real one: a JSON tree of odd values, or bytes."""
    if chooser.random() < 0.3:
        return b"".join(chooser.choice((*BYTES, chooser.randbytes(chooser.randrange(200)))) for _ in range(3))

    def tree(depth: int) -> Any:
        kind = chooser.randrange(3) if depth else 2
        if kind == 2:
            return copy.deepcopy(chooser.choice(ODD))
        values = [tree(depth - 1) for _ in range(chooser.randrange(4))]
        return values if kind == 0 else {str(chooser.choice(ODD))[:40]: value for value in values}

    return json.dumps(tree(4)).encode()


def is_json(data: bytes) -> bool:
    try:
        json.loads(data)
        return True
    except ValueError:
        return False
