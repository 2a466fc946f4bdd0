"""`prepare` as a job array: the data set of one process, also when a task was killed."""

import json
import os
import random
import signal
import sys
from pathlib import Path

from cluster import wait_for
from train_helpers import make_documents

from xgram_dist.cli.main import main
from xgram_dist.cluster.slurm.commands import job_facts, job_state, run_command
from xgram_dist.data.manifest import read_manifest

ROOT = Path(__file__).resolve().parents[2]


def write_source(folder):
    """Three files, of a unit each."""
    folder.mkdir()
    texts = make_documents(400)
    chooser = random.Random(7)
    for number in range(3):
        lines = (json.dumps({"text": " ".join(chooser.choices(texts, k=20))}) + "\n" for _ in range(270))
        (folder / f"{number}.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder


def test_an_array_with_a_killed_task_gives_the_data_set_of_one_process(cluster, data, tmp_path):
    raw = write_source(tmp_path / "raw")
    words = ["--source", f"web={raw}", "--tokenizer", str(data / "tokenizer.json"), "--chunk-tokens", "512"]
    script = str(ROOT / "slurm" / "prepare.sbatch")
    variables = f"--export=ALL,PYTHON={sys.executable},PYTHONPATH={ROOT}"
    options = ["--parsable", "--cpus-per-task=1", f"--output={tmp_path}/%a.txt", variables]
    out = [*words, "--out", str(tmp_path / "out")]
    parts = run_command(["sbatch", *options, "--array=0-2", "--nodelist=n1", script, *out]).strip()
    merge = run_command(
        ["sbatch", *options, "--array=0", f"--dependency=afterok:{parts}", script, "merge", *out]
    ).strip()
    wait_for(lambda: cluster.processes("n1", "--part 1/3"), 60)
    assert not (tmp_path / "out" / "dataset.json").exists()
    for pid in cluster.processes("n1", "--part 1/3"):
        if "bash" not in Path(f"/proc/{pid}/cmdline").read_text():
            os.kill(pid, signal.SIGKILL)
    wait_for(lambda: job_state(f"{merge}_0") == "COMPLETED", 120, lambda: job_facts(f"{merge}_0"))
    facts = job_facts(f"{parts}_1")
    assert facts is not None
    assert facts["Restarts"] == "1"
    assert main(["prepare", *words, "--out", str(tmp_path / "one"), "--workers", "1"]) == 0
    assert read_manifest(tmp_path / "out").fingerprint == read_manifest(tmp_path / "one").fingerprint
    assert (tmp_path / "out" / "counts.npz").read_bytes() == (tmp_path / "one" / "counts.npz").read_bytes()
