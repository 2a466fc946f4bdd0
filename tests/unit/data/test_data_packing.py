"""If these fail, documents are torn apart or lost where whole ones were asked for, or padding is trained on."""

from collections.abc import Callable
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pytest
import tiny_models as tiny
import torch
from data_helpers import jsonl, make_texts, read_back, write_packed
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from train_helpers import small_config

from xgram_dist.cli.main import main
from xgram_dist.data.manifest import read_manifest
from xgram_dist.data.packing import DocumentPacker, count_padding
from xgram_dist.data.prepare import Outcome
from xgram_dist.errors import UserError
from xgram_dist.train.trainer import Trainer

END = 0
Prepare = Callable[..., Outcome]


def packed_by_hand(documents: list[list[int]], length: int) -> tuple[list[list[int]], int, int]:
    """(sequences, padding, dropped), token by token."""
    sequences: list[list[int]] = [[]]
    dropped = 0
    for document in documents:
        pieces = [document[start : start + length] for start in range(0, len(document), length)]
        if len(pieces) > 1 and len(pieces[-1]) < length:
            dropped += len(pieces.pop())
        for piece in pieces:
            if len(sequences[-1]) + len(piece) > length:
                sequences.append([])
            sequences[-1] += piece
    if not sequences[-1]:
        sequences.pop()
    padding = sum(length - len(sequence) for sequence in sequences)
    return [sequence + [END] * (length - len(sequence)) for sequence in sequences], padding, dropped


@given(
    documents=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=40), max_size=30),
    length=st.integers(2, 17),
    cuts=st.lists(st.integers(0, 30), max_size=3),
)
def test_sequences_are_those_packed_by_hand_however_the_documents_arrive(
    documents: list[list[int]], length: int, cuts: list[int]
) -> None:
    ended = [[*document, END] for document in documents]
    sequences, padding, dropped = packed_by_hand(ended, length)
    packer, out = DocumentPacker(length, END), []
    borders = [0, *sorted(min(cut, len(ended)) for cut in cuts), len(ended)]
    for first, last in pairwise(borders):
        out += packer.add(np.array(list(chain(*ended[first:last])), dtype=np.uint32)).tolist()
    out += packer.flush().tolist()
    assert out == list(chain(*sequences))
    assert packer.dropped == dropped
    assert count_padding(np.array(out), length, END) == padding


def test_prepare_packs_whole_documents_and_counts_no_padding(
    run_prepare: Prepare, tmp_path: Path, bpe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = make_texts(300, 5)
    write_packed(tmp_path / "raw" / "a.jsonl", jsonl(texts))
    outcome = run_prepare({"one": tmp_path / "raw"}, sequence_length=32)
    library = Library.from_file(str(bpe))
    end = library.token_to_id("<|endoftext|>")
    documents = [[*library.encode(text, add_special_tokens=False).ids, end] for text in texts]
    chunks = read_back(tmp_path / "out", "train", "one")
    read = chunks.reshape(-1, 32)
    kept = {tuple(d[i : i + 32]) for d in documents for i in range(0, len(d), 32) if len(d) <= 32 or len(d) - i >= 32}
    for sequence in read.tolist():
        pieces, start = [], 0
        for position, token in enumerate(sequence):
            if token == end or position == 31:
                pieces.append(tuple(sequence[start : position + 1]))
                start = position + 1
        assert all(piece in kept or piece == (end,) for piece in pieces)
    manifest = read_manifest(tmp_path / "out")
    assert manifest.sequence_length == 32
    padding = count_padding(chunks.ravel(), 32, end)
    assert 0 < padding == manifest.sources[0].train.padding
    counts = np.load(tmp_path / "out" / "counts.npz")["counts"]
    assert counts.sum() == chunks.size - padding
    assert outcome.dropped_tokens > 0
    assert main(["data", str(tmp_path / "out")]) == 0
    assert f"whole documents in 32 ({100 * padding / chunks.size:.2f} % padding)" in capsys.readouterr().out


def test_sequences_of_another_length_and_labels_on_padding_are_refused(run_prepare: Prepare, tmp_path: Path) -> None:
    write_packed(tmp_path / "raw" / "a.jsonl", jsonl(make_texts(400, 5)))
    run_prepare({"one": tmp_path / "raw"}, sequence_length=32, validation=0.2)
    path = tmp_path / "out"
    longer = small_config(path, model={"sequence_length": 64, "label_masking": True})
    with pytest.raises(UserError, match="packed into sequences of 32 tokens, not 64"):
        Trainer(longer, tmp_path / "run", fresh=False)
    with pytest.raises(UserError, match=r"set model\.label_masking=true"):
        Trainer(small_config(path, model={"sequence_length": 32}), tmp_path / "run", fresh=False)
    joined = small_config(path, model={"sequence_length": 32, "label_masking": True}, data={"packing": "join"})
    with pytest.raises(UserError, match=r"data\.packing = join, but .* prepare it without --whole-documents"):
        Trainer(joined, tmp_path / "run", fresh=False)
    with pytest.raises(UserError, match="is not a multiple of it"):
        run_prepare({"one": tmp_path / "raw"}, sequence_length=48)


def test_padding_adds_nothing_to_the_loss() -> None:
    settings = tiny.config(model={"label_masking": True})
    made = tiny.model(settings, torch.float64)
    made.unlabelled = END
    tables = tiny.tables(settings, torch.float64)
    tokens = torch.tensor([[5, 9, 3, 7, END]])
    padded = torch.tensor([[5, 9, 3, 7, END, END, END, END]])

    def loss(tokens_BT: torch.Tensor) -> torch.Tensor:
        (window,) = tables.plan(tokens_BT[None]).result()
        working = tables.fetch(window, training=False)
        return made.loss(tokens_BT, working.slots[0], working.values, torch.ones((), dtype=torch.float64))[0]

    torch.testing.assert_close(loss(padded), loss(tokens), rtol=1e-12, atol=0)
