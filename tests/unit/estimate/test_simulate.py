"""A simulated step: collectives against closed forms, the program against what `plan` adds up, draws against a count by
hand, and what must hold for any links: bytes are conserved, a straggler delays by its excess, more bandwidth never
costs time."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from xgram_dist.config import load_config
from xgram_dist.errors import UserError
from xgram_dist.estimate.comm import Axes, ring_bytes
from xgram_dist.estimate.layout import plan_layout
from xgram_dist.estimate.links import AllToAll, Latency, Links, Ring, ranks_of_groups
from xgram_dist.estimate.requests import Requests, WindowLoad, draw_requests
from xgram_dist.estimate.scaling import LAYOUTS, Network, Trace, choose_ranks, fit, simulate_recipe, sweep
from xgram_dist.estimate.simulate import OTHERS, Clock, Stragglers, simulate_step
from xgram_dist.estimate.step_program import StepProgram, Work
from xgram_dist.estimate.step_time import Machine
from xgram_dist.estimate.tables import plan_rank_tables
from xgram_dist.estimate.traffic import build_traffic, zipf
from xgram_dist.model.methods.base import table_layout
from xgram_dist.tables.layout import routing_settings
from xgram_dist.tables.routing_build import build_routing
from xgram_dist.tables.row_sharding import plan_row_sharding

RECIPES = Path(__file__).resolve().parents[3] / "recipes"
NO_LATENCY = Latency(0.0, 0.0, 0.0)
GIGA = 1e9


def recipe(*overrides, file="xgram"):
    return load_config(RECIPES / "tiny" / f"{file}.yaml", ["train.micro_batch=1", *overrides])


def links(ranks, node_ranks=1, latency=NO_LATENCY, uplink=None, **machine):
    machine = Machine(**{"bandwidth": 1.0, "node_bandwidth": 10.0, "node_ranks": node_ranks} | machine)
    return Links.of(machine, ranks, latency, uplink)


def trace_of(config, seed=0):
    frequencies, layout = zipf(config.model.vocabulary), table_layout(config)
    if not layout.tables:
        return Trace(None, None, seed)
    routing = build_routing(frequencies, routing_settings(config), layout.num_views) if layout.hashed else None
    return Trace(frequencies, routing, seed)


def simulated(config, ranks, machine=None, latency=NO_LATENCY, **keys):
    return simulate_recipe(config, ranks, Network(machine or Machine(node_ranks=2), latency), trace_of(config), **keys)


# Transfers


def test_a_ring_takes_what_the_formula_says():
    ranks, size = 8, 4e9
    sent = ring_bytes("all-reduce", size, ranks)
    assert sent == 2 * 7 / 8 * size
    everybody = np.arange(ranks).reshape(1, -1)
    ring = Ring("r", "all-reduce", everybody, sent, links(ranks))
    assert ring.seconds == pytest.approx(sent / GIGA)
    # With 10 us a hop, few bytes go by tree: 3 levels up and down instead of 14 hops.
    assert Ring("r", "all-reduce", everybody, 8, links(ranks, latency=Latency(10, 0, 0))).seconds == pytest.approx(
        60e-6, rel=1e-3
    )
    # A gather has no such short cut.
    assert Ring("r", "all-gather", everybody, 8, links(ranks, latency=Latency(10, 0, 0))).seconds == pytest.approx(
        70e-6, rel=1e-3
    )


def test_a_ring_leaves_a_node_over_the_cards_of_its_ranks():
    everybody = np.arange(8).reshape(1, -1)
    assert Ring("r", "all-gather", everybody, 8e9, links(8, 4, node_bandwidth=1e3)).seconds == pytest.approx(2.0)
    # The uplink of a node may carry less than its cards.
    assert Ring("r", "all-gather", everybody, 8e9, links(8, 4, uplink=1.0)).seconds == pytest.approx(8.0)
    within = Ring("r", "all-gather", np.arange(8).reshape(2, 4), 8e9, links(8, 4))
    assert within.seconds == pytest.approx(0.8)
    assert not within.between_nodes
    # Four rings, each with a rank of both nodes, share the uplinks.
    across = np.arange(8).reshape(2, 4).T
    assert Ring("r", "all-reduce", across, 1e9, links(8, 4)).seconds == pytest.approx(1.0)
    assert Ring("r", "all-reduce", across, 1e9, links(8, 4, uplink=2.0)).seconds == pytest.approx(2.0)


def test_nobody_leaves_a_ring_before_the_last_one_came():
    ring = Ring("r", "all-gather", np.array([[0, 1], [2, 3]]), 1e9, links(4))
    assert ring.ends(np.array([0.0, 5.0, 1.0, 2.0])).tolist() == [6.0, 6.0, 3.0, 3.0]


def all_to_all(sent, received, links, near=None):
    nothing = np.zeros(links.ranks) if near is None else near
    groups = np.arange(links.ranks).reshape(1, -1)
    return AllToAll("a", groups, (np.array(sent), nothing), (np.array(received), nothing), links)


def test_two_ranks_exchange_at_the_speed_of_their_cards():
    exchange = all_to_all([3e9, 1e9], [1e9, 3e9], links(2, latency=Latency(10, 0, 5)))
    assert exchange.ends(np.zeros(2)) == pytest.approx([3.0 + 15e-6] * 2)
    # Rank 1 cannot have everything before rank 0 has sent it.
    assert exchange.ends(np.array([2.0, 0.0])) == pytest.approx([5.0 + 15e-6] * 2)


def test_the_ranks_of_a_node_share_its_uplink_whenever_there_is_work():
    shared = all_to_all([1e9] * 4, [0.0] * 4, links(4, 2, uplink=1.0))
    assert shared.ends(np.zeros(4)) == pytest.approx([2.0] * 4)
    # It works for rank 0 first, and is free again when rank 1 comes.
    assert shared.ends(np.array([0.0, 3.0, 0.0, 0.0])) == pytest.approx([4.0] * 4)


@pytest.mark.parametrize("axis", ["world", "data", "tensor", "shard", "replicate", "rows", "replicas"])
def test_each_rank_is_in_one_group_of_an_axis(axis):
    axes = Axes(data=8, tensor=2, replicate=2, replicas=4)
    groups = ranks_of_groups(axes, axis)
    assert groups.shape[1] == axes.size(axis)
    assert sorted(groups.ravel()) == list(range(16))
    if axis in ("tensor", "rows", "shard"):  # consecutive ranks of the axis
        assert all(np.ptp(group) < axes.span(axis) for group in groups)


# Requests


@pytest.mark.parametrize("shard", [4, 2])
def test_requests_are_those_of_the_tokens_and_the_row_sharding(shard):
    config = recipe(f"memory.shard={shard}")
    axes, trace = Axes.of(config, 4), trace_of(config)
    traffic = build_traffic(config, trace.frequencies, trace.routing, axes.rows)
    found = draw_requests(config, axes, trace.frequencies, trace.routing, traffic, [4], 2, seed=3)
    (load,) = found.windows
    assert load.requested_far.sum() == load.served_far.sum()
    assert load.requested_near.sum() == load.served_near.sum()
    assert (load.requested_far.sum() > 0) == (shard == 4)  # a replica on each node keeps vectors there
    # By hand: the same tokens, and the owners of all rows of each.
    slabs = table_layout(config).slabs
    owner = plan_row_sharding(trace.routing, slabs[0].rows, axes.rows).owner
    random, order = np.random.default_rng(3), np.argsort(-trace.frequencies, kind="stable")
    cumulative = np.cumsum(trace.frequencies[order]) / trace.frequencies.sum()
    requested = np.zeros(4)
    for rank in range(4):
        tokens = set(order[np.searchsorted(cumulative, random.random(4 * 256), side="right")].tolist())
        for slab in slabs:
            for token in tokens:
                rows, _ = trace.routing.views[slab.view].of_token(token)
                owners = set(owner[rows].tolist()) - {rank % shard}
                requested[rank] += slab.width * len(owners)
    assert (load.requested_far + load.requested_near).tolist() == requested.tolist()


def test_draws_have_the_mean_that_plan_expects():
    config = recipe()
    axes, trace = Axes.of(config, 16), trace_of(config)
    layout = plan_layout(config, axes, Machine(), trace.traffic(config, 16))
    step = simulated(config, 16).step
    planned = layout.wire_bytes
    assert float((step.far + step.near).mean()) == pytest.approx(planned, rel=0.03)


def test_ngrams_fall_on_all_owners_alike():
    config = recipe(file="engram")
    found = simulated(config, 8).requests
    assert found.imbalance < 1.05
    expected, _ = trace_of(config).traffic(config, 8).seen(2 * 256)
    assert found.distinct_tokens == pytest.approx(expected, rel=0.05)


# The step


def even_requests(config, axes, traffic, micro_batches):
    """Every rank asks every owner for what `plan` expects."""
    slabs = table_layout(config, axes.tensor).slabs
    found = Requests(served=np.ones(axes.world), hit=np.ones(axes.world))
    for size in plan_rank_tables(config, axes, micro_batches, traffic).window_sizes:
        _, vectors = traffic.seen(size * config.train.micro_batch * config.model.sequence_length)
        elements = sum(count * slab.width for count, slab in zip(vectors, slabs, strict=True))
        remote = np.full(axes.world, elements * (axes.rows - 1) / axes.rows)
        found.windows.append(WindowLoad(remote, np.zeros(axes.world), remote, np.zeros(axes.world)))
    return found


@pytest.mark.parametrize(
    "overrides",
    [
        ["parallel.engine=replicated"],
        ["parallel.engine=replicated", "memory.window=1"],
        ["parallel.engine=deepspeed", "parallel.zero_stage=1"],
        ["parallel.engine=deepspeed", "parallel.zero_stage=1", "memory.shard=4"],
        ["parallel.engine=replicated", "parallel.tensor=2"],
        ["parallel.engine=hsdp", "parallel.replicate=2"],
        ["parallel.engine=deepspeed", "parallel.zero_stage=2"],
        ["parallel.engine=deepspeed", "parallel.zero_stage=3"],
    ],
)
def test_with_uniform_links_and_even_loads_a_step_takes_what_plan_adds_up(overrides):
    config = recipe(*overrides)
    axes = Axes.of(config, 8)
    machine = Machine(bandwidth=0.1, node_ranks=1)
    traffic = build_traffic(config, zipf(4096), trace_of(config).routing, axes.rows)
    layout = plan_layout(config, axes, machine, traffic)
    requests = even_requests(config, axes, traffic, layout.micro_batches)
    work = replace(Work.of(config, layout, requests, 8), engine_overlaps=False)
    program = StepProgram(config, axes, Links.of(machine, 8, NO_LATENCY), layout, work, requests)
    step, _ = simulate_step(program, 8, lambda: Stragglers(8))
    # Token ids are exchanged a step ahead, beside the step; so is what replicas tell each other about rows.
    ahead = ("token ids", "touched rows of replicas")
    ids = sum(machine.seconds_on_wire(message, axes) for message in layout.messages if message.name in ahead)
    assert step.seconds == pytest.approx(layout.time.one_by_one - ids, rel=1e-6)
    assert sum(float(seconds[0]) for seconds in step.spent.values()) == pytest.approx(step.seconds)
    unplanned = [message.bytes for message in layout.messages if message.name == "touched rows of replicas"]
    assert float((step.far + step.near)[0]) == pytest.approx(layout.wire_bytes - sum(unplanned), rel=1e-3)


@pytest.mark.parametrize("factor", [1.25, 2.0])
def test_a_straggler_delays_everybody_by_exactly_its_excess(factor):
    config = recipe(file="vanilla")
    even, slowed = simulated(config, 8), simulated(config, 8, slow={3: factor})
    working = sum(float(even.step.spent[name][3]) for name in even.step.spent if name in slowed_phases(even))
    assert slowed.step.seconds - even.step.seconds == pytest.approx((factor - 1) * working, rel=1e-6)
    assert slowed.step.waiting[3] == pytest.approx(0.0, abs=1e-12)
    assert slowed.step.waiting[0] > 0
    assert choose_ranks(slowed.step, {3: factor}, 3)[0] == 3


def slowed_phases(simulation):
    """Work, and not waiting for transfers."""
    return [name for name in simulation.step.spent if name not in simulation.step.transferring and name != OTHERS]


def test_faster_links_never_make_a_step_slower():
    random = np.random.default_rng(0)
    for layout in LAYOUTS:
        config = fit(recipe(), layout, 8, Machine(node_ranks=4))
        assert config is not None
        for _ in range(3):
            bandwidth, node_bandwidth = 10.0 ** random.uniform(-2, 2, 2)
            delays = [Latency(*random.uniform(0, 100, 3)), NO_LATENCY]
            slow = Machine(bandwidth=bandwidth, node_bandwidth=node_bandwidth, node_ranks=4)
            seconds = simulated(config, 8, slow, delays[0], jitter=0.1).step.seconds
            for faster in (replace(slow, bandwidth=3 * bandwidth), replace(slow, node_bandwidth=3 * node_bandwidth)):
                assert simulated(config, 8, faster, delays[0], jitter=0.1).step.seconds <= seconds * (1 + 1e-12)
            assert simulated(config, 8, slow, delays[1], jitter=0.1).step.seconds <= seconds * (1 + 1e-12)


def test_overlap_hides_the_exchange_and_moves_the_same_bytes():
    wide = ["model.width=1024", "model.ffn_width=4096"]
    machine = Machine(bandwidth=50.0, node_ranks=1)
    plain, overlapped = (simulated(recipe(*wide, f"memory.overlap={on}"), 8, machine) for on in ("false", "true"))
    assert overlapped.part("tables") < plain.part("tables")
    assert overlapped.step.seconds < plain.step.seconds
    for sent, without in ((overlapped.step.far, plain.step.far), (overlapped.step.near, plain.step.near)):
        assert sent.sum() == pytest.approx(without.sum())


def test_the_same_seed_gives_the_same_step():
    config = recipe()
    first, again = (simulated(config, 4, jitter=0.2).step.seconds for _ in range(2))
    assert first == again


def test_waiting_is_told_apart():
    """One rank is late by 2 s; then both wait for the bytes, 1 s."""
    clock = Clock(2)
    clock.work("work", np.array([1.0, 3.0]))
    clock.wait(clock.send(Ring("gradients", "all-reduce", np.array([[0, 1]]), 1e9, links(2))))
    assert clock.now.tolist() == [4.0, 4.0]
    assert clock.spent[OTHERS].tolist() == [2.0, 0.0]
    assert clock.spent["gradients"].tolist() == [1.0, 1.0]


def test_transfers_of_a_lane_follow_one_another_and_links_of_a_node_are_another_lane():
    clock = Clock(4)
    between, within = np.arange(4).reshape(1, -1), np.arange(4).reshape(2, 2)
    first = clock.send(Ring("a", "all-gather", between, 4e9, links(4, 2)))
    second = clock.send(Ring("b", "all-gather", between, 2e9, links(4, 2)))
    inside = clock.send(Ring("c", "all-gather", within, 10e9, links(4, 2)))
    assert (first.end[0], second.end[0], inside.end[0]) == pytest.approx((2.0, 3.0, 1.0))


# Layouts on more ranks


def test_a_sweep_keeps_the_batch_and_leaves_out_what_does_not_divide():
    config = recipe("train.micro_batch=8")
    network = Network(Machine(node_ranks=4), Latency())
    rows = sweep(config, [2, 16, 64], ["replicated", "HSDP, tables by node"], network, trace_of(config))
    found = [(row.layout, row.simulation.layout.axes.world, row.micro_batch) for row in rows]
    assert found == [(name, *of) for name in ("replicated", "HSDP, tables by node") for of in ((2, 8), (16, 1))]
    by_node = rows[-1].simulation.layout.axes
    assert (by_node.replicate, by_node.replicas) == (4, 4)
    assert rows[0].efficiency == 1.0
    with pytest.raises(UserError, match="divides over none of the ranks 3, 5"):
        sweep(config, [3, 5], ["replicated"], network, trace_of(config))


@pytest.mark.parametrize("key", ["context", "pipeline"])
def test_what_is_not_simulated_is_refused_by_name(key):
    with pytest.raises(UserError, match=f"parallel.{key} = 2 cannot be simulated yet"):
        simulated(recipe(f"parallel.{key}=2"), 4)
