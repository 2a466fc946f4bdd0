"""Run folders made by hand, with every kind of record."""

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from xgram_dist.config import build_config, dump_config

MODEL = {
    "vocabulary": 4096,
    "layers": 4,
    "width": 128,
    "ffn_width": 352,
    "heads": 4,
    "kv_heads": 2,
    "sequence_length": 256,
}
MEMORY: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "xgram": {"method": "xgram", "sites": {"v": {"views": 2}}, "routing": {"vip": 50, "buckets": 16}},
}
EVIL = '<script>document.documentElement.dataset.owned="1"<_script><img src=x onerror="document.body.dataset.owned=1">'
"""What a folder may be called, without a slash."""


def records(method: str, steps: int = 100, shift: float = 0.0) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for step in range(10, steps + 1, 10):
        loss = 8.0 - 4.0 * step / steps + shift
        one = {
            "kind": "train",
            "step": step,
            "seconds": step / 10,
            "loss": loss,
            "cross_entropy": loss,
            "learning_rate": 1e-3,
            "gradient_norm": 1.0,
            "tokens_per_second": 10_000.0 + step,
            "tokens_per_second_rank": 5_000.0,
            "step_seconds": 0.4,
            "model_tflops": 0.01,
            "seconds_compute": 0.3,
            "seconds_fetch": 0.05,
            "seconds_update": 0.02,
        }
        if method != "vanilla":
            one |= {"distinct_tokens": 900, "bytes_sent": 123_456, "bytes_bound": 100_000, "imbalance": 1.1}
        found.append(one)
        if step % 20 == 0:
            found.append(
                {"kind": "validation", "step": step, "seconds": step / 10, "loss": loss, "perplexity": 2.0**loss}
            )
    for rank in (0, 1):
        found.append(
            {"kind": "memory", "step": 1, "rank": rank, "bytes_backbone": 7 << 20, "bytes_peak": (400 + rank) << 20}
        )
    saved = {"bytes": 30 << 20, "seconds_saving": 0.5, "seconds_blocked": 0.01, "written": True}
    found.append({"kind": "checkpoint", "step": steps, "seconds": steps / 10, **saved})
    found.append({"kind": "eval", "step": steps, "seconds": steps / 10, "sciq": 61.5, "piqa": 55.0})
    last = found[-5 if steps % 20 == 0 else -4]
    end = {"complete": True, "tokens_per_second": 10_050.0, "rows_hit": 5, "rows": 10 if method != "vanilla" else 0}
    found.append({"kind": "end", "step": steps, "seconds": steps / 10, "validation_loss": last["loss"], **end})
    return found


def make_run(folder: Path, method: str, lines: list[dict[str, Any]], **sections: Any) -> Path:
    folder.mkdir(parents=True)
    tree = {"name": f"hand-{method}", "model": MODEL, "memory": MEMORY[method], "train": {"steps": 100}, **sections}
    (folder / "config.yaml").write_text(dump_config(build_config(tree)), encoding="utf-8")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in lines))
    return folder


FIGURES: dict[str, Any] = {
    "run": "hand",
    "method": "xgram",
    "step": 100,
    "split": "validation",
    "positions": 64,
    "figures": {
        "activation": {
            "frequencies": "the data set's token counts",
            "bands": [
                {"from": 1e-4, "to": 3e-4, "tokens": 5, "occurrences": 9, "magnitude": 0.5},
                {"from": 3e-4, "to": 1e-3, "tokens": 3, "occurrences": 9, "magnitude": 0.9},
            ],
            "correlation": 0.8,
            "sites": {},
        },
        "layers": {part: [0.9, 0.7, 0.6, 0.5] for part in ("attention", "ffn", "hidden", "first_state")},
        "views": {"retrieved": {"mean": 0.25, "sites": {"layers.0.v": {"mean": 0.25, "pairs": {"0-1": 0.25}}}}},
        "row_hits": {"frequencies": "", "hottest": {"0.001": 0.43, "0.01": 0.66, "0.1": 0.87}, "by_view": []},
        "updates": {"tokens": 1, "rows": 1, "more_than": {"1": 0.99, "100": 0.5}},
        "movement": {"cv": 0.159, "gap": 1.14, "mean": 2.0, "tables": {}},
    },
}


def add_figures(run: Path, tree: dict[str, Any] | None = None) -> None:
    folder = run / "diagnose" / "step-00000100"
    folder.mkdir(parents=True)
    (folder / "figures.json").write_text(json.dumps(tree or FIGURES))


class Parsed(HTMLParser):
    """A page, taken apart: tags closed in order, ids, scripts, attributes, text."""

    def __init__(self, text: str):
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.ids: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in ("meta", "br", "hr"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, tag
        assert self.open[-1] == tag, (tag, self.open)
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.text += data + "\n"

    def stands_alone(self) -> bool:
        """Nothing is fetched: no source, no link out of the page, one script and one style, both in it."""
        outside = [
            (tag, name, value)
            for tag, name, value in self.attributes
            if name in ("src", "srcset", "data", "action") or (name == "href" and not value.startswith("#"))
        ]
        handlers = [(tag, name) for tag, name, _ in self.attributes if name.startswith("on")]
        once = self.tags.count("script") == self.tags.count("style") == 1
        return not outside and not handlers and once and not {"img", "link", "iframe", "object"} & set(self.tags)
