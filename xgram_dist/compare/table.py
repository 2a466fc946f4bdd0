"""The table of a comparison: one row a recipe, as cells for a page and as Markdown."""

from xgram_dist.compare.results import RecipeResult, Results
from xgram_dist.report.numbers import MISSING_TEXT, parameters, percent, size, thousands, three, whole, with_error

HEADER = [
    "recipe",
    "validation perplexity",
    "loss against the baseline (nats)",
    "backbone (parameters)",
    "tables",
    "others",
    "tokens to the baseline's loss",
    "of its tokens",
    "tokens/s",
    "peak memory of a rank",
    "table bytes sent a step",
    "complete runs",
]
NOTE = (
    "Means over seeds ± standard error of the mean. Parameters of tables and of others: extractors, gates, side "
    "networks. The loss against the baseline is the difference to the run with the same seed. Tokens to the baseline's "
    "loss: where the validation loss first comes down to the baseline's last (mean over its seeds), on the straight "
    "line between two validations. Table bytes: the first rank's part of the exchange."
)


def rows_of(results: Results) -> list[list[str]]:
    return [_row(results, one) for one in results.recipes]


def _row(results: Results, one: RecipeResult) -> list[str]:
    baseline = one.label == results.baseline
    wire = one.values("wire_bytes")
    return [
        one.label + (" (baseline)" if baseline else ""),
        with_error(one.values("perplexity"), three) or MISSING_TEXT,
        "0" if baseline else with_error(results.against_baseline(one.label), _signed) or MISSING_TEXT,
        parameters(one.backbone_parameters),
        parameters(one.table_parameters) if one.table_parameters else "none",
        thousands(one.other_parameters) if one.other_parameters else "none",
        *_reached(results, one),
        with_error(one.rates(), whole) or MISSING_TEXT,
        size(max(one.peaks())) if one.peaks() else MISSING_TEXT,
        with_error(wire, size) or (MISSING_TEXT if one.table_parameters or not one.values("loss") else "none"),
        f"{len(one.values('loss'))} of {len(one.seeds)}",
    ]


def _reached(results: Results, one: RecipeResult) -> tuple[str, str]:
    reached = results.tokens_to_target(one.label)
    known = [value for value in reached if value is not None]
    if not reached:
        return MISSING_TEXT, MISSING_TEXT
    if one.label == results.baseline:
        return thousands(one.tokens), percent(1.0)  # its last loss is where it ended
    if len(known) < len(reached):
        return f"not reached by {len(reached) - len(known)} of {len(reached)}", "-"
    share = [value / results.recipe(results.baseline).tokens for value in known]
    return with_error(known, thousands) or MISSING_TEXT, with_error(share, percent) or MISSING_TEXT


def _signed(value: float) -> str:
    return f"{value:+.4f}"


def markdown(results: Results, title: str) -> str:
    rows = rows_of(results)
    lines = [
        f"# {_cell(title)}",
        "",
        f"| {' | '.join(HEADER)} |",
        f"|{'|'.join(['---', *['---:'] * (len(HEADER) - 1)])}|",
        *(f"| {' | '.join(_cell(cell) for cell in row)} |" for row in rows),
        "",
        NOTE,
        "",
    ]
    return "\n".join(lines)


def _cell(text: str) -> str:
    """Harmless in Markdown, where HTML is allowed."""
    for plain, safe in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("|", "\\|"), ("\n", " ")):
        text = text.replace(plain, safe)
    return text
