"""Layers shared by tensor-parallel ranks equal the model in one process: loss, every gradient, a curve of steps."""

import copy

import numpy as np
import pytest
import tiny_models as tiny
import torch
import torch.nn.functional as F
from ranks_helper import run_ranks
from torch.utils._python_dispatch import TorchDispatchMode

F64 = torch.float64
MODEL = {"layers": 2, "width": 32, "heads": 8, "kv_heads": 4, "ffn_width": 24, "loss_chunk": 7}
MODEL |= {"z_loss": 0.05, "init_std": 0.2}  # large enough that every gradient counts
BATCH, LENGTH, VOCABULARY = 2, 12, 120
SITE = {"views": 2, "kernels": [3, 5]}
ALL_SITES = {
    "h": {"views": 3, "kernels": [3, 1, 2]},
    "q": {"views": 1, "kernels": [2]},
    "k": {"views": 1, "kernels": [1]},
    "v": {"views": 2, "kernels": [3, 5]},
    "o": {"views": 2, "kernels": [4], "layers": [1]},
}
RECOMPUTED = {"activation_checkpointing": True}
CASES = {
    "vanilla": {"memory": {"method": "vanilla"}},
    **{f"site {site}": {"memory": {"sites": {site: SITE}}} for site in ("h", "q", "k", "v", "o", "qk")},
    "all sites": {"memory": {"sites": ALL_SITES}},
    "all sites, recomputed": {"memory": {"sites": ALL_SITES}, "train": RECOMPUTED},
    "all sites, masked": {"memory": {"sites": ALL_SITES}, "model": {"document_masking": True}},
    # A kernel longer than a rank's part of the sequence.
    "long kernels, masked": {
        "memory": {"sites": {"h": {"kernels": [11]}, "v": {"kernels": [11]}}},
        "model": {"document_masking": True},
        "train": RECOMPUTED,
    },
    "h and v, recomputed": {"memory": {"sites": {"h": {"kernels": [2]}, "v": {"kernels": [2]}}}, "train": RECOMPUTED},
    "no extraction": {"memory": {"sites": {"h": SITE, "v": SITE}, "extraction": {"enabled": False}}},
    "content only": {"memory": {"sites": {"o": SITE, "qk": SITE}, "extraction": {"gate": False}}},
    "no retrieved norm": {"memory": {"sites": {"h": SITE, "v": SITE}, "extraction": {"norm": False}}},
    "shared extractor": {
        "memory": {"sites": {"h": {"views": 3}, "v": {"views": 2}}, "extraction": {"shared": True}},
    },
    "one kv head a rank": {"model": {"heads": 4}, "memory": {"sites": {"q": SITE, "v": SITE}}},
}
COMPILED = [("vanilla", False), ("h and v, recomputed", True)]  # between them they have every collective
VARIANTS = [(case, sequence) for case in CASES for sequence in (False, True)]


def settings_of(case, sequence, size):
    changed = copy.deepcopy(CASES[case])
    changed["model"] = MODEL | changed.get("model", {})
    changed["train"] = tiny.BASE["train"] | changed.get("train", {})
    changed["parallel"] = {"engine": "replicated", "tensor": size, "sequence_parallel": sequence}
    return tiny.config(**changed)


def batch_of(settings, seed=0):
    tokens = tiny.tokens(settings, BATCH, LENGTH, seed=seed)
    tokens[:, ::7] = 3  # a repeated token, which also ends documents
    return tokens


def leaves_of(settings, ranks):
    """A working set of the whole vocabulary, as a rank of the tensor axis gets it."""
    from xgram_dist.model.methods.base import table_layout
    from xgram_dist.tables.layout import RESIDUAL_SITES

    generator = torch.Generator().manual_seed(4)
    leaves = {}
    for table in table_layout(settings).tables:
        whole = torch.randn(VOCABULARY, table.width, dtype=F64, generator=generator)
        if table.site not in RESIDUAL_SITES:
            whole = whole.chunk(ranks.size, 1)[ranks.rank].contiguous()
        leaves[table.name] = whole.requires_grad_()
    return leaves


def complete(settings, leaves, ranks):
    """Sum over the tensor axis what a residual site's leaf has in parts."""
    from xgram_dist.tables.layout import RESIDUAL_SITES, residual_gradients_are_partial

    for name, leaf in leaves.items():
        if name.split(".")[2] in RESIDUAL_SITES and residual_gradients_are_partial(settings):
            ranks.all_reduce_sum(leaf.grad)


def tensors(made, leaves, axis, value):
    """{name: (part, shape of the whole, where the part begins)} of parameters and leaves."""
    from xgram_dist.parallel.tensor_parallel import global_shape_and_offset
    from xgram_dist.tables.layout import RESIDUAL_SITES

    found = {}
    for name, parameter in made.named_parameters():
        found[name] = (value(parameter).numpy(), *global_shape_and_offset(parameter, axis))
    for name, leaf in leaves.items():
        dim = None if name.split(".")[2] in RESIDUAL_SITES else 1
        found[f"leaf {name}"] = (value(leaf).numpy(), *global_shape_and_offset(leaf, axis, dim))
    return found


def run_case(ranks, case, sequence, dtype=F64, compiled=False):
    """One pass forward and back -> loss, cross-entropy, gradients."""
    settings = settings_of(case, sequence, ranks.size)
    made = tiny.model(settings, F64, end_of_text=3, tensor=ranks)
    made.compute_dtype = dtype
    if compiled:
        torch._dynamo.reset()
        for block in made.blocks:
            block.compile(fullgraph=True, backend="aot_eager")
    leaves, tokens = leaves_of(settings, ranks), batch_of(settings)
    loss, entropy = made.loss(tokens, tokens, leaves, torch.tensor(0.7, dtype=F64))
    (loss / 3).backward()
    complete(settings, leaves, ranks)
    gradients = tensors(made, leaves, ranks, lambda tensor: tensor.grad)
    return float(loss.detach()), float(entropy), gradients


def run_curve(ranks, case, sequence):
    """Losses of some steps of AdamW over parameters and leaves."""
    settings = settings_of(case, sequence, ranks.size)
    made = tiny.model(settings, F64, end_of_text=3, tensor=ranks)
    leaves = leaves_of(settings, ranks)
    optimizer = torch.optim.AdamW([*made.parameters(), *leaves.values()], lr=0.01, weight_decay=0.1)
    losses = []
    for step in range(4):
        tokens = batch_of(settings, step % 2)
        loss, _ = made.loss(tokens, tokens, leaves, torch.tensor(1.0))
        optimizer.zero_grad()
        loss.backward()
        complete(settings, leaves, ranks)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, tensors(made, leaves, ranks, torch.Tensor.detach)


def run_hidden(ranks, sequence):
    """Hidden states, which every rank gets whole, and a gradient through them."""
    settings = settings_of("all sites", sequence, ranks.size)
    made = tiny.model(settings, F64, tensor=ranks)
    leaves, tokens = leaves_of(settings, ranks), batch_of(settings)
    hidden = made(tokens, tokens, leaves, torch.tensor(1.0))
    hidden.sin().sum().backward()
    complete(settings, leaves, ranks)
    made.head.weight.grad = torch.zeros_like(made.head.weight)  # has no part in it
    return hidden.detach().numpy(), tensors(made, leaves, ranks, lambda tensor: tensor.grad)


def initial(ranks):
    from xgram_dist.model.build import initialise
    from xgram_dist.model.transformer import Transformer
    from xgram_dist.parallel.tensor_parallel import tensor_axis

    settings = settings_of("all sites", False, ranks.size)
    made = Transformer(settings, axis=tensor_axis(ranks, settings.parallel.sequence_parallel))
    initialise(made, settings)
    return tensors(made, {}, ranks, torch.Tensor.detach)


class Shapes(TorchDispatchMode):
    """The shapes of everything that is computed, backward included."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.found.add(tuple(tensor.shape))
        return out


def shapes(ranks, sequence):
    settings = settings_of("vanilla", sequence, ranks.size)
    made, tokens = tiny.model(settings, F64, tensor=ranks), batch_of(settings)
    with Shapes() as seen:
        made.loss(tokens, tokens, {}, torch.tensor(1.0))[0].backward()
    return tuple(made.head.weight.shape), tuple(made.embedding.shape), seen.found


def cross_entropies(ranks, sequence, compiled=False):
    """Loss, entropy, gradients of hidden states and of this rank's rows of the head, with extreme logits among them."""
    from xgram_dist.model.loss import EAGER, CompiledPasses, vocab_parallel_cross_entropy
    from xgram_dist.parallel.tensor_parallel import tensor_axis

    axis = tensor_axis(ranks, sequence)
    hidden, weight, labels = loss_inputs()
    part = hidden[:, axis.local_slice(LENGTH)] if sequence else hidden
    mine = weight[axis.local_slice(VOCABULARY)]
    part, mine = part.clone().requires_grad_(), mine.clone().requires_grad_()
    loss, entropy = vocab_parallel_cross_entropy(
        part, mine, labels, 0.1, 5, axis, CompiledPasses() if compiled else EAGER
    )
    (3 * loss).backward()
    return float(loss.detach()), float(entropy), part.grad.numpy(), mine.grad.numpy()


def loss_inputs():
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(BATCH, LENGTH, 6, dtype=F64, generator=generator)
    hidden[0, 0] *= 500
    weight = torch.randn(VOCABULARY, 6, dtype=F64, generator=generator)
    labels = torch.randint(-1, VOCABULARY, (BATCH, LENGTH), generator=generator)
    labels[1, 5], labels[0, 3] = -1, VOCABULARY - 1
    return hidden, weight, labels


def run_all(ranks):
    """Everything in one set of processes: starting them takes longer than the work."""
    found = {("case", *variant): run_case(ranks, *variant) for variant in VARIANTS}
    for sequence in (False, True):
        found["curve", sequence] = run_curve(ranks, "all sites, recomputed", sequence)
        found["hidden", sequence] = run_hidden(ranks, sequence)
        found["entropy", sequence] = cross_entropies(ranks, sequence)
        found["shapes", sequence] = shapes(ranks, sequence)
        found["bf16", sequence] = run_case(ranks, "all sites", sequence, torch.bfloat16)
    for variant in COMPILED if ranks.size == 2 else []:
        found["compiled", *variant] = run_case(ranks, *variant, compiled=True)
    if ranks.size == 2:
        found["entropy, compiled", False] = cross_entropies(ranks, False, compiled=True)
    found["initial"] = initial(ranks)
    return found


@pytest.fixture(scope="module", params=[2, 4])
def on_ranks(request):
    return run_ranks(run_all, request.param, timeout=300)


@pytest.fixture(scope="module")
def alone():
    """The same functions in one process, each result made once."""
    from xgram_dist.parallel.process_group import ProcessGroup

    made = {}

    def get(function, *arguments):
        key = (function.__name__, arguments)
        if key not in made:
            made[key] = function(ProcessGroup(), *arguments)
        return made[key]

    return get


def joined(name, parts):
    """The whole tensor of the ranks' parts; what every rank holds whole must be the same on all, to the bit."""
    _, shape, _ = parts[0]
    whole = np.full(shape, np.nan)
    for part, of_rank, offset in parts:
        assert of_rank == shape, name
        place = tuple(slice(start, start + length) for start, length in zip(offset, part.shape, strict=True))
        if not np.isnan(whole[place]).all():
            np.testing.assert_array_equal(part, whole[place], err_msg=f"{name} differs between ranks")
        whole[place] = part
    assert not np.isnan(whole).any(), name
    return whole


def assert_same_tensors(found, expected, rtol=1e-10, atol=1e-12):
    for name, (value, shape, _) in expected.items():
        assert all(name in of_rank for of_rank in found)
        whole = joined(name, [of_rank[name] for of_rank in found])
        assert whole.shape == shape
        np.testing.assert_allclose(whole, value, rtol=rtol, atol=atol, err_msg=name)
    assert all(of_rank.keys() == expected.keys() for of_rank in found)


def test_loss_and_every_gradient_equal_those_of_one_process(on_ranks, alone):
    for case, sequence in VARIANTS:
        print(case, sequence)
        loss, entropy, gradients = alone(run_case, case, False)
        results = [found["case", case, sequence] for found in on_ranks]
        for result in results:
            np.testing.assert_allclose(result[:2], (loss, entropy), rtol=1e-10)
            assert result[:2] == results[0][:2]
        assert_same_tensors([result[2] for result in results], gradients)
        assert all(np.abs(value).max() > 1e-5 for value, *_ in gradients.values())  # there was something to compare


@pytest.mark.parametrize("sequence", [False, True])
def test_steps_of_adamw_follow_the_same_curve(on_ranks, alone, sequence):
    losses, weights = alone(run_curve, "all sites, recomputed", False)
    assert losses[-1] < losses[0] - 0.1
    for found in on_ranks:
        np.testing.assert_allclose(found["curve", sequence][0], losses, rtol=1e-8)
    assert_same_tensors([found["curve", sequence][1] for found in on_ranks], weights, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("sequence", [False, True])
def test_hidden_states_are_whole_on_every_rank(on_ranks, alone, sequence):
    hidden, gradients = alone(run_hidden, False)
    for found in on_ranks:
        np.testing.assert_allclose(found["hidden", sequence][0], hidden, rtol=1e-10, atol=1e-12)
    assert_same_tensors([found["hidden", sequence][1] for found in on_ranks], gradients)


@pytest.mark.parametrize(("passes", "sequence"), [("entropy", False), ("entropy", True), ("entropy, compiled", False)])
def test_cross_entropy_over_a_spread_vocabulary_equals_the_plain_formula(on_ranks, passes, sequence):
    if (passes, sequence) not in on_ranks[0]:
        pytest.skip("passes are compiled on two ranks only")
    hidden, weight, labels = loss_inputs()
    hidden.requires_grad_()
    weight.requires_grad_()
    logits = hidden.reshape(-1, 6) @ weight.T
    entropy = F.cross_entropy(logits, labels.reshape(-1), ignore_index=-1)
    loss = entropy + 0.1 * logits.logsumexp(-1)[labels.reshape(-1) != -1].square().mean()
    (3 * loss).backward()
    results = [found[passes, sequence] for found in on_ranks]
    for result in results:
        np.testing.assert_allclose(result[:2], (float(loss.detach()), float(entropy.detach())), rtol=1e-12)
        if not sequence:
            np.testing.assert_allclose(result[2], hidden.grad, rtol=1e-10, atol=1e-12)
    if sequence:
        whole = np.concatenate([result[2] for result in results], axis=1)
        np.testing.assert_allclose(whole, hidden.grad, rtol=1e-10, atol=1e-12)
    whole = np.concatenate([result[3] for result in results])
    np.testing.assert_allclose(whole, weight.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("sequence", [False, True])
def test_no_rank_sees_the_whole_vocabulary(on_ranks, alone, sequence):
    size = len(on_ranks)
    assert (MODEL["loss_chunk"], VOCABULARY) in alone(shapes, False)[2]  # what is looked for is found in one process
    for found in on_ranks:
        head, embedding, seen = found["shapes", sequence]
        assert head == embedding == (VOCABULARY // size, MODEL["width"])
        assert (MODEL["loss_chunk"], VOCABULARY // size) in seen
        assert not any(VOCABULARY in shape for shape in seen)
        if sequence:  # between layers there is a part of the sequence only
            assert (BATCH, LENGTH // size, MODEL["width"]) in seen


def test_any_degree_starts_with_the_same_weights(on_ranks, alone):
    assert_same_tensors([found["initial"] for found in on_ranks], alone(initial), rtol=0, atol=0)


@pytest.mark.parametrize("sequence", [False, True])
def test_bf16_stays_near_and_whole_parameters_get_the_same_gradient_on_every_rank(on_ranks, alone, sequence):
    loss, _, gradients = alone(run_case, "all sites", False)
    results = [found["bf16", sequence] for found in on_ranks]
    assert abs(results[0][0] - loss) < 0.02
    for name, (value, *_) in gradients.items():
        whole = joined(name, [result[2][name] for result in results])
        if value.size > 100:
            assert np.vdot(whole, value) > 0.98 * np.linalg.norm(whole) * np.linalg.norm(value), name


def test_compiled_blocks_have_no_graph_break_and_the_same_numbers(on_ranks, alone):
    for case, sequence in COMPILED if len(on_ranks) == 2 else []:
        loss, _, gradients = alone(run_case, case, False)
        results = [found["compiled", case, sequence] for found in on_ranks]
        np.testing.assert_allclose(results[0][0], loss, rtol=1e-10)
        assert_same_tensors([result[2] for result in results], gradients)


def test_a_width_that_cannot_be_divided_is_refused_in_words():
    from xgram_dist.parallel.tensor_parallel import TensorAxis

    axis = TensorAxis(rank=1, size=4)
    assert axis.local_slice(12) == slice(3, 6)
    with pytest.raises(ValueError, match="10 cannot be divided evenly over 4 tensor-parallel ranks"):
        axis.local_size(10)


def test_one_rank_has_no_sharded_parameters_and_calls_no_collective():
    from xgram_dist.parallel.tensor_parallel import tensor_dims

    settings = settings_of("all sites", False, 1)
    made = tiny.model(settings, F64)
    assert tensor_dims(made) == {}
    leaves, tokens = leaves_of(settings, made.axis), batch_of(settings)
    with torch.profiler.profile() as profile:
        made.loss(tokens, tokens, leaves, torch.tensor(1.0))[0].backward()
    assert not any("c10d" in event.key for event in profile.key_averages())
