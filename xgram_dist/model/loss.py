"""Cross-entropy of the head without ever holding all logits.

Input: hidden states, the head's weight, labels (-1: no target). Output: the mean loss over the targets, z-loss
included, and the plain mean cross-entropy for reporting. Logits exist for one chunk of tokens at a time; their
gradient is formed in the forward pass, in place, so nothing of size tokens x vocabulary is kept or recomputed.
"""

from typing import Any

import torch
from torch import Tensor

from xgram_dist.model.layers import wide

IGNORED = -1


def next_token_labels(tokens_BT: Tensor) -> Tensor:
    """The label of a position is the next token; the last position of a sequence has none."""
    labels = torch.full_like(tokens_BT, IGNORED)
    labels[:, :-1] = tokens_BT[:, 1:]
    return labels


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, targets: Tensor, z_loss: float, chunk: int
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
            index = labels_N[part].clamp_min(0)[:, None]
            logits = wide(hidden_ND[part] @ weight.t())
            at_label = logits.gather(1, index)[:, 0]
            # One buffer for logits, their exponentials and their gradient: this pass is bound by memory.
            largest = logits.amax(-1)
            exponentials = logits.sub_(largest[:, None]).exp_()
            total = exponentials.sum(-1)
            normaliser = total.log() + largest
            nll = normaliser - at_label
            cross_entropy += torch.where(valid, nll, 0.0).sum()
            loss += torch.where(valid, nll + z_loss * normaliser.square(), 0.0).sum()
            if grad_hidden is not None and grad_weight is not None:
                # d loss / d logits = softmax * (1 + 2 z lse) - onehot, for valid positions, over the target count.
                scale = torch.where(valid, 1.0, 0.0).to(total.dtype) / targets
                grad = exponentials.mul_((scale * (1 + 2 * z_loss * normaliser) / total)[:, None])
                grad.scatter_add_(1, index, -scale[:, None])
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
        return (grad_hidden * factor).to(grad_hidden.dtype), grad_weight * factor, None, None, None, None


def chunked_cross_entropy(
    hidden_BTD: Tensor, weight_VD: Tensor, labels_BT: Tensor, z_loss: float = 0.0, chunk: int = 2048
) -> tuple[Tensor, Tensor]:
    """(loss with z-loss, cross-entropy): means over the positions that have a target."""
    labels = labels_BT.reshape(-1)
    targets = (labels != IGNORED).sum().clamp_min(1)
    loss, cross_entropy = _ChunkedCrossEntropy.apply(
        hidden_BTD.reshape(-1, hidden_BTD.shape[-1]), weight_VD, labels, targets, z_loss, chunk
    )
    return loss, cross_entropy
