"""docs/configuration.md says what the schema says."""

import re
from typing import Any

import pytest
from pydantic import BaseModel
from tools_helpers import ROOT, load_tool

from xgram_dist.config import Config
from xgram_dist.config.schema import SiteConfig, StageConfig

tool = load_tool("config_reference")


def rows() -> dict[str, list[str]]:
    """key -> [type, default, meaning] as the page has them."""
    found = {}
    for line in (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("| `"):
            key, *cells = (cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1])
            assert key not in found
            found[key.strip("`")] = cells
    return found


def leaves(model: type[BaseModel], path: str = "") -> set[str]:
    found = set()
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            found |= leaves(kind, f"{path}{name}.")
        else:
            found.add(path + name)
    return found


def test_the_page_is_up_to_date() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert page == tool.reference(), "run: python tools/config_reference.py > docs/configuration.md"


def test_every_key_has_a_row_with_a_meaning() -> None:
    expected = leaves(Config) | {f"memory.sites.SITE.{name}" for name in SiteConfig.model_fields}
    expected |= {f"data.stages[N].{name}" for name in StageConfig.model_fields}
    assert set(rows()) == expected
    for key, (kind, default, meaning) in rows().items():
        assert kind, key
        assert default, key
        assert len(meaning) > 5, key


@pytest.mark.parametrize(
    ("key", "kind", "default"),
    [
        ("model.layers", "whole number, above 0, at most 10000", "required"),
        ("model.norm_eps", "number, above 0", "`1.0e-08`"),
        ("memory.compression", "number, above 0, at most 1", "`0.5`"),
        ("memory.routing.paths", "whole number, at least 1, at most 8", "`2`"),
        ("memory.routing.file", "text", "none"),
        ("memory.sites.SITE.kernels", "list, at least 1 long, each whole number, above 0", "`[3]`"),
        ("memory.sites.SITE.layers", "`all` or list, each whole number, at least 0", "`all`"),
        (
            "memory.learning_rate.multiplier",
            "`sqrt_vocabulary` or `sqrt_rows` or number, above 0",
            "`sqrt_vocabulary`",
        ),
        ("optimizer.betas", "list of 2, each number, at least 0, below 1", "`[0.9, 0.95]`"),
        ("data.weights", "mapping of names, each to number, at least 0", "none"),
        ("train.compile", "`true` or `false`", "`false`"),
        ("train.precision", "`fp32` or `bf16`", "`bf16`"),
    ],
)
def test_types_limits_and_defaults_are_said_in_words(key: str, kind: str, default: str) -> None:
    assert rows()[key][:2] == [kind, default]


def test_the_command_prints_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main() == 0
    assert capsys.readouterr().out == tool.reference()


def test_a_key_without_a_meaning_is_not_let_through(monkeypatch: pytest.MonkeyPatch) -> None:
    field: Any = Config.model_fields["name"]
    monkeypatch.setattr(field, "description", None)
    with pytest.raises(AssertionError, match="name has no meaning"):
        tool.reference()
