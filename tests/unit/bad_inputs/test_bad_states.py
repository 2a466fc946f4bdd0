"""States of the library, remote indexes, scratch folders and small files of runs that nobody of ours wrote."""

import copy
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import check_sentence
from torch import Tensor

from xgram_dist.analysis.diagnose.figures import read_figures
from xgram_dist.checkpoint.manifest import manifest_checksum
from xgram_dist.checkpoint.remote import FORMAT, Index, RemoteCheckpoints
from xgram_dist.cluster.slurm.run_record import submitting
from xgram_dist.cluster.slurm.successor import read_jobs
from xgram_dist.config import load_config
from xgram_dist.config.load import is_saved_as
from xgram_dist.data.storage import StorageError
from xgram_dist.errors import UserError
from xgram_dist.eval.results import EvaluationResult, comparison_table, scoring_table
from xgram_dist.library import TokenTables
from xgram_dist.parallel.stacks import read_stacks, request_stacks
from xgram_dist.tables.storage import scratch
from xgram_dist.tables.storage.scratch import ScratchFile
from xgram_dist.train.metrics_file import parse_record
from xgram_dist.train.run_dir import open_run_folder
from xgram_dist.train.starts import StartClock, StartRecord, goodput

State = dict[str, Any]
IDS, ROWS, CURRENT, SUMS = "view-0.row_ids", "first.rows", "view-0.rows.current", "view-0.rows.sums"


@pytest.fixture(scope="module")
def tables() -> Iterator[TokenTables]:
    with TokenTables({"first": 4}, 40) as made:
        keys = torch.arange(12).reshape(2, 6)
        for _ in range(2):
            rows = made.fetch(made.plan(keys))
            rows.values["first"].square().sum().backward()
            made.give_back(rows)
            made.step(1e-2)
        yield made


STATES: dict[str, tuple[Callable[[State], Any], str]] = {
    "no ids": (lambda s: s.pop(IDS), f"the state holds no '{IDS}'"),
    "no rows": (lambda s: s.pop(ROWS), f"the state holds no '{ROWS}'"),
    "ids are floats": (lambda s: s.update({IDS: s[IDS].float()}), "is [40] of torch.float32, not one row of int64"),
    "ids are a table": (lambda s: s.update({IDS: s[IDS][None]}), "is [1, 40] of torch.int64, not one row of int64"),
    "ids are a list": (lambda s: s.update({IDS: [1]}), "is list, not one row of int64"),
    "an id twice": (lambda s: s[IDS].__setitem__(3, 4), "hold row 4 of view 0 twice"),
    "an id below zero": (lambda s: s[IDS].__setitem__(0, -1), "hold row -1, but the tables have 40"),
    "an id beyond": (lambda s: s[IDS].__setitem__(39, 40), "hold row 40, but the tables have 40"),
    "fewer rows": (lambda s: s.update({ROWS: s[ROWS][:5]}), "is [5, 4] of torch.float32, not [40, 4]"),
    "narrow rows": (lambda s: s.update({ROWS: s[ROWS][:, :1]}), "is [40, 1] of torch.float32, not [40, 4]"),
    "rows are integers": (lambda s: s.update({ROWS: s[ROWS].long()}), "torch.int64, not [40, 4] of torch.float32"),
    "rows are complex": (lambda s: s.update({ROWS: s[ROWS].cfloat()}), "complex64, not [40, 4] of torch.float32"),
    "steps are floats": (lambda s: s.update({CURRENT: s[CURRENT].float()}), "torch.float32, not [40] of torch.int"),
    "steps are unsigned": (lambda s: s.update({CURRENT: s[CURRENT].to(torch.uint64)}), "torch.uint64, not [40] of"),
    "steps that are to come": (lambda s: s[CURRENT].fill_(2**30), "steps beyond those that it kept, 0 to 2"),
    "steps below zero": (lambda s: s[CURRENT].fill_(-1), "steps beyond those that it kept, 0 to 2"),
    "a step that is NaN": (lambda s: s["view-0.rows.step"].fill_(float("nan")), "'view-0.rows.step' is nan"),
    "another table of missed steps": (lambda s: s.update({SUMS: s[SUMS][:, :1]}), "missed steps is damaged"),
    "missed steps that are NaN": (lambda s: s[SUMS].fill_(float("nan")), "missed steps is damaged"),
    "a base that the type of steps cannot hold": (
        lambda s: s["view-0.rows.base"].fill_(2**52),
        "steps beyond those that it kept, 4503599627370496 to",
    ),
    "a base below zero": (lambda s: s["view-0.rows.base"].fill_(-1), "'view-0.rows.base' is -1"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "sentence"), STATES.values(), ids=STATES)
def test_a_state_that_does_not_fit_changes_nothing(
    tables: TokenTables, change: Callable[[State], Any], sentence: str
) -> None:
    before: dict[str, Tensor] = copy.deepcopy(tables.state_dict())
    state: State = copy.deepcopy(before)
    change(state)
    with pytest.raises(UserError) as caught:
        tables.load_state_dict(state)
    check_sentence(caught.value, sentence)
    for name, tensor in tables.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    tables.load_state_dict(before)


PIECE = "0" * 32 + "-5"


def index(**changes: Any) -> bytes:
    tree = {"format": FORMAT, "version": 1, "step": 4, "files": {"manifest.json": [PIECE]}, **changes}
    return json.dumps({**tree, "checksum": manifest_checksum(tree)}).encode()


INDEXES = {
    "empty": (b"", "not an index"),
    "nested": (b"[" * 100_000, "not an index"),
    "a list": (b"[]", "not an index"),
    "another checksum": (index().replace(b'"step": 4', b'"step": 5'), "its checksum does not match"),
    "a version with colours": (index(version="\x1b[2J"), r"it has version '\x1b[2J'"),
    "step is a float": (index(step=4.0), "not an index"),
    "step is 10^400": (index(step=10**400), "not an index"),
    "step out of range": (b'{"step": 1e999}', "not an index"),
    "step is true": (index(step=True), "not an index"),
    "files is a list": (index(files=[]), "not an index"),
    "a name outside": (index(files={"../x": [PIECE]}), "a file outside its folder"),
    "a name with a newline": (index(files={"x\n": [PIECE]}), "a file outside its folder"),
    "a piece outside": (index(files={"x": ["../../etc/passwd"]}), "a piece outside its folder"),
    "a piece with a newline": (index(files={"x": [PIECE + "\n"]}), "a piece outside its folder"),
    "a piece in odd digits": (index(files={"x": ["0" * 32 + "-\u0665"]}), "a piece outside its folder"),
    "a piece of 5,000 digits": (index(files={"x": ["0" * 32 + "-" + "9" * 5000]}), "a piece outside its folder"),
    "a piece of a terabyte": (index(files={"x": ["0" * 32 + "-1000000000000"]}), "a piece outside its folder"),
    "pieces are a number": (index(files={"x": 3}), "a piece outside its folder"),
}


@pytest.mark.parametrize(("content", "sentence"), INDEXES.values(), ids=INDEXES)
def test_an_index_that_nobody_of_ours_wrote_is_refused(content: bytes, sentence: str) -> None:
    with pytest.raises(StorageError) as caught:
        Index.parse(content)
    assert sentence in caught.value.reason
    assert caught.value.reason.isprintable()


def test_the_index_of_another_step_and_a_pipe_are_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "step-00000005.json").write_bytes(index())
    os.mkfifo(tmp_path / "run" / "step-00000006.json")
    (tmp_path / "run" / "step-\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0667.json").write_bytes(index())
    remote = RemoteCheckpoints(str(tmp_path), "run")
    assert remote.steps() == [5]
    with pytest.raises(UserError, match="it is the index of step 4"):
        remote.index(5)
    with pytest.raises(UserError, match="is a named pipe"):
        remote.index(6)


OWNERS = [
    b"",
    b"\xff",
    b"[" * 9000,
    b"[]",
    b"{}",
    {"pid": "7"},
    {"pid": -1},
    {"pid": True},
    {"host": ["x"]},
    {"command": 3},
]


@pytest.mark.parametrize("content", OWNERS, ids=repr)
def test_an_owner_that_nobody_of_ours_wrote_is_left_alone(
    tmp_path: Path, content: bytes | dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scratch, "DYING_SECONDS", 0.0)
    held = ScratchFile(tmp_path, "other")
    owner = json.loads((tmp_path / "other.owner.json").read_text())
    held.close()
    owner_file = tmp_path / "other.owner.json"
    owner_file.write_bytes(content if isinstance(content, bytes) else json.dumps({**owner, **content}).encode())
    ScratchFile(tmp_path, "mine").close()
    assert owner_file.exists()
    with pytest.raises(UserError, match="is not of a run that is known"):
        ScratchFile(tmp_path, "other")


def test_an_owner_with_a_long_command_is_one_short_line(tmp_path: Path) -> None:
    held = ScratchFile(tmp_path, "other")
    file = tmp_path / "other.owner.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "command": "\x1b[2J\n" + "x" * 5000}))
    with pytest.raises(UserError) as caught:
        ScratchFile(tmp_path, "other")
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000
    held.close()


# Files of a run folder

START = {"begun": 1.0, "nodes": ["n1"], "ranks": 2, "after_step": 0, "parts": {"load": 0.5}, "starting": 1.0,
         "training": 2.0, "saving": 0.0, "evaluating": 0.0, "step": 4, "seen": 5.0, "ended": "complete"}  # fmt: skip
STARTS = [
    {"parts": []}, {"parts": {"load": "x"}}, {"parts": {"load": 1e300}}, {"nodes": 3}, {"nodes": [["n1"]]},
    {"ranks": "2"}, {"ranks": 10**9}, {"step": 1.5}, {"step": -1}, {"step": 10**400}, {"begun": 10**400},
    {"begun": True}, {"ended": 3},
]  # fmt: skip


@pytest.mark.parametrize("change", STARTS, ids=repr)
def test_a_start_that_nobody_of_ours_wrote_is_left_out(tmp_path: Path, change: dict[str, Any]) -> None:
    (tmp_path / "starts").mkdir()
    (tmp_path / "starts" / "0001.json").write_text(json.dumps(START))
    (tmp_path / "starts" / "0002.json").write_text(json.dumps({**START, **change}))
    found = goodput(tmp_path)
    assert found is not None
    assert len(found["starts"]) == 1


@pytest.mark.parametrize("name", ["²", "٠٠٠٧", "9" * 30, "x"])
def test_a_start_with_an_odd_number_does_not_stop_the_next_one(tmp_path: Path, name: str) -> None:
    (tmp_path / "starts").mkdir()
    (tmp_path / "starts" / f"{name}.json").write_text("{}")
    StartRecord(tmp_path, StartClock(1.0), ["n1"], 0)
    assert (tmp_path / "starts" / "0001.json").is_file()


SLOWEST = {"rank": 1, "node": "n1", "seconds": 1.0, "median": 0.5}
STRAGGLERS = [
    {"straggler": None}, {"straggler": {**SLOWEST, "node": 3}}, {"straggler": {**SLOWEST, "seconds": "x"}},
    {"straggler": {"rank": 1}}, {"phases": [1]}, {"phases": {"data": 3}}, {"nodes": {"data": {"node": "n1"}}},
    {"straggler": {**SLOWEST, "rank": "1"}}, {"straggler": {**SLOWEST, "median": 10**400}},
]  # fmt: skip


@pytest.mark.parametrize("change", STRAGGLERS, ids=repr)
def test_a_straggler_report_that_nobody_of_ours_wrote_is_no_record(change: dict[str, Any]) -> None:
    good = {"kind": "stragglers", "step": 3, "straggler": SLOWEST, "phases": {"data": SLOWEST}, "nodes": {}}
    assert parse_record(json.dumps(good).encode()) is not None
    assert parse_record(json.dumps({**good, **change}).encode()) is None


LAYERS = {part: [0.5, None] for part in ("attention", "ffn", "hidden", "first_state")}
BAND = {"from": 0.1, "to": 0.2, "magnitude": 1.0}
FIGURES: dict[str, Any] = {
    "no layers": {},
    "no layer": {"layers": {**LAYERS, "ffn": []}},
    "layers are text": {"layers": {**LAYERS, "ffn": "x"}},
    "a cosine is text": {"layers": {**LAYERS, "ffn": ["x"]}},
    "a cosine is 10^400": {"layers": {**LAYERS, "ffn": [10**400]}},
    "a band below zero": {"layers": LAYERS, "activation": {"correlation": 1.0, "bands": [{**BAND, "from": -1}]}},
    "bands are a number": {"layers": LAYERS, "activation": {"correlation": 1.0, "bands": 3}},
    "a site of no layer": {"layers": LAYERS, "views": {"retrieved": {"mean": 1.0, "sites": {"x": {"mean": 1.0}}}}},
    "updates of no number": {"layers": LAYERS, "updates": {"more_than": {"x": 1.0}}},
    "a share is text": {"layers": LAYERS, "updates": {"more_than": {"1": "x"}}},
    "no reason": {"layers": LAYERS, "movement": {"not_applicable": 3}},
    "hottest rows are missing": {"layers": LAYERS, "row_hits": {"hottest": {}}},
}  # fmt: skip


@pytest.mark.parametrize("figures", FIGURES.values(), ids=FIGURES)
def test_figures_that_nobody_of_ours_measured_are_refused(tmp_path: Path, figures: dict[str, Any]) -> None:
    head = {"run": "r", "method": "xgram", "step": 4, "positions": 32}
    path = tmp_path / "figures.json"
    path.write_text(json.dumps({**head, "figures": {"layers": LAYERS}}))
    assert read_figures(path)["run"] == "r"
    path.write_text(json.dumps({**head, "figures": figures}))
    with pytest.raises(UserError, match="is not a file of `xgram-dist diagnose`"):
        read_figures(path)


OURS = {"name": "run", "backbone_parameters": 1, "table_parameters": 0}
EVALUATIONS: dict[str, Any] = {
    "results is a list": {"results": []},
    "a task is text": {"results": {"sciq": "good"}},
    "groups is text": {"groups": "x"},
    "subtasks are numbers": {"group_subtasks": {"mmlu": [[1]]}},
    "configs are text": {"configs": {"sciq": "x"}},
    "ours is missing": {"xgram_dist": None},
    "name is a list": {"xgram_dist": {**OURS, "name": ["run"]}},
    "parameters are text": {"xgram_dist": {**OURS, "table_parameters": "1"}},
    "parameters below zero": {"xgram_dist": {**OURS, "table_parameters": -1}},
    "a score of 10^400": {"results": {"sciq": {"acc,none": 10**400}}},
}


@pytest.mark.parametrize("change", EVALUATIONS.values(), ids=EVALUATIONS)
def test_an_evaluation_that_nobody_of_ours_made_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    good = {"results": {"sciq": {"acc,none": 0.5}}, "configs": {"sciq": {"num_fewshot": 0}}, "xgram_dist": OURS}
    path = tmp_path / "x.json"
    path.write_text(json.dumps(good))
    made = EvaluationResult.read(path)
    assert comparison_table([made], paper=True)[1][0][0] == "run"
    assert scoring_table(made)[1]
    path.write_text(json.dumps({**good, **change}))
    with pytest.raises(UserError, match=r"is not a file of|holds no score"):
        EvaluationResult.read(path)


def test_stacks_are_plain_text_of_regular_files(tmp_path: Path) -> None:
    (tmp_path / "rank-1.txt").write_bytes(b"rank 1\x1b[2J\n\xff" + b"x" * 5000)
    (tmp_path / "rank-².txt").write_text("x")
    (tmp_path / "rank-2.txt").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "rank-3.txt")
    (found,) = read_stacks(tmp_path).items()
    assert found[0] == 1
    assert found[1].startswith("rank 1\\x1b[2J\n")
    assert len(found[1]) < 1000


def test_nothing_is_written_through_links_in_a_run_folder(tmp_path: Path) -> None:
    """Each of these was emptied or overwritten."""
    run, outside = tmp_path / "run", tmp_path / "outside"
    outside.write_text("mine")
    for name in ("deepspeed.json", "config.yaml", "slurm/.submitting", "stacks/request", "starts/.0001.json.part"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).symlink_to(outside)
    recipe = Path(__file__).resolve().parents[3] / "recipes/tiny/xgram.yaml"
    open_run_folder(run, load_config(recipe, ["parallel.engine=deepspeed"]), 1, resumed=2)
    assert (run / "deepspeed.json").is_file()
    request_stacks(run / "stacks")
    StartRecord(run, StartClock(1.0), ["n1"], 0)
    with pytest.raises(UserError, match="cannot write"), submitting([run]):
        pass
    assert outside.read_text() == "mine"


@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_a_recipe_or_jobs_that_are_no_file_are_not_waited_for(tmp_path: Path, kind: str) -> None:
    (tmp_path / "slurm").mkdir()
    for path in (tmp_path / "config.yaml", tmp_path / "slurm" / "jobs.json"):
        path.symlink_to("/dev/zero") if kind == "device" else os.mkfifo(path)
    recipe = Path(__file__).resolve().parents[3] / "recipes/tiny/xgram.yaml"
    assert not is_saved_as(load_config(recipe), tmp_path / "config.yaml")
    with pytest.raises(UserError, match=r"jobs.json' is damaged"):
        read_jobs(tmp_path)
