"""The pages in a real browser: light, dark, on paper, with the pointer over a curve, and with hostile names."""

import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from run_folders import EVIL, add_figures, make_run, records

from xgram_dist.cli.main import main

BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
pytestmark = [
    pytest.mark.skipif(BROWSER is None, reason="no chromium here; on Debian: apt-get install chromium"),
    pytest.mark.skipif(os.environ.get("XGRAM_BROWSER") == "0", reason="XGRAM_BROWSER=0"),
]


def browse(page: Path, profile: Path, *options: str) -> "subprocess.CompletedProcess[bytes]":
    fixed = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--enable-logging=stderr"]
    words = [str(BROWSER), *fixed, f"--user-data-dir={profile}", "--window-size=1200,1600", *options, page.as_uri()]
    return subprocess.run(words, capture_output=True, timeout=120, check=True)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    run = make_run(folder / EVIL, "xgram", records("xgram"))
    add_figures(run)
    assert main(["report", str(run), "--html", str(folder / "page.html")]) == 0
    return folder / "page.html"


def brightness(page: Path, profile: Path, *options: str) -> float:
    from matplotlib.image import imread

    picture = profile / "shot.png"
    browse(page, profile, f"--screenshot={picture}", *options)
    return float(np.median(imread(picture)[..., :3]))


def test_light_and_dark_follow_the_reader(page: Path, tmp_path: Path) -> None:
    assert brightness(page, tmp_path) > 0.9
    assert brightness(page, tmp_path, "--blink-settings=preferredColorScheme=0") < 0.2


def test_it_prints(page: Path, tmp_path: Path) -> None:
    browse(page, tmp_path, f"--print-to-pdf={tmp_path / 'page.pdf'}", "--no-pdf-header-footer")
    assert (tmp_path / "page.pdf").read_bytes()[:5] == b"%PDF-"


def test_the_script_runs_names_do_not_and_values_show_under_the_pointer(page: Path, tmp_path: Path) -> None:
    text = page.read_text(encoding="utf-8")
    moved = """<script>
      const svg = document.querySelector("figure[data-chart] svg"), box = svg.getBoundingClientRect();
      svg.dispatchEvent(new PointerEvent("pointermove", { clientX: box.left + box.width / 2, clientY: box.top + 50 }));
    </script></body>"""
    probe = tmp_path / "probe.html"
    probe.write_text(text.replace("</body>", moved), encoding="utf-8")
    done = browse(probe, tmp_path, "--dump-dom")
    made = done.stdout.decode()
    tip = made.split('class="tip"', 1)[1].split("</figure>", 1)[0]
    assert "hidden" not in tip.split(">", 1)[0]
    assert "million tokens" in tip
    assert "hand-xgram, training" in tip
    assert "data-owned" not in made
    assert b"CONSOLE" not in done.stderr, done.stderr.decode()
