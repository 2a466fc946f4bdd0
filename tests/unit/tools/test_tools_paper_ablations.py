"""tools/paper_ablations.py: effects are differences of losses by seed, and a verdict needs two standard errors."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from tools_helpers import ROOT, load_tool

from xgram_dist.config import load_config

tool = load_tool("paper_ablations")


def comparison(baseline: str, perplexities: dict[str, list[float]]) -> dict[str, object]:
    recipes = [
        {"recipe": name, "seeds": [{"seed": s, "validation_perplexity": p} for s, p in enumerate(values)]}
        for name, values in perplexities.items()
    ]
    return {"baseline": baseline, "recipes": recipes}


def test_every_variant_of_the_paper_has_a_recipe() -> None:
    names = {load_config(path).name for path in (ROOT / "recipes" / "ablations").rglob("*.yaml") if path.stem != "base"}
    for variants in tool.PAPER.values():
        assert set(variants) <= names


def test_effects_are_differences_by_seed(tmp_path: Path) -> None:
    values = {name: [100.0, 110.0, 90.0] for name in tool.PAPER["hashing-vip-only"]}
    values["hashing-hybrid-1x"] = [102.0, 112.3, 91.8]  # 2 % worse with each seed
    values["hashing-hybrid-2x"] = [103.0, 113.4, 92.6]  # worse, where the paper is better
    values["hashing-no-copies"] = [104.0, 100.0, 95.0]
    file = tmp_path / "results.json"
    file.write_text(json.dumps(comparison("hashing-vip-only", values)))
    out = tmp_path / "effects.json"
    command = [sys.executable, str(ROOT / "tools" / "paper_ablations.py"), str(file), "--json", str(out)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = {one["variant"]: one for one in json.loads(out.read_text())}
    assert found["hashing-hybrid-1x"]["measured"] == pytest.approx(math.log(1.02), abs=1e-3)
    assert found["hashing-hybrid-1x"]["paper"] == pytest.approx(math.log(18.419 / 18.310))
    verdicts = {name: one["verdict"] for name, one in found.items()}
    assert verdicts == {
        "hashing-hybrid-1x": "holds",
        "hashing-no-row-gates": "within the error",
        "hashing-no-copies": "within the error",
        "hashing-hybrid-2x": "opposite",
    }
    assert "| hashing-hybrid-1x | hashing-vip-only | +0.0059 | +0.020" in printed


def test_an_effect_that_the_paper_does_not_have() -> None:
    assert tool.verdict(1e-5, 0.1, 0.01) == "none in the paper, worse here"
    assert tool.verdict(1e-5, -0.1, 0.01) == "none in the paper, better here"
    assert tool.verdict(1e-5, 0.1, 0.1) == "none in the paper, none here"
