"""`compare --slurm` on a real Slurm: one array, then the page of what it left."""

import json

from slurm_helpers import log, wait_for_end, write_recipe, write_site

from xgram_dist.cli.main import main


def test_a_comparison_as_an_array_and_its_page_afterwards(cluster, data, tmp_path):
    recipe, out = write_recipe(tmp_path, data), tmp_path / "out"
    words = ["compare", recipe, "--seeds", "0,1", "--steps", "4", "--out", str(out), "--slurm", "--no-preflight"]
    words += ["--site", write_site(tmp_path, pace=0)]
    assert main(words) == 0
    for task in ("0", "1"):
        run = out / "array-0" / task
        job = json.loads((run / "slurm" / "jobs.json").read_text())["train"]
        assert wait_for_end(job, run) == "COMPLETED", log(run)
    assert main(words) == 0  # nothing is left to submit
    assert not (out / "array-1").exists()
    (found,) = json.loads((out / "results.json").read_text())["recipes"]
    assert found["complete"] == 2
    assert found["validation_perplexity"]["standard_error"] > 0
    assert "2 of 2 runs complete" in (out / "compare.html").read_text()
