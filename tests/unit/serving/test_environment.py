"""What vLLM imports of this package needs no package that `make serving` leaves out."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
# serving/model.py imports vLLM; these are what it takes from this package.
MODULES = [
    "xgram_dist.serving.plugin",
    "xgram_dist.serving.history",
    "xgram_dist.serving.mapped_rows",
    "xgram_dist.serving.recent_vectors",
    "xgram_dist.inference.hf.decoder",
    "xgram_dist.inference.hf.configuration_xgram",
    "xgram_dist.bench.memory_limit",
]
SCRIPT = """
import importlib, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name in absent:
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)

absent, modules = sys.argv[1].split(), sys.argv[2].split()
sys.meta_path.insert(0, Absent())
for module in modules:
    importlib.import_module(module)
"""


def names(lines: list[str]) -> set[str]:
    return {re.split(r"[\[<>=; ]", line)[0].lower() for line in lines if line and not line.startswith("#")}


def test_the_plugin_imports_nothing_that_the_environment_of_serving_lacks() -> None:
    installed = names((ROOT / "tools/serving/requirements.txt").read_text().splitlines())
    core = names(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"])
    absent = {name.replace("-", "_") for name in core - installed}
    assert {"crc32c", "gigatoken"} <= absent
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, " ".join(absent), " ".join(MODULES)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-1000:]
