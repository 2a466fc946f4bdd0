"""The weights of a checkpoint as one safetensors file: `backbone.*` and `tables.layers.LAYER.SITE.VIEW.*`.

    python tools/consolidate.py runs/tiny-xgram tiny-xgram.safetensors

Rows stand in the order of their numbers, brought up to date where the optimizer was behind with them; every part is
checked against its checksum. The file is written piece by piece, so that no table is ever whole in memory, aside, and
renamed when complete. A run folder stands for its newest checkpoint.
"""

import argparse
import os
import sys
from pathlib import Path


def consolidate(checkpoint: Path, out: Path) -> int:
    """Bytes written."""
    from xgram_dist.checkpoint.files import NAMES, blocks, header
    from xgram_dist.checkpoint.weights import SavedWeights
    from xgram_dist.errors import UserError
    from xgram_dist.progress import Progress

    weights = SavedWeights(checkpoint)
    entries = weights.manifest.tensors
    # Wide types first, as safetensors itself has it.
    names = sorted(weights.shapes(), key=lambda name: -NAMES[entries[name].dtype].itemsize)
    sizes = {name: weights.manifest.bytes_of(name) for name in names}
    facts = {"step": str(weights.facts["step"]), "name": weights.config.name, "config": weights.facts["config"]}
    aside = out.with_name(f".{out.name}.part")
    try:
        with aside.open("wb") as file, Progress(sum(sizes.values()) / 1e6, "MB", "writing") as progress:
            file.write(header({name: (entries[name].dtype, entries[name].shape, sizes[name]) for name in names}, facts))
            for name in names:
                for piece in weights.pieces(name):
                    for block in blocks(piece):
                        file.write(block)
                    progress.update(piece.nbytes / 1e6)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(out)
    except OSError as error:
        raise UserError(f"cannot write '{out}': {error.strerror}; choose another place") from error
    finally:
        aside.unlink(missing_ok=True)
    return out.stat().st_size


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="a checkpoint, or a run: then its newest one")
    parser.add_argument("out", metavar="OUT.safetensors", help="the file to write")
    args = parser.parse_args(arguments)
    from xgram_dist.checkpoint.folder import checkpoints_at
    from xgram_dist.errors import UserError

    try:
        checkpoint = checkpoints_at(Path(args.checkpoint))[-1]
        size = consolidate(checkpoint, Path(args.out))
    except UserError as error:
        print(f"consolidate: {error}", file=sys.stderr)
        return 2
    print(f"{checkpoint} -> {args.out} ({size / 1e6:,.1f} MB)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
