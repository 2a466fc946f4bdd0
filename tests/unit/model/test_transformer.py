"""The network as a whole: sizes, recomputation, compilation, precision, accumulation."""

import pytest
import tiny_models as tiny
import torch
from torch._functorch import config as functorch_config

from xgram_dist.estimate.flops import plan_budget
from xgram_dist.model.build import build_model
from xgram_dist.model.loss import CompiledPasses, next_token_labels, vocab_parallel_cross_entropy
from xgram_dist.parallel.device import recompute_elementwise
from xgram_dist.tables.initial_rows import initial_rows

SITES = {"h": {"views": 1, "kernels": [3]}, "v": {"views": 2, "kernels": [3, 5]}}


def losses_and_gradients(settings, batch, made=None, tables=None):
    made, tables = made or tiny.model(settings), tables or tiny.tables(settings)
    working = tiny.fetch(tables, batch)
    total = 0.0
    for tokens, slots in zip(batch, working.slots, strict=True):
        loss, _ = made.loss(tokens, slots, working.values, torch.tensor(0.5))
        (loss / len(batch)).backward()
        total += float(loss.detach()) / len(batch)
    tables.give_back(working)
    gradients = {name: p.grad.clone() for name, p in made.named_parameters()}
    gradients |= {f"table {i}": tiny.dense_gradients(state)[0] for i, state in enumerate(tables.shards)}
    return total, gradients


def assert_same(first, second, **tolerance):
    torch.testing.assert_close(first[0], second[0], **tolerance)
    assert first[1].keys() == second[1].keys()
    for name in first[1]:
        torch.testing.assert_close(first[1][name], second[1][name], msg=lambda m, n=name: f"{n}: {m}", **tolerance)


@pytest.mark.parametrize(
    "memory",
    [
        {"method": "vanilla"},
        {"sites": SITES},
        {"sites": SITES, "compression": 1.0},
        {"extraction": {"gate": False}},
        {"extraction": {"enabled": False}},
        {"sites": {"o": {"views": 2, "kernels": [4]}, "qk": {"layers": [1]}}, "extraction": {"shared": True}},
    ],
)
def test_planned_parameters_are_those_that_are_made(memory):
    settings = tiny.config(memory=memory)
    budget = plan_budget(settings)
    made = tiny.model(settings)
    injected = sum(p.numel() for name, p in made.named_parameters() if ".sites." in name)
    assert sum(p.numel() for p in made.parameters()) - injected == budget.backbone_parameters
    assert injected == budget.extractor_parameters
    if settings.memory.method != "vanilla":
        states = tiny.tables(settings).shards
        assert sum(s.rows.numel() for s in states) == budget.table_parameters
        assert sum(s.gates.numel() for s in states if s.gates is not None) == budget.gate_parameters


def test_activation_checkpointing_changes_nothing():
    plain = tiny.config(memory={"sites": SITES})
    recomputed = tiny.config(memory={"sites": SITES}, train={**tiny.BASE["train"], "activation_checkpointing": True})
    batch = tiny.tokens(plain, 2, 2, 12)
    assert_same(losses_and_gradients(plain, batch), losses_and_gradients(recomputed, batch), rtol=1e-6, atol=1e-7)


def test_accumulated_micro_batches_equal_one_large_batch():
    settings = tiny.config(memory={"sites": SITES})
    batch = tiny.tokens(settings, 4, 2, 12)
    apart = losses_and_gradients(settings, batch)
    together = losses_and_gradients(settings, batch.reshape(1, 8, 12))
    assert_same(apart, together, rtol=1e-4, atol=1e-6)


def test_compiled_blocks_have_no_graph_break_and_the_same_numbers():
    settings = tiny.config(memory={"sites": SITES})
    batch = tiny.tokens(settings, 2, 2, 12)
    expected = losses_and_gradients(settings, batch)
    made = tiny.model(settings)
    torch._dynamo.reset()
    for block in made.blocks:
        block.compile(fullgraph=True, backend="aot_eager")  # fullgraph: a break is an error
    assert_same(losses_and_gradients(settings, batch, made=made), expected, rtol=1e-5, atol=1e-6)
    torch._dynamo.utils.counters.clear()
    other = tiny.tokens(settings, 2, 2, 12, seed=3)  # another number of distinct tokens
    losses_and_gradients(settings, other, made=made)
    assert not torch._dynamo.utils.counters["graph_break"]
    torch._dynamo.reset()


@pytest.mark.parametrize("recomputed", [False, True])
def test_blocks_are_compiled_once_for_all_layers_and_sizes_of_the_working_set(recomputed):
    """A graph compiled again at the second window would be minutes on every start, on every rank."""
    train = {**tiny.BASE["train"], "activation_checkpointing": recomputed}
    settings = tiny.config(memory={"sites": SITES, "window": 2}, train=train)
    made, tables = tiny.model(settings), tiny.tables(settings)
    graphs, sizes = [], set()

    def count(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    for block in made.blocks:
        block.compile(backend=count, fullgraph=True)
    for seed in range(3):
        batch = tiny.tokens(settings, 3, 2, 12, seed=seed)  # windows of two micro-batches and of one
        for window in tables.plan(batch).result():
            working = tables.fetch(window)
            sizes.add(len(next(iter(working.values.values()))))
            for tokens, slots in zip(batch[window.micro_batches], working.slots, strict=True):
                made.loss(tokens, slots, working.values, torch.tensor(0.5))[0].backward()
            tables.give_back(working)
        tiny.drop_gradients(tables.shards)
    torch._dynamo.reset()
    assert len(sizes) >= 4
    assert len(graphs) == 1


def test_blocks_compiled_for_a_gpu_compute_again_what_they_could_keep(monkeypatch):
    with functorch_config.patch(aggressive_recomputation=False):
        recompute_elementwise(torch.device("cpu"))
        assert not functorch_config.aggressive_recomputation
        recompute_elementwise(torch.device("cuda"))
        assert functorch_config.aggressive_recomputation
    asked = []
    monkeypatch.setattr("xgram_dist.model.build.recompute_elementwise", asked.append)
    for compiled in (False, True):
        build_model(tiny.config(train={**tiny.BASE["train"], "compile": compiled}), tiny.CPU)
    assert asked == [tiny.CPU]


def test_the_passes_over_the_logits_are_compiled_once_for_all_chunks():
    hidden, weight = torch.randn(2, 9, 16), torch.randn(40, 16)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for length in (9, 8, 5):  # of 18, 16 and 10 tokens in chunks of 7
        labels = next_token_labels(torch.randint(0, 40, (2, length)))
        arguments = (hidden[:, :length].clone().requires_grad_(), weight.clone().requires_grad_(), labels)
        vocab_parallel_cross_entropy(*arguments, 0.0, 7, passes=CompiledPasses())[0].backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    torch._dynamo.reset()


def test_bf16_stays_near_fp32_and_gradients_of_master_weights_are_fp32():
    settings = tiny.config(memory={"sites": SITES})
    batch = tiny.tokens(settings, 2, 2, 12)
    exact = losses_and_gradients(settings, batch)
    made = tiny.model(settings)
    made.compute_dtype = torch.bfloat16
    rough = losses_and_gradients(settings, batch, made=made)
    assert abs(exact[0] - rough[0]) < 0.02
    assert all(gradient.dtype == torch.float32 for gradient in rough[1].values())
    for name in ("table 0", "blocks.1.ffn.down.weight", "embedding"):
        cosine = torch.cosine_similarity(exact[1][name].flatten(), rough[1][name].flatten(), dim=0)
        assert cosine > 0.99, name


def test_a_backbone_starts_the_same_whatever_stands_beside_it():
    from xgram_dist.model.build import initialise
    from xgram_dist.model.transformer import Transformer

    weights = []
    for memory in ({"method": "vanilla"}, {"sites": SITES}):
        settings = tiny.config(memory=memory)
        made = Transformer(settings)
        initialise(made, settings)
        weights.append({n: p for n, p in made.named_parameters() if ".sites." not in n})
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    matrix = weights[0]["embedding"]
    assert 0.017 < matrix.std() < 0.023
    assert matrix.abs().max() <= 0.06 + 1e-6


def test_initial_rows_depend_on_seed_table_and_row_alone():
    rows = torch.arange(1000)
    whole = initial_rows(rows, 32, 0.02, 7, "layers.0.v.0")
    assert torch.equal(whole[200:300], initial_rows(rows[200:300], 32, 0.02, 7, "layers.0.v.0"))
    assert torch.equal(whole[rows.flip(0)], initial_rows(rows.flip(0), 32, 0.02, 7, "layers.0.v.0"))
    for other in (initial_rows(rows, 32, 0.02, 8, "layers.0.v.0"), initial_rows(rows, 32, 0.02, 7, "layers.0.v.1")):
        assert abs(float(torch.corrcoef(torch.stack([whole.flatten(), other.flatten()]))[0, 1])) < 0.02


def test_initial_rows_are_a_normal_cut_at_three_deviations():
    values = initial_rows(torch.arange(4000), 64, 1.0, 0, "t").double()
    assert values.abs().max() <= 3.0
    assert abs(values.mean()) < 0.01
    # A standard normal cut at 3 has variance 1 - 6 phi(3) / (2 Phi(3) - 1).
    assert abs(values.var() - 0.97334) < 0.01
    assert abs((values.abs() < 1).double().mean() - 0.68269 / 0.99730) < 0.005
    columns = torch.corrcoef(values.T)
    assert (columns - torch.eye(64)).abs().max() < 0.1
