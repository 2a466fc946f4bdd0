"""Site files: every key checked by name; the examples in the repository are whole."""

from pathlib import Path

import pytest
import yaml

from xgram_dist.cluster.slurm.site import Site, load_site
from xgram_dist.errors import UserError

SITES = Path(__file__).resolve().parents[3] / "slurm" / "sites"


def site(tmp_path, **keys):
    path = tmp_path / "site.yaml"
    path.write_text(yaml.safe_dump(keys))
    return load_site(str(path))


@pytest.mark.parametrize("path", sorted(SITES.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_examples_are_site_files(path):
    assert load_site(str(path)).ranks == 8


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"partitoin": "gpu"}, "unknown key 'partitoin'; did you mean 'partition'?"),
        ({"partition": "gpu\n#SBATCH --wrap=x"}, "partition = "),
        ({"partition": "a b"}, "partition = 'a b'"),
        ({"environment": {"A B": "1"}}, "environment"),
        ({"environment": {"A": "1\nrm"}}, "environment"),
        ({"setup": ["one\ntwo"]}, "setup"),
        ({"sbatch": ["rm -rf"]}, "sbatch"),
        ({"time": "tomorrow"}, "time = 'tomorrow'"),
        ({"gpus_per_node": 0}, "gpus_per_node = 0 needs ranks_per_node"),
        ({"gpus_per_node": 4, "ranks_per_node": 8}, "ranks_per_node = 8 is more than gpus_per_node = 4"),
        ({"cpus_per_node": 4}, "cpus_per_node = 4 leaves less than one"),
        ({"gpus_per_node": 4}, "gpus_per_node = 4 needs cpus_per_node"),
        ({"launcher": "mpirun"}, "launcher = 'mpirun'"),
    ],
)
def test_a_wrong_key_or_value_is_named(tmp_path, keys, said):
    with pytest.raises(UserError) as error:
        site(tmp_path, **keys)
    assert said in str(error.value)


def test_a_missing_site_file_says_how_to_name_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="--site FILE"):
        load_site(None)


def test_every_key_is_in_the_docs_with_its_meaning():
    page = (SITES.parents[1] / "docs" / "slurm.md").read_text(encoding="utf-8")
    for name, field in Site.model_fields.items():
        meaning = " ".join((field.description or "").split())
        assert any(
            line.startswith(f"| `{name}` |") and line.endswith(f"| {meaning} |") for line in page.splitlines()
        ), name
