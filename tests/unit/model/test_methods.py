"""Every method against its formula, written out position by position, in a network whose blocks are written out too."""

import math

import method_models as methods
import pytest
import tiny_models as tiny
import torch
import torch.nn.functional as F

from xgram_dist.model.methods.engram import Engram

F64 = torch.float64
WARMUP = torch.tensor(0.3, dtype=F64)


def rms(x, weight, eps):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def swiglu(x, ffn):
    gate = x @ ffn.gate.weight.T
    return (gate / (1 + torch.exp(-gate)) * (x @ ffn.up.weight.T)) @ ffn.down.weight.T


def row_of(lookup, name, key):
    (state,) = lookup.shards
    return state.rows[key, state.slab.columns()[name]]


class Literal:
    """One sequence through the network; what a method does is in its own functions, for one position at a time."""

    def __init__(self, settings, made, lookup, tokens_T):
        self.settings, self.made, self.lookup, self.tokens = settings, made, lookup, tokens_T.tolist()
        self.losses = []

    def rows(self, layer, site, views):
        """[view][position] rows of the token."""
        names = [f"layers.{layer}.{site}.{view}" for view in range(views)]
        return [torch.stack([row_of(self.lookup, name, t) for t in self.tokens]) for name in names]

    @torch.no_grad()
    def hidden(self):
        made, model = self.made, self.settings.model
        x = made.embedding[self.tokens]
        if made.side is not None:
            x = x + torch.stack([self.scone(t) for t in range(len(self.tokens))])
        rotary = (made.rotary_cos[: len(x)], made.rotary_sin[: len(x)])
        for layer, block in enumerate(made.blocks):
            method = self.settings.memory.method
            there = bool(len(block.sites))
            deltas = {}
            if method == "ple":
                for site, module in block.sites.items():
                    rows = self.rows(layer, site, len(module.gain))
                    deltas[site] = sum(g * r for g, r in zip(module.gain, rows, strict=True)) / math.sqrt(len(rows))
                x = x + deltas.pop("h")
            if method == "engram" and there:
                x = self.engram(x, block.sites["ngram"], layer)
            attended = block.attention(
                rms(x, block.attention_norm.weight, model.norm_eps)[None],
                rotary,
                {site: delta[None] for site, delta in deltas.items()},
                None,
            )[0]
            x = x + attended
            n = rms(x, block.ffn_norm.weight, model.norm_eps)
            if method == "stem" and there:
                gate = n @ block.ffn.gate.weight.T
                out = (gate * torch.sigmoid(gate) * self.rows(layer, "up", 1)[0]) @ block.ffn.down.weight.T
            else:
                out = swiglu(n, block.ffn)
            if method == "retoken":
                for view, rows in enumerate(self.rows(layer, "ffn", 2)):
                    a = getattr(block.sites["ffn"], f"scale_{view}")
                    out = torch.stack([o * (1 + a * row / row.norm()) for o, row in zip(out, rows, strict=True)])
            if method == "mort":
                out = out + self.mort(n, block.sites["block"], layer)
            if method == "mole":
                out = out + self.mole(n, block.sites["experts"])
            x = x + out
        return rms(x, made.norm.weight, model.norm_eps)

    def mort(self, n, site, layer):
        settings = self.settings.memory.mort
        rows = self.rows(layer, "block", settings.views)
        chance_sum, counts, added = [0.0] * settings.views, [0] * settings.views, []
        for t in range(len(n)):
            z = [float(site.router[m] @ n[t] + site.router_bias[m]) for m in range(settings.views)]
            chance = [1 / (1 + math.exp(-value)) for value in z]
            top = sorted(range(settings.views), key=lambda m: -chance[m])[: settings.top]
            mix = sum(chance[m] / sum(chance[r] for r in top) * rows[m][t] for m in top)
            added.append(site.scale * mix / mix.norm() / math.sqrt(2 * self.settings.model.layers))
            for m in range(settings.views):
                chance_sum[m] += chance[m]
                counts[m] += m in top
        load = sum(a * b for a, b in zip(chance_sum, counts, strict=True))
        self.losses.append(settings.balance * settings.views / (len(n) ** 2 * settings.top) * load)
        return torch.stack(added)

    def engram(self, x, site, layer):
        settings, eps = self.settings.memory.engram, self.settings.model.norm_eps
        gate_eps, output_eps = settings.gate_eps or eps, settings.output_eps or eps
        pad = self.settings.model.vocabulary if settings.pad_token is None else settings.pad_token
        hashing = Engram(self.settings).ngram_hash()
        place = settings.layers.index(layer)
        earlier = sum(rows for of_layer in hashing.rows[:place] for of_order in of_layer for rows in of_order)
        outputs = []
        for t in range(len(x)):
            pieces, first = [], earlier
            for order, multipliers, heads in zip(
                settings.orders, hashing.multipliers[place], hashing.rows[place], strict=True
            ):
                mixed = 0
                for back in range(order):
                    token = self.tokens[t - back] if t >= back else pad
                    mixed ^= token * multipliers[back]
                for rows in heads:
                    pieces.append(row_of(self.lookup, "layers.all.ngram.0", first + mixed % rows))
                    first += rows
            e = torch.cat(pieces)
            k, q = rms(site.key @ e, site.key_norm.weight, gate_eps), rms(x[t], site.query_norm.weight, gate_eps)
            score = float(k @ q) / math.sqrt(len(q))
            gate = 1 / (1 + math.exp(-math.copysign(math.sqrt(abs(score)), score)))
            outputs.append(gate * (site.value @ e))
        added = []
        for t, y in enumerate(outputs):
            conv = torch.zeros_like(y)
            for back in range(settings.taps):
                if t >= back:
                    conv = conv + site.kernel[back] * rms(outputs[t - back], site.output_norm.weight, output_eps)
            added.append(y + conv * torch.sigmoid(conv))
        return x + torch.stack(added)

    def mole(self, n, site):
        added = []
        for t, token in enumerate(self.tokens):
            e = rms(self.made.embedding[token], site.norm.weight, self.settings.model.norm_eps)
            powers = [math.exp(float(w @ n[t])) for w in site.router]
            added.append(
                sum(p / sum(powers) * swiglu(e, expert) for p, expert in zip(powers, site.experts, strict=True))
            )
        return torch.stack(added)

    def scone(self, t):
        """The embedding of the longest f-gram that ends at t, by a side network over its tokens alone."""
        known = {tuple(int(x) for x in row if x >= 0) for row in self.lookup.grams.tokens[1:]}
        for length in range(self.settings.memory.scone.longest, 1, -1):
            gram = tuple(self.tokens[t - length + 1 : t + 1]) if t + 1 >= length else ()
            if gram in known:
                x = self.made.embedding[list(gram)]
                eps, side = self.settings.model.norm_eps, self.made.side
                # Rotary angles are relative: where the tokens stand does not matter.
                rotary = (side.rotary_cos[:length], side.rotary_sin[:length])
                for block in side.blocks:
                    x = x + block.attention(rms(x, block.attention_norm.weight, eps)[None], rotary, {}, None)[0]
                    x = x + swiglu(rms(x, block.ffn_norm.weight, eps), block.ffn)
                return x[-1]
        return torch.zeros(self.settings.model.width, dtype=F64)


@pytest.mark.parametrize("method", methods.MEMORY)
def test_the_network_is_the_formula_written_out(method):
    settings = methods.config(method)
    made, lookup = tiny.model(settings, F64), methods.lookup(settings, dtype=F64)
    tokens = methods.repeating(settings, 2, 11, seed=3)
    working = tiny.fetch(lookup, tokens)
    found = made(tokens, working.slots, working.values, WARMUP)
    losses = 0.0
    for row, expected_of in zip(found, tokens, strict=True):
        literal = Literal(settings, made, lookup, expected_of)
        torch.testing.assert_close(row, literal.hidden(), rtol=1e-6, atol=1e-8)
        losses += sum(literal.losses)
    lookup.close()
    if method == "mort":
        one = tokens[:1]
        working = tiny.fetch(methods.lookup(settings, dtype=F64), one)
        loss, entropy = made.loss(one, working.slots, working.values, WARMUP)
        literal = Literal(settings, made, lookup, one[0])
        hidden = literal.hidden()
        logits = hidden[:-1] @ made.head.weight.detach().T
        z = settings.model.z_loss * torch.logsumexp(logits, -1).square().mean()
        assert float(entropy) == pytest.approx(float(F.cross_entropy(logits, one[0, 1:])), rel=1e-9)
        assert float((loss - entropy - z).detach()) == pytest.approx(sum(literal.losses), rel=1e-6)
        assert sum(literal.losses) > 1e-4


def test_engram_as_the_authors_of_x_gram_ran_it_is_the_formula_written_out():
    """Primes by layer, a token for what lies before the sequence, epsilons of its own, an identity kernel."""
    settings = methods.config(
        "engram",
        memory={
            "engram": {
                **methods.MEMORY["engram"]["engram"],
                "kernel_init": "identity",
                "layer_primes": True,
                "pad_token": 2,
                "gate_eps": 1e-2,
                "output_eps": 1e-3,
            }
        },
    )
    hashing = Engram(settings).ngram_hash()
    primes = [rows for of_layer in hashing.rows for of_order in of_layer for rows in of_order]
    assert len(set(primes)) == len(primes) == 8
    assert Engram(settings).num_rows == sum(primes)
    made, lookup = tiny.model(settings, F64), methods.lookup(settings, dtype=F64)
    assert made.blocks[0].sites["ngram"].kernel.shape[0] == 3
    tokens = methods.repeating(settings, 2, 11, seed=3)
    working = tiny.fetch(lookup, tokens)
    found = made(tokens, working.slots, working.values, WARMUP)
    for row, expected_of in zip(found, tokens, strict=True):
        torch.testing.assert_close(row, Literal(settings, made, lookup, expected_of).hidden(), rtol=1e-6, atol=1e-8)
    lookup.close()


@pytest.mark.parametrize("method", methods.MEMORY)
def test_what_starts_at_nothing_and_what_does_not(method):
    """At the start, retoken and mort are the vanilla backbone; the others are not."""
    from xgram_dist.model.build import initialise
    from xgram_dist.model.transformer import Transformer

    settings = methods.config(method)
    made, vanilla = Transformer(settings), Transformer(tiny.config(memory={"method": "vanilla"}))
    initialise(made, settings)
    initialise(vanilla, tiny.config(memory={"method": "vanilla"}))
    shared = dict(made.named_parameters())
    assert all(torch.equal(shared[name], value) for name, value in vanilla.named_parameters() if name in shared)
    tokens = methods.repeating(settings, 2, 11, seed=3)
    lookup = methods.lookup(settings)
    working = tiny.fetch(lookup, tokens)
    same = torch.allclose(made(tokens, working.slots, working.values, WARMUP), vanilla(tokens, tokens, {}, WARMUP))
    assert same == (method in ("retoken", "mort"))
    lookup.close()
    if method == "mort":
        assert made.blocks[0].sites["block"].router_bias[0].item() == -2.0
    if method == "engram":
        assert made.blocks[0].sites["ngram"].kernel[:, 0].tolist() == [0.0, 0.0, 0.0]
        engram = {**methods.MEMORY["engram"]["engram"], "kernel_init": "identity"}
        settings = methods.config(method, memory={"engram": engram})
        made = Transformer(settings)
        initialise(made, settings)
        assert made.blocks[0].sites["ngram"].kernel[:, 0].tolist() == [1.0, 0.0, 0.0]


def test_stem_has_no_up_projection_where_rows_stand_for_it():
    made = tiny.model(methods.config("stem"))
    assert [block.ffn.up is None for block in made.blocks] == [False, True, False]


@pytest.mark.parametrize("method", ["mort", "engram", "mole"])
def test_recomputing_blocks_changes_nothing(method):
    losses = {}
    for recomputed in (False, True):
        settings = methods.config(method, train={"activation_checkpointing": recomputed})
        made, lookup = tiny.model(settings, F64), methods.lookup(settings, dtype=F64)
        tokens = methods.repeating(settings, 2, 11, seed=3)
        working = tiny.fetch(lookup, tokens)
        loss, _ = made.loss(tokens, working.slots, working.values, WARMUP)
        loss.backward()
        losses[recomputed] = [loss.detach(), *(p.grad for p in made.parameters())]
        lookup.close()
    for one, other in zip(losses[False], losses[True], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def test_keys_do_not_reach_across_documents_when_these_are_apart():
    import numpy as np
    from slow_plan import listed_keys

    from xgram_dist.tables.ngrams import NgramKeys

    settings = methods.config("engram")
    hashing, identity = Engram(settings).ngram_hash(), np.arange(120)
    apart = NgramKeys(hashing, identity, end_of_text=9)
    whole = NgramKeys(hashing, identity)
    tokens = np.array([[5, 9, 7, 8, 3]])
    found, across = listed_keys(apart, tokens), listed_keys(whole, tokens)
    np.testing.assert_array_equal(found[:, :2], across[:, :2])  # the end belongs to what it ends
    np.testing.assert_array_equal(found[:, 2:], listed_keys(whole, tokens[:, 2:]))  # as if the sequence began there
    assert (found[:, 2] != across[:, 2]).any()


@pytest.mark.parametrize("method", methods.MEMORY)
def test_in_bf16_the_loss_is_nearly_that_of_fp32_and_every_parameter_learns(method):
    settings = methods.config(method)
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        made, lookup = tiny.model(settings), methods.lookup(settings)
        made.compute_dtype = dtype
        tokens = methods.repeating(settings, 2, 11, seed=3)
        working = tiny.fetch(lookup, tokens)
        loss, _ = made.loss(tokens, working.slots, working.values, WARMUP)
        loss.backward()
        found.append(float(loss.detach()))
        for name, parameter in made.named_parameters():
            assert parameter.grad is not None, name
            assert bool(parameter.grad.isfinite().all()), name
            assert bool(parameter.grad.any()), name
        if method in methods.WITH_TABLES:
            assert all(leaf.grad.dtype == torch.float32 for leaf in working.values.values())
            assert all(bool(leaf.grad.any()) for leaf in working.values.values())
        lookup.close()
    assert found[1] == pytest.approx(found[0], rel=2e-3)


@pytest.mark.parametrize("method", ["ple", "retoken", "mort", "engram", "mole"])
def test_blocks_of_all_layers_are_one_graph(method):
    memory = {"engram": {"heads": 2, "rows": 40, "width": 24, "taps": 3}} if method == "engram" else {}
    settings = methods.config(method, memory=memory)
    made, lookup = tiny.model(settings), methods.lookup(settings)
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    for block in made.blocks:
        block.compile(backend=count, fullgraph=True, dynamic=None)
    tokens = methods.repeating(settings, 2, 11, seed=3)
    working = tiny.fetch(lookup, tokens)
    with torch.no_grad():
        made(tokens, working.slots, working.values, WARMUP)
    lookup.close()
    assert len(graphs) == 1
