"""If these fail, a command that is killed leaves processes behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

IN_MULTIPROCESSING = """
import multiprocessing, os, sys, time
from xgram_dist.parallel.launch import end_with_starter

def work(late):
    if late:
        os.kill(os.getppid(), 9)  # the starter is gone before the child asks
        time.sleep(0.2)
    end_with_starter()
    print(os.getpid(), flush=True)
    time.sleep(60)

if __name__ == "__main__":
    multiprocessing.get_context("spawn").Process(target=work, args=(sys.argv[1] == "late",)).start()
    time.sleep(60)
"""


def wait_for_end(pid: int) -> None:
    end = time.monotonic() + 10
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return
        except OSError:
            return
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    pytest.fail("the child outlives the process that started it")


def test_a_process_of_a_benchmark_ends_with_the_benchmark(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(IN_MULTIPROCESSING)
    starter = subprocess.Popen([sys.executable, str(script), "early"], stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    child = int(starter.stdout.readline())
    starter.kill()
    starter.wait()
    wait_for_end(child)


def test_one_whose_benchmark_has_ended_meanwhile_does_not_begin(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(IN_MULTIPROCESSING)
    starter = subprocess.Popen([sys.executable, str(script), "late"], stdout=subprocess.PIPE, text=True)
    printed, _ = starter.communicate(timeout=60)  # ends when the last process that could write has ended
    assert printed == ""
