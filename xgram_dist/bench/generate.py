"""The cost of tables per generated token: X-gram, with rows mapped from a checkpoint's files, against vanilla.

Both models are built and saved as checkpoints as in training, opened as by `generate`, and decode the same tokens one
by one with a key-value cache. The sides alternate. The ratio of a round is of two consecutive runs of tokens; the
result is the median over rounds. Tokens follow Zipf's law and differ between rounds, so that rows are really looked up.
"""

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from xgram_dist.bench.common import synthetic_facts
from xgram_dist.bench.step import step_config
from xgram_dist.checkpoint.save import Saver
from xgram_dist.checkpoint.sharded_tensor import training_state
from xgram_dist.config import Config
from xgram_dist.console import Progress
from xgram_dist.data.train_bpe import train_bpe
from xgram_dist.engine import build_engine
from xgram_dist.inference.hf.decoder import Cache
from xgram_dist.inference.model import HOST, Checkpoint, Model
from xgram_dist.model.build import build_lookup, build_model
from xgram_dist.model.methods.base import table_layout
from xgram_dist.model.transformer import Transformer
from xgram_dist.parallel.device import choose_device, synchronize
from xgram_dist.parallel.mesh import single_mesh
from xgram_dist.parallel.process_group import ProcessGroup
from xgram_dist.tables.exchange import shards_of
from xgram_dist.tables.layout import routing_settings
from xgram_dist.tables.routing_build import build_routing
from xgram_dist.tables.routing_io import save_routing

PROMPT = 64


def run_generate_benchmark(rounds: int, tokens: int, vocabulary: int) -> dict[str, Any]:
    frequencies = 1.0 / (np.arange(vocabulary) + 10.0)
    frequencies /= frequencies.sum()
    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory(prefix="xgram-dist-bench-") as folder:
        models = {}
        for method in ("vanilla", "xgram"):
            config = step_config(method, vocabulary, False)
            saved = saved_checkpoint(config, build_model(config, HOST), frequencies, Path(folder) / method)
            models[method] = saved.load(choose_device(), "fp32")
        seconds: dict[str, list[float]] = {name: [] for name in models}
        with Progress(rounds + 1, "rounds", "vanilla and X-gram in turn") as progress:
            for number in range(rounds + 1):
                drawn = torch.from_numpy(random.choice(vocabulary, size=(1, PROMPT + 2 * tokens), p=frequencies))
                taken = _round(models, drawn, tokens, first=sorted(models)[number % 2])
                for name in models if number else ():  # the first round warms up
                    seconds[name].append(taken[name] / (2 * tokens))
                progress.update()
    ratios = [x / v for x, v in zip(seconds["xgram"], seconds["vanilla"], strict=True)]
    return {
        "vocabulary": vocabulary,
        "threads": torch.get_num_threads(),
        "rounds": rounds,
        "tokens_a_round": 2 * tokens,
        "vanilla_ms": round(1000 * statistics.median(seconds["vanilla"]), 3),
        "xgram_ms": round(1000 * statistics.median(seconds["xgram"]), 3),
        "ratio": round(statistics.median(ratios), 4),
        "ratio_quartiles": [round(q, 4) for q in statistics.quantiles(ratios, n=4)[::2]],
    }


def _round(models: dict[str, Model], drawn: torch.Tensor, tokens: int, first: str) -> dict[str, float]:
    """first, second, second, first: seconds of each over all its tokens."""
    second = next(name for name in models if name != first)
    caches = {name: Cache() for name in models}
    taken = dict.fromkeys(models, 0.0)
    done = dict.fromkeys(models, PROMPT)
    for name, model in models.items():
        model.hidden(drawn[:, :PROMPT], caches[name])
    for name in (first, second, second, first):
        model = models[name]
        synchronize(model.device)
        start = time.perf_counter()
        for position in range(done[name], done[name] + tokens):
            model.logits(model.hidden(drawn[:, position : position + 1], caches[name])[:, -1]).argmax(-1)
        synchronize(model.device)
        taken[name] += time.perf_counter() - start
        done[name] += tokens
    return taken


def saved_checkpoint(
    config: Config, model: Transformer, frequencies: "np.ndarray[Any, Any]", folder: Path
) -> Checkpoint:
    """The model with initial tables, saved as a run saves it."""
    routing, mesh = None, single_mesh()
    folder.mkdir()
    if table_layout(config).hashed:
        routing = build_routing(frequencies, routing_settings(config), table_layout(config).num_views)
        save_routing(routing, folder / "routing.npz")
    engine = build_engine(config, model, mesh, HOST)
    lookup = build_lookup(config, routing, HOST)
    tables = shards_of(lookup)
    state = training_state(engine, tables, mesh)
    tokenizer = train_bpe(["the text of a tokenizer that encodes nothing here"], 257, folder / "tokenizer.json")
    known = {
        "routing": None if routing is None else routing.sha256(),
        "tokenizer": _tokenizer_facts(tokenizer),
        "loader": {"position": 0, "fingerprint": ""},
    }
    facts = synthetic_facts(config, config.train.steps, 1, tables, **known)
    saver = Saver(folder, config.checkpoint, ProcessGroup())
    saver.save(state, facts, [tokenizer] + ([folder / "routing.npz"] if routing is not None else []), wait=True)
    saver.close()
    lookup.close()
    return Checkpoint.find(folder)


def _tokenizer_facts(file: Path) -> dict[str, str]:
    from xgram_dist.data.tokenizer import load_tokenizer

    found = load_tokenizer(file)
    return {"file": file.name, "sha256": found.sha256, "end_of_text_name": found.end_of_text_name}
