"""The wheel in an environment that has the packages of the core alone, away from this tree."""

import importlib.util
import json
import random
import re
import tarfile
import tomllib
import zipfile
from pathlib import Path

from core_environment import CoreEnvironment
from packaging.requirements import Requirement

from xgram_dist import __version__
from xgram_dist.train.metrics_file import FILE, read_metrics

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = ["boto3", "deepspeed", "lm_eval", "matplotlib", "mlflow", "pyarrow", "streaming", "transformers", "wandb"]
SMALL = ["model.vocabulary=400", "model.sequence_length=64", "train.steps=3", "train.global_batch=4"]
SMALL += ["train.micro_batch=2", "train.validation_sequences=2", "memory.routing.vip=20", "memory.routing.buckets=4"]

# In one process: what needs a package of an extra says which. `find` imports nothing.
QUESTIONS = f"""
import importlib.util, json, sys
from xgram_dist.cli.main import main
import xgram_dist
found = [name for name in {EXTRAS} if importlib.util.find_spec(name) is not None]
print(json.dumps([found, xgram_dist.__file__]), flush=True)
main(["plan", "recipes/0.73b/xgram-1x-50.yaml", "--json"])
print()
main(["report", "runs/tiny-xgram", "--picture", "losses.png"])
main(["prepare", "--source", "text=rows.parquet", "--tokenizer", "data/demo/tokenizer.json", "--out", "data/rows"])
main(["prepare", "--source", "text=text", "--train-bpe", "400", "--out", "s3://bucket/data"])
main(["train", "recipes/tiny/xgram.yaml", "parallel.engine=deepspeed", "--folder", "runs/other", *{SMALL}])
main(["train", "recipes/tiny/xgram.yaml", "eval.every=1", "--folder", "runs/other", *{SMALL}])
main(["train", "recipes/tiny/xgram.yaml", "train.loggers=[wandb]", "--folder", "runs/other", *{SMALL}])
main(["train", "recipes/tiny/xgram.yaml", "train.loggers=[mlflow]", "--folder", "runs/other", *{SMALL}])
"""


def write_documents(folder: Path) -> None:
    folder.mkdir()
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghij", k=draw.randint(2, 7))) for _ in range(300)]
    lines = [json.dumps({"text": " ".join(draw.choices(words, k=200))}) for _ in range(60)]
    (folder / "part.jsonl").write_text("\n".join(lines))


def test_the_installed_wheel_prepares_plans_and_trains_from_its_own_recipes(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("build_dist", ROOT / "tools" / "build_dist.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    archive, wheel = tool.build(tmp_path / "dist")
    recipes = {str(path.relative_to(ROOT)) for path in (ROOT / "recipes").rglob("*") if path.is_file()}
    with zipfile.ZipFile(wheel) as built, tarfile.open(archive) as source:
        assert {f"xgram_dist/{path}" for path in recipes} <= set(built.namelist())
        prefix = f"xgram_dist-{__version__}/xgram_dist/"
        assert {f"{prefix}{path}" for path in recipes} <= set(source.getnames())
        assert not [name for name in built.namelist() if name.startswith(("tests", "tools", "docs", "recipes"))]

    environment = CoreEnvironment(tmp_path / "environment", wheel)
    here = tmp_path / "here"
    here.mkdir()
    write_documents(here / "text")

    def run(*words: str) -> str:
        done = environment.run(*words, cwd=here)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "xgram-dist" in run("xgram-dist", "--help")
    run("xgram-dist", "recipes", "tiny", "0.73b", "--copy", "recipes")
    prepare = ["prepare", "--source", "text=text", "--train-bpe", "400", "--chunk-tokens", "64", "--validation", "0.1"]
    run("xgram-dist", *prepare, "--out", "data/demo")
    run("xgram-dist", "train", "recipes/tiny/xgram.yaml", *SMALL)
    records = read_metrics(here / "runs" / "tiny-xgram" / FILE).records
    assert records[-1]["kind"] == "end"
    assert records[-1]["complete"]

    (here / "rows.parquet").write_bytes(b"PAR1")
    done = environment.run("python", "-c", QUESTIONS, cwd=here)
    first, _, plan = done.stdout.partition("\n")
    assert json.loads(plan)["table_parameters"] == 1_166_868_480
    found, package = json.loads(first)
    assert found == []
    assert package.startswith(str(tmp_path / "environment"))
    wanted = ["plots", "parquet", "s3", "deepspeed", "eval", "wandb", "mlflow"]
    errors = done.stderr.splitlines()
    assert [extra for extra in wanted if sum(f"pip install 'xgram-dist[{extra}]'" in e for e in errors) == 1] == wanted
    assert len(errors) == len(wanted), done.stderr


def test_the_docs_name_every_package_of_the_core_and_every_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    core, extras = re.findall(r"\n\|---\|.*\n((?:\|.*\n)+)", (ROOT / "docs" / "install.md").read_text())
    named = [name for row in core.splitlines() for name in row.split("|")[1].strip().split(", ")]
    assert sorted(named) == sorted(Requirement(line).name for line in project["dependencies"])
    named = [name for row in extras.splitlines() for name in re.findall(r"`([^`]+)`", row.split("|")[1])]
    assert sorted(named) == sorted(project["optional-dependencies"])
    lock = {line.partition("==")[0] for line in (ROOT / "requirements.lock").read_text().splitlines()}
    for extra, lines in project["optional-dependencies"].items():
        assert extra == "serve" or {re.split(r"[\[<>=]", line)[0].lower() for line in lines} <= lock, extra
