"""Engines of `prepare`: texts in, joined token ids out, as fast as the machine allows.

In: UTF-8 texts. Out: one array (uint32) of all of them, each followed by the end-of-text id. Two engines give the same
ids: `gigatoken` (tens of times faster) and `huggingface`, the tokenizer's own library (for a `.model`, sentencepiece).

gigatoken implements the pipelines of common tokenizers, not all. So `choose_engine` compares the two before any work:
a fixed hard sample, every added token in several surroundings, and the first documents of every source. Where one id
differs, or gigatoken cannot read the file or is not installed, Hugging Face is taken and the reason is said.
gigatoken is imported here alone.

One difference is known: Hugging Face normalises by the tables of Unicode 9, gigatoken by newer ones. Texts with
combining marks of later versions, all of them rare scripts, are encoded by Hugging Face in either engine.
"""

import json
import random
import re
import resource
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from xgram_dist.data.tokenizer import Tokenizer, library_faults, load_tokenizer
from xgram_dist.errors import UserError

AUTO, GIGATOKEN, HUGGINGFACE = "auto", "gigatoken", "huggingface"
CHOICES = (AUTO, GIGATOKEN, HUGGINGFACE)
MAX_WORKER_BYTES = 800_000_000  # memory of the process above which gigatoken's cache is dropped
_MIN_CACHED_BYTES = 32_000_000  # text between two drops, at least
_PROBE_CHARACTERS = 1 << 17  # of a source's first documents


# Combining marks whose order or composition was defined after Unicode 9, and the blocks of rare scripts that hold them.
_LATER_MARKS = (
    (0x07FD, 0x07FD),
    (0x0890, 0x089F),
    (0x08CF, 0x08D3),
    (0x0C3C, 0x0C3C),
    (0x0D3B, 0x0D3C),
    (0x0EBA, 0x0EBA),
    (0x1715, 0x1715),
    (0x1ABF, 0x1AFF),
    (0x1DF6, 0x1DFA),
    (0xA82C, 0xA82C),
    (0x10D00, 0x10FFF),
    (0x11000, 0x11FFF),
    (0x16000, 0x16FFF),
    (0x1E000, 0x1EFFF),
)
_LATER_MARK = re.compile("[" + "".join(f"{chr(first)}-{chr(last)}" for first, last in _LATER_MARKS) + "]")
_LATER_MARK_BYTES = sorted({chr(first).encode()[:1] for first, _ in _LATER_MARKS})  # first bytes in UTF-8


def _has_later_mark(text: bytes) -> bool:
    return (
        not text.isascii()
        and any(byte in text for byte in _LATER_MARK_BYTES)
        and _LATER_MARK.search(text.decode("utf-8")) is not None
    )


class Engine(Protocol):
    def encode_joined(self, texts: Sequence[bytes]) -> NDArray[Any]: ...


class _LibraryEngine:
    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer

    def encode_joined(self, texts: Sequence[bytes]) -> NDArray[Any]:
        return self._tokenizer.encode_joined([text.decode("utf-8") for text in texts])


def import_gigatoken() -> Any:
    """The package and the one that its results are arrays of."""
    import awkward  # noqa: F401
    import gigatoken

    return gigatoken


def _resident_bytes() -> int:
    """Memory of this process; 0 where the system does not tell."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        return 0


class _GigatokenEngine:
    """On the calling thread. Its cache of words is kept from batch to batch, and dropped when memory runs short: the
    library sets it no limit."""

    def __init__(self, file: Path, end_of_text: int, end_of_text_name: str):
        self._end = end_of_text
        self._file, self._end_name = file, end_of_text_name
        self._fallback: _LibraryEngine | None = None  # loaded when a text needs it
        self._library: Any = None
        self._load()

    def _load(self) -> None:
        self._library = None  # free the old one first
        record = json.loads(self._file.read_bytes())
        self._library = import_gigatoken().Tokenizer.from_json(_without_special_tokens(record))
        self._encoded_bytes = 0

    def encode_joined(self, texts: Sequence[bytes]) -> NDArray[Any]:
        if not any(map(_has_later_mark, texts)):
            return self._encode(texts)
        if self._fallback is None:
            self._fallback = _LibraryEngine(load_tokenizer(self._file, self._end_name))
        engines = (self._encode, self._fallback.encode_joined)
        return np.concatenate([engines[marked](list(group)) for marked, group in groupby(texts, _has_later_mark)])

    def _encode(self, texts: Sequence[bytes]) -> NDArray[Any]:
        if not texts:
            return np.zeros(0, dtype=np.uint32)
        self._encoded_bytes += sum(map(len, texts))
        if self._encoded_bytes > _MIN_CACHED_BYTES and _resident_bytes() > MAX_WORKER_BYTES:
            self._load()
        with library_faults(f"tokenizer '{self._file}' fails"):
            layout = self._library.encode_batch(texts, parallel=False).layout
        offsets, ids = np.asarray(layout.offsets.data), np.asarray(layout.content.data)
        assert len(offsets) == len(texts) + 1
        assert ids.dtype == np.uint32
        ids = ids[offsets[0] : offsets[-1]]
        ends = offsets[1:] - offsets[0] + np.arange(len(texts))
        joined = np.full(len(ids) + len(texts), self._end, dtype=np.uint32)
        is_text = np.ones(len(joined), dtype=np.bool_)
        is_text[ends] = False
        joined[is_text] = ids
        return joined


def _without_special_tokens(record: dict[str, Any]) -> str:
    """The text of a special token inside a document is plain text, so gigatoken must not know any."""
    tokens = [token for token in record.get("added_tokens") or [] if not token.get("special")]
    return json.dumps({**record, "added_tokens": tokens})


def load_engine(name: str, file: Path, end_of_text: int, end_of_text_name: str) -> Engine:
    if name == GIGATOKEN:
        return _GigatokenEngine(file, end_of_text, end_of_text_name)
    return _LibraryEngine(load_tokenizer(file, end_of_text_name))


@dataclass(frozen=True)
class EngineChoice:
    name: str
    reason: str | None = None  # why it is not gigatoken, where that was asked for or possible


def choose_engine(tokenizer: Tokenizer, asked: str, texts: Iterable[str]) -> EngineChoice:
    """The engine for `tokenizer`, as `--tokenizer-engine` asks; `texts`: first documents of the sources."""
    if asked == HUGGINGFACE:
        return EngineChoice(HUGGINGFACE)
    reason = _gigatoken_fault(tokenizer, texts)
    if reason is None:
        return EngineChoice(GIGATOKEN)
    if asked == GIGATOKEN:
        raise UserError(f"--tokenizer-engine gigatoken: {reason}; use auto or huggingface")
    return EngineChoice(HUGGINGFACE, reason)


def _gigatoken_fault(tokenizer: Tokenizer, texts: Iterable[str]) -> str | None:
    """Why gigatoken cannot be used; None where it gives the same ids."""
    if tokenizer.path.suffix == ".model":
        return f"'{tokenizer.path.name}' is a sentencepiece model, gigatoken is used for tokenizers JSON files"
    record = json.loads(tokenizer.path.read_bytes())
    model = record.get("model") or {}
    if model.get("type", "BPE") != "BPE":
        return f"gigatoken does not know models of type {model['type']}"
    if model.get("dropout"):
        return f"gigatoken does not know BPE dropout ({model['dropout']})"
    try:
        engine = _GigatokenEngine(tokenizer.path, tokenizer.end_of_text, tokenizer.end_of_text_name)
    except ImportError:
        return "the package gigatoken is not installed (pip install gigatoken)"
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # it raises many types, and panics
        normalizer = (record.get("normalizer") or {}).get("type", "none")
        return f"gigatoken does not read this tokenizer (normalizer {normalizer}): {str(error).splitlines()[0][:200]}"
    added = [str(token["content"]) for token in record.get("added_tokens") or []]
    for text in [*hard_sample(), *_surrounded(added), *texts]:
        data = text.encode("utf-8")
        try:
            same = np.array_equal(engine.encode_joined([data]), tokenizer.encode_joined([text]))
        except Exception as error:
            return f"gigatoken fails on {text[:40]!r}: {str(error).splitlines()[0][:200]}"
        if not same:
            return f"gigatoken's ids differ from Hugging Face's for {text[:40]!r}"
    return None


def hard_sample() -> list[str]:
    """Texts on which implementations of a tokenizer tend to differ."""
    chooser = random.Random(0)
    planes = [*range(0x20, 0x3000), *range(0x3000, 0xD800, 7), *range(0xE000, 0x20000, 11), 0xE0041, 0x10FFFF]
    any_characters = ["".join(map(chr, chooser.choices(planes, k=400))) for _ in range(24)]
    return [
        "",
        " ",
        "\n",
        "it's we'll I'M THEY'RE don’t 'S 's'T x'y ''' 'RE're",
        "0 01 012 0123 01234567890123456789 1,234.56 ١٢٣ ४५ ²³ Ⅷ 1e-9 0x1F",
        "👩‍👩‍👧‍👦 👍🏽 🇩🇪🇫🇷 ☺️ 🏳️‍🌈 \U0001f9ff\U0001fae0 text👍text",
        "e\u0301 \u00e9 a\u0308\u0323 \u1e69 s\u0323\u0307 \u0915\u094d\u0937 \u0e01\u0e33",
        "\uac00 \u1100\u1161 \ufb01 Å\u212b \u1e9b\u0323",
        " \t\t  \n\n \r\n\r\n\t \u00a0\u2003\u3000  x   y\t\tz \u2028\u2029\u0085\u200b\u200d\ufeff end  ",
        "    if x:\n        return  {'a':1}\n\n\n\n#  \n\t\tpass;;;; //// ==== !!!??? …—“”",
        "中文字符，标点。 日本語のテキスト 한국어 텍스트 العربية עברית ไทย हिन्दी ქართული",
        "\x00\x01\x02\x1b[0m\x7f\x80\x9f\ufffd\ufffe\uffff",
        "\U00010000\U0001f600\U000e0041\U0010ffff \ud7ff\ue000 \ufdd0",
        "x" * 20_000,
        " " * 5_000 + "y" + "\n" * 3_000 + "\t" * 1_000,
        "ab1 " * 8_000,
        "A" * 300 + "a" * 300 + "!" * 300 + "9" * 300 + "é" * 300 + "字" * 300,
        "CamelCaseWords snake_case_words SCREAMING_CASE mixedCASEWords iPhone McDonald's",
        "https://example.org/a/b?c=d&e=%20f#g user@example.org C:\\path\\file \\n \\u00e9 &amp; <b>x</b>",
        *any_characters,
    ]


def _surrounded(tokens: list[str]) -> list[str]:
    """Added tokens as text, alone and beside others."""
    texts = [f"a{token}b {token} c\n{token}\n {token}{token}  {token.upper()} {token[:-1]}" for token in tokens]
    return [*tokens, *texts, "".join(tokens), " ".join(tokens), "".join(token[:-1] for token in tokens)]


def first_documents(texts: Iterable[str]) -> list[str]:
    """Texts until there are enough characters to compare engines on."""
    chosen, left = [], _PROBE_CHARACTERS
    for text in texts:
        if len(text) > left:
            text = text[:left]
        chosen.append(text)
        left -= len(text)
        if left <= 0:
            break
    return chosen
