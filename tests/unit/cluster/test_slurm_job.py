"""What the end of the ranks means for the job, without Slurm: its commands are stand-ins."""

import json
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from xgram_dist.cluster.slurm import job as job_module
from xgram_dist.cluster.slurm import ranks as ranks_module
from xgram_dist.cluster.slurm import time_limit
from xgram_dist.cluster.slurm.attempts import CRASHED, CUT_OFF, STOPPED, AttemptLog, read_attempts
from xgram_dist.cluster.slurm.commands import job_facts, rank_environment
from xgram_dist.cluster.slurm.job import Job, choose_nodes, parse_arguments
from xgram_dist.cluster.slurm.ranks import torchrun_command
from xgram_dist.errors import UserError


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """`srun`, `scontrol` and `scancel` that write down how they were called; `srun` does as a file says."""
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    texts = {
        "srun": f'echo "srun $*" >>{tmp_path}/calls; . {tmp_path}/srun.sh',
        "scontrol": f"""echo "scontrol $*" >>{tmp_path}/calls
            case $2 in hostnames) echo n1; echo n2;; job) cat {tmp_path}/facts;; esac""",
        "scancel": f'echo "scancel $*" >>{tmp_path}/calls',
    }
    for name, text in texts.items():
        path = bin_folder / name
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "facts").write_text("JobId=7 JobState=RUNNING Reason=None Restarts=0 Command=a b\n")
    monkeypatch.setenv("PATH", f"{bin_folder}:/usr/bin:/bin")
    for name, value in {"JOB_ID": "7", "JOB_NODELIST": "n[1-2]", "CPUS_PER_TASK": "6"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setattr(job_module.time, "sleep", lambda _: None)
    monkeypatch.setattr(job_module.signal, "signal", lambda *_: None)
    return tmp_path


def run_job(slurm, srun, *words):
    (slurm / "srun.sh").write_text(srun)
    job = Job(
        parse_arguments(
            ["--folder", str(slurm / "run"), "--ranks", "2", *words, "--", "python", "-m", "xgram_dist", "train"]
        )
    )
    return job.run()


def start_number(slurm, monkeypatch, restart):
    """The next start is this one, and Slurm knows it."""
    monkeypatch.setenv("SLURM_RESTART_COUNT", str(restart))
    (slurm / "facts").write_text(f"JobId=7 JobState=RUNNING Reason=None Restarts={restart}\n")


def calls(slurm, name):
    return [line for line in (slurm / "calls").read_text().splitlines() if line.startswith(name)]


def last(slurm):
    return read_attempts(slurm / "run")[-1]


def test_a_complete_training_ends_the_job_with_0(slurm):
    assert run_job(slurm, "echo $MASTER_ADDR >&2; exit 0") == 0
    assert last(slurm).outcome == "complete"
    assert not calls(slurm, "scontrol requeue")
    started = calls(slurm, "srun")[0]
    assert "--nodes=2 " in started
    assert "--ntasks=4 --ntasks-per-node=2 --cpus-per-task=3 " in started
    assert started.endswith("python -m xgram_dist train")


@pytest.mark.parametrize(("given", "share"), [("96(x2)", 48), ("64,96(x3),32", 16), ("1(x2)", None), (None, None)])
def test_ranks_share_all_cpus_of_the_job_where_no_number_was_asked_for(slurm, monkeypatch, given, share):
    monkeypatch.delenv("SLURM_CPUS_PER_TASK")
    monkeypatch.delenv("SLURM_JOB_CPUS_PER_NODE", raising=False)
    if given is not None:
        monkeypatch.setenv("SLURM_JOB_CPUS_PER_NODE", given)
    assert run_job(slurm, "exit 0") == 0
    asked = re.findall(r"--cpus-per-task=(\d+)", calls(slurm, "srun")[0])
    assert asked == ([] if share is None else [str(share)])


def test_ranks_that_stopped_and_saved_are_requeued(slurm):
    lines = ["srun: error: n1: task 0: Exited with exit code 130", "srun: error: n2: task 3: Killed"]  # by srun, then
    run_job(slurm, "".join(f'echo "{line}" >&2\n' for line in lines) + "exit 137")
    assert calls(slurm, "scontrol requeue") == ["scontrol requeue 7"]
    assert last(slurm).outcome == STOPPED


def test_a_crash_names_the_first_rank_and_its_last_words(slurm):
    lines = [
        "[rank3]: ValueError: no",
        "[rank3]: rank 3, step 5",
        "srun: error: n2: task 3: Exited with exit code 1",
        "srun: error: n1: task 0: Killed",
    ]
    run_job(slurm, "".join(f'echo "{line}" >&2\n' for line in lines) + "exit 137")
    assert calls(slurm, "scontrol requeue") == ["scontrol requeue 7"]
    assert last(slurm).outcome == CRASHED
    assert last(slurm).reason == "rank 3 on n2 ended with exit code 1 (ValueError: no); requeued"


CRASHES_ONCE = """case "$*" in *" true") exit 0;; esac
    if [ -e $0.crashed ]; then exit 0; fi
    touch $0.crashed; echo "srun: error: n2: task 3: Killed" >&2; exit 137"""


def test_after_a_crash_the_ranks_are_started_again_on_nodes_that_answer(slurm):
    assert run_job(slurm, CRASHES_ONCE) == 0
    assert not calls(slurm, "scontrol requeue")
    probe = calls(slurm, "srun")[1]
    assert probe == "srun --nodes=2 --ntasks=2 --nodelist n1,n2 true"
    first, second = read_attempts(slurm / "run")
    assert (first.outcome, second.outcome) == (CRASHED, "complete")
    assert first.reason == "rank 3 on n2 ended: Killed; the ranks are started again on the same nodes"
    assert (first.restart, first.again, second.restart, second.again) == (0, 0, 0, 1)


@pytest.mark.parametrize("how", ["restarted elsewhere", "cancelled", "a second time"])
def test_ranks_are_not_started_again_where_the_job_is_not_to_go_on(slurm, how):
    if how == "restarted elsewhere":
        (slurm / "facts").write_text("JobId=7 JobState=RUNNING Reason=None Restarts=1\n")
    before = f"touch {slurm}/run/slurm/cancelled\n" if how == "cancelled" else ""
    always = CRASHES_ONCE.replace("-e $0.crashed", "-e $0.never") if how == "a second time" else CRASHES_ONCE
    run_job(slurm, before + always)
    steps = [one for one in calls(slurm, "srun") if not one.endswith(" true")]
    assert len(steps) == (2 if how == "a second time" else 1)
    assert len(calls(slurm, "scontrol requeue")) == (1 if how == "a second time" else 0)


def test_a_killed_rank_has_no_last_words(slurm):
    run_job(slurm, 'echo "ValueError: caught" >&2; echo "srun: error: n2: tasks 2-3: Killed" >&2; exit 137')
    assert last(slurm).reason == "rank 2-3 on n2 ended: Killed; requeued"


def test_a_refusal_is_not_tried_again(slurm):
    lines = [
        "xgram-dist train: no",
        "srun: error: n2: task 3: Exited with exit code 2",
        "srun: error: n1: task 0: Killed",
    ]
    assert run_job(slurm, "".join(f'echo "{line}" >&2\n' for line in lines) + "exit 137") == 2
    assert not calls(slurm, "scontrol requeue")
    assert "xgram-dist train: no" in last(slurm).reason


def test_a_refusal_under_torchrun_is_known_by_the_code_of_its_rank(slurm):
    lines = [
        "xgram-dist train: no",
        "  exitcode  : 2 (pid: 71)",
        "srun: error: n2: task 1: Exited with exit code 1",
    ]
    srun = "".join(f'echo "{line}" >&2\n' for line in lines) + "exit 1"
    assert run_job(slurm, srun, "--launcher", "torchrun") == 2
    assert not calls(slurm, "scontrol requeue")
    run_job(slurm, srun.replace(": 2", ": 1"), "--launcher", "torchrun")
    assert len(calls(slurm, "scontrol requeue")) == 1


def test_a_run_that_is_always_stopped_before_its_first_checkpoint_is_given_up(slurm, monkeypatch):
    for restart in range(job_module.MAX_STOPS):
        start_number(slurm, monkeypatch, restart)
        assert run_job(slurm, "exit 130") == 1
    assert len(calls(slurm, "scontrol requeue")) == job_module.MAX_STOPS - 1
    assert "asked to stop 10 times in a row" in last(slurm).reason
    (slurm / "run" / "checkpoints" / "step-00000003").mkdir(parents=True)  # with progress the count begins anew
    start_number(slurm, monkeypatch, job_module.MAX_STOPS)
    run_job(slurm, "exit 130")
    assert len(calls(slurm, "scontrol requeue")) == job_module.MAX_STOPS


@pytest.mark.parametrize("how", ["file", "slurm"])
def test_a_cancelled_job_is_not_requeued(slurm, how):
    if how == "slurm":
        (slurm / "facts").write_text("JobId=7 JobState=CANCELLED Reason=None Restarts=0\n")
    cancel = f"touch {slurm}/run/slurm/cancelled" if how == "file" else ":"
    assert run_job(slurm, f"{cancel}; exit 130") == 130
    assert not calls(slurm, "scontrol requeue")


def test_a_start_that_slurm_has_replaced_does_not_requeue_its_successor(slurm):
    (slurm / "facts").write_text("JobId=7 JobState=RUNNING Reason=None Restarts=1\n")
    assert run_job(slurm, "exit 1") == 1
    assert not calls(slurm, "scontrol requeue")


def test_a_crash_loop_ends_after_the_cap_and_progress_begins_the_count_anew(slurm, monkeypatch):
    attempts = AttemptLog(slurm / "run", "7")
    for restart, step in enumerate((0, 0, 3)):  # two without progress, then a checkpoint of step 3, then one more
        attempts.begin(restart, ["n1"], step)
        attempts.end(CRASHED, "first")
    (slurm / "run" / "checkpoints" / "step-00000003").mkdir(parents=True)
    start_number(slurm, monkeypatch, 3)
    run_job(slurm, "exit 1", "--restarts", "2")
    assert len(calls(slurm, "scontrol requeue")) == 1
    start_number(slurm, monkeypatch, 4)
    assert run_job(slurm, "exit 9", "--restarts", "2") == 1
    assert len(calls(slurm, "scontrol requeue")) == 1
    assert "3 starts in a row left no new checkpoint, the last: srun ended with exit code 9" in last(slurm).reason


def test_starts_that_were_cut_off_count_too_but_stops_and_other_jobs_do_not(slurm, monkeypatch):
    AttemptLog(slurm / "run", "6").begin(0, ["n1"], 0)
    attempts = AttemptLog(slurm / "run", "7")
    for restart, outcome in enumerate((None, STOPPED, None)):
        attempts.begin(restart, ["n1"], 0)
        if outcome:
            attempts.end(outcome, "")
    assert len(attempts.without_progress(0)) == 2
    start_number(slurm, monkeypatch, 3)
    assert run_job(slurm, "exit 0", "--restarts", "1") == 1
    assert CUT_OFF in last(slurm).reason
    assert not calls(slurm, "srun")


def test_a_job_that_slurm_will_not_requeue_says_so(slurm):
    (slurm / "bin" / "scontrol").write_text(
        f"""#!/bin/bash
        case $1$2 in showhostnames) echo n1;; showjob) cat {slurm}/facts;; *) echo denied >&2; exit 1;; esac"""
    )
    assert run_job(slurm, "exit 130") == 1
    assert "could not be requeued: scontrol: denied; submit again to resume" in last(slurm).reason


def test_an_old_start_that_ends_late_leaves_the_newer_one_on_record(slurm):
    old, new = AttemptLog(slurm / "run", "7"), AttemptLog(slurm / "run", "7")
    old.begin(0, ["n1"], 0)
    new.begin(1, ["n2"], 3)
    old.end(STOPPED, "replaced")
    assert [(one.restart, one.outcome) for one in read_attempts(slurm / "run")] == [(0, STOPPED), (1, None)]


def test_a_damaged_count_is_no_obstacle(slurm):
    (slurm / "run" / "slurm").mkdir(parents=True)
    (slurm / "run" / "slurm" / "attempts.json").write_text('[{"job": 1')
    assert run_job(slurm, "exit 0") == 0
    assert len(json.loads((slurm / "run" / "slurm" / "attempts.json").read_text())) == 1


def test_of_more_nodes_than_the_batch_divides_over_the_most_usable_are_taken():
    assert choose_nodes(["a", "b", "c"], [1, 2, 4], set()) == ["a", "b"]
    assert choose_nodes(["a", "b", "c"], [], set()) == ["a", "b", "c"]
    with pytest.raises(UserError, match="gave 1 node"):
        choose_nodes(["a"], [2, 4], set())


def test_torchrun_stands_between_the_interpreter_and_the_command():
    words = torchrun_command(["wrap", "python", "-m", "xgram_dist", "train"], 2, 8, "n1:12014", "7")
    assert words[4:8] == ["wrap", "python", "-m", "torch.distributed.run"]
    assert words[-3:] == ["-m", "xgram_dist", "train"]
    assert words[words.index("--rdzv-endpoint") + 1] == "n1:12014"


def test_ranks_meet_where_slurm_says(slurm):
    step = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "10007"}
    found = rank_environment({**step, "SLURM_STEP_NODELIST": "n[1-2]"})
    assert (found["RANK"], found["WORLD_SIZE"], found["LOCAL_RANK"]) == ("3", "4", "1")
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("n1", "12014")
    assert rank_environment({**step, "MASTER_ADDR": "x", "MASTER_PORT": "1"}).keys() == {
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
    }
    assert rank_environment({**step, "RANK": "0"}) == {}  # torchrun within srun
    assert rank_environment({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}) == {}  # a batch script, no step
    assert rank_environment({**step, "SLURM_STEP_NUM_TASKS": "1"}) == {}


def test_a_folder_named_like_a_state_is_no_state(slurm):
    (slurm / "facts").write_text(
        "JobId=7 JobName=run JobState=RUNNING Reason=None Restarts=0 WorkDir=/a JobState=FAILED b=c\n"
    )
    facts = job_facts("7")
    assert facts is not None
    assert (facts["JobState"], facts["Restarts"], facts["WorkDir"]) == ("RUNNING", "0", "/a")


def test_the_first_process_of_a_job_needs_the_standard_library_alone():
    """The host's Python runs it, outside the container that has torch and the other packages."""
    root = Path(__file__).resolve().parents[3]
    code = f"import sys; sys.path.insert(0, {str(root)!r}); import xgram_dist.cluster.slurm.job"
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True)  # -S: no site-packages
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("facts", "again"),
    [
        ("JobState=COMPLETING Reason=None PreemptTime=None", 0),  # scancel
        ("JobState=COMPLETING Reason=TimeLimit PreemptTime=None", 1),
        ("JobState=COMPLETING Reason=None PreemptTime=2026-01-01T00:00:00", 1),
        ("JobState=COMPLETING Reason=None PreemptTime=None DUE TO PREEMPTION", 1),  # as its steps say
    ],
)
def test_a_job_that_a_person_ends_stays_ended(slurm, facts, again):
    (slurm / "facts").write_text(f"JobId=7 {facts} Restarts=0\n")
    said = f"slurmstepd-n5: error: *** STEP 2.0 ON n5 CANCELLED AT 2026-11-19T05:12:40 {facts[-17:]} ***"
    run_job(slurm, f"echo '{said}' >&2; exit 130")
    assert len(calls(slurm, "scontrol requeue")) == again


def test_a_task_of_an_array_is_requeued_alone(slurm, monkeypatch):
    """To Slurm the number of an array's last task means all its tasks."""
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "7")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "2")
    run_job(slurm, "exit 130")
    assert calls(slurm, "scontrol requeue") == ["scontrol requeue 7_2"]


@pytest.fixture
def not_requeued(slurm):
    """A site that requeues no job; its script, which `submit` has written."""
    (slurm / "facts").write_text("JobId=7 JobState=RUNNING Reason=None Restarts=0 Requeue=0 Partition=main\n")
    (slurm / "run" / "slurm").mkdir(parents=True)
    (slurm / "run" / "slurm" / "jobs.json").write_text('{"train": "7", "eval": "8"}')
    sbatch = slurm / "bin" / "sbatch"
    sbatch.write_text(f'#!/bin/bash\necho "sbatch $* ${{SLURM_JOB_ID:-}}" >>{slurm}/calls; echo 9\n')
    sbatch.chmod(0o755)
    return ["--script", "/script", "--restarts", "1"]


def test_where_no_job_is_requeued_its_successor_waits_from_the_start_on(slurm, not_requeued, monkeypatch):
    assert run_job(slurm, "exit 130", *not_requeued) == 1
    assert calls(slurm, "sbatch") == ["sbatch --parsable --dependency=afternotok:7 --kill-on-invalid-dep=yes /script "]
    assert calls(slurm, "scontrol update") == ["scontrol update JobId=8 Dependency=afterok:7?afterok:9"]
    assert not calls(slurm, "scontrol requeue")
    assert not calls(slurm, "scancel")
    assert last(slurm).reason == "asked to stop; job 9 carries the run on"
    assert json.loads((slurm / "run" / "slurm" / "jobs.json").read_text()) == {"train": "7", "next": "9", "eval": "8"}
    monkeypatch.setenv("SLURM_JOB_ID", "9")
    (slurm / "facts").write_text("JobId=9 JobState=RUNNING Reason=None Restarts=0 Requeue=0\n")
    assert run_job(slurm, "echo $XGRAM_DIST_JOB >&2; exit 9", *not_requeued) == 1
    assert last(slurm).job == "9"
    monkeypatch.setenv("SLURM_JOB_ID", "10")
    attempts = AttemptLog(slurm / "run", "9")
    attempts.begin(0, ["n1"], 0)
    attempts.succeeded_by("10")
    assert run_job(slurm, "exit 9", *not_requeued) == 1  # the limit counts over all jobs of the run
    assert "starts in a row left no new checkpoint" in last(slurm).reason
    assert AttemptLog(slurm / "run", "10").jobs == ["7", "9", "10"]


def test_a_successor_is_dropped_with_a_complete_run_and_does_nothing_after_a_cancelled_one(
    slurm, not_requeued, monkeypatch
):
    assert run_job(slurm, "exit 0", *not_requeued) == 0
    assert calls(slurm, "scancel") == ["scancel --quiet 9"]
    monkeypatch.setenv("SLURM_JOB_ID", "9")
    (slurm / "facts").write_text("JobId=7 JobState=CANCELLED Reason=None Restarts=0\n")
    assert run_job(slurm, "exit 0", *not_requeued) == 130
    assert last(slurm).reason == "job 7, which this one was to carry on, was cancelled"
    assert len(calls(slurm, "sbatch")) == 1


def test_a_job_that_slurm_refuses_to_requeue_is_carried_on_by_its_successor(slurm, not_requeued):
    (slurm / "facts").write_text("JobId=7 JobState=RUNNING Reason=None Restarts=0 Requeue=1\n")
    scontrol = (slurm / "bin" / "scontrol").read_text()
    (slurm / "bin" / "scontrol").write_text(scontrol.replace("case $2 in", '[ "$1" = requeue ] && exit 1; case $2 in'))
    assert run_job(slurm, "exit 130", *not_requeued) == 1
    assert last(slurm).reason.endswith("it could not be requeued: scontrol: exit code 1; job 9 carries the run on")


def test_a_node_that_failed_twice_is_taken_from_the_job_while_it_waits(slurm, not_requeued):
    (slurm / "facts").write_text("JobId=7 JobState=RUNNING Reason=None Restarts=0 Requeue=1\n")
    fails = """case "$*" in *" true") exit 0;; esac; echo "srun: error: n2: task 3: Killed" >&2; exit 137"""
    run_job(slurm, fails, *not_requeued, "--restarts", "3", "--exclude", "n[5-6]")
    assert calls(slurm, "scontrol requeue") == ["scontrol requeue 7"]
    assert calls(slurm, "scontrol update") == ["scontrol update JobId=7 ExcNodeList=n[5-6],n2"]
    assert calls(slurm, "sbatch")[-1].startswith("sbatch --test-only --exclude=n[5-6],n2 /script")


def test_a_time_limit_that_cannot_be_read_is_the_sites(slurm, capsys):
    assert run_job(slurm, "exit 0", "--time", "10:00") == 0
    assert "the time limit of job 7 cannot be read; taken as 10:00, as the site asks for" in capsys.readouterr().out
    assert run_job(slurm, "exit 0") == 0
    assert "the time limit of job 7 cannot be read; the run waits for its signal" in capsys.readouterr().out


def test_near_its_limit_a_job_asks_by_a_file_and_signals_ranks_that_do_not_answer(slurm, monkeypatch):
    monkeypatch.setattr(time_limit, "TICK_SECONDS", 0.05)
    monkeypatch.setattr(ranks_module, "ANSWER_SECONDS", 0.2)
    (slurm / "facts").write_text(
        "JobId=7 JobState=RUNNING Reason=None Restarts=0 RunTime=00:09:52 TimeLimit=00:10:00\n"
    )
    wait = 'trap "exit 130" USR1; for i in $(seq 200); do [ "$(cat $XGRAM_DIST_STOP_FILE)" = stop ] && {}; '
    wait += "/bin/sleep 0.05; done"
    answers = wait.format('{ echo stopping >$XGRAM_DIST_STOP_FILE; trap "exit 1" USR1; /bin/sleep 0.5; exit 130; }')
    for ranks in (answers, wait.format("true")):
        run_job(slurm, ranks, "--save-seconds", "8")
        assert last(slurm).outcome == STOPPED
        assert last(slurm).signalled is not None
