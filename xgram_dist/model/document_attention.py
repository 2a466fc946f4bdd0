"""Causal attention inside documents, without a mask of sequence x sequence.

In: the document of each position, as numbers that do not fall along a sequence. `build_document_mask` prepares them
once for a micro-batch; every layer attends with the result. No collectives.

On a GPU the mask is flex_attention's `BlockMask`: blocks of one document are computed without a mask, blocks on a
border with one, others not at all. It is found from the documents at the ends of each block, on the device, so the host
does not wait and nothing of size T x T exists. flex_attention is compiled whether or not `train.compile` is set:
uncompiled it would materialise all scores.

On the CPU, where flex_attention has no compiled backward pass, documents are attended to one by one (`Documents`): the
lengths are known to the host. A compiled block has a graph break there.

Where sequences are cut over a context axis, queries are those of a rank's two chunks and keys those of whole sequences:
the mask then knows the positions of the queries, with or without documents (`build_block_mask`, `Spans`).

Shapes: B batch, T sequence, H heads, G key/value heads, K head width, N blocks of the sequence.
"""

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from xgram_dist.parallel.context_parallel import WHOLE_SEQUENCES, ContextAxis
from xgram_dist.parallel.device import has_flex_attention

BLOCK = 128
QUERIES = 1024
"""Of a span, on the CPU: bounds the memory of its mask."""


class Documents:
    """The lengths of the documents of a micro-batch, sequence after sequence."""

    def __init__(self, documents_BT: Tensor):
        begins = F.pad(documents_BT.diff(dim=1) != 0, (1, 0), value=True).flatten()
        starts = [*begins.nonzero()[:, 0].tolist(), len(begins)]
        self.lengths = [end - start for start, end in pairwise(starts)]


class Span(NamedTuple):
    """Some queries of one document, and the keys up to the last of them."""

    sequence: int
    queries: slice
    """Among the positions that this rank computes."""
    keys: slice
    """Among those of the whole sequence."""


class Spans:
    """The documents of a micro-batch as far as this rank's positions lie in them."""

    def __init__(self, documents_BT: Tensor, context: ContextAxis):
        length = documents_BT.shape[1]
        self.spans: list[Span] = []
        for sequence, documents_T in enumerate(documents_BT):
            begins = F.pad(documents_T.diff() != 0, (1, 0), value=True)
            ends = [*begins.nonzero()[:, 0].tolist(), length]
            for number, chunk in enumerate(context.computed(length)):
                # From a position of the sequence to that among the computed ones.
                offset = number * (chunk.stop - chunk.start) - chunk.start
                for begin, end in pairwise(ends):
                    first, last = max(begin, chunk.start), min(end, chunk.stop)
                    for start in range(first, last, QUERIES):
                        stop = min(start + QUERIES, last)
                        self.spans.append(Span(sequence, slice(start + offset, stop + offset), slice(begin, stop)))


DocumentMask = BlockMask | Documents | Spans


def number_documents(tokens_BT: Tensor, end_of_text: int) -> Tensor:
    """The document of each position [B, T]; an end-of-text token still belongs to the document it ends."""
    ends = (tokens_BT == end_of_text).long()
    return torch.cumsum(ends, 1) - ends


def build_document_mask(documents_BT: Tensor, context: ContextAxis = WHOLE_SEQUENCES) -> DocumentMask:
    """`documents_BT`: of whole sequences. `context`: the ranks that share them: queries are those that this rank
    computes, keys are of whole sequences."""
    if has_flex_attention(documents_BT.device):
        return build_block_mask(documents_BT, context)
    return Documents(documents_BT) if context.size == 1 else Spans(documents_BT, context)


def build_block_mask(documents_BT: Tensor, context: ContextAxis = WHOLE_SEQUENCES) -> BlockMask:
    """Document numbers do not fall, so the ends of a block say all: queries see earlier keys if a document reaches from
    one block into the other, and all of them if both blocks lie in one document. A block of queries may lie across the
    border of two chunks: its first and last position bound it all the same."""
    device, length = documents_BT.device, documents_BT.shape[1]
    whole = context.size == 1
    position_S = torch.cat([torch.arange(part.start, part.stop, device=device) for part in context.computed(length)])
    document_BS = context.select(documents_BT)
    first_N, last_N = _block_ends(len(position_S), device)
    begin_M, end_M = _block_ends(length, device)
    is_whole_NM = (last_N - first_N + 1 == BLOCK)[:, None] & (end_M - begin_M + 1 == BLOCK)
    earlier_NM = position_S[first_N][:, None] >= end_M
    begin_document, end_document = documents_BT[:, None, begin_M], documents_BT[:, None, end_M]
    is_full = earlier_NM & is_whole_NM & (begin_document == document_BS[:, last_N, None])
    reaches_NM = position_S[last_N][:, None] >= begin_M
    is_partial = reaches_NM & (end_document >= document_BS[:, first_N, None]) & ~is_full

    def is_visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        position = query if whole else position_S[query]
        return (position >= key) & (document_BS[batch, query] == documents_BT[batch, key])

    return BlockMask.from_kv_blocks(
        *_ordered_blocks(is_partial),
        *_ordered_blocks(is_full),
        BLOCK,
        is_visible,
        seq_lengths=(len(position_S), length),
    )


def _block_ends(length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The first and the last position of each block."""
    starts = torch.arange(0, length, BLOCK, device=device)
    return starts, (starts + BLOCK - 1).clamp_max(length - 1)


def _ordered_blocks(chosen_BNN: Tensor) -> tuple[Tensor, Tensor]:
    """For each row of blocks: how many are chosen, and their indices first [B, 1, ...]."""
    chosen = chosen_BNN[:, None].int()
    return chosen.sum(-1, dtype=torch.int32), chosen.argsort(dim=-1, descending=True, stable=True).int()


@cache
def _compiled_flex_attention() -> Callable[..., Any]:
    """Compiled when it is first needed: torch.compile imports inductor."""
    return torch.compile(flex_attention)


def document_attention(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, mask: DocumentMask) -> Tensor:
    """[B, H, T, K]."""
    if isinstance(mask, Documents):
        return _attend_one_by_one(q_BHTK, k_BGTK, v_BGTK, mask)
    if isinstance(mask, Spans):
        return _attend_by_spans(q_BHTK, k_BGTK, v_BGTK, mask)
    grouped = q_BHTK.shape[1] != k_BGTK.shape[1]
    attend: Callable[..., Any] = flex_attention
    if not torch.compiler.is_compiling():  # else the compiled block takes it into its graph
        attend = _compiled_flex_attention()
    return attend(q_BHTK, k_BGTK, v_BGTK, block_mask=mask, enable_gqa=grouped)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attend_one_by_one(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, documents: Documents) -> Tensor:
    batch, heads, length, head_width = q_BHTK.shape
    grouped = heads != k_BGTK.shape[1]
    q_documents, k_documents, v_documents = (
        [document.transpose(0, 1)[None] for document in x.transpose(1, 2).flatten(0, 1).split(documents.lengths)]
        for x in (q_BHTK, k_BGTK, v_BGTK)
    )
    mixed = [
        F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)[0].transpose(0, 1)
        for q, k, v in zip(q_documents, k_documents, v_documents, strict=True)
    ]
    return torch.cat(mixed).view(batch, length, heads, head_width).transpose(1, 2)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attend_by_spans(q_BHSK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, mask: Spans) -> Tensor:
    grouped = q_BHSK.shape[1] != k_BGTK.shape[1]
    mixed: list[list[Tensor]] = [[] for _ in range(len(q_BHSK))]
    for sequence, queries, keys in mask.spans:
        q, k, v = q_BHSK[sequence, None, :, queries], k_BGTK[sequence, None, :, keys], v_BGTK[sequence, None, :, keys]
        num_queries, num_keys = q.shape[2], k.shape[2]
        # The last query sees all keys, each one before it one key less.
        seen = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)
        mixed[sequence].append(F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=grouped))
    return torch.cat([torch.cat(parts, 2) for parts in mixed])
