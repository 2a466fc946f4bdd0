"""Keys of n-grams and exchange plans of all ranks by plain loops: what the planner must find, number for number."""

from typing import Any

import numpy as np

from xgram_dist.tables.ngrams import NgramHash, NgramKeys


def slow_keys(
    hashing: NgramHash, folding: np.ndarray, tokens: np.ndarray, end_of_text: int | None = None
) -> np.ndarray:
    """[..., T] -> [..., T, K], position by position."""
    keys = np.array(
        [_keys_of_sequence(hashing, folding, line, end_of_text) for line in tokens.reshape(-1, tokens.shape[-1])]
    )
    return keys.reshape(*tokens.shape, hashing.num_keys)


def _keys_of_sequence(hashing: NgramHash, folding: np.ndarray, line: np.ndarray, end: int | None) -> list[list[int]]:
    found = []
    pad = hashing.outside if hashing.pad_token is None else int(folding[hashing.pad_token])
    for t in range(len(line)):
        keys, first_row = [], 0
        for of_layer, layer_rows in zip(hashing.multipliers, hashing.rows, strict=True):
            for order, multipliers, heads in zip(hashing.orders, of_layer, layer_rows, strict=True):
                mixed = 0
                for steps in range(order):
                    between = [] if end is None else [token for token in line[max(0, t - steps) : t] if token == end]
                    outside = t < steps or bool(between)
                    mixed ^= (pad if outside else int(folding[line[t - steps]])) * multipliers[steps]
                for rows in heads:
                    keys.append(first_row + mixed % rows)
                    first_row += rows
        found.append(keys)
    return found


def listed_keys(keys: NgramKeys, tokens: np.ndarray) -> np.ndarray:
    """The keys [..., T, K] by way of the distinct n-grams, as the planner finds them."""
    grams, columns, first_row = keys.grams(tokens), [], 0
    for layer in range(len(keys.hash.multipliers)):
        for order, of_order in enumerate(grams):
            for rows, row_G in zip(keys.hash.rows[layer][order], keys.head_rows(layer, order, of_order), strict=True):
                columns.append(first_row + row_G[of_order.index])
                first_row += rows
    return np.stack(columns, axis=-1)


def slow_plans(keys: list[list[np.ndarray]], zero_copy: bool) -> list[list[dict[str, Any]]]:
    """[rank][window] -> the fields of its plan. `keys`: [rank][window], any shape. Rank `key % ranks` owns a key."""
    ranks, windows = len(keys), len(keys[0])
    distinct = [[_by_owner(keys[r][w], r, ranks) for w in range(windows)] for r in range(ranks)]
    plans = []
    for me in range(ranks):
        others = [r for r in range(ranks) if r != me]
        wanted = [[(r, k) for r in (me, *others) for k in distinct[r][w] if k % ranks == me] for w in range(windows)]
        touched = [
            _touched([k // ranks for r, k in of if r != me], [k // ranks for r, k in of if r == me]) for of in wanted
        ]
        step_rows = sorted({row for of_window in touched for row in of_window})
        of_rank = []
        for w in range(windows):
            index = [touched[w].index(key // ranks) for _, key in wanted[w]]
            num_own = sum(r == me for r, _ in wanted[w])
            gathered = index[num_own:] if zero_copy else index
            by_row = sorted(range(len(gathered)), key=lambda n: (gathered[n], n))
            rows = sorted(set(gathered))
            own = distinct[me][w]
            working_set = [row * ranks + me for row in touched[w]] + own[num_own:] if zero_copy else own
            of_rank.append(
                {
                    "keys": working_set,
                    "slots": np.vectorize(working_set.index, otypes=[np.int64])(keys[me][w]).tolist(),
                    "num_distinct": len(own),
                    "requested": [sum(k % ranks == r for k in own) for r in range(ranks)],
                    "served": [sum(k % ranks == me for k in distinct[r][w]) for r in range(ranks)],
                    "num_local": len(touched[w]) if zero_copy else num_own,
                    "num_remote_tokens": len(own) - num_own,
                    "touched": touched[w],
                    "num_remote": len({k for r, k in wanted[w] if r != me}),
                    "remote": index[num_own:],
                    "local": None if zero_copy else index[:num_own],
                    "token": by_row,
                    "row_starts": [min(i for i, n in enumerate(by_row) if gathered[n] == row) for row in rows],
                    "step_rows": None if windows == 1 else step_rows,
                    "index": None if windows == 1 else [step_rows.index(row) for row in touched[w]],
                }
            )
        plans.append(of_rank)
    return plans


def _by_owner(keys: np.ndarray, me: int, ranks: int) -> list[int]:
    return sorted(set(keys.ravel().tolist()), key=lambda key: (key % ranks != me, key % ranks, key))


def _touched(of_remote: list[int], of_local: list[int]) -> list[int]:
    return [*sorted(set(of_remote)), *sorted(set(of_local) - set(of_remote))]
