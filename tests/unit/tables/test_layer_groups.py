"""Which layers share a message of the exchange."""

import pytest

from xgram_dist.tables.layout import ALL_LAYERS, Table, TableLayout


@pytest.mark.parametrize(
    ("layers", "most", "groups"),
    [
        ([0, 1, 2, 3], 8, [[0], [1], [2], [3]]),
        ([0, 1, 2, 3, 4], 2, [[0, 1], [2, 3, 4]]),
        ([3, 1, 1, 7], 2, [[1], [3, 7]]),
        ([5, ALL_LAYERS], 1, [[ALL_LAYERS, 5]]),
        ([], 8, []),
    ],
)
def test_groups_are_consecutive_layers_of_nearly_equal_number(
    layers: list[int], most: int, groups: list[list[int]]
) -> None:
    tables = tuple(Table(layer, "v", view, 4) for view, layer in enumerate(layers))
    assert TableLayout(tables, 10, hashed=False).layer_groups(most) == groups
