"""A comparison as Slurm jobs, with stand-ins for sbatch and scontrol."""

from pathlib import Path

import pytest
import yaml
from train_helpers import small_tree

from xgram_dist.analysis.compare.runs import ComparisonState, plan_runs
from xgram_dist.cli.main import main

SBATCH = '#!/bin/sh\necho "$@" >> "$FAKE/submitted"\nwc -l < "$FAKE/submitted"\n'
SCONTROL = '#!/bin/sh\necho "JobId=1 JobName=x JobState=$(cat "$FAKE/state") Reason=None"\n'


@pytest.fixture
def here(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bin").mkdir()
    for name, text in (("sbatch", SBATCH), ("scontrol", SCONTROL)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("FAKE", str(tmp_path))
    (tmp_path / "site.yaml").write_text("gpus_per_node: 2\ncpus_per_node: 16\n")
    for method in ("vanilla", "xgram"):
        (tmp_path / f"{method}.yaml").write_text(yaml.safe_dump(small_tree(data, method)))
    return tmp_path


def compare(*words: str) -> int:
    fixed = ["--seeds", "0,1", "--steps", "4", "--slurm", "--site", "site.yaml", "--out", "out"]
    return main(["compare", "vanilla.yaml", "xgram.yaml", *fixed, *words])


def submitted(here: Path) -> list[str]:
    return (here / "submitted").read_text().splitlines()


def test_one_array_then_nothing_twice_then_what_ended_again(here: Path) -> None:
    assert compare() == 0
    assert len(submitted(here)) == 1
    script = (here / "out" / "array-0" / "0" / "slurm" / "job.sbatch").read_text()
    assert "#SBATCH --array=0-3\n" in script
    state, plan = ComparisonState(Path("out")), plan_runs(["vanilla.yaml", "xgram.yaml"], [], (0, 1), 4, None)
    assert [state.folder(run) for run in plan.runs] == [Path("out") / "array-0" / str(n) for n in range(4)]
    (here / "state").write_text("RUNNING")
    assert compare() == 0
    assert len(submitted(here)) == 1
    (here / "state").write_text("FAILED")
    assert compare() == 0
    again = submitted(here)[1:]
    assert [Path(words.split()[-1]).parent.parent.name for words in again] == ["0", "1", "2", "3"]
    text = (here / "out" / "compare.html").read_text()
    assert "0 of 4 runs complete" in text
    assert "not started" in text
