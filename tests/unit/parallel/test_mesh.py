"""Which ranks share an axis, for every combination of degrees: against coordinates computed rank by rank."""

import itertools

import pytest
import tiny_models as tiny

from xgram_dist.errors import UserError
from xgram_dist.parallel import mesh as mesh_module
from xgram_dist.parallel.mesh import build_mesh
from xgram_dist.parallel.process_group import ProcessGroup

AXES = ("data", "tensor", "replicate", "shard", "rows", "replicas", "batch", "context", "pipeline")


def groups_of_a_rank(monkeypatch, rank, world, **parallel):
    """The members of this rank's group of each axis."""

    def build_axis(world, groups):
        assert sorted(itertools.chain(*groups)) == list(range(world.size)), "each rank is in one group of an axis"
        members = next(group for group in groups if world.rank in group)
        return ProcessGroup(members.index(world.rank), len(members), tuple(members))

    monkeypatch.setattr(mesh_module, "_build_axis", build_axis)
    config = tiny.config(parallel={"engine": "hsdp", **parallel}, train={"global_batch": 24})
    mesh = build_mesh(config, ProcessGroup(rank, world, tuple(range(world))))
    return {axis: getattr(mesh, axis).group or (rank,) for axis in AXES}


@pytest.mark.parametrize(
    ("pipeline", "batch", "context", "tensor"), [(1, 2, 2, 2), (2, 1, 2, 2), (2, 2, 2, 1), (2, 2, 1, 2), (3, 2, 2, 2)]
)
def test_axes_are_the_product_of_the_world(monkeypatch, pipeline, batch, context, tensor):
    world = pipeline * batch * context * tensor
    places = list(itertools.product(*(range(n) for n in (pipeline, batch, context, tensor))))
    free = {"pipeline": (0,), "batch": (1,), "context": (2,), "tensor": (3,), "data": (1, 2)}
    for rank in range(world):
        groups = groups_of_a_rank(monkeypatch, rank, world, pipeline=pipeline, context=context, tensor=tensor)
        for axis, dims in free.items():
            same = [
                other
                for other in range(world)
                if all(places[other][d] == places[rank][d] for d in range(4) if d not in dims)
            ]
            assert list(groups[axis]) == same, (axis, rank)
        assert groups["shard"] == groups["rows"] == groups["data"]


def test_replicas_of_the_backbone_cross_the_context(monkeypatch):
    groups = groups_of_a_rank(monkeypatch, 5, 8, context=2, replicate=2)
    assert groups["batch"] == (1, 3, 5, 7)
    assert groups["context"] == (4, 5)
    assert groups["replicate"] == (1, 5)
    assert groups["shard"] == (4, 5, 6, 7)


def test_degrees_that_do_not_divide_the_ranks_are_named(monkeypatch):
    with pytest.raises(UserError, match=r"6 rank.*parallel.tensor = 1 x parallel.pipeline = 2 x parallel.context = 2"):
        groups_of_a_rank(monkeypatch, 0, 6, pipeline=2, context=2)
