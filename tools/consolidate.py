"""The weights of a checkpoint as one safetensors file: `backbone.*` and `tables.layers.LAYER.SITE.VIEW.*`.

    python tools/consolidate.py runs/tiny-xgram tiny-xgram.safetensors

Rows are in global order and caught up; every chunk is verified against its checksum. The file is written block by
block, so that no table has to fit in memory, under another name, and renamed when complete. A run folder means its
newest checkpoint.
"""

import argparse
import os
import sys
from pathlib import Path


def consolidate(checkpoint: Path, out: Path) -> int:
    """Write the file; returns its bytes."""
    from xgram_dist.checkpoint.reader import CheckpointReader
    from xgram_dist.checkpoint.tensor_file import TORCH_DTYPES, encode_header, tensor_bytes
    from xgram_dist.console import Progress
    from xgram_dist.errors import UserError

    reader = CheckpointReader(checkpoint)
    entries = reader.manifest.tensors
    # Wide dtypes first, as the safetensors package orders them.
    names = sorted(reader.weight_shapes(), key=lambda name: -TORCH_DTYPES[entries[name].dtype].itemsize)
    sizes = {name: reader.manifest.nbytes(name) for name in names}
    layout = {name: (entries[name].dtype, entries[name].shape, sizes[name]) for name in names}
    metadata = {"step": str(reader.facts["step"]), "name": reader.config.name, "config": reader.facts["config"]}
    unfinished = out.with_name(f".{out.name}.part")
    try:
        with unfinished.open("wb") as file, Progress(sum(sizes.values()) / 1e6, "MB", "writing") as progress:
            file.write(encode_header(layout, metadata))
            for name in names:
                for block in reader.blocks(name):
                    for data in tensor_bytes(block):
                        file.write(data)
                    progress.update(block.nbytes / 1e6)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(out)
    except OSError as error:
        raise UserError(f"cannot write '{out}': {error.strerror}; choose another path") from error
    finally:
        unfinished.unlink(missing_ok=True)
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
