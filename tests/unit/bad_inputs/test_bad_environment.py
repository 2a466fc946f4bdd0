"""Environments that no launcher would set: the variable, its value and what was expected."""

import pytest
from refusals import check_sentence

from xgram_dist.checkpoint.lease import _job
from xgram_dist.cli.main import main
from xgram_dist.cluster.slurm.commands import rank_environment
from xgram_dist.environment import Place, SlurmJob, node_names, read_place, read_slurm_job, slurm_cpus
from xgram_dist.errors import UserError

TWO = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
SRUN = {
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "7",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "29500",
}
MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"RANK": "one"}, ["RANK = 'one'", "a whole number of at least 0"]),
        ({"RANK": ""}, ["RANK = ''", "a whole number"]),
        ({"RANK": "-1"}, ["RANK = '-1'", "at least 0"]),
        ({"RANK": "1.0"}, ["RANK = '1.0'"]),
        ({"RANK": "1e0"}, ["RANK = '1e0'"]),
        ({"RANK": "\u0661"}, ["RANK = '\u0661'"]),
        ({"RANK": "2"}, ["RANK = 2 is not below WORLD_SIZE = 2", "from 0 to 1"]),
        ({"RANK": "9" * 400}, ["RANK = '999", "..."]),
        ({"RANK": "1\n2"}, [r"RANK = '1\n2'"]),
        ({"RANK": None}, ["WORLD_SIZE = '2' is set", "RANK is not", "set both"]),
        ({"WORLD_SIZE": None, "RANK": "9" * 5000}, ["RANK = '999", "WORLD_SIZE is not"]),
        ({"WORLD_SIZE": None}, ["RANK = '1' is set", "WORLD_SIZE is not"]),
        ({"WORLD_SIZE": "0"}, ["WORLD_SIZE = '0'", "from 1 to 1048575"]),
        ({"WORLD_SIZE": "-2"}, ["WORLD_SIZE = '-2'"]),
        ({"WORLD_SIZE": "two"}, ["WORLD_SIZE = 'two'"]),
        ({"WORLD_SIZE": "1000000000"}, ["WORLD_SIZE = '1000000000'", "from 1 to 1048575"]),
        ({"LOCAL_RANK": "x"}, ["LOCAL_RANK = 'x'"]),
        ({"LOCAL_RANK": "-1"}, ["LOCAL_RANK = '-1'"]),
        ({"LOCAL_RANK": "2"}, ["LOCAL_RANK = 2 is not below WORLD_SIZE = 2"]),
        ({"MASTER_PORT": None}, ["MASTER_PORT is not set"]),
        ({"MASTER_PORT": "0"}, ["MASTER_PORT = '0'", "from 1 to 65535"]),
        ({"MASTER_PORT": "65536"}, ["MASTER_PORT = '65536'", "from 1 to 65535"]),
        ({"MASTER_PORT": "http"}, ["MASTER_PORT = 'http'"]),
        ({"MASTER_ADDR": None}, ["MASTER_ADDR is not set", "rank 0"]),
        ({"MASTER_ADDR": ""}, ["MASTER_ADDR = ''", "host name or an IP address"]),
        ({"MASTER_ADDR": "a b"}, ["MASTER_ADDR = 'a b'"]),
        ({"MASTER_ADDR": "x" * 300}, ["MASTER_ADDR = 'xxx"]),
        ({"MASTER_ADDR": "n1\x1b[2J"}, [r"MASTER_ADDR = 'n1\x1b[2J'"]),
        ({"TORCHELASTIC_RESTART_COUNT": "many"}, ["TORCHELASTIC_RESTART_COUNT = 'many'"]),
        ({"RANK": "0", "XGRAM_DIST_LISTEN_FD": "stdin"}, ["XGRAM_DIST_LISTEN_FD = 'stdin'"]),
    ],
)
def test_of_ranks(changes: dict[str, str | None], words: list[str]) -> None:
    environment = {name: value for name, value in {**TWO, **changes}.items() if value is not None}
    with pytest.raises(UserError) as error:
        read_place(environment)
    check_sentence(error.value, *words)


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({**SRUN, "SLURM_PROCID": "x"}, ["SLURM_PROCID = 'x'"]),
        ({**SRUN, "SLURM_PROCID": "2"}, ["SLURM_PROCID = 2 is not below SLURM_STEP_NUM_TASKS = 2"]),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "0"}, ["SLURM_STEP_NUM_TASKS = '0'"]),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "2(x3)"}, ["SLURM_STEP_NUM_TASKS = '2(x3)'"]),
        ({name: value for name, value in SRUN.items() if name != "SLURM_PROCID"}, ["SLURM_PROCID is not set"]),
        ({name: value for name, value in SRUN.items() if name != "SLURM_LOCALID"}, ["SLURM_LOCALID is not set"]),
        ({name: value for name, value in SRUN.items() if name != "MASTER_ADDR"}, ["SLURM_STEP_NODELIST"]),
        (MPI, ["OMPI_COMM_WORLD_RANK = 1 is set, but MASTER_ADDR is not", "MASTER_PORT"]),
        ({**MPI, "OMPI_COMM_WORLD_SIZE": "few"}, ["OMPI_COMM_WORLD_SIZE = 'few'"]),
        ({**MPI, "OMPI_COMM_WORLD_RANK": "5"}, ["OMPI_COMM_WORLD_RANK = 5 is not below OMPI_COMM_WORLD_SIZE = 2"]),
        ({"PMI_SIZE": "2", "PMI_RANK": "zero"}, ["PMI_RANK = 'zero'"]),
    ],
)
def test_of_srun_and_mpirun(environment: dict[str, str], words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        rank_environment(environment)
    check_sentence(error.value, *words)


JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"SLURM_JOB_ID": None}, ["SLURM_JOB_ID is not set"]),
        ({"SLURM_JOB_ID": "0"}, ["SLURM_JOB_ID = '0'", "at least 1"]),
        ({"SLURM_JOB_ID": "-uroot"}, ["SLURM_JOB_ID = '-uroot'"]),
        ({"SLURM_JOB_ID": "7\n8"}, [r"SLURM_JOB_ID = '7\n8'"]),
        ({"SLURM_ARRAY_JOB_ID": "x"}, ["SLURM_ARRAY_JOB_ID = 'x'"]),
        ({"SLURM_ARRAY_JOB_ID": "6"}, ["SLURM_ARRAY_TASK_ID is not set"]),
        ({"SLURM_ARRAY_JOB_ID": "6", "SLURM_ARRAY_TASK_ID": "3 --all"}, ["SLURM_ARRAY_TASK_ID = '3 --all'"]),
        ({"SLURM_RESTART_COUNT": "again"}, ["SLURM_RESTART_COUNT = 'again'"]),
        ({"SLURM_JOB_NODELIST": None}, ["SLURM_JOB_NODELIST = ''", "within a job of Slurm"]),
        ({"SLURM_JOB_NODELIST": "--all"}, ["SLURM_JOB_NODELIST = '--all'"]),
        ({"SLURM_JOB_NODELIST": "n1\x1b[2J"}, [r"SLURM_JOB_NODELIST = 'n1\x1b[2J'"]),
    ],
)
def test_of_a_job(changes: dict[str, str | None], words: list[str]) -> None:
    environment = {name: value for name, value in {**JOB, **changes}.items() if value is not None}
    with pytest.raises(UserError) as error:
        read_slurm_job(environment)
    check_sentence(error.value, *words)


@pytest.mark.parametrize(
    "environment",
    [
        {"SLURM_CPUS_PER_TASK": "many"},
        {"SLURM_CPUS_PER_TASK": "-1"},
        {"SLURM_JOB_CPUS_PER_NODE": "x"},
        {"SLURM_JOB_CPUS_PER_NODE": "64(x2"},
        {"SLURM_JOB_CPUS_PER_NODE": "\u0661"},
    ],
    ids=str,
)
def test_of_the_cores_of_a_job(environment: dict[str, str]) -> None:
    with pytest.raises(UserError) as error:
        slurm_cpus(environment)
    ((name, value),) = environment.items()
    check_sentence(error.value, f"{name} = '{value}'")


@pytest.mark.parametrize("nodes", ["a,b,c", "a,b,c,d,e", "a\x1b[2J,b"])
def test_of_the_names_of_nodes(nodes: str) -> None:
    with pytest.raises(UserError) as error:
        node_names(4, {"XGRAM_DIST_NODES": nodes})
    check_sentence(error.value, "XGRAM_DIST_NODES = 'a", "the nodes of 4 ranks")


def test_of_a_parent(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("XGRAM_DIST_PARENT", "nobody")
    assert main(["plan"]) == 2
    assert capsys.readouterr().err.startswith("xgram-dist plan: XGRAM_DIST_PARENT = 'nobody' in the environment: ")


def test_of_a_restarted_job() -> None:
    with pytest.raises(UserError) as error:
        _job({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "twice"})
    check_sentence(error.value, "SLURM_RESTART_COUNT = 'twice'")


def test_good_ones_are_read() -> None:
    assert read_slurm_job(JOB) == SlurmJob(7, "7", 0, "n[1-2]")
    array = {"SLURM_ARRAY_JOB_ID": "6", "SLURM_ARRAY_TASK_ID": "2", "SLURM_RESTART_COUNT": "3"}
    assert read_slurm_job({**JOB, **array}) == SlurmJob(7, "6_2", 3, "n[1-2]")
    assert [slurm_cpus({"SLURM_JOB_CPUS_PER_NODE": text}) for text in ("96(x2),64", "64", "")] == [64, 64, 0]
    assert node_names(4, {"XGRAM_DIST_NODES": "a,b"}) == ["a", "b"]
    assert read_place({}) == Place()
    assert read_place({"RANK": "0", "WORLD_SIZE": "1"}) == Place()
    assert read_place(TWO) == Place(1, 2, 0, "127.0.0.1", 29500)
    assert rank_environment({**SRUN, **TWO}) == {}  # torchrun within srun
    assert read_place({**SRUN, **rank_environment(SRUN)}) == Place(1, 2, 1, "n1", 29500)
    mpi = {**MPI, "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
    assert read_place({**mpi, **rank_environment(mpi)}) == Place(1, 2, 0, "n1", 29500)
    # mpirun within a Slurm allocation, whose daemons srun has started one a node; and srun with PMI
    assert rank_environment({**mpi, **SRUN, "SLURM_STEP_NUM_TASKS": "8"})["WORLD_SIZE"] == "2"
    assert rank_environment({**SRUN, "PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1"})["WORLD_SIZE"] == "2"
