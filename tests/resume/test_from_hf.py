"""`train --from-hf`: a backbone from a Hugging Face folder computes what transformers computes, on any layout."""

import json
import shutil

import pytest
import tiny_models as tiny
import torch
from ranks_helper import run_ranks
from torch import nn
from train_helpers import LENGTH, VOCABULARY, read_metrics, saved_weights, small_config, small_tree
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import xgram_dist.train.trainer as trainer_module
from xgram_dist.checkpoint.from_hf import init_from_hf, model_keys
from xgram_dist.cli.main import main
from xgram_dist.config import build_config, dump_config
from xgram_dist.engine import build_engine
from xgram_dist.errors import BadFileError, UserError
from xgram_dist.inference.hf.decoder import Cache, Decoder
from xgram_dist.inference.model import Checkpoint, spec_of
from xgram_dist.library import TableSites, TokenTables
from xgram_dist.model.build import build_model
from xgram_dist.parallel.mesh import build_mesh, single_mesh
from xgram_dist.train.checkpointing import StartFromHf
from xgram_dist.train.trainer import Trainer

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
FAMILIES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, rope_scaling=LLAMA3, tie_word_embeddings=True)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16, rope_theta=1e6)),
    "olmo2": lambda: Olmo2ForCausalLM(Olmo2Config(**SIZES)),
}
TOKENS = torch.randint(0, VOCABULARY, (3, LENGTH), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model of each family with weights that are far from their initial values, and norm scales that are not 1."""
    found = {}
    for number, (family, build) in enumerate(FAMILIES.items()):
        torch.manual_seed(number)
        model = build()
        for parameter in model.parameters():
            nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.3 if parameter.dim() == 1 else 0.1)
        found[family] = tmp_path_factory.mktemp(family)
        model.save_pretrained(found[family], max_shard_size="20KB" if family == "qwen3" else "1GB")
    return found


def config_of(folder, **sections):
    tree = {
        **tiny.BASE,
        "model": {**model_keys(folder), "sequence_length": LENGTH},
        "memory": {"method": "vanilla"},
    }
    return build_config({**tree, **sections})


def reference(folder):
    family = next(name for name in FAMILIES if json.loads((folder / "config.json").read_text())["model_type"] == name)
    return type(FAMILIES[family]()).from_pretrained(folder)


def our_engine(config, folder, mesh):
    model = build_model(config, tiny.CPU, mesh=mesh)
    engine = build_engine(config, model, mesh, tiny.CPU)
    init_from_hf(folder, engine, mesh)
    return engine


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family, folders):
    config = config_of(folders[family])
    model = our_engine(config, folders[family], single_mesh()).model
    with torch.no_grad():
        expected = reference(folders[family])(TOKENS).logits
        trained = model(TOKENS, TOKENS, {}, torch.ones(())) @ model.head.weight.T
        decoder = Decoder(spec_of(config, 0, 0))
        decoder.load_state_dict({name: value.detach() for name, value in model.named_parameters()})
        decoded = decoder.logits(decoder(TOKENS, TOKENS, {}))
    assert expected.std() > 0.1
    torch.testing.assert_close(trained, expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(decoded, expected, atol=1e-4, rtol=0)


def losses_and_gradients(ranks, folders, layouts):
    """[(loss, gradient of a query norm over all ranks)], by family and layout."""
    found = []
    for folder in folders:
        for parallel in layouts:
            config = config_of(folder, parallel=parallel)
            mesh = build_mesh(config, ranks)
            engine = our_engine(config, folder, mesh)
            loss, _ = engine.loss(TOKENS, TOKENS, {}, torch.ones(()))
            engine.backward(loss, last=True)
            gradients = dict(engine._local_gradients())
            squares = torch.stack([g.double().square().sum() for n, g in gradients.items() if "_norm" in n]).sum()
            if parallel["engine"] == "hsdp" or "olmo2" in str(folder):
                squares = ranks.all_reduce_sum(squares)
            found.append((float(loss.detach()), float(squares)))
            engine.close()
    return found


def test_every_layout_reads_the_same_backbone(folders):
    """Tensor parallelism splits heads, whose norm Qwen3 shares; FSDP2 splits rows."""
    layouts = [{"engine": "hsdp"}, {"engine": "replicated", "tensor": 2}]
    for results in run_ranks(losses_and_gradients, 2, [folders["qwen3"]], layouts):
        model = reference(folders["qwen3"])
        expected = model(TOKENS, labels=TOKENS).loss
        expected.backward()
        squares = sum(
            p.grad.double().square().sum() for n, p in model.named_parameters() if "norm" in n and "model.norm" not in n
        )
        for loss, norm in results:
            assert loss == pytest.approx(expected.item() + 0, rel=2e-3)  # ours has a z-loss of 1e-5
            assert norm == pytest.approx(float(squares), rel=2e-2)


def adapted(data, folder, **train):
    tree = small_tree(data)
    tree["model"] = {**model_keys(folder), "sequence_length": LENGTH, "z_loss": 0.0}
    tree["memory"] = {
        "method": "xgram",
        "compression": 1.0,
        "sites": {"v": {"views": 2, "kernels": [3, 5]}},
        "injection": {"warmup": False},
        "learning_rate": {"multiplier": 5.0, "warmup": False},
        "optimizer": "catch_up",
    }
    tree["optimizer"] = {"schedule": "constant", "warmup_share": 0.0, "learning_rate": 1e-3}
    tree["train"] |= train
    return build_config(tree)


def recorded_run(monkeypatch, config, folder, source):
    """(run, tokens and losses of each step, the trainer before its first step)"""
    trainer = Trainer(config, folder, fresh=False, start_from=StartFromHf(source))
    start = {name: value.detach().clone() for name, value in trainer.engine.model.named_parameters()}
    steps, step_of = [], trainer_module.train_step

    def recording(config, lookup, optimizer, tokens_ABT, *arguments, **keywords):
        result = step_of(config, lookup, optimizer, tokens_ABT, *arguments, **keywords)
        steps.append((tokens_ABT.clone(), float(result.loss)))
        return result

    monkeypatch.setattr(trainer_module, "train_step", recording)
    assert trainer.run() == 0
    return start, steps


def test_our_trainer_equals_a_plain_loop_over_the_hugging_face_model(data, folders, tmp_path, monkeypatch):
    """The same batches, tables of the same names and seed, and clipping by the joint norm."""
    config = adapted(data, folders["llama"], steps=6)
    start, steps = recorded_run(monkeypatch, config, tmp_path / "run", folders["llama"])
    model = reference(folders["llama"])
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())  # ours learns apart
    sites = TableSites({f"layers.{n}.v": block.self_attn.v_proj for n, block in enumerate(model.model.layers)})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".memory." in name:
                layer, rest = name.split(".")[2], name.split(".memory.")[1].replace(".conv.", ".")
                parameter.copy_(start[f"blocks.{layer}.sites.v.{rest}"])
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=1e-3, betas=(0.9, 0.95), eps=1e-8,
    )  # fmt: skip
    with TokenTables(sites.widths, VOCABULARY) as tables:
        for tokens_ABT, expected in steps:
            rows = tables.fetch(tables.plan(*tokens_ABT))
            losses = []
            for tokens, slots in zip(tokens_ABT, rows.slots, strict=True):
                sites.use(rows.values, slots)
                losses.append(model(tokens, labels=tokens).loss)
                (losses[-1] / len(tokens_ABT)).backward()
            assert torch.stack(losses).mean().item() == pytest.approx(expected, rel=2e-5)
            tables.give_back(rows)
            tables.clip(model.parameters(), 1.0)
            assert tables.step(5e-3)
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("engine", ["replicated", "hsdp"])
def test_a_frozen_backbone_stays_and_tables_learn(data, folders, tmp_path, monkeypatch, engine):
    config = adapted(data, folders["qwen3"], steps=8, freeze_backbone=True)
    config = config.model_copy(update={"parallel": config.parallel.model_copy(update={"engine": engine})})
    _, steps = recorded_run(monkeypatch, config, tmp_path / "run", folders["qwen3"])
    assert steps[-1][1] < steps[0][1]
    saved, model = saved_weights(tmp_path / "run"), reference(folders["qwen3"])
    value = model.model.layers[1].self_attn.v_proj.weight
    torch.testing.assert_close(saved["backbone.blocks.1.attention.value.weight"], value.detach(), rtol=0, atol=0)
    torch.testing.assert_close(saved["backbone.embedding"], model.model.embed_tokens.weight.detach(), rtol=0, atol=0)
    assert not any("moment" in name and "attention" in name for name in saved)
    assert any("sites" in name for name in saved)


@pytest.mark.parametrize("family", FAMILIES)
def test_export_and_decoder_compute_what_was_trained(data, folders, tmp_path, family):
    """After some steps, with tables, in transformers and in our own inference."""
    config = adapted(data, folders[family], steps=3, validation_sequences=4)
    trainer = Trainer(config, tmp_path / "run", fresh=False, start_from=StartFromHf(folders[family]))
    assert trainer.run() == 0
    assert main(["export", str(tmp_path / "run"), "--to", "hf", str(tmp_path / "hf")]) == 0
    theirs = AutoModelForCausalLM.from_pretrained(str(tmp_path / "hf"), trust_remote_code=True).eval()
    ours = Checkpoint.find(tmp_path / "run").load(tiny.CPU)
    expected = ours.logits(ours.hidden(TOKENS))
    torch.testing.assert_close(theirs(TOKENS).logits.detach(), expected, atol=1e-4, rtol=0)
    cache = Cache()
    first = ours.hidden(TOKENS[:, :20], cache)
    whole = torch.cat((first, *(ours.hidden(TOKENS[:, t : t + 1], cache) for t in range(20, LENGTH))), 1)
    torch.testing.assert_close(ours.logits(whole), expected, atol=1e-4, rtol=0)
    # The loss of the trained network, tables and all, on text that it has not seen.
    labels = torch.nn.functional.cross_entropy(expected[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())
    tables = Trainer(config, tmp_path / "run", fresh=False)
    working = tables.lookup.fetch(tables.lookup.plan(TOKENS, whole=True).result()[0], training=False)
    with torch.no_grad():
        _, trained = tables.engine.loss(TOKENS, working.slots, working.values, torch.ones((), dtype=torch.float64))
    assert float(trained) == pytest.approx(float(labels), rel=1e-5)


def test_the_command_sets_the_keys_of_the_model(data, folders, tmp_path, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(dump_config(small_config(data, "vanilla", train={"steps": 1})))
    arguments = ["train", str(recipe), "--from-hf", str(folders["olmo2"]), "--folder", str(tmp_path / "run")]
    assert main(arguments) == 0
    assert "backbone" in capsys.readouterr().out
    assert "norms: after" in (tmp_path / "run" / "config.yaml").read_text()
    assert read_metrics(tmp_path / "run", "end")[0]["complete"]
    shutil.copytree(folders["olmo2"], tmp_path / "other")
    (tmp_path / "other" / "tokenizer.json").write_text("{}")
    again = ["train", str(recipe), "--from-hf", str(tmp_path / "other"), "--folder", str(tmp_path / "second")]
    assert main(again) != 0
    assert "another tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"model_type": "gpt2"}, "a backbone starts from llama"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"hidden_size": "32"}, "hidden_size is '32'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rotary scaling 'yarn'"),
        ({"rope_scaling": [1]}, "not a section"),
    ],
)
def test_what_the_backbone_does_not_compute_is_refused(folders, tmp_path, change, sentence):
    config = json.loads((folders["llama"] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises((UserError, BadFileError), match=sentence):
        model_keys(tmp_path)


def test_damaged_folders_are_refused_by_a_sentence(folders, tmp_path):
    with pytest.raises(UserError, match=r"has no config\.json"):
        model_keys(tmp_path)
    config = config_of(folders["llama"])
    engine = build_engine(config, build_model(config, tiny.CPU), single_mesh(), tiny.CPU)
    with pytest.raises(UserError, match="safetensors files"):
        init_from_hf(tmp_path, engine, single_mesh())
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(BadFileError, match="not a whole safetensors file"):
        init_from_hf(tmp_path, engine, single_mesh())
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../model.safetensors"}}')
    with pytest.raises(BadFileError, match="not a plain name"):
        init_from_hf(tmp_path, engine, single_mesh())
    with pytest.raises(UserError, match=r"do not fit|but this recipe has"):
        init_from_hf(folders["olmo2"], engine, single_mesh())
