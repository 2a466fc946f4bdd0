from pathlib import Path

import numpy as np
import pytest
from data_helpers import SHARED_DATA, make_texts
from tokenizers import Tokenizer as Library

from xgram_dist.data.tokenizer import load_tokenizer
from xgram_dist.data.train_bpe import train_bpe
from xgram_dist.errors import UserError

QWEN3 = SHARED_DATA / "tokenizers" / "qwen3" / "tokenizer.json"
SENTENCEPIECE = SHARED_DATA / "tokenizers" / "sentencepiece" / "sp_test_en_1k.model"


def test_encoding_agrees_with_the_library(bpe: Path) -> None:
    tokenizer, library = load_tokenizer(bpe), Library.from_file(str(bpe))
    texts = [*make_texts(50, 2), "naïve 数据 \x00 \U0001f600", "x"]
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        assert ids.tolist() == library.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids) == text


def test_joined_documents_each_end_with_end_of_text(bpe: Path) -> None:
    tokenizer = load_tokenizer(bpe)
    texts = make_texts(20, 2)
    parts = [np.append(ids, tokenizer.end_of_text) for ids in tokenizer.encode_batch(texts)]
    assert tokenizer.encode_joined(texts).tolist() == np.concatenate(parts).tolist()


def test_a_text_that_spells_end_of_text_does_not_end_the_document(bpe: Path) -> None:
    tokenizer = load_tokenizer(bpe)
    ids = tokenizer.encode_batch(["before <|endoftext|> after"])[0]
    assert tokenizer.end_of_text not in ids
    assert tokenizer.decode(ids) == "before <|endoftext|> after"


def test_training_twice_gives_the_same_file(tmp_path: Path) -> None:
    texts = make_texts(300, 1)
    first = train_bpe(iter(texts), 400, tmp_path / "a.json")
    second = train_bpe(iter(texts), 400, tmp_path / "b.json")
    assert first.read_bytes() == second.read_bytes()
    assert load_tokenizer(first).vocabulary <= 400


def test_every_byte_can_be_encoded_by_a_trained_tokenizer(bpe: Path) -> None:
    tokenizer = load_tokenizer(bpe)
    text = "".join(chr(code) for code in range(0x250))
    assert tokenizer.decode(tokenizer.encode_batch([text])[0]) == text


def test_faults_of_the_user_are_sentences(tmp_path: Path, bpe: Path) -> None:
    with pytest.raises(UserError, match="cannot read tokenizer"):
        load_tokenizer(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(UserError, match="not a tokenizers JSON"):
        load_tokenizer(tmp_path / "bad.json")
    (tmp_path / "bad.model").write_bytes(b"no")
    with pytest.raises(UserError, match="not a sentencepiece model"):
        load_tokenizer(tmp_path / "bad.model")
    with pytest.raises(UserError, match="has no token '<stop>'"):
        load_tokenizer(bpe, "<stop>")
    bpe_text = bpe.read_text().replace("<|endoftext|>", "<|fin|>")
    (tmp_path / "nameless.json").write_text(bpe_text)
    with pytest.raises(UserError, match="--end-of-text"):
        load_tokenizer(tmp_path / "nameless.json")
    assert load_tokenizer(tmp_path / "nameless.json", "<|fin|>").end_of_text == 0
    with pytest.raises(UserError, match="too small"):
        train_bpe(["x"], 100, tmp_path / "t.json")


@pytest.mark.skipif(not SENTENCEPIECE.is_file(), reason="the sentencepiece model is not beside the checkout")
def test_a_sentencepiece_model_encodes_and_knows_its_end_of_text() -> None:
    import sentencepiece

    tokenizer = load_tokenizer(SENTENCEPIECE)
    library = sentencepiece.SentencePieceProcessor(model_file=str(SENTENCEPIECE))
    assert (tokenizer.vocabulary, tokenizer.end_of_text, tokenizer.end_of_text_name) == (1000, library.eos_id(), "</s>")
    assert tokenizer.encode_batch(["hello there"])[0].tolist() == library.encode("hello there")


@pytest.mark.skipif(not QWEN3.is_file(), reason="the Qwen3 tokenizer is not beside the checkout")
def test_the_qwen3_tokenizer_has_its_published_size_and_end_of_text() -> None:
    tokenizer = load_tokenizer(QWEN3.parent)
    assert (tokenizer.vocabulary, tokenizer.end_of_text) == (151_669, 151_643)
