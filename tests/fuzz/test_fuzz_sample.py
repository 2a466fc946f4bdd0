"""A sample of `make fuzz`: no reader answers a damaged or odd file with an exception that is not ours."""

import subprocess
import sys
from pathlib import Path


def test_readers_answer_odd_files_with_our_errors_alone(tmp_path: Path) -> None:
    command = [sys.executable, str(Path(__file__).with_name("fuzz_readers.py"))]
    limits = ["--inputs", "100000", "--keep", str(tmp_path / "findings")]
    done = subprocess.run([*command, *limits], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.split(" inputs")[0].replace(",", "")) >= 100_000
