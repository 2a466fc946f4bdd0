"""The constants of estimate/device_traffic.py against counts of the product's own operations, to 5 %.

A failure means that a kernel of the product reads or writes more or less than `xgram-dist plan` says.
"""

import pytest
import torch
from traffic_counter import count_eager_bytes, count_fused_bytes

from xgram_dist.config import build_config
from xgram_dist.estimate import device_traffic
from xgram_dist.estimate.comm import Axes
from xgram_dist.model.build import build_lookup
from xgram_dist.model.gather import sort_slots
from xgram_dist.model.layers import rotary_cos_sin
from xgram_dist.model.loss import vocab_parallel_cross_entropy
from xgram_dist.model.methods.base import method_of, table_layout
from xgram_dist.model.transformer import Block
from xgram_dist.parallel.context_parallel import WHOLE_SEQUENCES
from xgram_dist.parallel.mesh import single_mesh
from xgram_dist.parallel.tensor_parallel import SINGLE_RANK
from xgram_dist.tables.layout import routing_settings
from xgram_dist.tables.routing_build import build_routing

CPU, TOLERANCE = torch.device("cpu"), 0.05


def config(width=1024, ffn=2048, length=64, memory=None, kv_heads=2, **train):
    model = {"vocabulary": 4096, "layers": 1, "width": width, "ffn_width": ffn, "heads": 4, "kv_heads": kv_heads}
    return build_config(
        {
            "name": "counted",
            "model": {**model, "sequence_length": length, "loss_chunk": length},
            "memory": memory or {"method": "vanilla"},
            "train": {"precision": "bf16", "compile": True, "global_batch": 1, "micro_batch": 1, **train},
        }
    )


def of_each_token(count, **keys):
    """Bytes of one token: what a longer sequence adds."""
    return (count(config(length=128, **keys)) - count(config(length=64, **keys))) / 64


def parts_of(settings, rows=0):
    return {part.name: part for part in device_traffic.plan_compute_parts(settings, Axes(1), 1, rows)}


# Blocks


def count_block(settings, backward=True):
    block, length = Block(method_of(settings), 0), settings.model.sequence_length
    rotary = rotary_cos_sin(settings.model, length)
    names = [name for name, _ in block.named_parameters()]

    def run(x, gradient, parameters):
        x = x.detach().requires_grad_()
        arguments = (x, rotary, {}, None, torch.tensor(1.0), None, None)
        out = torch.func.functional_call(block, dict(zip(names, parameters, strict=True)), arguments)
        return torch.autograd.grad(out, [x, *parameters], gradient) if backward else out

    x = torch.zeros(1, length, settings.model.width, dtype=torch.bfloat16)
    # As an engine holds them: matrices in the compute type.
    parameters = [p.detach().to(x.dtype if p.dim() > 1 else p.dtype).requires_grad_() for p in block.parameters()]
    return count_fused_bytes(run, x, torch.zeros_like(x), parameters)


@pytest.mark.parametrize(("width", "ffn", "kv_heads"), [(1024, 2048, 2), (512, 3072, 1)])
def test_blocks(width, ffn, kv_heads):
    keys = {"width": width, "ffn": ffn, "kv_heads": kv_heads}
    both = of_each_token(count_block, **keys)
    forward = of_each_token(lambda settings: count_block(settings, backward=False), **keys)
    for again in (False, True):
        settings = config(**keys, activation_checkpointing=again)
        counted = both + (forward if again else 0)
        assert parts_of(settings)["blocks"].bytes / 64 == pytest.approx(counted, rel=TOLERANCE)


def test_a_pass_more_or_less_is_seen(monkeypatch):
    """The tolerance is tight enough to notice one more fp32 pass over the width in a block."""
    counted = of_each_token(count_block)
    monkeypatch.setattr(device_traffic, "BLOCK_FORWARD_AND_BACKWARD", (60 + 8, 20, 9))
    assert parts_of(config())["blocks"].bytes / 64 != pytest.approx(counted, rel=TOLERANCE)


# Extraction and scatter

XGRAM = {"method": "xgram", "sites": {"v": {"views": 2, "kernels": [3, 5]}, "h": {"views": 1, "kernels": [3]}}}
ROWS = 32


def count_site(settings, site, backward):
    """(fused bytes, bytes of segment sums) of one site."""
    injection = method_of(settings).build_sites(0, SINGLE_RANK, WHOLE_SEQUENCES)[site]
    width = next(table.width for table in table_layout(settings).tables if table.site == site)
    names = [name for name, _ in injection.named_parameters()]

    def run(values, gradient, parameters, rows):
        values = [value.detach().requires_grad_() for value in values]
        arguments = (values, sort_slots(rows, ROWS), torch.tensor(1.0), None, torch.bfloat16)
        out = torch.func.functional_call(injection, dict(zip(names, parameters, strict=True)), arguments)
        return torch.autograd.grad(out, [*values, *parameters], gradient) if backward else out

    length = settings.model.sequence_length
    values = [torch.zeros(ROWS, width) for _ in injection.tables]
    parameters = [parameter.detach().requires_grad_() for parameter in injection.parameters()]
    gradient = torch.zeros(1, length, width, dtype=torch.bfloat16)
    return count_fused_bytes(run, values, gradient, parameters, torch.zeros(1, length, dtype=torch.long), split=True)


def test_extraction_and_scatter():
    def forward(settings):
        return sum(count_site(settings, site, False)[0] for site in ("v", "h"))

    def backward(settings):
        return sum(count_site(settings, site, True)[0] for site in ("v", "h"))

    def sums(settings):
        return sum(count_site(settings, site, True)[1] for site in ("v", "h"))

    once, twice = (config(memory=XGRAM, activation_checkpointing=again) for again in (False, True))
    first, second = of_each_token(forward, memory=XGRAM), of_each_token(backward, memory=XGRAM)
    assert parts_of(once)["extraction"].bytes / 64 == pytest.approx(first + second, rel=TOLERANCE)
    assert parts_of(twice)["extraction"].bytes / 64 == pytest.approx(2 * first + second, rel=TOLERANCE)
    assert parts_of(once)["scatter"].bytes / 64 == pytest.approx(of_each_token(sums, memory=XGRAM), rel=TOLERANCE)
    # Rows of the working set: a segment sum writes them, adding to the gradient reads two and writes one.
    added = parts_of(once, 10)["scatter"].bytes - parts_of(once)["scatter"].bytes
    assert added == 4 * 10 * 4 * table_layout(once).width


# Head


def test_the_passes_over_the_logits_without_compilation():
    """Only tensors as large as the logits count; the rest is small or part of a matrix product."""
    tokens, vocabulary, width = 64, 4096, 16
    hidden = torch.zeros(1, tokens, width, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.zeros(vocabulary, width, requires_grad=True)
    labels = torch.zeros(1, tokens, dtype=torch.long)
    counted = count_eager_bytes(
        lambda: vocab_parallel_cross_entropy(hidden, weight, labels, 1e-5, tokens), only_numel=tokens * vocabulary
    )
    assert counted / tokens / vocabulary == pytest.approx(device_traffic.HEAD_EAGER_BYTES[2], rel=TOLERANCE)


# Exchange


@pytest.mark.parametrize("compression", [0.5, 1.0])
def test_fetch_and_return(compression):
    memory = {"method": "xgram", "compression": compression, "routing": {"vip": 16, "buckets": 8}, "optimizer": "dense",
              "sites": {"v": {"views": 2, "kernels": [3, 5]}}}  # fmt: skip
    settings = config(width=64, length=1024, memory=memory, precision="fp32", compile=False)
    layout, share = table_layout(settings), 1.0 / torch.arange(1, 4097, dtype=torch.float64)
    routing = build_routing(share.numpy(), routing_settings(settings), layout.num_views) if layout.hashed else None
    lookup = build_lookup(settings, routing, CPU, single_mesh())
    tokens = torch.multinomial(share, 1024, True, generator=torch.Generator().manual_seed(0)).view(1, 1, 1024)
    (window,) = lookup.plan(tokens).result()
    found = []
    counted = count_eager_bytes(lambda: found.append(lookup.fetch(window)))
    for value in found[0].values.values():
        value.grad = torch.zeros_like(value)
    counted += count_eager_bytes(lambda: lookup.give_back(found[0]))
    lookup.close()
    rows = sum(len(slab.accesses.touched_R) for slab in window.slabs) / len(window.slabs)
    planned = device_traffic.exchange_bytes(settings, Axes(1), rows, window.num_distinct)
    assert planned == pytest.approx(counted, rel=TOLERANCE)


def test_the_counter_counts():
    """By hand: a product read once and written once, though two operations make it."""
    x = torch.zeros(8, 8)
    assert count_fused_bytes(lambda a: (a * 2 + 1).relu(), x) == 2 * 4 * 64
    assert count_fused_bytes(lambda a: ((a * 2) @ a) + 1, x) == 2 * 2 * 4 * 64
    assert count_eager_bytes(lambda: (x * 2 + 1).relu()) == 3 * 2 * 4 * 64
