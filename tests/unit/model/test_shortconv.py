"""Stage 2: the gated convolution."""

import pytest
import tiny_models as tiny
import torch

from xgram_dist.config.schema import ExtractionConfig
from xgram_dist.model.gather import sort_slots
from xgram_dist.model.injection import ShortConv

F64 = torch.float64


def extractor(taps, width=6, **switches):
    made = ShortConv(width, taps, ExtractionConfig(**switches)).double()
    generator = torch.Generator().manual_seed(taps)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=F64, generator=generator))
    return made


def sequence(length=11, width=6, rows=7):
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(rows, width, dtype=F64, generator=generator)
    return values, torch.randint(0, rows, (2, length), generator=generator)


@pytest.mark.parametrize("taps", [1, 2, 3, 5, 8, 15])
@pytest.mark.parametrize("switches", [{}, {"gate": False}, {"norm": False}])
def test_output_equals_the_sum_over_taps(taps, switches):
    made = extractor(taps, **switches)
    values, slots = sequence()
    out = made(values, sort_slots(slots, len(values)), None)
    for b in range(2):
        torch.testing.assert_close(out[b], tiny.literal_shortconv(made, values[slots[b]]), rtol=1e-12, atol=1e-12)


def test_a_later_token_never_changes_an_earlier_output_and_an_old_one_is_forgotten_after_k_positions():
    made = extractor(3)
    values, slots = sequence()
    out = made(values, sort_slots(slots, len(values)), None)
    changed = slots.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 7
    difference = (made(values, sort_slots(changed, len(values)), None) - out).abs().sum(-1)
    assert torch.all(difference[:, :5] == 0)
    assert torch.all(difference[:, 5:8] > 0)
    assert torch.all(difference[:, 8:] == 0)


def test_document_masking_keeps_the_convolution_inside_its_document():
    made = extractor(5)
    values, slots = sequence()
    documents = torch.tensor([[0] * 4 + [1] * 7, [0] * 11])
    out = made(values, sort_slots(slots, len(values)), documents)
    for b in range(2):
        expected = tiny.literal_shortconv(made, values[slots[b]], documents[b].tolist())
        torch.testing.assert_close(out[b], expected, rtol=1e-12, atol=1e-12)
    alone = made(values, sort_slots(slots, len(values)).select(slice(4, None)), None)
    torch.testing.assert_close(out[0, 4:], alone[0], rtol=1e-12, atol=1e-12)


def test_gradients_of_values_kernels_and_bias_are_right():
    made = extractor(3, width=4)
    values, slots = sequence(length=6, width=4, rows=4)
    values.requires_grad_()
    parameters = list(made.parameters())

    def run(v, *weights):
        return torch.func.functional_call(
            made,
            dict(zip([n for n, _ in made.named_parameters()], weights, strict=True)),
            (v, sort_slots(slots, len(v)), None),
        )

    assert torch.autograd.gradcheck(run, (values, *parameters), atol=1e-7)


def test_initial_extractor_adds_the_normalised_vector_through_its_gate():
    """Content starts as the identity and the gate near its bias of 1, so out = e + n * silu(about 1)."""
    settings = tiny.config()
    from xgram_dist.model.build import initialise
    from xgram_dist.model.transformer import Transformer

    made = Transformer(settings)
    initialise(made, settings)
    conv = made.blocks[0].sites["v"].extractors[1]
    assert conv.taps == 5
    assert torch.equal(conv.content[0], torch.ones_like(conv.content[0]))
    assert conv.content[1:].abs().sum() == 0
    assert torch.equal(conv.gate_bias, torch.ones_like(conv.gate_bias))
    assert 0.01 < conv.gate.std() < 0.03
