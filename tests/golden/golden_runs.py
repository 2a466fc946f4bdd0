"""Runs of the command line, and the numbers they leave: what goldens/KIND.json is made of, for each kind of CPU.

    python tests/golden/golden_runs.py            run every configuration and write the file of this CPU (`make golden`)
    python tests/golden/golden_runs.py NAME ..    run these and replace their numbers alone

Nothing of the package is imported: commands, keys of recipes and files on the disk are all that is used. Commands run
in a workspace folder with relative paths, so that no path of this machine gets into what they write.
"""

import atexit
import functools
import hashlib
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

import yaml
from configurations import CONFIGURATIONS, STEPS, Configuration
from digest import digests

sys.path.append(str(Path(__file__).resolve().parents[1] / "resume"))
from forked import Zygote

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
GOLDENS = HERE / "goldens"
"""A file for each kind of CPU: the order of additions, and so the bits, depend on its instructions."""
TOKENIZER = HERE / "tokenizer.json"
SYLLABLES = ["ta", "ble", "ro", "w", "gra", "di", "ent", "ve", "ctor", "ran", "k", "ste", "p", "é", "数", "据", "hash"]
WORDS, DOCUMENTS = 240, 160


def environment() -> dict[str, str]:
    """Of a command: this tree before any that is installed, and one thread a process."""
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def command(words: list[str], workspace: Path, timeout: float = 1200.0) -> str:
    """Run `python WORDS` in the workspace; its output. A failure is an error with the output's end."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=workspace,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"'{' '.join(words)}' ended with {done.returncode}:\n{done.stdout[-4000:]}")
    return done.stdout


def make_documents() -> list[str]:
    """The same each time: words of some syllables, a few of them frequent and most of them rare."""
    chooser = random.Random(5)
    words = ["".join(chooser.choices(SYLLABLES, k=chooser.randint(1, 4))) for _ in range(WORDS)]
    shares = [1 / (1 + place) for place in range(WORDS)]
    return [" ".join(chooser.choices(words, shares, k=chooser.randint(20, 80))) for _ in range(DOCUMENTS)]


def make_workspace(folder: Path) -> Path:
    """The folder, with the data set of all configurations in `data`: tokens of tokenizer.json, a tenth held out."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in make_documents())
    (folder / "raw.jsonl").write_text(lines, encoding="utf-8")
    words = ["--tokenizer", str(TOKENIZER), "--chunk-tokens", "128", "--validation", "0.1", "--workers", "1"]
    command(["-m", "xgram_dist", "prepare", "--source", "web=raw.jsonl", *words, "--out", "data"], folder)
    return folder


def train(workspace: Path, name: str, recipe: dict[str, Any], ranks: int, *more: str) -> Path:
    """Run a recipe in the workspace, or go on with it; its run folder."""
    (workspace / f"{name}.yaml").write_text(yaml.safe_dump({"name": name, **recipe}), encoding="utf-8")
    words = ["train", f"{name}.yaml", "--ranks", str(ranks), "--folder", name, *more]
    run_words(words, workspace)
    return workspace / name


def run_words(words: list[str], workspace: Path, timeout: float = 600) -> None:
    """`xgram-dist WORDS` in the workspace, by forking a process that has imported everything: a start of several ranks
    takes longer than these runs."""
    log = workspace / f"{uuid.uuid4().hex}.log"
    code = zygote().start(words, log, workspace).wait(timeout)
    if code:
        raise RuntimeError(f"'{' '.join(words)}' ended with {code}:\n{log.read_text(encoding='utf-8')[-4000:]}")


@functools.cache
def zygote() -> Zygote:
    started = Zygote(deepspeed=True)
    atexit.register(started.close)
    return started


def records(run: Path, kind: str) -> list[dict[str, Any]]:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def checkpoint_of(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def result_of(name: str, configuration: Configuration, workspace: Path) -> dict[str, Any]:
    """Run a configuration; loss and gradient norm of every step, the loss on held-out data, digests of the end."""
    run = train(workspace, name, configuration.recipe, configuration.ranks)
    steps = records(run, "train")
    assert [record["step"] for record in steps] == list(range(1, STEPS + 1)), "a step has no record"
    return {
        "loss": [float(record["loss"]).hex() for record in steps],
        "gradient_norm": [float(record["gradient_norm"]).hex() for record in steps],
        "validation_loss": [float(record["loss"]).hex() for record in records(run, "validation")],
        "checkpoint": digests(checkpoint_of(run, STEPS)),
    }


def kind_of_machine() -> dict[str, str]:
    """What decides the bits beside the code: torch, and the kind of CPU with the instructions it has."""
    import torch

    facts = {"torch": torch.__version__, "cpu_capability": torch.backends.cpu.get_cpu_capability()}
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    fields = dict(line.split(":", 1) for line in reversed(lines) if ":" in line)
    of = {key.strip(): value.strip() for key, value in fields.items()}
    flags = hashlib.sha256(of.get("flags", "").encode()).hexdigest()[:12]
    name = of.get("model name", platform.processor() or platform.machine())
    return {**facts, "cpu": f"{name}, family {of.get('cpu family')}, model {of.get('model')}, flags {flags}"}


def goldens_of_this_machine() -> Path:
    """The file of this kind of CPU, which may not exist."""
    kind = kind_of_machine()
    return GOLDENS / f"{kind['cpu_capability']}-{kind['cpu'].rpartition(' ')[2]}.json"


def _commit() -> str:
    """Of the last change to the package."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    changed = git("status", "--porcelain", "--", "xgram_dist")
    return git("log", "-1", "--format=%H", "--", "xgram_dist") + (" with changes" if changed else "")


def main() -> int:
    header = {"made_by": "make golden", **kind_of_machine(), "python": platform.python_version(), "commit": _commit()}
    names, results, file = sys.argv[1:], {}, goldens_of_this_machine()
    if names:
        if not file.exists():
            raise SystemExit(f"there is no {file.name}: make all of it first, without a name")
        kept = json.loads(file.read_text(encoding="utf-8"))
        differing = [key for key, value in kind_of_machine().items() if kept["header"][key] != value]
        if differing:
            raise SystemExit(f"{file.name} was made with another {', '.join(differing)}; make all of it anew")
        header, results = kept["header"], kept["configurations"]
    with tempfile.TemporaryDirectory(prefix="golden-") as folder:
        workspace = make_workspace(Path(folder))
        for name in names or CONFIGURATIONS:
            start = time.monotonic()
            results[name] = result_of(name, CONFIGURATIONS[name], workspace)
            losses = [float.fromhex(results[name]["loss"][place]) for place in (0, -1)]
            seconds = time.monotonic() - start
            print(f"{name:40} loss {losses[0]:.4f} -> {losses[1]:.4f}  {seconds:5.1f} s", flush=True)
    file.write_text(json.dumps({"header": header, "configurations": results}, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
