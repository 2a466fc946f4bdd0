"""Slurm's own commands: words in, text out, never through a shell.

Standard library alone: this is also used inside the job, by whatever Python the batch host has.
"""

import re
import subprocess

from xgram_dist.errors import UserError

ENDED = frozenset(
    {"COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"}
)
SECONDS = 60.0


def run_command(words: list[str]) -> str:
    """The output of a command that must succeed."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS)
    except FileNotFoundError:
        raise UserError(f"'{words[0]}' is not on this machine; run this where Slurm's commands are") from None
    except subprocess.TimeoutExpired:
        raise UserError(f"'{words[0]}' did not answer in {SECONDS:g} s; is Slurm's controller up?") from None
    if done.returncode != 0:
        raise UserError(f"{words[0]}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout


def submit_script(words: list[str], script: str) -> str:
    """`sbatch WORDS SCRIPT`; the job's id."""
    return run_command(["sbatch", "--parsable", *words, script]).strip().split(";")[0]


def hostnames(nodelist: str) -> list[str]:
    """`n[1-2,7]` as names."""
    return run_command(["scontrol", "show", "hostnames", nodelist]).split()


def job_facts(job: str) -> dict[str, str] | None:
    """What Slurm knows of a job, by its own names; None when it has forgotten it."""
    try:
        text = run_command(["scontrol", "show", "job", "-o", job])
    except UserError as error:
        if "Invalid job id" in str(error):
            return None
        raise
    # KEY=VALUE words; a value may hold spaces, so a key is what follows one and starts with a capital letter. Of a key
    # that seems to stand twice the first is meant: state and count come before the paths, which people name.
    pairs = re.findall(r"(?:^| )([A-Z][\w/:]*)=(.*?)(?= [A-Z][\w/:]*=|\s*$)", text.splitlines()[0])
    return dict(reversed(pairs))


def job_state(job: str) -> str | None:
    """PENDING, RUNNING, ..., or None when Slurm has forgotten the job."""
    facts = job_facts(job)
    return None if facts is None else facts["JobState"]
