"""Tokenizers behind one small class: texts in, token ids out.

In: a `tokenizers` JSON file or a sentencepiece `.model`. Out: `Tokenizer` with its vocabulary (largest id + 1), its
end-of-text id and the SHA-256 of its file. No state. `train_bpe` makes such a file.

The text of a special token inside a document is encoded as plain text, so that an end-of-text id in the data is always
the end of a document.
"""

import hashlib
import os
import threading
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from xgram_dist.errors import BadFileError, UserError
from xgram_dist.untrusted import JsonError, parse_json, read_file, shown

END_OF_TEXT = "<|endoftext|>"
# Common names of the end-of-text token, in the order of the search.
END_OF_TEXT_NAMES = (
    END_OF_TEXT,
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "[EOS]",
    "<EOS>",
    "<end_of_text>",
    "<｜end▁of▁sentence｜>",
)


MAX_ID = 2**24
"""Tables of ids are as long as the largest."""


_STANDARD_ERROR = threading.RLock()


@contextmanager
def library_faults(what: str) -> Iterator[None]:
    """A fault of a tokenizer library as one sentence. A panic of Rust code is a BaseException, which Rust has printed
    with the stack by then: what is written to standard error meanwhile is held back, and dropped after a fault."""
    with _STANDARD_ERROR:
        saved, held = os.dup(2), os.memfd_create("standard error")
        os.dup2(held, 2)
        try:
            yield
        except (UserError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            os.ftruncate(held, 0)
            raise BadFileError(f"{what}: {str(error).strip() or type(error).__name__}") from None
        finally:
            os.dup2(saved, 2)
            os.close(saved)
            if size := os.fstat(held).st_size:
                os.write(2, os.pread(held, size, 0))
            os.close(held)


def _check_ids(path: Path) -> None:
    """Refuse ids that would need tables of gigabytes."""
    try:
        record = parse_json(read_file(path, follow=True), depth=None)
    except JsonError as error:
        raise BadFileError(f"'{path}' is not a tokenizers JSON file: {error}") from None
    model = record.get("model") if isinstance(record, dict) else None
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else []
    added = record.get("added_tokens") if isinstance(record, dict) else None
    ids += [token.get("id") for token in added or [] if isinstance(token, dict)] if isinstance(added, list) else []
    wrong = next((one for one in ids if type(one) is not int or not 0 <= one < MAX_ID), None)
    if wrong is not None:
        raise BadFileError(f"tokenizer '{path}' has the token id {shown(wrong)}; ids must be from 0 to {MAX_ID - 1:,}")


class _Encoder(Protocol):
    """The common interface of the two libraries."""

    @property
    def vocabulary(self) -> int: ...
    def token_id(self, name: str) -> int | None: ...
    def encode(self, texts: Sequence[str]) -> list[list[int]]: ...
    def decode(self, ids: list[int]) -> str: ...


class _JsonEncoder:
    def __init__(self, path: Path):
        from tokenizers import Tokenizer as Library

        self._path = path
        _check_ids(path)
        with library_faults(f"'{path}' is not a tokenizers JSON file"):
            self._library = Library.from_file(str(path))
        self._library.no_truncation()
        self._library.no_padding()
        self._library.encode_special_tokens = True
        self._encode: Any = getattr(self._library, "encode_batch_fast", self._library.encode_batch)

    @property
    def vocabulary(self) -> int:
        return max(self._library.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def token_id(self, name: str) -> int | None:
        token: int | None = self._library.token_to_id(name)
        return token

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        with library_faults(f"tokenizer '{self._path}' fails"):
            return [encoding.ids for encoding in self._encode(list(texts), add_special_tokens=False)]

    def decode(self, ids: list[int]) -> str:
        text: str = self._library.decode(ids, skip_special_tokens=False)
        return text


class _SentencePieceEncoder:
    def __init__(self, path: Path):
        import sentencepiece

        try:
            self._library = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except (RuntimeError, OSError) as error:
            raise UserError(f"'{path}' is not a sentencepiece model: {error}") from error

    @property
    def vocabulary(self) -> int:
        return int(self._library.vocab_size())

    def token_id(self, name: str) -> int | None:
        token = int(self._library.piece_to_id(name))
        # The library returns the id of the unknown token for an unknown piece.
        return token if self._library.id_to_piece(token) == name else None

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        ids: list[list[int]] = self._library.encode(list(texts), out_type=int, num_threads=1)
        return ids

    def decode(self, ids: list[int]) -> str:
        text: str = self._library.decode(ids)
        return text


@dataclass(frozen=True)
class Tokenizer:
    path: Path
    sha256: str
    vocabulary: int  # largest id + 1
    end_of_text: int
    end_of_text_name: str
    _encoder: _Encoder

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """One array (uint32) per text, without special tokens."""
        # Through array(): several times faster than np.array on a list of Python integers.
        return [np.frombuffer(array("I", ids), dtype=np.uint32) for ids in self._encoder.encode(texts)]

    def encode_joined(self, texts: Sequence[str]) -> NDArray[Any]:
        """All texts as one array (uint32), each followed by the end-of-text id."""
        flat = array("I")
        for ids in self._encoder.encode(texts):
            flat.extend(array("I", ids))
            flat.append(self.end_of_text)
        return np.frombuffer(flat, dtype=np.uint32)

    def decode(self, ids: Iterable[int]) -> str:
        return self._encoder.decode([int(token) for token in ids])

    @property
    def file_name(self) -> str:
        """Name of the tokenizer file in a prepared data set."""
        return "tokenizer.model" if self.path.suffix == ".model" else "tokenizer.json"


def load_tokenizer(path: str | Path, end_of_text: str | None = None) -> Tokenizer:
    """`.model` is read as sentencepiece, anything else as tokenizers JSON; a folder as the tokenizer file in it."""
    file = Path(path)
    if file.is_dir():
        candidates = [file / name for name in ("tokenizer.json", "tokenizer.model") if (file / name).is_file()]
        if not candidates:
            raise UserError(f"folder '{file}' holds neither tokenizer.json nor tokenizer.model")
        file = candidates[0]
    try:
        sha256 = hashlib.sha256(read_file(file, follow=True)).hexdigest()
    except OSError as error:
        raise UserError(f"cannot read tokenizer '{file}': {error.strerror}") from error
    encoder: _Encoder = _SentencePieceEncoder(file) if file.suffix == ".model" else _JsonEncoder(file)
    names = END_OF_TEXT_NAMES if end_of_text is None else (end_of_text,)
    for name in names:
        token = encoder.token_id(name)
        if token is not None:
            return Tokenizer(file, sha256, encoder.vocabulary, token, name, encoder)
    if end_of_text is not None:
        raise BadFileError(
            f"tokenizer '{file}' has no token {shown(end_of_text)}; give another name with --end-of-text"
        )
    raise UserError(
        f"tokenizer '{file}' has no end-of-text token with a common name ({', '.join(END_OF_TEXT_NAMES)}); "
        "name it with --end-of-text"
    )
