"""The vocabulary-parallel head and its cross-entropy, computed chunk by chunk.

In: hidden states, this rank's range of the head's weight, labels. Out: the mean loss over the targets, with z-loss, and
the plain mean cross-entropy for reporting; both the same on all ranks of the tensor axis.

Logits exist for one chunk of tokens at a time. Their gradient is computed in the forward pass, in place, so that
nothing of size tokens x vocabulary is kept or recomputed. Beside the three matrix products, a chunk is bound by memory
bandwidth. `EagerPasses` runs one kernel for each operation, in an fp32 buffer. `CompiledPasses` (train.compile, on a
GPU) reads the logits twice and writes their gradient over them, in the type of the matrix products.

On a tensor axis each rank has a range of the vocabulary. Collectives: `column_parallel_input` of the hidden states; for
each chunk, an all-reduce (max) of the largest logits, then one (sum) of the normaliser and the label's logit.

Shapes: B batch, T sequence, N tokens (B x T, or those of a chunk), D width, V this rank's range of the vocabulary.
"""

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from xgram_dist.model.layers import at_least_fp32, local_vocab_index
from xgram_dist.parallel.device import accumulate_matmul
from xgram_dist.parallel.tensor_parallel import (
    SINGLE_RANK,
    TensorAxis,
    all_reduce,
    column_parallel_input,
    sharded_parameter,
)

IGNORE_INDEX = -1
"""The label of a position without a target."""


class ElementwisePasses(Protocol):
    """What is done with a chunk's logits between the matrix products."""

    def normalise(
        self, logits_NV: Tensor, index_N: Tensor, is_local_N: Tensor, axis: TensorAxis
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`logits_NV`: the output of the matrix product, which may be overwritten. `index_N`, `is_local_N`: of the
        labels (`local_vocab_index`). Returns a buffer for `gradient`; and, over the whole vocabulary and at least fp32,
        the largest logit, the sum of exp(logit - largest) and the label's logit [N]."""
        ...

    def gradient(
        self, buffer_NV: Tensor, largest_N: Tensor, factor_N: Tensor, index_N: Tensor, at_label_N: Tensor
    ) -> Tensor:
        """factor * exp(logit - largest), plus `at_label_N` in the label's column. Overwrites the buffer of
        `normalise`."""
        ...


class EagerPasses:
    """One buffer for logits, their exponentials and their gradient; about ten passes over it."""

    def normalise(
        self, logits_NV: Tensor, index_N: Tensor, is_local_N: Tensor, axis: TensorAxis
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        logits = at_least_fp32(logits_NV)
        at_label = torch.where(is_local_N, logits.gather(1, index_N[:, None])[:, 0], 0.0)
        largest = all_reduce(logits.amax(-1), axis, "max")
        exponentials = logits.sub_(largest[:, None]).exp_()
        total, at_label = all_reduce(torch.stack((exponentials.sum(-1), at_label)), axis)
        return exponentials, largest, total, at_label

    def gradient(
        self, buffer_NV: Tensor, largest_N: Tensor, factor_N: Tensor, index_N: Tensor, at_label_N: Tensor
    ) -> Tensor:
        return buffer_NV.mul_(factor_N[:, None]).scatter_add_(1, index_N[:, None], at_label_N[:, None])


class CompiledPasses:
    """Two passes: one reads the logits, one reads them and writes the gradient. fp32 exists in registers only."""

    def __init__(self) -> None:
        self._softmax_statistics = torch.compile(softmax_statistics)
        self._replace_by_gradient = torch.compile(replace_by_gradient)

    def normalise(
        self, logits_NV: Tensor, index_N: Tensor, is_local_N: Tensor, axis: TensorAxis
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        _any_number_of_tokens(logits_NV, index_N, is_local_N)
        local_largest, local_total, at_label = self._softmax_statistics(logits_NV, index_N, is_local_N)
        if axis.size == 1:
            return logits_NV, local_largest, local_total, at_label
        largest = all_reduce(local_largest.clone(), axis, "max")
        local_total = local_total * (local_largest - largest).exp()
        total, at_label = all_reduce(torch.stack((local_total, at_label)), axis)
        return logits_NV, largest, total, at_label

    def gradient(
        self, buffer_NV: Tensor, largest_N: Tensor, factor_N: Tensor, index_N: Tensor, at_label_N: Tensor
    ) -> Tensor:
        _any_number_of_tokens(buffer_NV, largest_N, factor_N, index_N, at_label_N)
        self._replace_by_gradient(buffer_NV, largest_N, factor_N, index_N, at_label_N)
        return buffer_NV


EAGER = EagerPasses()


def softmax_statistics(logits_NV: Tensor, index_N: Tensor, is_local_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The largest logit, the sum of exp(logit - largest), the label's logit; of this rank's range."""
    logits = at_least_fp32(logits_NV)
    # With the dimension kept, inductor recognises the pair and finds both in one pass over the logits.
    largest = logits.amax(-1, keepdim=True)
    total = (logits - largest).exp().sum(-1, keepdim=True)
    at_label = torch.where(is_local_N, at_least_fp32(logits_NV.gather(1, index_N[:, None])[:, 0]), 0.0)
    return largest[:, 0], total[:, 0], at_label


def replace_by_gradient(
    logits_NV: Tensor, largest_N: Tensor, factor_N: Tensor, index_N: Tensor, at_label_N: Tensor
) -> None:
    """Overwrites the logits with factor * exp(logit - largest), plus `at_label_N` in the label's column."""
    softmax = (at_least_fp32(logits_NV) - largest_N[:, None]).exp() * factor_N[:, None]
    # A comparison in registers. A scatter would be a pass of its own, and serial in deterministic mode.
    is_label = torch.arange(logits_NV.shape[1], device=logits_NV.device) == index_N[:, None]
    logits_NV.copy_(softmax + torch.where(is_label, at_label_N[:, None], 0.0))


def _any_number_of_tokens(*per_token: Tensor) -> None:
    """So that the last chunk of a micro-batch, and micro-batches of evaluation, do not compile again."""
    for tensor in per_token:
        torch._dynamo.maybe_mark_dynamic(tensor, 0)


class VocabParallelHead(nn.Module):
    """From hidden states to the loss. A module of its own, so that an engine can gather its weight around it."""

    def __init__(self, width: int, vocabulary: int, z_loss: float, chunk: int, axis: TensorAxis = SINGLE_RANK):
        super().__init__()
        self.weight = sharded_parameter((vocabulary, width), 0, axis)
        self.z_loss, self.chunk, self.axis = z_loss, chunk, axis
        self.passes: ElementwisePasses = EAGER
        self.keeps_scores = False
        """For evaluation: leave `token_scores` in `scores`, since an engine returns the loss alone."""
        self.scores: tuple[Tensor, Tensor] | None = None

    def forward(self, hidden: Tensor, labels_BT: Tensor, num_targets: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if self.keeps_scores:
            self.scores = token_scores(hidden, self.weight, labels_BT, self.chunk, self.axis, self.passes)
        return vocab_parallel_cross_entropy(
            hidden, self.weight, labels_BT, self.z_loss, self.chunk, self.axis, self.passes, num_targets
        )


def next_token_labels(tokens_BT: Tensor, unlabelled: int | None = None) -> Tensor:
    """The label of a position is the next token; the last position of a sequence has none, nor has a token
    `unlabelled`."""
    labels = torch.full_like(tokens_BT, IGNORE_INDEX)
    labels[:, :-1] = tokens_BT[:, 1:]
    return labels if unlabelled is None else labels.masked_fill(tokens_BT == unlabelled, IGNORE_INDEX)


def count_targets(labels: Tensor) -> Tensor:
    """At least 1."""
    return (labels != IGNORE_INDEX).sum().clamp_min(1)


def vocab_parallel_cross_entropy(
    hidden: Tensor,
    weight_VD: Tensor,
    labels_BT: Tensor,
    z_loss: float = 0.0,
    chunk: int = 2048,
    axis: TensorAxis = SINGLE_RANK,
    passes: ElementwisePasses = EAGER,
    num_targets: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(loss with z-loss, cross-entropy): means over the positions that have a target.

    `hidden`: [B,T,D], or, with sequence parallelism, this rank's part of the sequence. `num_targets`: what the sums are
    divided by; by default the number of these positions."""
    hidden_BTD = column_parallel_input(hidden, axis)
    labels = labels_BT.reshape(-1)
    if num_targets is None:
        num_targets = count_targets(labels)
    needs_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight_VD.requires_grad)
    loss, cross_entropy = _ChunkedCrossEntropy.apply(
        hidden_BTD.flatten(0, 1), weight_VD, labels, num_targets, z_loss, chunk, axis, passes, needs_grad
    )
    return loss, cross_entropy


class _ChunkedCrossEntropy(torch.autograd.Function):
    """The gradient of `hidden_ND` is a partial sum, which `column_parallel_input` reduces."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        labels_N: Tensor,
        num_targets: Tensor,
        z_loss: float,
        chunk: int,
        axis: TensorAxis,
        passes: ElementwisePasses,
        needs_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        weight = weight_VD.to(hidden_ND.dtype)
        loss = at_least_fp32(hidden_ND.new_zeros(()))
        cross_entropy = torch.zeros_like(loss)
        grad_hidden = torch.empty_like(hidden_ND) if needs_grad else None
        trains_weight = needs_grad and ctx.needs_input_grad[1]
        grad_weight = at_least_fp32(weight_VD[:0]).new_zeros(weight_VD.shape) if trains_weight else None
        for start in range(0, hidden_ND.shape[0], chunk):
            rows = slice(start, start + chunk)
            valid = labels_N[rows] != IGNORE_INDEX
            index, is_local = local_vocab_index(labels_N[rows], weight.shape[0], axis)
            buffer, largest, total, at_label = passes.normalise(hidden_ND[rows] @ weight.t(), index, is_local, axis)
            log_normaliser = total.log() + largest
            nll = log_normaliser - at_label
            cross_entropy += torch.where(valid, nll, 0.0).sum()
            loss += torch.where(valid, nll + z_loss * log_normaliser.square(), 0.0).sum()
            if grad_hidden is not None:
                # d loss / d logits = (softmax * (1 + 2 z lse) - onehot) / targets at valid positions, with lse the log
                # of the normaliser.
                scale = torch.where(valid, 1.0, 0.0).to(total.dtype) / num_targets
                factor = scale * (1 + 2 * z_loss * log_normaliser) / total
                grad = passes.gradient(buffer, largest, factor, index, torch.where(is_local, -scale, 0.0))
                grad = grad.to(hidden_ND.dtype)
                torch.mm(grad, weight, out=grad_hidden[rows])
                if grad_weight is not None:
                    accumulate_matmul(grad_weight, grad.t(), hidden_ND[rows])
            del buffer  # before the next chunk's logits
        if grad_hidden is not None:
            ctx.save_for_backward(grad_hidden, None if grad_weight is None else grad_weight.to(weight_VD.dtype))
        cross_entropy = cross_entropy / num_targets
        ctx.mark_non_differentiable(cross_entropy)
        return loss / num_targets, cross_entropy

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        factor = grads[0]
        of_weight = None if grad_weight is None else grad_weight * factor
        return (grad_hidden * factor).to(grad_hidden.dtype), of_weight, *[None] * 7


@torch.no_grad()
def token_scores(
    hidden: Tensor,
    weight_VD: Tensor,
    labels_BT: Tensor,
    chunk: int,
    axis: TensorAxis,
    passes: ElementwisePasses = EAGER,
) -> tuple[Tensor, Tensor]:
    """[B, T]: the log-likelihood of each label (0 without a target), and whether the label is the likeliest token."""
    hidden_BTD = column_parallel_input(hidden, axis)
    hidden_ND, labels_N = hidden_BTD.reshape(-1, hidden_BTD.shape[-1]), labels_BT.reshape(-1)
    weight = weight_VD.to(hidden_ND.dtype)
    likelihood = at_least_fp32(hidden_ND.new_zeros(len(labels_N)))
    is_likeliest = torch.zeros_like(labels_N, dtype=torch.bool)
    for start in range(0, len(labels_N), chunk):
        rows = slice(start, start + chunk)
        index, is_local = local_vocab_index(labels_N[rows], weight.shape[0], axis)
        _, largest, total, at_label = passes.normalise(hidden_ND[rows] @ weight.t(), index, is_local, axis)
        valid = labels_N[rows] != IGNORE_INDEX
        likelihood[rows] = torch.where(valid, at_label - total.log() - largest, 0.0)
        is_likeliest[rows] = at_label >= largest
    return likelihood.view_as(labels_BT), is_likeliest.view_as(labels_BT)
