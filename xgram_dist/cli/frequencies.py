"""`xgram-dist frequencies`: the exact token counts of a prepared data set as a frequency file."""

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from xgram_dist.errors import UserError
from xgram_dist.progress import table

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

EXAMPLES = """
  xgram-dist frequencies data/embedded --out frequencies.npz
  xgram-dist frequencies data/olmo-mix --vocabulary 151936 --out qwen3-olmo-mix.npz --json
"""
TOP = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("data", metavar="DATA", help="a folder written by `xgram-dist prepare`")
    parser.add_argument(
        "--out", required=True, metavar="FILE.npz", help="the frequency file: `counts` over the vocabulary"
    )
    parser.add_argument("--vocabulary", type=int, metavar="V", help="pad with zeros to V tokens, as the model does")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def run(args: argparse.Namespace) -> int:
    import numpy as np

    from xgram_dist.data.manifest import read_manifest
    from xgram_dist.data.tokenizer import load_tokenizer

    folder = Path(args.data)
    manifest = read_manifest(folder)
    path = folder / "counts.npz"
    try:
        with np.load(path, allow_pickle=False) as stored:
            counts = stored["counts"]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"cannot read '{path}': {error}; run `xgram-dist prepare --overwrite` again") from error
    expected = sum(source.train.tokens for source in manifest.sources)
    if counts.shape != (manifest.vocabulary,) or counts.dtype != np.int64 or int(counts.sum()) != expected:
        raise UserError(
            f"'{path}' does not hold the counts of this data set; run `xgram-dist prepare --overwrite` again"
        )
    size = manifest.vocabulary if args.vocabulary is None else args.vocabulary
    if size < manifest.vocabulary:
        raise UserError(f"--vocabulary {size:,} is smaller than that of the data set ({manifest.vocabulary:,})")
    padded = np.zeros(size, dtype=np.int64)
    padded[: len(counts)] = counts
    write(Path(args.out), padded)

    tokenizer = load_tokenizer(folder / manifest.tokenizer_file, manifest.end_of_text_name)
    order = np.argsort(-counts, kind="stable")[:TOP]
    top = [(int(token), tokenizer.decode([token]) or "", int(counts[token])) for token in order if counts[token]]
    total, distinct = int(counts.sum()), int((counts > 0).sum())
    if args.json:
        figures = {
            "out": args.out,
            "vocabulary": size,
            "total": total,
            "distinct": distinct,
            "top": [{"token": token, "text": text, "count": count} for token, text, count in top],
        }
        print(json.dumps(figures, indent=1, ensure_ascii=False))
        return 0
    table(
        ["token", "text", "count", "share"],
        [[str(token), repr(text), f"{count:,}", f"{100 * count / total:.2f} %"] for token, text, count in top],
    )
    print(f"{total:,} tokens, {distinct:,} of {size:,} ids seen; written to {args.out}")
    return 0


def write(out: Path, counts: "NDArray[np.int64]") -> None:
    """Aside and renamed; `.npz` is part of the name as given."""
    import numpy as np

    aside = out.with_name(out.name + ".tmp")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with open(aside, "wb") as file:
            np.savez_compressed(file, counts=counts)
        os.replace(aside, out)
    except OSError as error:
        raise UserError(f"cannot write '{out}': {error.strerror}") from error
