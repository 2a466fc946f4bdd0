"""What tables cost a generated token: X-gram, its rows mapped from a checkpoint's files, beside vanilla.

Both models are made and saved as checkpoints by the trainer's own parts, opened as `generate` opens them, and decode
the same tokens one by one from a cache, in turn. The ratio of a round is of two stretches of tokens right after each
other; the median over rounds is the result. Tokens follow Zipf's law and differ from round to round, so rows are
really looked up.
"""

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from xgram_dist.bench.facts import made_facts
from xgram_dist.bench.step import step_config
from xgram_dist.checkpoint.save import Saver
from xgram_dist.checkpoint.state import backbone_state, table_state
from xgram_dist.config import Config
from xgram_dist.data.tokenizer import train_bpe
from xgram_dist.engine import build_engine
from xgram_dist.inference.decoder import Cache
from xgram_dist.inference.open import Checkpoint, Model
from xgram_dist.memory.layout import num_views, routing_settings
from xgram_dist.memory.routing.build import build_routing
from xgram_dist.model.build import build_lookup, build_model
from xgram_dist.optim.update import Optimizer
from xgram_dist.parallel.device import choose_device, synchronize
from xgram_dist.parallel.mesh import single_mesh
from xgram_dist.parallel.ranks import Ranks
from xgram_dist.progress import Progress

PROMPT = 64


def run_generate_benchmark(rounds: int, tokens: int, vocabulary: int) -> dict[str, Any]:
    frequencies = 1.0 / (np.arange(vocabulary) + 10.0)
    frequencies /= frequencies.sum()
    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory(prefix="xgram-dist-bench-") as folder:
        models = {
            m: _model(step_config(m, vocabulary, False), frequencies, Path(folder) / m) for m in ("vanilla", "xgram")
        }
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


def _model(config: Config, frequencies: "np.ndarray[Any, Any]", folder: Path) -> Model:
    """Saved as a run saves it, and opened again."""
    routing, mesh, cpu = None, single_mesh(), torch.device("cpu")
    folder.mkdir()
    if config.memory.method == "xgram":
        routing = build_routing(frequencies, routing_settings(config), num_views(config))
        routing.save(folder / "routing.npz")
    engine = build_engine(config, build_model(config, cpu), mesh, cpu)
    lookup = build_lookup(config, routing, cpu)
    tables = Optimizer(config, engine, lookup, mesh).table_optimizer
    state = backbone_state(engine, mesh)
    if tables is not None:
        rows, whole = table_state(tables, mesh)
        state |= rows | whole
    tokenizer = train_bpe(["the text of a tokenizer that encodes nothing here"], 257, folder / "tokenizer.json")
    known = {"routing": None if routing is None else routing.sha256(), "tokenizer": _tokenizer_facts(tokenizer)}
    facts = made_facts(config, config.train.steps, 1, tables, **known)
    saver = Saver(folder, config.checkpoint, Ranks())
    saver.save(state, facts, [tokenizer] + ([folder / "routing.npz"] if routing is not None else []), wait=True)
    saver.close()
    lookup.close()
    return Checkpoint.find(folder).load(choose_device(), "fp32")


def _tokenizer_facts(file: Path) -> dict[str, str]:
    from xgram_dist.data.tokenizer import load_tokenizer

    found = load_tokenizer(file)
    return {"file": file.name, "sha256": found.sha256, "end_of_text_name": found.end_of_text_name}
