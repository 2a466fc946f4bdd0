"""Causal attention inside documents, without a mask of sequence x sequence.

In: the document of each position, as numbers that do not fall along a sequence. `build_document_mask` prepares them
once for a micro-batch; every layer attends with the result. No collectives.

On a GPU the mask is flex_attention's `BlockMask`: blocks of one document are computed without a mask, blocks on a
border with one, others not at all. It is found from the documents at the ends of each block, on the device, so the host
does not wait and nothing of size T x T exists. flex_attention is compiled whether or not `train.compile` is set:
uncompiled it would materialise all scores.

On the CPU, where flex_attention has no compiled backward pass, documents are attended to one by one (`Documents`): the
lengths are known to the host. A compiled block has a graph break there.

Shapes: B batch, T sequence, H heads, G key/value heads, K head width, N blocks of the sequence.
"""

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from xgram_dist.parallel.device import has_flex_attention

BLOCK = 128


class Documents:
    """The lengths of the documents of a micro-batch, sequence after sequence."""

    def __init__(self, documents_BT: Tensor):
        begins = F.pad(documents_BT.diff(dim=1) != 0, (1, 0), value=True).flatten()
        starts = [*begins.nonzero()[:, 0].tolist(), len(begins)]
        self.lengths = [end - start for start, end in pairwise(starts)]


DocumentMask = BlockMask | Documents


def number_documents(tokens_BT: Tensor, end_of_text: int) -> Tensor:
    """The document of each position [B, T]; an end-of-text token still belongs to the document it ends."""
    ends = (tokens_BT == end_of_text).long()
    return torch.cumsum(ends, 1) - ends


def build_document_mask(documents_BT: Tensor) -> DocumentMask:
    return build_block_mask(documents_BT) if has_flex_attention(documents_BT.device) else Documents(documents_BT)


def build_block_mask(documents_BT: Tensor) -> BlockMask:
    """Document numbers do not fall, so the ends of a block say all: a block sees an earlier one if a document reaches
    from one into the other, and sees all of it if both lie in one document."""
    length = documents_BT.shape[1]
    block_starts = torch.arange(0, length, BLOCK, device=documents_BT.device)
    first_BN = documents_BT[:, block_starts]
    last_BN = documents_BT[:, (block_starts + BLOCK - 1).clamp_max(length - 1)]
    earlier_NN = block_starts[:, None] > block_starts
    is_whole_N = block_starts + BLOCK <= length  # the last block may be shorter, and then needs its mask
    is_full = earlier_NN & is_whole_N[:, None] & (first_BN[:, None, :] == last_BN[:, :, None])
    reaches = earlier_NN & (last_BN[:, None, :] == first_BN[:, :, None])
    is_partial = (reaches & ~is_full) | (block_starts[:, None] == block_starts)

    def is_visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (documents_BT[batch, query] == documents_BT[batch, key])

    return BlockMask.from_kv_blocks(
        *_ordered_blocks(is_partial), *_ordered_blocks(is_full), BLOCK, is_visible, seq_lengths=(length, length)
    )


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
