"""The paper's scripts start what they say, and it fits GPUs of 80 GB by the plan."""

import importlib.util
import os
import re
import subprocess
from pathlib import Path

import pytest

from xgram_dist.cluster.slurm.site import Site
from xgram_dist.cluster.slurm.submit import check_memory, usable_node_counts
from xgram_dist.config import load_config

ROOT = Path(__file__).resolve().parents[3]
SCRIPTS = sorted((ROOT / "slurm" / "paper").glob("*.sbatch"))


def command(script, tmp_path, *words):
    """What a rank of the script runs."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nfor word; do echo "$word"; done\n')
    python.chmod(0o755)
    environment = {**os.environ, "PYTHON": str(python)}
    done = subprocess.run(
        ["bash", str(script), *words], capture_output=True, text=True, cwd=ROOT, env=environment, check=True
    )
    found = done.stdout.splitlines()
    assert importlib.util.find_spec(found[found.index("-m") + 1]) is not None
    return found[found.index("--") + 1 :]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
@pytest.mark.parametrize("recipe", ["vanilla", "xgram-4x-100", None])
def test_the_papers_runs_fit(script, recipe, tmp_path):
    size, nodes = re.findall(r"^([\d.]+b)-(\d)-nodes$", script.stem)[0]
    given = [f"recipes/{size}/{recipe}.yaml", "train.steps=7"] if recipe else []
    words = command(script, tmp_path, *given)
    path, *overrides = words[words.index("train") + 1 : words.index("--folder")]
    config = load_config(ROOT / path, overrides)
    assert config.name == f"{size}-{recipe or 'xgram-2x-50'}"
    assert words[words.index("--folder") + 1] == f"runs/{config.name}"
    assert (config.train.steps == 7) == bool(recipe)
    counts = usable_node_counts(config, int(nodes), int(nodes), 8)
    check_memory(config, counts, Site(memory_per_gpu="80GB"))
    assert f"#SBATCH --nodes={nodes}\n" in script.read_text()
