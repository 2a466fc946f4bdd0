"""Stands for `python` in the jobs of these tests: training takes its time, and fails where it is told to.

TEST_PACE       seconds added to every step, so that a test can strike in the middle of a run;
                FIRST,LATER: of the job's first start and of later ones
TEST_CRASH      RANK:STEP: that rank fails at that step, in every start
TEST_ABSENT     NODE: what is started there does nothing; the others wait for it for 5 seconds instead of a minute
"""

import os
import runpy
import socket
import sys
import time


def pace() -> None:
    from xgram_dist.train import trainer as loop

    paces = os.environ.get("TEST_PACE", "0").split(",")
    original, seconds = loop.train_step, float(paces[-1 if int(os.environ.get("SLURM_RESTART_COUNT", "0")) else 0])
    rank, _, at = os.environ.get("TEST_CRASH", "").partition(":")

    def step(*arguments, **keywords):
        time.sleep(seconds)
        if at and int(rank) == int(os.environ["RANK"]) and int(at) == arguments[-1]:
            raise RuntimeError("a fault of this test")
        return original(*arguments, **keywords)

    loop.train_step = step


def lose(node: str) -> None:
    from xgram_dist.cluster import preflight

    if socket.gethostname() == node:
        time.sleep(600)
    preflight.check_in.__defaults__ = (5.0,)


words = [word for word in sys.argv[1:] if word != "-u"]
assert words[0] == "-m"
module, sys.argv = words[1], words[1:]
if sys.argv[:2] == ["xgram_dist", "train"]:
    pace()
    if "TEST_ABSENT" in os.environ:
        lose(os.environ["TEST_ABSENT"])
runpy.run_module(module, run_name="__main__", alter_sys=True)
