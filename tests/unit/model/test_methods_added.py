"""The method of docs/methods.md, as it stands there: it trains, resumes, is planned, and decodes."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from inference_helpers import some_tokens, trained, training_logits
from train_helpers import LAYERS, VOCABULARY, WIDTH, read_metrics, saved_weights, small_tree

from xgram_dist.checkpoint.folder import checkpoints_at
from xgram_dist.config import build_config
from xgram_dist.config.schema import Config, MemoryConfig
from xgram_dist.errors import UserError
from xgram_dist.estimate.flops import plan_budget
from xgram_dist.inference.hf import decoder_methods
from xgram_dist.inference.model import Checkpoint
from xgram_dist.model.methods.base import REGISTRY, check_method, method_class

DOCS = Path(__file__).parents[3] / "docs" / "methods.md"


@pytest.fixture
def tokengate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The documented method, added as the page says."""
    method, decoder = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "tokengate.py").write_text(method, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(REGISTRY, "tokengate", "tokengate.TokenGate")
    names: dict[str, Any] = dict(vars(decoder_methods))
    exec(decoder, names)
    monkeypatch.setitem(decoder_methods.SITE_MODULES, "tokengate", names["TokenGate"])
    field = MemoryConfig.model_fields["method"]
    known = field.annotation
    _set_names(str)
    yield
    _set_names(known)


def _set_names(annotation: Any) -> None:
    MemoryConfig.model_fields["method"].annotation = annotation
    MemoryConfig.model_rebuild(force=True)
    Config.model_rebuild(force=True)


def recipe(data: Path, **train: Any) -> Config:
    tree = small_tree(data, "tokengate")
    tree["memory"] |= {"compression": 1.0}
    tree["train"] |= {"global_batch": 4, "micro_batch": 2, "validation_sequences": 4, **train}
    tree["checkpoint"] = {"every": 1, "keep": 3}
    tree["optimizer"] = {"learning_rate": 0.02, "warmup_share": 0.0}
    return build_config(tree)


def test_it_trains_resumes_and_decodes(tokengate: None, data: Path, tmp_path: Path) -> None:
    trainer = trained(recipe(data, steps=3), tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    losses = [record["loss"] for record in read_metrics(tmp_path / "whole", "train")]
    assert losses[-1] < losses[0]
    for checkpoint in checkpoints_at(tmp_path / "again")[1:]:
        shutil.rmtree(checkpoint)
    assert trained(recipe(data, steps=3), tmp_path / "again").start == 1
    whole, again = saved_weights(tmp_path / "whole"), saved_weights(tmp_path / "again")
    assert f"tables.layers.{LAYERS - 1}.ffn.0.rows" in whole
    assert all(torch.equal(value, again[name]) for name, value in whole.items())
    model = Checkpoint.find(tmp_path / "whole").load(torch.device("cpu"))
    tokens = some_tokens(trainer.config, 2, 20)
    found = model.logits(model.hidden(tokens))
    torch.testing.assert_close(found, training_logits(trainer, tokens), rtol=1e-5, atol=1e-5)


def test_it_is_planned_and_checked(tokengate: None, data: Path) -> None:
    config = recipe(data)
    check_method(config)
    budget = plan_budget(config)
    assert budget.table_parameters == LAYERS * VOCABULARY * WIDTH
    assert budget.extractor_parameters == LAYERS * WIDTH
    assert budget.extra_flops_per_token == 3 * LAYERS * WIDTH
    tree = small_tree(data, "tokengate")
    tree["memory"] |= {"compression": 1.0, "retoken": {"views": 2}}
    with pytest.raises(
        UserError, match=r"memory\.retoken is of memory\.method = retoken, but the recipe has tokengate"
    ):
        check_method(build_config(tree))


def test_a_recipe_can_name_every_method_of_the_registry() -> None:
    assert get_args(MemoryConfig.model_fields["method"].annotation) == tuple(REGISTRY)
    for name in REGISTRY:
        assert method_class(name).name == name


@pytest.mark.parametrize("name", REGISTRY)
def test_a_method_reads_keys_that_exist(name: str) -> None:
    assert set(method_class(name).reads) <= set(MemoryConfig.model_fields)
    assert set(method_class(name).reduced_settings) <= set(method_class(name).reads)


def test_no_other_package_compares_names_of_methods() -> None:
    package = Path(__file__).parents[3] / "xgram_dist"
    for path in package.rglob("*.py"):
        if path.parent.name != "methods":
            assert not re.search(r"memory\.method *(==|!=|in|not in) *[\"'(]", path.read_text(encoding="utf-8")), path
