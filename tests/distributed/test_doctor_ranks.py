"""`xgram-dist doctor --ranks 2` on real gloo ranks: the exchange is timed, and losses are those of one process."""

import json
import subprocess
import sys


def test_two_ranks_pass(tmp_path):
    words = ["doctor", "--quick", "--seconds", "0.2", "--ranks", "2", "--folder", str(tmp_path / "runs")]
    out = tmp_path / "kept.json"
    done = subprocess.run(
        [sys.executable, "-m", "xgram_dist", *words, "--out", str(out)], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["check"]: row for row in json.loads(out.read_text())["rows"]}
    passed = (
        "clock skew",
        "gloo interface",
        "links between ranks",
        "lease",
        "exclusive creation",
        "repetition bit for bit",
    )
    for check in (*passed, "parity of 20 steps with the CPU (replicated, fp32)", "share of the exchange"):
        assert rows[check]["status"] == "pass", rows[check]
    assert rows["parity of 20 steps with the CPU (replicated, fp32)"]["figures"]["error"] < 1e-5
    assert rows["share of the exchange"]["figures"]["share"] > 0
