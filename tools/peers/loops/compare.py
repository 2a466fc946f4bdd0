"""Lines of code and step time of one training loop with xgram_dist.library and with torchrec.

python tools/peers/loops/compare.py --ranks 2
"""

import argparse
import ast
import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
LOOPS = {"xgram_dist.library": ("with_library.py", Path(sys.executable)), "torchrec": ("with_torchrec.py", None)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3, help="of both in turn; the best of each counts (default 3)")
    args = parser.parse_args()
    peers = HERE.parent / ".venv" / "bin" / "python"
    if not peers.exists():
        parser.error("tools/peers/.venv does not exist; make it with 'make peers'")
    found: dict[str, list[float]] = {name: [] for name in LOOPS}
    for _ in range(args.rounds):
        for name, (file, python) in LOOPS.items():
            command = [str(python or peers), "-m", "torch.distributed.run", "--standalone"]
            command += ["--nproc-per-node", str(args.ranks), str(HERE / file)]
            threads = str(max(1, (os.cpu_count() or 1) // args.ranks))
            environment = {**os.environ, "OMP_NUM_THREADS": threads}
            done = subprocess.run(command, capture_output=True, text=True, env=environment)
            if done.returncode:
                sys.exit(f"{name}: {done.stderr[-2000:]}")
            figures = json.loads(done.stdout.splitlines()[-1])
            found[name].append(figures["step_ms"])
            print(name, figures, flush=True)
    for name, (file, _) in LOOPS.items():
        print(f"{name}: {statements(HERE / file)} lines, {min(found[name]):.1f} ms a step")


def statements(path: Path) -> int:
    """Lines of code: without blank lines, comments and docstring."""
    text = path.read_text()
    first = ast.parse(text).body[0]
    lines = text.splitlines()[first.end_lineno if isinstance(first, ast.Expr) else 0 :]
    return sum(bool(line.strip()) and not line.strip().startswith("#") for line in lines)


if __name__ == "__main__":
    main()
