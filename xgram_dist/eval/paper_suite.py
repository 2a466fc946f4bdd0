"""The paper's evaluation suite: its benchmarks with their number of shots, its average, and its published scores.

`paper` scores as the authors' evaluator does: split, metric, and the mean over the categories of MMLU. Prompts are
lm-eval's. For CommonsenseQA these ask for a letter, so that its length-normalised accuracy, which the authors report,
is its accuracy. `paper-lm-eval` has the same benchmarks with lm-eval's own splits and metrics.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Benchmark:
    column: str
    task: str
    """Name in lm-eval."""
    shots: int
    file: str
    """Its definition, in lm-eval's task folder."""
    averaged: bool = True
    metric: str | None = None
    """The only one; None: lm-eval's."""
    split: str | None = None
    """That it is scored on; None: lm-eval's."""
    by_category: bool = False
    """MMLU: the mean over its four categories; otherwise over all questions."""
    note: str = ""
    """What lm-eval cannot do as the authors' evaluator does."""

    @property
    def name(self) -> str:
        """Of the generated task. One benchmark is in the suite twice, with different numbers of shots."""
        return f"{self.task}_{self.shots}shot" if not self.averaged and self.shots else self.task


_LETTERS = "lm-eval asks for letters, of one length; the authors: acc_norm of answers"

PAPER = (
    Benchmark("SciQ", "sciq", 0, "sciq/sciq.yaml", metric="acc"),
    Benchmark("PIQA", "piqa", 0, "piqa/piqa.yaml", metric="acc_norm"),
    Benchmark("WG", "winogrande", 0, "winogrande/default.yaml", metric="acc"),
    Benchmark("ARC-E", "arc_easy", 0, "arc/arc_easy.yaml", metric="acc", split="validation"),
    Benchmark("ARC-C", "arc_challenge", 5, "arc/arc_challenge.yaml", metric="acc_norm", split="test"),
    Benchmark("Hella.", "hellaswag", 0, "hellaswag/hellaswag.yaml", metric="acc_norm"),
    Benchmark("S.QA", "social_iqa", 0, "siqa/siqa.yaml", metric="acc_norm"),
    Benchmark("BoolQ", "boolq", 0, "super_glue/boolq/default.yaml", metric="acc"),
    Benchmark("OBQA", "openbookqa", 0, "openbookqa/openbookqa.yaml", metric="acc_norm"),
    Benchmark("MMLU", "mmlu", 5, "mmlu/default", metric="acc", split="validation", by_category=True),
    Benchmark("CSQA", "commonsense_qa", 0, "commonsense_qa/default.yaml", averaged=False, note=_LETTERS),
    Benchmark("CSQA-5", "commonsense_qa", 5, "commonsense_qa/default.yaml", averaged=False, note=_LETTERS),
)
"""In the order of the paper's columns; the last two are in its suite but not in its table."""

SUITES = {
    "paper": PAPER,
    "paper-lm-eval": tuple(replace(one, metric=None, split=None, by_category=False) for one in PAPER),
}
CATEGORIES = ("mmlu_humanities", "mmlu_other", "mmlu_social_sciences", "mmlu_stem")
"""Of MMLU; lm-eval's names."""

COLUMNS = tuple(benchmark.column for benchmark in PAPER if benchmark.averaged)

_SMALL = """
Baseline|0.73B|78.4 60.9 51.3 41.4 25.3 35.8 39.8 60.8 27.6 25.4 44.7
Retoken 1x|0.73B+2.33B|77.5 62.4 48.1 46.1 25.5 36.3 41.0 61.2 28.0 24.0 45.0
MoRT 1x|0.73B+2.33B|74.3 63.3 54.1 47.9 25.8 35.5 42.2 60.5 28.0 26.3 45.8
Engram 1x|0.73B+2.33B|77.9 65.6 51.6 53.5 27.8 40.2 41.7 60.0 27.8 25.7 47.2
X-gram 1x 50 %|0.73B+1.17B|82.9 67.5 52.1 56.7 27.5 41.5 42.6 60.4 28.8 24.9 48.5
X-gram 1x 100 %|0.73B+2.33B|81.0 65.9 49.6 54.0 27.9 40.6 42.8 60.1 26.8 26.4 47.5
Retoken 2x|0.73B+4.67B|78.8 65.7 49.9 51.2 26.2 36.8 42.2 60.4 29.0 25.9 46.6
MoRT 2x|0.73B+4.67B|78.2 62.5 52.6 47.9 25.0 36.0 41.9 61.6 28.8 24.7 45.9
Engram 2x|0.73B+4.67B|78.1 67.5 50.8 53.5 28.1 41.8 43.4 59.5 29.6 24.6 47.7
X-gram 2x 50 %|0.73B+2.33B|83.5 68.4 54.7 53.0 29.7 42.2 41.5 59.1 27.4 27.3 48.7
X-gram 2x 100 %|0.73B+4.67B|83.5 68.9 53.7 59.1 28.0 43.2 42.8 60.8 30.4 26.4 49.7
Retoken 4x|0.73B+9.33B|80.4 63.4 50.3 48.8 25.3 37.2 41.8 58.0 25.8 25.4 45.6
MoRT 4x|0.73B+9.33B|75.0 63.1 52.2 49.6 25.4 36.5 42.2 59.9 29.6 25.5 45.9
Engram 4x|0.73B+9.33B|73.9 62.6 51.4 43.5 27.6 39.2 40.6 60.9 29.0 27.3 45.6
X-gram 4x 50 %|0.73B+4.67B|82.8 70.2 52.8 58.1 29.9 41.8 42.5 57.6 32.0 23.7 49.1
X-gram 4x 100 %|0.73B+9.33B|84.4 69.6 51.5 58.4 28.1 44.0 43.5 59.8 30.2 25.8 49.5
"""
_MEDIUM = """
Baseline|1.15B|82.0 66.2 52.2 53.2 28.7 41.0 42.8 54.4 29.2 23.9 47.4
Retoken 1x|1.15B+3.73B|81.2 67.3 52.6 52.3 26.8 41.6 42.2 56.6 28.6 26.0 47.5
MoRT 1x|1.15B+3.73B|81.0 66.0 51.7 49.3 28.6 41.2 41.6 59.9 28.6 24.8 47.3
Engram 1x|1.15B+3.73B|77.5 65.8 51.0 49.1 29.0 42.4 43.1 58.8 28.0 24.4 46.9
X-gram 1x 50 %|1.15B+1.87B|83.4 68.8 50.5 56.3 30.6 45.0 42.5 51.9 28.6 24.5 48.2
X-gram 1x 100 %|1.15B+3.73B|82.8 68.4 51.2 57.7 30.5 45.0 42.7 59.3 30.8 26.4 49.5
Retoken 2x|1.15B+7.47B|81.5 64.4 51.3 50.7 27.0 41.1 43.8 56.0 28.6 25.1 47.0
MoRT 2x|1.15B+7.47B|80.5 66.2 50.0 55.1 27.4 40.4 42.6 60.0 30.4 25.2 47.8
Engram 2x|1.15B+7.47B|78.7 64.6 50.6 48.6 29.3 43.1 43.0 57.3 27.4 24.8 46.7
X-gram 2x 50 %|1.15B+3.73B|84.8 69.9 53.1 60.5 29.9 46.5 43.8 60.0 31.0 25.1 50.5
X-gram 2x 100 %|1.15B+7.47B|84.2 69.6 52.3 59.5 30.2 46.6 42.5 59.4 31.6 22.4 49.8
Retoken 4x|1.15B+14.94B|78.6 63.5 50.0 47.9 28.8 41.1 41.6 59.0 28.4 26.0 46.5
MoRT 4x|1.15B+14.94B|82.7 66.1 52.0 55.6 27.9 41.1 44.7 61.8 27.2 25.1 48.4
Engram 4x|1.15B+14.94B|78.0 67.6 50.8 51.6 30.7 45.6 43.1 61.4 29.8 26.1 48.5
X-gram 4x 50 %|1.15B+7.47B|86.0 70.2 53.7 60.9 31.8 47.4 43.7 57.3 33.4 23.6 50.8
X-gram 4x 100 %|1.15B+14.94B|85.8 70.8 52.9 61.1 32.2 47.9 43.7 57.1 30.8 25.8 50.8
"""


@dataclass(frozen=True)
class PaperRow:
    method: str
    parameters: str
    scores: dict[str, float]
    """By column, in per cent."""
    average: float


def paper_rows(backbone_parameters: int) -> list[PaperRow]:
    """The paper's rows at the scale nearest to a backbone of that size."""
    rows = []
    for line in (_SMALL if backbone_parameters < 0.94e9 else _MEDIUM).split("\n"):
        if line:
            method, parameters, numbers = line.split("|")
            *scores, average = (float(number) for number in numbers.split())
            rows.append(PaperRow(method, parameters, dict(zip(COLUMNS, scores, strict=True)), average))
    return rows
