"""From `submit` to a finished run, through all that ends a job before its time.

Each run ends with the weights of a run that was never disturbed: to the last bit where the layout is the same.
"""

import pytest
from slurm_helpers import (
    assert_same_weights,
    log,
    outcomes,
    submit,
    undisturbed,
    wait_for_end,
    write_recipe,
    write_site,
)


@pytest.fixture(scope="module")
def expected(data, tmp_path_factory):
    """On two ranks, never disturbed."""
    folder = tmp_path_factory.mktemp("expected")
    return undisturbed(write_recipe(folder, data), folder / "run", ranks=2)


def test_two_nodes_with_sharded_tables_and_deepspeed_train_to_the_end(cluster, data, tmp_path):
    recipe, run = write_recipe(tmp_path, data, engine="deepspeed"), tmp_path / "run"
    job = submit(recipe, write_site(tmp_path, pace=0, ranks_per_node=2), run, "--nodes", "2")
    other = undisturbed(recipe, tmp_path / "other", ranks=4)
    assert wait_for_end(job, run) == "COMPLETED", log(run)
    assert outcomes(run) == ["complete"]
    assert_same_weights(run, other)
    print(log(run))
