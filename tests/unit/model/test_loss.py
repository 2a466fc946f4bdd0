"""Cross-entropy in chunks, z-loss, labels."""

import pytest
import torch
import torch.nn.functional as F

from xgram_dist.model.loss import EAGER, CompiledPasses, next_token_labels, token_scores, vocab_parallel_cross_entropy
from xgram_dist.parallel.tensor_parallel import SINGLE_RANK

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
    loss, entropy = vocab_parallel_cross_entropy(hidden, weight, labels, z_loss, chunk)
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
        lambda h, w: vocab_parallel_cross_entropy(h, w, labels, 0.01, 4)[0], (hidden, weight), atol=1e-7
    )


def test_last_position_of_a_sequence_has_no_target():
    labels = next_token_labels(torch.tensor([[1, 2, 3], [4, 5, 6]]))
    assert labels.tolist() == [[2, 3, -1], [5, 6, -1]]


def test_huge_logits_stay_finite():
    hidden, weight, labels = inputs(torch.float32)
    loss, _ = vocab_parallel_cross_entropy(hidden * 1e4, weight, labels, 0.0, 4)
    assert torch.isfinite(loss)


def test_bf16_hidden_states_give_fp32_loss_and_gradient_of_the_weight_in_its_own_type():
    hidden, weight, labels = inputs(torch.float32)
    loss, _ = vocab_parallel_cross_entropy(hidden.bfloat16(), weight, labels, 1e-5, 4)
    loss.backward()
    assert loss.dtype == torch.float32
    assert weight.grad.dtype == torch.float32
    exact, _ = vocab_parallel_cross_entropy(hidden, weight, labels, 1e-5, 4)
    assert abs(loss - exact) < 0.05


@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16])
def test_compiled_passes_give_the_numbers_of_the_eager_ones(dtype):
    def run(passes):
        hidden, weight, labels = inputs(torch.float32 if dtype == torch.bfloat16 else dtype)
        loss, entropy = vocab_parallel_cross_entropy(hidden.to(dtype), weight, labels, 0.1, 4, SINGLE_RANK, passes)
        loss.backward()
        scores = token_scores(hidden.to(dtype), weight, labels, 4, SINGLE_RANK, passes)
        return loss, entropy, hidden.grad, weight.grad, *scores

    # In bf16 a gradient may round the other way.
    tolerance = {"rtol": 2**-7, "atol": 1e-4} if dtype == torch.bfloat16 else {"rtol": 1e-6, "atol": 1e-7}
    eager, compiled = run(EAGER), run(CompiledPasses())
    torch.testing.assert_close(compiled[:2], eager[:2], rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(compiled[2:], eager[2:], **tolerance)
