"""What a refusal looks like: one line, short, nothing that a terminal would obey, and the expected words."""

from xgram_dist.errors import UserError

LONGEST = 400


def check_sentence(error: UserError, *words: str) -> None:
    sentence = str(error)
    assert sentence.isprintable(), repr(sentence)
    assert len(sentence) <= LONGEST, sentence
    for word in words:
        assert word in sentence, sentence
