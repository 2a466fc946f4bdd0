"""lm-eval on a checkpoint: its Hugging Face model on the exported folder finds the same numbers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from eval_helpers import accelerate_stand_in, make_benchmarks, write
from inference_helpers import recipe, trained

from xgram_dist.cli.main import main
from xgram_dist.errors import UserError
from xgram_dist.eval.lm_eval_adapter import HarnessModel, run_harness
from xgram_dist.eval.paper_suite import CATEGORIES, COLUMNS, PAPER, paper_rows
from xgram_dist.eval.results import EvaluationResult
from xgram_dist.eval.scoring import CheckpointScorer
from xgram_dist.eval.tasks import load_tasks
from xgram_dist.inference.export import export_hf
from xgram_dist.inference.model import Checkpoint
from xgram_dist.parallel.mesh import single_mesh

CPU = torch.device("cpu")
TASKS = ["sciq", "piqa", "arc_challenge", "boolq"]


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eval") / "run"
    trained(recipe(data, train={"steps": 6}), folder)
    return folder


@pytest.fixture(scope="module")
def benchmarks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_benchmarks(tmp_path_factory.mktemp("benchmarks"))


def harness(run: Path, batch_tokens: int = 256) -> HarnessModel:
    checkpoint = Checkpoint.find(run)
    model = checkpoint.load(CPU)
    return HarnessModel(
        CheckpointScorer(model), checkpoint.tokenizer, model.context, batch_tokens, single_mesh(), model
    )


def hugging_face(run: Path, folder: Path) -> Any:
    export_hf(Checkpoint.find(run), folder, "fp32")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(str(folder), trust_remote_code=True)
    with accelerate_stand_in():
        from lm_eval.models.huggingface import HFLM
    return HFLM(pretrained=model, tokenizer=AutoTokenizer.from_pretrained(str(folder)), batch_size=8)


def results(model: Any, benchmarks: Path, scratch: Path, shots: int | None = None) -> tuple[dict[str, Any], list[Any]]:
    """(lm-eval's results, every answer the model gave)."""
    answers: list[Any] = []
    asked = model.loglikelihood

    def keep(requests: Any, **kwargs: Any) -> Any:
        answers.extend(asked(requests, **kwargs))
        return answers[-len(requests) :]

    model.loglikelihood = keep
    if not hasattr(model, "pool"):
        model.pool = type("NoPool", (), {"shut_down": lambda self: None})()
    return run_harness(model, load_tasks(TASKS, benchmarks, scratch, shots), None)["results"], answers


def test_log_likelihoods_and_scores_are_those_of_the_hugging_face_model(
    run: Path, benchmarks: Path, tmp_path: Path
) -> None:
    ours, our_answers = results(harness(run), benchmarks, tmp_path / "ours", shots=1)
    theirs, their_answers = results(hugging_face(run, tmp_path / "hf"), benchmarks, tmp_path / "theirs", shots=1)
    assert len(our_answers) >= 200
    found, expected = ([float(answer[0]) for answer in answers] for answers in (our_answers, their_answers))
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=0, atol=1e-4)
    assert [bool(answer[1]) for answer in our_answers] == [bool(answer[1]) for answer in their_answers]
    assert max(expected) - min(expected) > 5
    assert {task: _numbers(values) for task, values in ours.items()} == {t: _numbers(v) for t, v in theirs.items()}


def _numbers(values: dict[str, Any]) -> dict[str, float]:
    return {key: value for key, value in values.items() if isinstance(value, float)}


def test_rolling_and_generation_are_those_of_the_hugging_face_model(run: Path, tmp_path: Path) -> None:
    from lm_eval.api.instance import Instance

    def instances(kind: str, arguments: list[Any]) -> list[Any]:
        return [Instance(kind, {}, argument, number) for number, argument in enumerate(arguments)]

    ours, theirs = harness(run), hugging_face(run, tmp_path / "hf")
    texts = ["the table of the row " * 30, "état 数据", "gradient"]
    rolling = instances("loglikelihood_rolling", [(text,) for text in texts])
    found, expected = (torch.tensor(model.loglikelihood_rolling(rolling)) for model in (ours, theirs))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
    settings = {"until": ["row", "\n"], "max_gen_toks": 12, "do_sample": False}
    asked = instances("generate_until", [(text[:60], settings) for text in texts] + [("of", {"max_gen_toks": 3})])
    assert ours.generate_until(asked) == theirs.generate_until(asked)


def test_batches_do_not_change_what_is_found(run: Path) -> None:
    pairs = [(None, [5] * length, [7, 9, length]) for length in (1, 4, 9, 40, 70)] + [
        (None, [5, 6], [token]) for token in range(20, 40)
    ]
    one_by_one = harness(run, 1)._loglikelihood_tokens(pairs)
    together = harness(run, 100_000)._loglikelihood_tokens(pairs)
    torch.testing.assert_close(
        torch.tensor([a[0] for a in together]), torch.tensor([a[0] for a in one_by_one]), rtol=0, atol=1e-5
    )
    # Continuations of one token over one context are the whole distribution.
    every = [(None, [5, 6], [token]) for token in range(320)]
    assert sum(torch.tensor([score[0] for score in harness(run)._loglikelihood_tokens(every)]).exp()) == pytest.approx(
        1
    )


def test_the_command_writes_lm_evals_results_and_the_papers_table(
    run: Path, benchmarks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["eval", str(run), "--tasks", "piqa,sciq", "--data", str(benchmarks), "--limit", "4"]
    assert main([*words, "--ranks", "1"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].split() == ["run", "parameters", "SciQ", "PIQA"]
    file = run / "eval" / "step-00000006.json"
    saved = json.loads(file.read_text())
    assert saved["results"]["piqa"]["acc,none"] in (0, 0.25, 0.5, 0.75, 1)
    assert saved["n-samples"]["sciq"]["effective"] == 4
    assert main(["eval", "--compare", str(run), str(file)]) == 0
    compared = capsys.readouterr().out
    assert compared.count("small-xgram at step 6") == 2
    assert "paper: X-gram 4x 100 %" in compared
    assert main(["eval", "--compare", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["scores"].keys() == {"piqa", "sciq"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tasks", "pi qa"], "'pi qa' is not a task name; did you mean 'piqa'?"),
        (["--tasks", "piqa", "--data", "nowhere"], "--data 'nowhere' is not a folder"),
        (["--tasks", "openbookqa"], "the data of task 'openbookqa' is missing: there is no"),
        (["--tasks", "sciq", "--shots", "3"], None),
        (["--tasks", "boolq", "--limit", "0"], "--limit 0 is not at least 1"),
        (["--compare", "nowhere"], "cannot read 'nowhere'"),
    ],
)
def test_bad_input_is_one_sentence_before_the_model_is_loaded(
    run: Path,
    benchmarks: Path,
    words: list[str],
    said: str | None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def loaded(*_: Any) -> None:
        raise UserError("the model was loaded")

    monkeypatch.setattr(Checkpoint, "load", loaded)
    given = [] if "--data" in words else ["--data", str(benchmarks)]
    assert main(["eval", str(run), *given, *words]) == 2
    error = capsys.readouterr().err
    # With few examples sciq has its validation split to take them from.
    assert (said or "the model was loaded") in error
    assert "Traceback" not in error


def test_unknown_tasks_are_answered_with_near_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from xgram_dist.eval import tasks

    monkeypatch.setattr(tasks, "_task_index", lambda: {"lambada_openai": None, "hellaswag": None})
    with pytest.raises(UserError, match="unknown task 'lambda_openai'; did you mean 'lambada_openai'"):
        load_tasks(["lambda_openai"], None, tmp_path)


def test_benchmarks_that_cannot_be_fetched_are_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def offline(*_: Any, **__: Any) -> None:
        raise ConnectionError("Couldn't reach the hub")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(UserError, match=r"cannot be fetched from the Hugging Face hub .* give local parquet files"):
        load_tasks(["piqa"], None, tmp_path)


def test_damaged_parquet_is_one_sentence(tmp_path: Path) -> None:
    write(tmp_path / "data", "piqa", "validation", [{"goal": "a"}])
    (tmp_path / "data" / "piqa" / "validation.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(UserError, match="cannot be used"):
        load_tasks(["piqa"], tmp_path / "data", tmp_path / "scratch")


def test_the_papers_averages_are_the_means_of_its_rows() -> None:
    for backbone in (726_000_000, 1_150_000_000):
        rows = paper_rows(backbone)
        assert len(rows) == 16
        for row in rows:
            assert sum(row.scores.values()) / len(COLUMNS) == pytest.approx(row.average, abs=0.21)
    assert {one.name: one.shots for one in PAPER if one.shots} == {
        "arc_challenge": 5,
        "mmlu": 5,
        "commonsense_qa_5shot": 5,
    }


def test_the_average_is_over_the_papers_ten() -> None:
    results = {one.name: {"acc,none": 0.1 * n, "acc_stderr,none": 9.0} for n, one in enumerate(PAPER)}
    results["sciq"]["acc_norm,none"] = 1.0
    made = EvaluationResult("x", 1, 0, {"results": results, "group_subtasks": {}})
    assert made.scores["sciq"] == 100
    assert made.scores["average"] == pytest.approx((100 + sum(10 * n for n in range(1, 10))) / 10)


def test_mmlu_is_the_mean_of_its_categories_where_they_were_scored_apart() -> None:
    groups = {name: {"acc,none": share} for name, share in zip(CATEGORIES, (0.1, 0.2, 0.3, 0.8), strict=True)}
    pooled = {"mmlu": {"acc,none": 0.6}}
    members = {"mmlu": list(CATEGORIES)}
    apart = {"results": {**groups, **pooled}, "groups": {**groups, **pooled}, "group_subtasks": members}
    assert EvaluationResult("x", 1, 0, apart).scores == {"mmlu": pytest.approx(35)}
    whole = {"results": pooled, "groups": pooled, "group_subtasks": {"mmlu": []}}
    assert EvaluationResult("x", 1, 0, whole).scores == {"mmlu": pytest.approx(60)}


def test_the_two_suites_are_not_evaluated_at_once(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="both suites have the same tasks"):
        load_tasks(["paper", "paper-lm-eval"], None, tmp_path)


def test_the_suite_takes_the_authors_splits_and_metrics(tmp_path: Path) -> None:
    folder = Path(__file__).resolve().parents[4] / "shared" / "data" / "eval"
    if not folder.is_dir():
        pytest.skip("needs eval in the folder shared/data beside the checkout")
    loaded = load_tasks(["paper"], folder, tmp_path).loaded["tasks"]
    assert len(loaded["arc_easy"].eval_docs) == 570  # the published scores are multiples of 1/570
    assert len(loaded["arc_challenge"].eval_docs) == 1172
    mmlu = [task for name, task in loaded.items() if name.startswith("mmlu_")]
    assert sum(len(task.eval_docs) for task in mmlu) == 1531
    metric = {name: [one["metric"] for one in task.config.metric_list] for name, task in loaded.items()}
    by_length = {"piqa", "hellaswag", "openbookqa", "social_iqa", "arc_challenge"}
    assert {name for name in metric if metric[name] == ["acc_norm"]} == by_length
    assert all(metric[name] == ["acc"] for name in metric if name not in by_length)


def test_mmlu_is_asked_subject_by_subject_with_examples_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from xgram_dist.eval import tasks

    subjects = ["anatomy", "virology"]
    for split, count in (("dev", 6), ("validation", 3)):
        rows = [
            {"question": f"{split} {subject} {n}", "subject": subject, "choices": list("wxyz"), "answer": n % 4}
            for n in range(count)
            for subject in subjects
        ]
        write(tmp_path / "data", "mmlu", split, rows)
    original = tasks._split_subjects
    monkeypatch.setattr(
        tasks, "_split_subjects", lambda folder, split, shots, _, out: original(folder, split, shots, subjects, out)
    )
    monkeypatch.setattr(Path, "glob", _only(subjects, Path.glob))
    mmlu = next(one for one in PAPER if one.task == "mmlu")
    monkeypatch.setitem(tasks.SUITES, "paper", (mmlu,))
    loaded = load_tasks(["paper"], tmp_path / "data", tmp_path / "scratch").loaded
    assert sorted(loaded["tasks"]) == ["mmlu_anatomy", "mmlu_virology"]
    task = loaded["tasks"]["mmlu_anatomy"]
    task.build_all_requests(limit=1, rank=0, world_size=1)
    prompt = task.instances[0].args[0]
    assert [line for line in prompt.splitlines() if "anatomy " in line] == [
        *(f"dev anatomy {n}" for n in range(5)),
        "validation anatomy 0",
    ]


def _only(subjects: list[str], original: Any) -> Any:
    def glob(self: Path, pattern: str, **kwargs: Any) -> Any:
        found = original(self, pattern, **kwargs)
        return [file for file in found if file.stem[5:] in subjects] if pattern == "mmlu_*.yaml" else found

    return glob


def test_all_real_benchmarks_are_read(tmp_path: Path) -> None:
    folder = Path(__file__).resolve().parents[4] / "shared" / "data" / "eval"
    if not folder.is_dir():
        pytest.skip("needs eval in the folder shared/data beside the checkout")
    tasks = load_tasks([one.task for one in PAPER if one.task != "mmlu"], folder, tmp_path).loaded["tasks"]
    counts = {name: len(task.eval_docs) for name, task in tasks.items()}
    assert counts == {
        "sciq": 1000,
        "piqa": 1838,
        "winogrande": 1267,
        "arc_easy": 2376,
        "arc_challenge": 1172,
        "hellaswag": 10042,
        "social_iqa": 1954,
        "boolq": 3270,
        "openbookqa": 500,
        "commonsense_qa": 1221,
    }
