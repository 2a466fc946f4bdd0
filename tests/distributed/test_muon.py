"""Muon of the backbone: torch's own on whole matrices, whatever ranks hold their rows; and accumulation by tokens."""

import engine_helper as helper
import pytest
import tiny_models as tiny
import torch
from ranks_helper import run_ranks

from xgram_dist.config import build_config
from xgram_dist.errors import UserError
from xgram_dist.optim.backbone_muon import BackboneMuon, is_muons
from xgram_dist.tables.exchange_plan import Window
from xgram_dist.tables.working_set import NoTables
from xgram_dist.train.step import JointOptimizer, train_step

SHAPES = {"blocks.0.a": (6, 4), "blocks.0.b": (5, 8), "blocks.1.a": (6, 4), "blocks.1.c": (1, 4)}
MUON = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.95, "adjust_lr_fn": "match_rms_adamw"}


def drawn(seed):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def rows_of(ranks, shape):
    size = -(-shape[0] // ranks.size)
    return slice(min(ranks.rank * size, shape[0]), min((ranks.rank + 1) * size, shape[0]))


def sharded_steps(ranks):
    config = tiny.config(optimizer={"matrices": "muon"})
    local = {n: torch.nn.Parameter(value[rows_of(ranks, value.shape)].clone()) for n, value in drawn(0).items()}
    muon = BackboneMuon(config, {name: (rows, SHAPES[name]) for name, rows in local.items()}, ranks)
    for step in (1, 2, 3):
        for name, gradient in drawn(step).items():
            local[name].grad = gradient[rows_of(ranks, gradient.shape)].clone()
        muon.step(0.02)
    with torch.no_grad():
        for rows in local.values():
            rows.mul_(0.5)  # as a loaded checkpoint overwrites them
    muon.refresh()
    muon.step(0.02)
    return {name: rows.detach().numpy() for name, rows in local.items()}, len(muon.momentum)


def test_rows_over_ranks_are_updated_as_whole_matrices_to_the_last_bit():
    whole = {name: torch.nn.Parameter(value) for name, value in drawn(0).items()}
    optimizer = torch.optim.Muon(whole.values(), **MUON)
    for step in (1, 2, 3, 3):
        for name, gradient in drawn(step).items():
            whole[name].grad = gradient.clone()
        if step == 3 and optimizer.state[whole["blocks.0.a"]]["seen"]:
            with torch.no_grad():
                for value in whole.values():
                    value.mul_(0.5)
        optimizer.step()
        for value in whole.values():
            optimizer.state[value]["seen"] = step == 3
    for size in (1, 3):
        results = run_ranks(sharded_steps, size)
        for name, value in whole.items():
            found = torch.cat([torch.from_numpy(rows[name]) for rows, _ in results])
            assert torch.equal(found, value.detach()), (size, name)
        assert sum(owned for _, owned in results) == len(SHAPES)
        assert max(owned for _, owned in results) < len(SHAPES) or size == 1


class Plain(helper.Plain):
    """With torch's Muon beside AdamW."""

    def __init__(self, config, data):
        super().__init__(config, data)
        chosen = [p for name, p in self.named.items() if is_muons(config, name, p.shape)]
        assert len(chosen) == 7 * config.model.layers
        for group in self.adamw.param_groups:
            group["params"] = [p for p in group["params"] if all(p is not other for other in chosen)]
        settings = {"lr": helper.RATE, "weight_decay": config.optimizer.weight_decay}
        muon, adamw_step = torch.optim.Muon(chosen, **{**MUON, **settings}), self.adamw.step

        def step():
            adamw_step()
            muon.step()
            muon.zero_grad()

        self.adamw.step = step


def engines(world):
    plain, cases = None, [{"engine": "replicated"}, {"engine": "hsdp"}]
    for parallel in [*cases, *([{"engine": "hsdp", "replicate": 2}] if world.size == 2 else [])]:
        config = helper.settings(world.size, parallel)
        config = config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"matrices": "muon"})})
        if plain is None:
            plain = Plain(config, world.size)
            expected = [plain.step(step) for step in range(1, helper.STEPS + 1)]
        where = f"muon, {parallel} on {world.size}"
        steps, run = helper.train_skip_and_restore(config, world, where)
        for found, wanted in zip(steps, expected, strict=True):
            assert found[0] == pytest.approx(wanted[0], rel=1e-4), where
        # Muon orthogonalises in bf16, which rounds up to one part in 256 differently where sums were ordered otherwise.
        helper.assert_weights(run, plain.weights(), where, tolerance=1e-3)
        kinds = {s.kind for s in run.engine.parameter_shards() if s.name == "blocks.0.ffn.up.weight"}
        assert kinds == {"weight", "first_moment"}
        run.close()


@pytest.mark.parametrize("size", [1, 2])
def test_engines_with_muon_equal_a_plain_loop_and_restore_to_the_last_bit(size):
    run_ranks(engines, size)


@pytest.mark.parametrize("parallel", [{"engine": "deepspeed"}, {"engine": "hsdp", "tensor": 2}])
def test_what_cuts_matrices_is_refused(parallel):
    with pytest.raises(UserError, match="whole matrices"):
        tiny.config(optimizer={"matrices": "muon"}, parallel=parallel)


# Accumulation by tokens

END = 7


def accumulated(ranks, accumulation):
    """(loss, gradient norm) of a step whose micro-batches have very different numbers of labels."""
    tree = {
        **tiny.BASE,
        "model": {**tiny.BASE["model"], "label_masking": True},
        "memory": {"method": "vanilla"},
        "optimizer": {"clip_norm": 0.0},
        "train": {
            "precision": "fp32",
            "global_batch": 8,
            "micro_batch": 8 // ranks.size // 2,
            "accumulation": accumulation,
        },
    }
    if accumulation == "one":
        tree["train"] = {**tree["train"], "micro_batch": 8, "accumulation": "batches"}
    config = build_config(tree)
    run = helper.Run(config, ranks)
    run.engine.model.unlabelled = END
    tokens = torch.randint(8, 100, (8, config.model.sequence_length), generator=torch.Generator().manual_seed(3))
    tokens[:2, 1:] = END
    tokens[5, 4:] = END
    mine = tokens.view(ranks.size, -1, config.train.micro_batch, tokens.shape[1])[ranks.rank]
    lookup = NoTables(tiny.CPU)
    window = Window(slice(0, len(mine)), torch.zeros_like(mine), 0, [])
    result = train_step(config, lookup, JointOptimizer(config, run.engine, lookup, run.mesh), mine, [window], 1)
    run.close()
    return float(result.loss), float(result.gradient_norm)


def test_by_tokens_every_label_of_a_step_weighs_the_same():
    ((loss, norm),) = run_ranks(accumulated, 1, "one")
    for found in run_ranks(accumulated, 2, "tokens"):
        assert found == (pytest.approx(loss, rel=1e-6), pytest.approx(norm, rel=1e-5))
    for found in run_ranks(accumulated, 2, "batches"):
        assert found[1] != pytest.approx(norm, rel=1e-2)
