"""Every configuration gives the numbers kept for this kind of CPU, bit for bit.

Where none are kept, or with another torch, bits may differ: there, losses and norms are compared to a tolerance
(`LOOSE`), and a warning says so.
"""

import json
import warnings

import pytest
from configurations import CONFIGURATIONS
from golden_runs import GOLDENS, goldens_of_this_machine, kind_of_machine, make_workspace, result_of

FILES = sorted(GOLDENS.glob("*.json"))
KEPT = json.loads(
    (goldens_of_this_machine() if goldens_of_this_machine() in FILES else FILES[0]).read_text(encoding="utf-8")
)
CURVES = ("loss", "gradient_norm", "validation_loss")
LOOSE = {"fp32": 1e-3, "bf16": 1e-2}
"""By compute precision."""


@pytest.fixture(scope="session")
def workspace(tmp_path_factory):
    return make_workspace(tmp_path_factory.mktemp("golden"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_configuration_is_kept(file):
    assert sorted(json.loads(file.read_text(encoding="utf-8"))["configurations"]) == sorted(CONFIGURATIONS)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_numbers_are_the_kept_ones(workspace, name):
    expected, found = KEPT["configurations"][name], result_of(name, CONFIGURATIONS[name], workspace)
    here = kind_of_machine()
    made = {key: KEPT["header"][key] for key in here}
    if here == made:
        differing = [f"{what}: {_first_difference(found[what], expected[what])}" for what in CURVES]
        differing = [line for line in differing if not line.endswith("equal")]
        of_checkpoint = found["checkpoint"], expected["checkpoint"]
        differing += [
            f"checkpoint: {key}" for key in of_checkpoint[1] if of_checkpoint[0].get(key) != of_checkpoint[1][key]
        ]
        assert not differing, "\n".join([name, *differing])
        assert found == expected
        return
    loose = LOOSE[CONFIGURATIONS[name].recipe["train"]["precision"]]
    warnings.warn(f"goldens are of {made}, this is {here}: compared to {loose:g}, not bit for bit", stacklevel=1)
    for what in CURVES:
        values, kept = ([float.fromhex(one) for one in result[what]] for result in (found, expected))
        assert values == pytest.approx(kept, rel=loose), f"{name}: {what}"
    counts = [{key: one["tensors"] for key, one in result["checkpoint"].items()} for result in (found, expected)]
    assert counts[0] == counts[1], name


def _first_difference(found, expected):
    if found == expected:
        return "equal"
    for place, (mine, kept) in enumerate(zip(found, expected, strict=False)):
        if mine != kept:
            return f"number {place + 1} is {float.fromhex(mine)!r}, was {float.fromhex(kept)!r}"
    return f"{len(found)} numbers, were {len(expected)}"
