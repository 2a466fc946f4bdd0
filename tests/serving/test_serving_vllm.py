"""The exported model in vLLM gives the tokens of `generate`: in large batches, in chunks, with shared prefixes, when
sequences are preempted, on two tensor-parallel ranks, and compiled; and lm-eval the scores of `eval`. Needs the
environment of `make serving`."""

import json
import os
import random
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from eval_helpers import make_benchmarks
from inference_helpers import recipe, trained
from test_inference_methods import MEMORY
from train_helpers import make_documents, small_tree

from xgram_dist.cli.main import main
from xgram_dist.config import build_config
from xgram_dist.eval.lm_eval_adapter import HarnessModel, run_harness
from xgram_dist.eval.scoring import CheckpointScorer
from xgram_dist.eval.tasks import load_tasks
from xgram_dist.inference.generate import generate
from xgram_dist.inference.model import Checkpoint
from xgram_dist.parallel.mesh import single_mesh

PYTHON = Path(__file__).resolve().parents[2] / "tools/serving/.venv/bin/python"
pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="needs the environment of `make serving`")

NEW_TOKENS = 12
# vLLM's attention on CPUs has heads of at least 32 columns.
MODEL = {"width": 128, "heads": 4, "kv_heads": 2, "ffn_width": 96, "sequence_length": 128}
MANY = {"max_num_seqs": 256, "enable_chunked_prefill": False, "enable_prefix_caching": False}
SCARCE = {"block_size": 32, "max_num_batched_tokens": 48, "max_num_seqs": 32, "num_gpu_blocks_override": 16}
"""Prompts in chunks of at most 48 tokens, and a cache of fewer positions than the sequences of a batch have."""
BACKBONES: dict[str, dict[str, Any]] = {
    "llama": {
        "qk_norm": "none",
        "rope_scaling": {"factor": 8.0, "low_frequency": 1.0, "high_frequency": 4.0, "original_length": 32},
    },
    "qwen3": {"qk_norm": "head", "head_width": 48},
    "olmo2": {"norms": "after"},
}
"""Keys of `model` by which the backbones of `--from-hf` differ from the paper's."""
METHODS = ["ple", "retoken", "mort", "stem", "engram", "mole", "scone"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs and exported folders of every method."""
    folder = tmp_path_factory.mktemp("serving")
    lines = "".join(json.dumps({"text": text}) + "\n" for text in make_documents(1200))
    (folder / "raw.jsonl").write_text(lines, encoding="utf-8")
    words = ["--train-bpe", "300", "--chunk-tokens", "512", "--validation", "0.2", "--workers", "1"]
    data = folder / "data"
    assert main(["prepare", "--source", f"web={folder / 'raw.jsonl'}", *words, "--out", str(data)]) == 0
    trained(recipe(data, "all", model=MODEL), folder / "all")
    trained(recipe(data, "qk", model=MODEL, memory={"compression": 1.0}), folder / "own-rows")
    for method in METHODS:
        tree = small_tree(data, method)
        tree["memory"] |= MEMORY[method]
        tree["model"] |= MODEL
        tree["train"] |= {"global_batch": 4, "micro_batch": 1, "validation_sequences": 4}
        tree["optimizer"] = {"learning_rate": 0.02, "warmup_share": 0.0}
        trained(build_config(tree), folder / method)
    for name, keys in BACKBONES.items():
        trained(recipe(data, "all", model=MODEL | keys), folder / name)
    for name in ["all", "own-rows", *BACKBONES, *METHODS]:
        assert main(["export", str(folder / name), "--to", "hf", str(folder / f"{name}-hf")]) == 0
    return folder


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """200 of mixed length."""
    chosen = random.Random(0)
    lengths = [1, 2, 3, 5, 9, 30, 70]
    return [[chosen.randrange(300) for _ in range(chosen.choice(lengths))] for _ in range(200)]


def served(folder: Path, jobs: list[dict[str, Any]], preempts: bool = False) -> list[Any]:
    """The outputs of each job by batch. `preempts`: whether sequences have to give way to others in it."""
    (folder / "jobs.json").write_text(json.dumps(jobs), encoding="utf-8")
    script = Path(__file__).with_name("vllm_outputs.py")
    variables = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # otherwise two ranks need two NUMA nodes
    }
    done = subprocess.run(
        [str(PYTHON), str(script), str(folder / "jobs.json"), str(folder / "out.json")],
        env=variables,
        capture_output=True,
        text=True,
        timeout=560,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    outputs = json.loads((folder / "out.json").read_text(encoding="utf-8"))
    if preempts:
        assert all(output["preemptions"] for output in outputs)
    return [output["batches"] for output in outputs]


def check(run: Path, prompts: list[list[int]], batch: list[dict[str, Any]]) -> None:
    """Greedy tokens are those of `generate`, log-probabilities those of the whole sequence at once, to 1e-4."""
    model = Checkpoint.find(run).load(torch.device("cpu"), "fp32")
    expected = [list(tokens) for tokens in zip(*generate(model, prompts, NEW_TOKENS), strict=True)]
    assert [found["tokens"] for found in batch] == expected
    for prompt, tokens, found in zip(prompts, expected, batch, strict=True):
        logits = model.logits(model.hidden(torch.tensor([prompt + tokens])))[0, len(prompt) - 1 : -1]
        logprobs = torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(found["logprobs"]), logprobs, rtol=0, atol=1e-4)


def job(folder: Path, name: str, batches: list[list[list[int]]], options: dict[str, Any]) -> dict[str, Any]:
    return {"folder": str(folder / f"{name}-hf"), "max_tokens": NEW_TOKENS, "batches": batches, "options": options}


def test_200_prompts_in_one_batch_are_those_of_generate(folder: Path, prompts: list[list[int]]) -> None:
    jobs = [job(folder, name, [prompts], MANY) for name in ("all", "own-rows")]
    for name, (batch,) in zip(("all", "own-rows"), served(folder, jobs), strict=True):
        check(folder / name, prompts, batch)


def test_every_method_in_chunks_with_shared_prefixes_and_preemption(folder: Path, prompts: list[list[int]]) -> None:
    names = ["all", *METHODS]
    shared = [prompt for prompt in prompts if len(prompt) == 70][:4]
    jobs = [job(folder, name, [prompts, shared], SCARCE) for name in names]
    for name, (first, second) in zip(names, served(folder, jobs, preempts=True), strict=True):
        check(folder / name, prompts, first)
        check(folder / name, shared, second)
    # A prompt that was just served is found in the cache.
    ((_, again),) = served(folder, [job(folder, "all", [shared, shared], SCARCE)])
    check(folder / "all", shared, again)
    assert sum(found["cached"] for found in again) >= 4 * 64


def test_two_tensor_parallel_ranks(folder: Path, prompts: list[list[int]]) -> None:
    """Sites at queries, keys, values and in the feed-forward network are divided; those at the residual stream are not,
    as Engram's, and with it all others."""
    names = ["all", "own-rows", "stem", "engram"]
    jobs = [job(folder, name, [prompts[:40]], {**MANY, "tensor_parallel_size": 2}) for name in names]
    for name, (batch,) in zip(names, served(folder, jobs), strict=True):
        check(folder / name, prompts[:40], batch)


def test_backbones_of_other_families(folder: Path, prompts: list[list[int]]) -> None:
    """Their norms, heads and rotary frequencies; on two ranks, too, which share the heads."""
    few = prompts[:40]
    for options in (SCARCE, {**MANY, "tensor_parallel_size": 2}):
        jobs = [job(folder, name, [few], options) for name in BACKBONES]
        for name, (batch,) in zip(BACKBONES, served(folder, jobs), strict=True):
            check(folder / name, few, batch)


def test_no_cuda_graph_is_made_of_a_model_with_tables() -> None:
    """Its replay would leave out what the host reads."""
    script = """
import sys
from types import SimpleNamespace
from vllm.config import CUDAGraphMode
from vllm.model_executor.models.config import MODELS_CONFIG_MAP
from vllm.plugins import load_general_plugins
load_general_plugins()
for tables in ([], [{"name": "layers.0.h.0"}]):
    config = SimpleNamespace(
        model_config=SimpleNamespace(hf_config=SimpleNamespace(tables=tables)),
        compilation_config=SimpleNamespace(cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE),
    )
    MODELS_CONFIG_MAP["XgramForCausalLM"].verify_and_update_config(config)
    print("mode", config.compilation_config.cudagraph_mode.name)
"""
    done = subprocess.run([str(PYTHON), "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    modes = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("mode ")]
    assert modes == ["FULL_AND_PIECEWISE", "NONE"]


def test_the_compiled_network(folder: Path, prompts: list[list[int]]) -> None:
    jobs = [job(folder, name, [prompts], {**SCARCE, "enforce_eager": False}) for name in ("all", "stem")]
    for name, (batch,) in zip(("all", "stem"), served(folder, jobs, preempts=True), strict=True):
        check(folder / name, prompts, batch)


@contextmanager
def endpoint(folder: Path, log: Path) -> Iterator[str]:
    """The address of vLLM's server of an exported folder."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = ["--model", str(folder), "--dtype", "float32", "--enforce-eager", "--kv-cache-memory-bytes", "256M"]
    command = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", *words, "--host", "127.0.0.1"]
    with log.open("wb") as file:
        process = subprocess.Popen([*command, "--port", str(port)], stdout=file, stderr=file)
    try:
        end, ready = time.monotonic() + 300, False
        while not ready:
            assert process.poll() is None, log.read_text(errors="replace")[-3000:]
            assert time.monotonic() < end, log.read_text(errors="replace")[-3000:]
            with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health") as answer:
                ready = answer.status == 200
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/v1/completions"
    finally:
        process.terminate()
        process.wait(60)


def scored(model: Any, benchmarks: Path, scratch: Path) -> tuple[dict[str, Any], list[Any]]:
    """(lm-eval's scores by task, every answer the model gave)."""
    answers: list[Any] = []
    asked = model.loglikelihood

    def keep(requests: Any, **options: Any) -> Any:
        found = asked(requests, **options)
        answers.extend(found)
        return found

    model.loglikelihood = keep
    if not hasattr(model, "pool"):
        model.pool = type("NoPool", (), {"shut_down": lambda self: None})()
    results = run_harness(model, load_tasks(["sciq", "piqa", "arc_challenge"], benchmarks, scratch), None)["results"]
    return {task: {k: v for k, v in of.items() if isinstance(v, float)} for task, of in results.items()}, answers


def test_lm_eval_on_the_endpoint_gives_the_scores_of_eval(folder: Path, tmp_path: Path) -> None:
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    benchmarks = make_benchmarks(tmp_path / "benchmarks")
    checkpoint = Checkpoint.find(folder / "all")
    model = checkpoint.load(torch.device("cpu"), "fp32")
    ours = HarnessModel(CheckpointScorer(model), checkpoint.tokenizer, model.context, 2048, single_mesh(), model)
    expected, expected_answers = scored(ours, benchmarks, tmp_path / "ours")
    exported = str(folder / "all-hf")
    with endpoint(folder / "all-hf", tmp_path / "log") as address:
        served = LocalCompletionsAPI(
            model=exported,
            base_url=address,
            tokenizer=exported,
            tokenizer_backend="huggingface",
            batch_size=8,
            max_length=model.context,
        )
        found, answers = scored(served, benchmarks, tmp_path / "served")
    assert len(answers) > 150
    logs, expected_logs = (torch.tensor([float(one[0]) for one in of]) for of in (answers, expected_answers))
    torch.testing.assert_close(logs, expected_logs, rtol=0, atol=1e-4)
    assert [bool(one[1]) for one in answers] == [bool(one[1]) for one in expected_answers]
    assert found == expected


def test_vllms_engram_hashes_as_the_reader_of_published_ones() -> None:
    """`interchange.engram_hash`; vLLM's kernels have no form for CPUs, the layout of its tables has."""
    from xgram_dist.inference.interchange import engram_hash

    config = {
        "engram_layer_ids": [1, 5, 9],
        "engram_num_embeddings": [0, 0, 0],
        "engram_max_ngram_size": 4,
        "engram_n_heads": 3,
        "engram_head_dim": 32,
        "engram_vocab_size": 1000,
        "engram_compressed_vocab_size": 700,
        "engram_pad_token_id": 2,
    }
    script = """
import json, sys, types
from vllm.models.deepseek_v41.common.engram import EngramLayout, compute_hash_multipliers
config = types.SimpleNamespace(**json.loads(sys.argv[1]))
layout = EngramLayout(config)
multipliers = compute_hash_multipliers(layout.layer_ids, layout.max_ngram_size, layout.compressed_vocab_size)
print(json.dumps([layout.primes, multipliers.tolist()]))
"""
    done = subprocess.run([str(PYTHON), "-c", script, json.dumps(config)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    primes, multipliers = json.loads(done.stdout.splitlines()[-1])
    ours = engram_hash(config, config["engram_layer_ids"])
    assert [[list(heads) for heads in layer] for layer in ours.rows] == primes
    assert [[list(of) for of in layer] for layer in ours.multipliers] == [
        [drawn[:order] for order in (2, 3, 4)] for drawn in multipliers
    ]
