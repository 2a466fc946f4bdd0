"""Cross-entropy in chunks, z-loss, labels."""

import pytest
import torch
import torch.nn.functional as F

from xgram_dist.model.loss import chunked_cross_entropy, next_token_labels

F64 = torch.float64


def inputs(dtype=F64):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 7, 5, dtype=F64, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(11, 5, dtype=F64, generator=generator).to(dtype).requires_grad_()
    return hidden, weight, next_token_labels(torch.randint(0, 11, (2, 7), generator=generator))


@pytest.mark.parametrize("chunk", [1, 3, 14, 100])
@pytest.mark.parametrize("z_loss", [0.0, 0.1])
def test_loss_and_gradients_equal_the_plain_formula_for_any_chunk(chunk, z_loss):
    hidden, weight, labels = inputs()
    loss, entropy = chunked_cross_entropy(hidden, weight, labels, z_loss, chunk)
    (3 * loss).backward()
    got = hidden.grad.clone(), weight.grad.clone()
    hidden.grad = weight.grad = None
    logits = hidden.reshape(-1, 5) @ weight.T
    plain = F.cross_entropy(logits, labels.reshape(-1), ignore_index=-1)
    valid = labels.reshape(-1) != -1
    full = plain + z_loss * logits.logsumexp(-1)[valid].square().mean()
    (3 * full).backward()
    torch.testing.assert_close(entropy, plain.detach())
    torch.testing.assert_close(loss, full)
    torch.testing.assert_close(got[0], hidden.grad)
    torch.testing.assert_close(got[1], weight.grad)


def test_gradients_agree_with_finite_differences():
    hidden, weight, labels = inputs()
    assert torch.autograd.gradcheck(
        lambda h, w: chunked_cross_entropy(h, w, labels, 0.01, 4)[0], (hidden, weight), atol=1e-7
    )


def test_last_position_of_a_sequence_has_no_target():
    labels = next_token_labels(torch.tensor([[1, 2, 3], [4, 5, 6]]))
    assert labels.tolist() == [[2, 3, -1], [5, 6, -1]]


def test_huge_logits_stay_finite():
    hidden, weight, labels = inputs(torch.float32)
    loss, _ = chunked_cross_entropy(hidden * 1e4, weight, labels, 0.0, 4)
    assert torch.isfinite(loss)


def test_bf16_hidden_states_give_fp32_loss_and_gradient_of_the_weight_in_its_own_type():
    hidden, weight, labels = inputs(torch.float32)
    loss, _ = chunked_cross_entropy(hidden.bfloat16(), weight, labels, 1e-5, 4)
    loss.backward()
    assert loss.dtype == torch.float32
    assert weight.grad.dtype == torch.float32
    exact, _ = chunked_cross_entropy(hidden, weight, labels, 1e-5, 4)
    assert abs(loss - exact) < 0.05
