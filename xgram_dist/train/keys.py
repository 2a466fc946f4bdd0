"""What a method that looks up n-grams must know of the data: foldings of tokens (engram), f-grams (scone).

Made at the start of every run from the data alone, so that it comes out the same; saved as keys.npz beside what is
trained with it.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from xgram_dist.checkpoint.fits import saved_config
from xgram_dist.config import Config
from xgram_dist.data.dataset import PreparedData
from xgram_dist.data.loader import validation_batches
from xgram_dist.data.tokenizer import load_tokenizer
from xgram_dist.errors import UserError
from xgram_dist.memory.ngrams.folding import Folding
from xgram_dist.memory.ngrams.frequent import Grams, count_grams
from xgram_dist.memory.ngrams.hashing import plan_ngram_hash
from xgram_dist.model.build import Keys
from xgram_dist.parallel.ranks import Ranks

FILE = "keys.npz"


def resolve_keys(config: Config, data: PreparedData, ranks: Ranks) -> tuple[Keys | None, str | None]:
    """(keys, a sentence about them); made by the first rank. All ranks call it."""
    if config.memory.method not in ("engram", "scone"):
        return None, None
    made: tuple[Keys, str] | None = None
    if ranks.first:
        made = _folding(config, data) if config.memory.method == "engram" else _grams(config, data)
    found = ranks.gather_objects(made)[0]
    assert found is not None
    return found


def check_keys(saved: str | None, keys: Keys | None) -> None:
    """`saved`: the hash in a checkpoint."""
    mine = None if keys is None else keys.sha256()
    if saved != mine:
        raise UserError(
            f"the checkpoint was saved with other n-gram keys ({str(saved)[:12]}, here {str(mine)[:12]}): its rows "
            "would belong to other n-grams; go on with the data set, its tokenizer and the keys of memory it had"
        )


def check_taken(folder: Path, facts: dict[str, Any], config: Config, keys: Keys | None) -> None:
    """Before weights are taken from a checkpoint: rows of n-grams mean something to the same hashing only."""
    saved = saved_config(folder, facts)
    if config.memory.method != "engram" or saved.memory.method != "engram":
        return
    if plan_ngram_hash(saved) != plan_ngram_hash(config):
        raise UserError(
            f"'{folder}' hashes n-grams in another way: set memory.engram (orders, heads, rows, layers) as it was, "
            f"{saved.memory.engram}"
        )
    check_keys(facts.get("keys"), keys)


def _folding(config: Config, data: PreparedData) -> tuple[Folding, str]:
    vocabulary, files = config.model.vocabulary, data.tokenizer_files()
    if not config.memory.engram.fold:
        return Folding.identity(vocabulary), "n-grams over token ids (memory.engram.fold is off)"
    if not files:
        return Folding.identity(vocabulary), f"n-grams over token ids: '{data.folder}' has no tokenizer to fold them by"
    tokenizer = load_tokenizer(files[0], data.manifest.end_of_text_name)
    made = Folding.build(lambda token: tokenizer.decode([token]), min(tokenizer.vocabulary, vocabulary), vocabulary)
    return made, str(made)


def _grams(config: Config, data: PreparedData) -> tuple[Grams, str]:
    scone = config.memory.scone
    sequences = torch.cat(validation_batches(data, config.model.sequence_length, 1, scone.sequences)).numpy()
    made = count_grams(np.asarray(sequences), scone.longest, scone.grams)
    if len(made.tokens) == 1:
        raise UserError(f"no n-gram of 2 to {scone.longest} tokens occurs twice in '{data.folder}'; give it more data")
    return made, f"{made}, of {len(sequences):,} sequences"
