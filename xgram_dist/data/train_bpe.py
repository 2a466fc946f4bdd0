"""Training of a byte-level BPE: texts in, a `tokenizers` JSON file out.

gigatoken's trainer is used where it is installed, else that of Hugging Face. Both find the same merges and write the
same file; gigatoken does so in a tenth of the time. Deterministic in the texts.
"""

import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from xgram_dist.data.engines import import_gigatoken
from xgram_dist.data.tokenizer import END_OF_TEXT
from xgram_dist.errors import UserError
from xgram_dist.files import write_atomically

MIN_BPE = 257  # 256 bytes and the end-of-text token
_SEPARATOR = b"\xff\x00\xff"  # between texts; no UTF-8 text holds it


def train_bpe(texts: Iterable[str], size: int, out: Path) -> Path:
    """Train a byte-level BPE of `size` tokens (with end-of-text) and write it to `out`."""
    if size < MIN_BPE:
        raise UserError(f"--train-bpe {size} is too small: 256 bytes and the end-of-text token need {MIN_BPE}")
    try:
        import_gigatoken()
    except ImportError:
        record = _train_with_huggingface(texts, size)
    else:
        record = _train_with_gigatoken(texts, size)
    write_atomically(out, json.dumps(json.loads(record), ensure_ascii=False, indent=1))
    return out


def _train_with_huggingface(texts: Iterable[str], size: int) -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(texts, trainer=trainer)
    record: str = library.to_str()
    return record


def _train_with_gigatoken(texts: Iterable[str], size: int) -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    data = _SEPARATOR.join(text.encode("utf-8") for text in texts)
    with _silent_output():
        pairs = _useful_merges(import_gigatoken(), data, size)
    characters = _byte_characters()
    merges = [("".join(characters[b] for b in left), "".join(characters[b] for b in right)) for left, right in pairs]
    tokens = [END_OF_TEXT, *sorted(characters), *(left + right for left, right in merges)]
    vocabulary: dict[str, int] = {}
    for token in tokens:
        vocabulary.setdefault(token, len(vocabulary))
    library = Tokenizer(models.BPE(vocabulary, merges))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([END_OF_TEXT])
    record: str = library.to_str()
    return record


def _useful_merges(library: Any, data: bytes, size: int) -> list[tuple[bytes, bytes]]:
    """The merges, without those after every word is one token, where gigatoken goes on with pairs that do not occur."""
    _, pairs = library.train_bpe(data, size - 1, [], "huggingface", _SEPARATOR)
    number_of: dict[bytes, int] = {}
    for number, (left, right) in enumerate(pairs):
        number_of.setdefault(left + right, number)
    words = [word for word, _ in library.gigatoken_rs.pretokenized_counts(data, _SEPARATOR) if len(word) > 1]
    if all(word in number_of for word in words):
        return list(pairs[: max((number_of[word] for word in words), default=-1) + 1])
    return list(pairs)


def _byte_characters() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary: printable bytes for themselves."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]


@contextlib.contextmanager
def _silent_output() -> Iterator[None]:
    """gigatoken's trainer prints its progress from Rust, past `sys.stdout`."""
    saved = os.dup(1), os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(saved[0], 1)
        os.dup2(saved[1], 2)
        for descriptor in (nowhere, *saved):
            os.close(descriptor)
