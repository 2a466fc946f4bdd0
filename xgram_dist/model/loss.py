"""The head and its cross-entropy, without ever holding all logits.

Input: hidden states, the head's weight, labels (-1: no target). Output: the mean loss over the targets, z-loss
included, and the plain mean cross-entropy for reporting. Logits exist for one chunk of tokens at a time; their
gradient is formed in the forward pass, in place, so nothing of size tokens x vocabulary is kept or recomputed.
On a tensor axis each rank has a range of the vocabulary; largest logit, normaliser and the label's logit are reduced.
"""

from typing import Any

import torch
from torch import Tensor, nn

from xgram_dist.model.layers import in_part, wide
from xgram_dist.parallel.tensor import ALONE, TensorAxis, all_reduce, enter_layer, sharded

IGNORED = -1


def next_token_labels(tokens_BT: Tensor) -> Tensor:
    """The label of a position is the next token; the last position of a sequence has none."""
    labels = torch.full_like(tokens_BT, IGNORED)
    labels[:, :-1] = tokens_BT[:, 1:]
    return labels


class _ChunkedCrossEntropy(torch.autograd.Function):
    """The gradient of `hidden_ND` is this rank's part of a sum over the tensor axis."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        labels_N: Tensor,
        targets: Tensor,
        z_loss: float,
        chunk: int,
        axis: TensorAxis,
    ) -> tuple[Tensor, Tensor]:
        needs_grad = hidden_ND.requires_grad or weight_VD.requires_grad
        weight = weight_VD.to(hidden_ND.dtype)
        loss = wide(hidden_ND.new_zeros(()))
        cross_entropy = torch.zeros_like(loss)
        grad_hidden = torch.empty_like(hidden_ND) if needs_grad else None
        grad_weight = wide(weight_VD[:0]).new_zeros(weight_VD.shape) if needs_grad else None
        for start in range(0, hidden_ND.shape[0], chunk):
            part = slice(start, start + chunk)
            valid = labels_N[part] != IGNORED
            index, mine = in_part(labels_N[part], weight.shape[0], axis)
            logits = wide(hidden_ND[part] @ weight.t())
            at_label = torch.where(mine, logits.gather(1, index[:, None])[:, 0], 0.0)
            # One buffer for logits, their exponentials and their gradient: this pass is bound by memory.
            largest = all_reduce(logits.amax(-1), axis, "max")
            exponentials = logits.sub_(largest[:, None]).exp_()
            total, at_label = all_reduce(torch.stack((exponentials.sum(-1), at_label)), axis)
            normaliser = total.log() + largest
            nll = normaliser - at_label
            cross_entropy += torch.where(valid, nll, 0.0).sum()
            loss += torch.where(valid, nll + z_loss * normaliser.square(), 0.0).sum()
            if grad_hidden is not None and grad_weight is not None:
                # d loss / d logits = softmax * (1 + 2 z lse) - onehot, for valid positions, over the target count.
                scale = torch.where(valid, 1.0, 0.0).to(total.dtype) / targets
                grad = exponentials.mul_((scale * (1 + 2 * z_loss * normaliser) / total)[:, None])
                grad.scatter_add_(1, index[:, None], torch.where(mine, -scale, 0.0)[:, None])
                grad = grad.to(hidden_ND.dtype)
                grad_hidden[part] = grad @ weight
                grad_weight += wide(grad.t() @ hidden_ND[part])
        if grad_hidden is not None and grad_weight is not None:
            ctx.save_for_backward(grad_hidden, grad_weight.to(weight_VD.dtype))
        cross_entropy = cross_entropy / targets
        ctx.mark_non_differentiable(cross_entropy)
        return loss / targets, cross_entropy

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        factor = grads[0]
        return (grad_hidden * factor).to(grad_hidden.dtype), grad_weight * factor, None, None, None, None, None


def chunked_cross_entropy(
    hidden: Tensor,
    weight_VD: Tensor,
    labels_BT: Tensor,
    z_loss: float = 0.0,
    chunk: int = 2048,
    axis: TensorAxis = ALONE,
) -> tuple[Tensor, Tensor]:
    """(loss with z-loss, cross-entropy): means over the positions that have a target; alike on all ranks of the axis.

    `hidden` is what stands between layers ([B,T,D], or this rank's part of the sequence), `weight_VD` this rank's range
    of the vocabulary.
    """
    hidden_BTD = enter_layer(hidden, axis)
    labels = labels_BT.reshape(-1)
    targets = (labels != IGNORED).sum().clamp_min(1)
    loss, cross_entropy = _ChunkedCrossEntropy.apply(
        hidden_BTD.reshape(-1, hidden_BTD.shape[-1]), weight_VD, labels, targets, z_loss, chunk, axis
    )
    return loss, cross_entropy


@torch.no_grad()
def token_scores(
    hidden: Tensor, weight_VD: Tensor, labels_BT: Tensor, chunk: int, axis: TensorAxis
) -> tuple[Tensor, Tensor]:
    """[B, T]: the log-likelihood of each label (0 where there is none), and whether no token is likelier."""
    hidden_BTD = enter_layer(hidden, axis)
    flat, labels = hidden_BTD.reshape(-1, hidden_BTD.shape[-1]), labels_BT.reshape(-1)
    weight = weight_VD.to(flat.dtype)
    likelihood, likeliest = wide(flat.new_zeros(len(labels))), torch.zeros_like(labels, dtype=torch.bool)
    for start in range(0, len(labels), chunk):
        part = slice(start, start + chunk)
        index, mine = in_part(labels[part], weight.shape[0], axis)
        logits = wide(flat[part] @ weight.t())
        at_label = torch.where(mine, logits.gather(1, index[:, None])[:, 0], 0.0)
        largest = all_reduce(logits.amax(-1), axis, "max")
        total, at_label = all_reduce(torch.stack((logits.sub_(largest[:, None]).exp_().sum(-1), at_label)), axis)
        valid = labels[part] != IGNORED
        likelihood[part] = torch.where(valid, at_label - total.log() - largest, 0.0)
        likeliest[part] = at_label >= largest
    return likelihood.view_as(labels_BT), likeliest.view_as(labels_BT)


class Head(nn.Module):
    """From hidden states to the loss: a module of its own, so that an engine can gather its weight around it."""

    def __init__(self, width: int, vocabulary: int, z_loss: float, chunk: int, axis: TensorAxis = ALONE):
        super().__init__()
        self.weight = sharded((vocabulary, width), 0, axis)
        self.z_loss, self.chunk, self.axis = z_loss, chunk, axis
        self.keeps_scores = False
        """For evaluation: leave `token_scores` in `scores`, since an engine hands out the loss alone."""
        self.scores: tuple[Tensor, Tensor] | None = None

    def forward(self, hidden: Tensor, labels_BT: Tensor) -> tuple[Tensor, Tensor]:
        if self.keeps_scores:
            self.scores = token_scores(hidden, self.weight, labels_BT, self.chunk, self.axis)
        return chunked_cross_entropy(hidden, self.weight, labels_BT, self.z_loss, self.chunk, self.axis)
