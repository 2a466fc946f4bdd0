"""Stage 3: what is added, where, with which factor."""

import math

import pytest
import tiny_models as tiny
import torch
import torch.nn.functional as F

F64 = torch.float64
ALL_SITES = {
    "h": {"views": 2, "kernels": [3]},
    "q": {"views": 1, "kernels": [2]},
    "k": {"views": 1, "kernels": [1]},
    "v": {"views": 2, "kernels": [3, 5]},
    "o": {"views": 3, "kernels": [3], "layers": [1]},
}


def literal_delta(settings, made, tables, layer, site, asked_T, warmup):
    """1/sqrt(M) sum_m lambda_m sqrt(l+1) w out_m of one sequence."""
    injection, options = made.blocks[layer].sites[site], settings.memory
    views = options.sites[site].views
    total = 0
    for view in range(views):
        e = torch.stack([tiny.literal_retrieval(tables, f"layers.{layer}.{site}.{view}", int(t)) for t in asked_T])
        if options.extraction.enabled:
            which = 0 if options.extraction.shared else view
            e = tiny.literal_shortconv(injection.extractors[which], e)
        total = total + injection.gain[view] * e
    if options.injection.view_norm:
        total = total / math.sqrt(views)
    if options.injection.depth_scaling:
        total = total * math.sqrt(layer + 1)
    return total * warmup if options.injection.warmup else total


def literal_model(settings, made, tables, asked_T, warmup):
    """The whole network for one sequence, sites included, with explicit attention."""
    shape = settings.model
    d, h, g = shape.width, shape.heads, shape.kv_heads
    k = d // h
    length = len(asked_T)

    def norm(x, weight):
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + shape.norm_eps) * weight

    def rotate(x):  # [T, heads, k]
        out = torch.empty_like(x)
        for t in range(length):
            for i in range(k // 2):
                angle = torch.tensor(t * shape.rope_theta ** (-2 * i / k), dtype=F64)
                # The model keeps its table in fp32.
                c, s = torch.cos(angle).float().double(), torch.sin(angle).float().double()
                a, b = x[t, :, i], x[t, :, i + k // 2]
                out[t, :, i], out[t, :, i + k // 2] = a * c - b * s, b * c + a * s
        return out

    x = made.embedding[asked_T]
    for layer, block in enumerate(made.blocks):
        delta = {
            site: literal_delta(settings, made, tables, layer, site, asked_T, warmup) for site in block.sites
        }  # fmt: skip
        if "h" in delta:
            x = x + delta["h"]
        a = block.attention
        y = norm(x, block.attention_norm.weight)
        q, key, v = y @ a.query.weight.T, y @ a.key.weight.T, y @ a.value.weight.T
        dq, dk = delta.get("q", delta.get("qk")), delta.get("k", delta.get("qk"))
        if dq is not None:
            q = q + torch.cat([dq[:, (i // (h // g)) * k : (i // (h // g) + 1) * k] for i in range(h)], 1)
        if dk is not None:
            key = key + dk
        if "v" in delta:
            v = v + delta["v"]
        q = rotate(norm(q, a.query_norm.weight).view(length, h, k))
        key = rotate(norm(key, a.key_norm.weight).view(length, g, k))
        v = v.view(length, g, k)
        heads = []
        for i in range(h):
            scores = q[:, i] @ key[:, i // (h // g)].T / math.sqrt(k)
            scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf)
            heads.append(torch.softmax(scores, -1) @ v[:, i // (h // g)])
        out = torch.cat(heads, 1) @ a.output.weight.T
        x = x + (out + delta["o"] if "o" in delta else out)
        y = norm(x, block.ffn_norm.weight)
        f = block.ffn
        x = x + (F.silu(y @ f.gate.weight.T) * (y @ f.up.weight.T)) @ f.down.weight.T
    return norm(x, made.norm.weight)


CASES = {
    "vanilla": {"method": "vanilla"},
    "only v": {},
    "no hashing": {"compression": 1.0},
    "all sites": {"sites": ALL_SITES},
    "shared qk": {"sites": {"qk": {"views": 2, "kernels": [3]}}},
    "single layer": {"sites": {"h": {"views": 2, "kernels": [3], "layers": [2]}}},
    "no extraction": {"extraction": {"enabled": False}},
    "content only": {"extraction": {"gate": False}},
    "no retrieved norm": {"extraction": {"norm": False}},
    "shared extractor": {"sites": {"v": {"views": 3, "kernels": [3]}}, "extraction": {"shared": True}},
    "no depth scaling and warm-up": {"injection": {"depth_scaling": False, "warmup": False}},
    "no view norm": {"injection": {"view_norm": False}},
    "no row gates": {"row_gates": False},
    "no copies": {"routing": {"vip": 4, "buckets": 4, "copies": 0}},
    "no VIP": {"routing": {"vip": 0, "buckets": 4}},
}


@pytest.mark.parametrize("case", CASES)
def test_network_equals_the_formulas_with_every_switch(case):
    settings = tiny.config(memory=CASES[case])
    made, tables = tiny.model(settings, F64), None
    asked = tiny.tokens(settings, 2, 9)
    values, slots = {}, torch.zeros_like(asked)
    if settings.memory.method != "vanilla":
        tables = tiny.tables(settings, F64)
        working = tiny.fetch(tables, asked)
        values, slots = working.values, working.slots
    hidden = made(asked, slots, values, torch.tensor(0.7, dtype=F64))
    for b in range(2):
        expected = literal_model(settings, made, tables, asked[b], 0.7)
        torch.testing.assert_close(hidden[b], expected, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("sites", [ALL_SITES, {"qk": {"views": 1, "kernels": [3]}}], ids=["q k v h o", "qk"])
def test_no_position_sees_a_later_token(sites):
    settings = tiny.config(memory={"sites": sites})
    made, tables = tiny.model(settings, F64), tiny.tables(settings, F64)
    asked = tiny.tokens(settings, 1, 12)
    changed = asked.clone()
    changed[0, 7] = (changed[0, 7] + 1) % settings.model.vocabulary
    outputs = []
    for line in (asked, changed):
        working = tiny.fetch(tables, line)
        outputs.append(made(line, working.slots, working.values, torch.tensor(1.0)))
    difference = (outputs[0] - outputs[1]).abs().sum(-1)[0]
    assert torch.all(difference[:7] < 1e-12)
    assert torch.all(difference[7:] > 1e-9)


def test_document_masking_makes_documents_independent():
    """With masking, what stands before an end-of-text token does not change what comes after it."""
    settings = tiny.config(model={"document_masking": True}, memory={"sites": ALL_SITES})
    made, tables = tiny.model(settings, F64, end_of_text=0), tiny.tables(settings, F64)
    one = torch.tensor([[5, 9, 3, 0, 8, 8, 4, 7]])
    other = torch.tensor([[6, 1, 2, 0, 8, 8, 4, 7]])
    outputs = []
    for line in (one, other):
        working = tiny.fetch(tables, line)
        outputs.append(made(line, working.slots, working.values, torch.tensor(1.0)))
    torch.testing.assert_close(outputs[0][:, 4:], outputs[1][:, 4:], rtol=1e-10, atol=1e-12)
    assert (outputs[0][:, :4] - outputs[1][:, :4]).abs().max() > 1e-6


def test_warm_up_factor_zero_leaves_the_vanilla_network():
    settings, plain = tiny.config(memory={"sites": ALL_SITES}), tiny.config(memory={"method": "vanilla"})
    asked = tiny.tokens(settings, 2, 12)
    working = tiny.fetch(tiny.tables(settings), asked)
    with_tables = tiny.model(settings)(asked, working.slots, working.values, torch.tensor(0.0))
    without = tiny.model(plain)(asked, asked, {}, torch.tensor(0.0))
    torch.testing.assert_close(with_tables, without)
