"""Attention inside documents against a dense mask; labels and f-grams at the borders of documents."""

import subprocess
import sys

import numpy as np
import pytest
import tiny_models as tiny
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils._python_dispatch import TorchDispatchMode

from xgram_dist.model import document_attention as module
from xgram_dist.model import transformer
from xgram_dist.model.document_attention import Documents, build_block_mask, document_attention, number_documents
from xgram_dist.model.loss import next_token_labels
from xgram_dist.parallel.context_parallel import ContextAxis
from xgram_dist.tables.fgrams import count_grams

END = 0


def documents_of(length, share_of_ends, seed=0):
    """Two sequences; the second is one document."""
    generator = torch.Generator().manual_seed(seed)
    tokens = 1 - (torch.rand(2, length, generator=generator) < share_of_ends).long()
    tokens[1] = 1
    return number_documents(tokens, END)


def dense_mask(documents_BT):
    return torch.tril(documents_BT[:, :, None] == documents_BT[:, None, :])[:, None]


def with_gradients(attend, dtype, length):
    generator = torch.Generator().manual_seed(1)
    shapes = [(2, 4, length, 8), (2, 2, length, 8), (2, 2, length, 8)]
    qkv = [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]
    out = attend(*qkv)
    out.backward(torch.randn(out.shape, generator=generator, dtype=dtype))
    return [out.detach(), *(x.grad for x in qkv)]


@pytest.mark.parametrize("length", [1, 37, 300])
@pytest.mark.parametrize("share_of_ends", [0.0, 0.1, 1.0])
def test_documents_one_by_one_equal_the_dense_mask_with_gradients(length, share_of_ends):
    documents = documents_of(length, share_of_ends)
    found = with_gradients(lambda *qkv: document_attention(*qkv, Documents(documents)), torch.float64, length)
    mask = dense_mask(documents)
    expected = with_gradients(
        lambda *qkv: F.scaled_dot_product_attention(*qkv, attn_mask=mask, enable_gqa=True), torch.float64, length
    )
    torch.testing.assert_close(found, expected)


def test_flex_attention_equals_the_dense_mask_with_gradients(monkeypatch):
    # On the CPU torch refuses its backward pass, though uncompiled, as here, it is there.
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    monkeypatch.setattr(module, "_compiled_flex_attention", lambda: flex_attention)
    documents = documents_of(300, 0.02)
    block_mask = build_block_mask(documents)
    found = with_gradients(lambda *qkv: document_attention(*qkv, block_mask), torch.float32, 300)
    mask = dense_mask(documents)
    expected = with_gradients(
        lambda *qkv: F.scaled_dot_product_attention(*qkv, attn_mask=mask, enable_gqa=True), torch.float32, 300
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_training_is_imported_without_inductor():
    """Which would take every rank 0.7 s of CPU, used or not."""
    code = "import sys, xgram_dist.train.trainer; print('torch._inductor.compile_fx' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_a_compiled_block_has_flex_attention_in_its_graph():
    graphs = []

    def keep(graph, _):
        graphs.append(graph)
        return graph

    mask = build_block_mask(documents_of(300, 0.02))
    q, k = torch.randn(2, 4, 300, 8), torch.randn(2, 2, 300, 8)
    torch.compile(document_attention, backend=keep, fullgraph=True)(q, k, k, mask)
    (graph,) = graphs
    called = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert called.count("flex_attention") == 1


@pytest.mark.parametrize("length", [60, 128, 1000, 1024])
@pytest.mark.parametrize("share_of_ends", [0.0, 0.004, 0.05, 1.0])
def test_blocks_are_those_that_torch_finds_position_by_position(length, share_of_ends):
    """A block that is left out would be attention that is silently missing; only on a GPU does it show in numbers."""
    documents = documents_of(length, share_of_ends)
    found = build_block_mask(documents)
    expected = create_block_mask(found.mask_mod, 2, None, length, length, device="cpu")
    assert found.seq_lengths == expected.seq_lengths
    for kind in ("kv", "full_kv", "q", "full_q"):
        count, index = (getattr(found, f"{kind}_{part}") for part in ("num_blocks", "indices"))
        expected_count, expected_index = (getattr(expected, f"{kind}_{part}") for part in ("num_blocks", "indices"))
        assert torch.equal(count, expected_count), kind
        used = torch.arange(index.shape[-1]) < count[..., None]
        assert torch.equal(index * used, expected_index * used), kind


CONTEXTS = [(rank, size) for size in (2, 3) for rank in range(size)]


@pytest.mark.parametrize(("rank", "size"), CONTEXTS)
@pytest.mark.parametrize("length", [24, 768, 1536])
@pytest.mark.parametrize("share_of_ends", [0.0, 0.004, 0.05, 1.0])
def test_blocks_of_a_cut_sequence_see_all_that_is_visible_and_nothing_else(rank, size, length, share_of_ends):
    context, documents = ContextAxis(rank, size), documents_of(length, share_of_ends)
    mask = build_block_mask(documents, context)
    positions = torch.cat([torch.arange(length)[part] for part in context.computed(length)])
    expected = dense_mask(documents)[:, :, positions]
    queries, keys = torch.arange(len(positions)), torch.arange(length)
    visible = mask.mask_mod(torch.arange(2)[:, None, None], torch.tensor(0), queries[:, None], keys)[:, None]
    assert torch.equal(visible, expected)
    full, partial = (blocks_of(mask, kind, visible.shape) for kind in ("full_kv", "kv"))
    assert torch.equal(full | (partial & visible), expected)
    if length == 1536:  # no block lies across chunks: none is looked at in vain
        by_block = expected[:, 0].unflatten(1, (-1, module.BLOCK)).unflatten(3, (-1, module.BLOCK))
        needed = by_block.any(4).any(2)
        assert int(mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum()) == int(needed.sum())


def blocks_of(mask, kind, shape):
    """The positions in the blocks of a kind."""
    count, index = (getattr(mask, f"{kind}_{part}")[:, 0] for part in ("num_blocks", "indices"))
    chosen = torch.zeros(*count.shape, index.shape[-1], dtype=torch.bool)
    chosen.scatter_(2, index.long(), torch.arange(index.shape[-1]) < count[..., None])
    whole = chosen.repeat_interleave(module.BLOCK, 1).repeat_interleave(module.BLOCK, 2)
    return whole[:, None, : shape[2], : shape[3]]


@pytest.mark.parametrize(("rank", "size"), CONTEXTS)
@pytest.mark.parametrize("share_of_ends", [0.0, 0.1, 1.0])
def test_spans_of_a_cut_sequence_equal_the_dense_mask_with_gradients(monkeypatch, rank, size, share_of_ends):
    monkeypatch.setattr(module, "QUERIES", 7)
    context, documents = ContextAxis(rank, size), documents_of(60, share_of_ends)
    positions = torch.cat([torch.arange(60)[part] for part in context.computed(60)])
    mask = dense_mask(documents)[:, :, positions]

    def selected(attend):
        return lambda q, k, v: attend(q[:, :, positions], k, v)

    found = with_gradients(
        selected(lambda *qkv: document_attention(*qkv, module.Spans(documents, context))), torch.float64, 60
    )
    expected = with_gradients(
        selected(lambda *qkv: F.scaled_dot_product_attention(*qkv, attn_mask=mask, enable_gqa=True)), torch.float64, 60
    )
    torch.testing.assert_close(found, expected)


class LargestTensor(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            self.numel = max(self.numel, tensor.numel() if isinstance(tensor, torch.Tensor) else 0)
        return out


def test_no_tensor_of_sequence_by_sequence_is_made():
    length = 8192
    documents = documents_of(length, 0.001)
    with LargestTensor() as largest:
        build_block_mask(documents)
    assert largest.numel <= 4 * length


@pytest.mark.parametrize("recomputed", [False, True])
def test_the_mask_is_built_once_for_all_layers(monkeypatch, recomputed):
    built = []

    def build(documents_BT, context):
        built.append(documents_BT)
        return module.build_document_mask(documents_BT, context)

    monkeypatch.setattr(transformer, "build_document_mask", build)
    train = {**tiny.BASE["train"], "activation_checkpointing": recomputed}
    settings = tiny.config(model={"document_masking": True}, memory={"method": "vanilla"}, train=train)
    made, tokens = tiny.model(settings, end_of_text=END), tiny.tokens(settings, 2, 12)
    made.loss(tokens, tokens, {}, torch.tensor(1.0))[0].backward()
    assert len(built) == 1


def test_with_a_block_mask_blocks_are_one_graph_without_breaks_for_all_micro_batches(monkeypatch):
    """As on a GPU: the mask is an argument of the compiled block, new for each micro-batch."""
    model = {"document_masking": True, "width": 64, "sequence_length": 150}
    settings = tiny.config(model=model, memory={"method": "vanilla"})
    plain, compiled = (tiny.model(settings, end_of_text=END) for _ in range(2))
    graphs = []

    def count(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    for block in compiled.blocks:
        block.compile(backend=count, fullgraph=True)
    for seed in range(2):
        tokens = tiny.tokens(settings, 2, 150, seed=seed)
        with torch.no_grad():
            expected = plain(tokens, tokens, {}, torch.tensor(1.0))
            with monkeypatch.context() as patch:
                patch.setattr(transformer, "build_document_mask", build_block_mask)
                found = compiled(tokens, tokens, {}, torch.tensor(1.0))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()
    assert len(graphs) == 1


# Labels and f-grams


def test_with_label_masking_the_end_of_a_document_predicts_nothing():
    tokens = torch.tensor([[1, 2, END, 3, 4, END]])
    assert next_token_labels(tokens).tolist() == [[2, END, 3, 4, END, -1]]
    assert next_token_labels(tokens, END).tolist() == [[2, END, -1, 4, END, -1]]


def test_label_masking_leaves_out_the_first_tokens_of_documents_but_not_in_scores():
    losses, scores = {}, {}
    for masked in (False, True):
        settings = tiny.config(model={"label_masking": masked}, memory={"method": "vanilla"})
        made, tokens = tiny.model(settings, end_of_text=END), tiny.tokens(settings, 1, 12).clamp_min(1)
        tokens[0, 5] = END
        losses[masked] = float(made.loss(tokens, tokens, {}, torch.tensor(1.0))[1])
        made.head.keeps_scores = True
        made.loss(tokens, tokens, {}, torch.tensor(1.0))
        scores[masked] = made.head.scores[0]
    torch.testing.assert_close(scores[True], scores[False])
    kept = [t for t in range(11) if t != 5]
    assert losses[True] == pytest.approx(-float(scores[False][0, kept].mean()), rel=1e-6)
    assert losses[False] == pytest.approx(-float(scores[False][0, :11].mean()), rel=1e-6)


def test_no_f_gram_reaches_over_the_end_of_a_document():
    tokens = np.array([[7, END, 5, 6, 7, END, 5, 6]])
    grams = count_grams(tokens, 3, 100)
    found = grams.match(tokens, END)[0]
    crossing = [[int(t) for t in grams.tokens[number] if t >= 0] for number in found]
    assert crossing == [[], [7, END], [], [5, 6], [], [7, END], [], [5, 6]]
    assert [int(t) for t in grams.tokens[grams.match(tokens)[0, 7]]] == [END, 5, 6]
