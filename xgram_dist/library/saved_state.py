"""State dicts of tables from elsewhere: shapes, types, row ids and steps are checked before any of them is loaded."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xgram_dist.errors import UserError
from xgram_dist.tables.optimizers.catchup_math import any_outside, saved_range
from xgram_dist.tables.shard import Shard

StateDict = Mapping[str, Tensor]
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def row_ids_name(shard: Shard) -> str:
    return f"view-{shard.slab.view}.row_ids"


def checked_row_ids(states: Sequence[StateDict], shard: Shard) -> list[NDArray[np.int64]]:
    """The ids of the rows of each state, which all its other tensors for `shard` agree with."""
    found = [_row_ids(state, shard) for state in states]
    together = np.sort(np.concatenate(found)) if found else np.empty(0, np.int64)
    twice = together[1:][together[1:] == together[:-1]]
    if len(twice):
        raise UserError(
            f"the states hold row {twice[0]:,} of view {shard.slab.view} twice; give the state of each rank once"
        )
    if len(together) and not 0 <= together[0] <= together[-1] < shard.slab.rows:
        outside = together[0] if together[0] < 0 else together[-1]
        raise UserError(
            f"the states hold row {outside:,}, but the tables have {shard.slab.rows:,}; they are of other tables"
        )
    return found


def _row_ids(state: StateDict, shard: Shard) -> NDArray[np.int64]:
    wanted, name = shard.state_dict(), row_ids_name(shard)
    per_row = wanted.columns | wanted.tables | wanted.rows
    missing = [one for one in (name, *per_row, *wanted.replicated) if one not in state]
    if missing:
        raise UserError(
            f"the state holds no '{missing[0]}'; it is of other tables, another routing or another optimizer"
        )
    ids = state[name]
    if not isinstance(ids, Tensor) or ids.dtype != torch.int64 or ids.dim() != 1:
        raise _fault(name, "one row of int64", ids)
    for key, tensor in per_row.items():
        _check(key, state[key], (len(ids), *tensor.shape[1:]), tensor.dtype)
    for key, tensor in wanted.replicated.items():
        if isinstance(state[key], Tensor) and state[key].dim() == tensor.dim():
            _check(key, state[key], tuple(state[key].shape), tensor.dtype)
        else:
            raise _fault(key, f"{tensor.dim()}-dimensional {tensor.dtype}", state[key])
        if not tensor.dim() and not 0 <= float(state[key]) < 2**53:
            raise UserError(f"the state's '{key}' is {float(state[key]):g}; it must be a step, from 0 on")
    _check_steps(state, shard)
    return ids.cpu().numpy()


def _check(name: str, value: object, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    kinds = FLOATS if dtype.is_floating_point else INTEGERS
    if not isinstance(value, Tensor) or value.dtype not in kinds or tuple(value.shape) != shape:
        raise _fault(name, f"{list(shape)} of {dtype}", value)


def _check_steps(state: StateDict, shard: Shard) -> None:
    """Rows that miss steps must be at a step that the state's table of missed steps has."""
    for kind in ("rows", "gates"):
        prefix = f"view-{shard.slab.view}.{kind}."
        if f"{prefix}sums" not in state:
            continue
        base, entries = saved_range(
            {name.removeprefix(prefix): one for name, one in state.items() if name.startswith(prefix)}
        )
        for name in (f"{prefix}last", f"{prefix}current"):
            steps = state.get(name)
            if steps is not None and any_outside(steps, base, base + entries - 1):
                raise UserError(
                    f"the state's '{name}' has steps beyond those that it kept, {base} to {base + entries - 1}"
                )


def _fault(name: str, wanted: str, value: object) -> UserError:
    found = f"{list(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
    return UserError(f"the state's '{name}' is {found}, not {wanted}; it is of other tables or another optimizer")
