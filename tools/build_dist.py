"""Build the source archive, and from it the wheel.

    python tools/build_dist.py dist

Both are built with the setuptools of this environment, from a copy of the tree. Nothing is downloaded.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("pyproject.toml", "README.md", "LICENSE", "xgram_dist", "recipes")
SDIST = "import sys; from setuptools import build_meta; print(build_meta.build_sdist(sys.argv[1]))"


def build(out: Path) -> tuple[Path, Path]:
    """(archive, wheel) in the folder `out`."""
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="xgram-dist-build-") as folder:
        tree = Path(folder)
        for part in PARTS:
            if (ROOT / part).is_dir():
                shutil.copytree(ROOT / part, tree / part, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / part, tree)
        archive = out / _last_line([sys.executable, "-c", SDIST, str(out)], tree)
        pip = [sys.executable, "-m", "pip", "wheel", "--disable-pip-version-check", "--no-deps", "--no-build-isolation"]
        before = set(out.glob("*.whl"))
        _last_line([*pip, "--no-index", "--wheel-dir", str(out), str(archive)], tree)
        name = archive.name.removesuffix(".tar.gz")
        wheels = sorted(set(out.glob(f"{name}-*.whl")) - before) or sorted(out.glob(f"{name}-*.whl"))
    return archive, wheels[0]


def _last_line(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}build_dist.py: '{' '.join(command[1:4])} ...' failed")
    return done.stdout.splitlines()[-1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for both files")
    for file in build(parser.parse_args().out):
        print(f"{file}  {file.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
