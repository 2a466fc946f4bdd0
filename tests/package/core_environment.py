"""An environment that holds what `pip install xgram-dist` would bring, without downloading it.

Of this environment's packages, those that the core requires, and what they require, are linked into a new one. Nothing
else can be imported there: not the packages of extras, not this tree.
"""

import os
import subprocess
import sys
import venv
from collections.abc import Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path, PurePosixPath

from packaging.requirements import Requirement


def requirements(dist: Distribution) -> Iterator[Requirement]:
    for line in dist.requires or ():
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement


def closure(names: list[str]) -> dict[str, Distribution]:
    """By name: these distributions and what they require."""
    found: dict[str, Distribution] = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop().lower().replace("_", "-")
        if name not in found:
            found[name] = distribution(name)
            waiting += [requirement.name for requirement in requirements(found[name])]
    return found


class CoreEnvironment:
    def __init__(self, folder: Path, wheel: Path):
        venv.create(folder, symlinks=True, with_pip=False)
        self.bin = folder / "bin"
        site = next(folder.glob("lib/python3*/site-packages"))
        pip = [sys.executable, "-m", "pip", "--python", str(self.bin / "python"), "install", "-q", "--no-deps"]
        subprocess.run([*pip, "--no-index", "--disable-pip-version-check", str(wheel)], check=True, capture_output=True)
        installed = next(Distribution.discover(name="xgram-dist", path=[str(site)]))
        self.packages = closure([requirement.name for requirement in requirements(installed)])
        for dist in self.packages.values():
            _link(dist, site)

    def run(self, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": f"{self.bin}:{os.defpath}", "OMP_NUM_THREADS": "1", "HOME": str(cwd)}
        return subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)


def _link(dist: Distribution, site: Path) -> None:
    """Files and folders of a distribution; folders without __init__.py may be shared, so what is in them is linked."""
    for file in dist.files or ():
        path = PurePosixPath(file)
        if path.is_absolute() or ".." in path.parts:
            continue  # programs
        depth = 1
        while depth < len(path.parts) and not path.parts[0].endswith(("-info", ".libs")):
            if Path(str(dist.locate_file(PurePosixPath(*path.parts[:depth], "__init__.py")))).exists():
                break
            depth += 1
        part = PurePosixPath(*path.parts[:depth])
        target = Path(str(dist.locate_file(part)))
        if target.exists() and not os.path.lexists(site / part):
            (site / part).parent.mkdir(parents=True, exist_ok=True)
            (site / part).symlink_to(target)
