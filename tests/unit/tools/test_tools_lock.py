"""The lock file: what is pinned and what is left out."""

import json
import sys
from pathlib import Path

import pytest
from tools_helpers import ROOT, load_tool

tool = load_tool("lock")


def lock(tmp_path: Path, capsys: pytest.CaptureFixture[str], *packages: tuple[str, str]) -> list[str]:
    report = tmp_path / "report.json"
    report.write_text(json.dumps({"install": [{"metadata": {"name": n, "version": v}} for n, v in packages]}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["lock.py", str(report)])
        assert tool.main() == 0
    comment, *pins = capsys.readouterr().out.splitlines()
    assert comment.startswith("# ")
    return pins


def test_packages_are_pinned_in_order_and_under_one_spelling(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pins = lock(tmp_path, capsys, ("PyYAML", "6.0.1"), ("numpy", "2.1.0"), ("typing_extensions", "4.12"))
    assert pins == ["numpy==2.1.0", "pyyaml==6.0.1", "typing-extensions==4.12"]


def test_a_local_build_is_pinned_as_the_release_it_is_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert lock(tmp_path, capsys, ("torch", "2.13.0+cpu")) == ["torch==2.13.0"]


@pytest.mark.parametrize(
    "name",
    ["torchvision", "xgram-dist", "xgram_dist", "nvidia-cublas-cu12", "nvidia_nccl_cu13", "cuda-bindings"],
)
def test_what_others_cannot_install_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert lock(tmp_path, capsys, (name, "1.0"), ("torch", "2.13.0")) == ["torch==2.13.0"]


@pytest.mark.parametrize("name", ["torch", "torchmetrics", "nvidia", "cudatoolkit", "triton"])
def test_what_only_looks_like_it_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert lock(tmp_path, capsys, (name, "1.0")) == [f"{name}==1.0"]


def test_the_lock_file_of_the_project_follows_the_rule() -> None:
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    names = [line.partition("==")[0] for line in lines if not line.startswith("#")]
    assert "torch" in names
    assert names == sorted(names)
    assert not [name for name in names if name in tool.LEFT_OUT or name.startswith(tool.LEFT_OUT_PREFIXES)]
