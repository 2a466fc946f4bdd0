"""`xgram-dist train` on a disk that damages table rows: python damaging_train.py MARKER RECIPE ...

Once there is a checkpoint, a bit of all records that lie on the disk alone flips, as it would there: after they were
written back, and before they are read again. That happens once, or with `MARKER.always` after every start.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from xgram_dist.cli.main import main
from xgram_dist.tables.storage import disk
from xgram_dist.tables.storage.base import Slots
from xgram_dist.tables.storage.checksums import SUMMED
from xgram_dist.tables.storage.disk import DiskStorage

disk.WRITE_BACK_SECONDS = 0.0
marker = Path(sys.argv[1])
always = marker.with_suffix(".always").exists()
writing = DiskStorage.writing
damaged = set[DiskStorage]()


@contextmanager
def writing_and_damaging(storage: DiskStorage, slots: Slots) -> Iterator[None]:
    with writing(storage, slots):
        yield
    if storage in damaged or (marker.exists() and not always):
        return
    saved = list(Path(sys.argv[sys.argv.index("--folder") + 1]).glob("checkpoints/step-*/manifest.json"))
    if not saved:
        return
    storage._reader.submit(int).result()  # nothing is being checked
    checksums = storage._checksums
    rests = np.flatnonzero(checksums._states_S == SUMMED)
    rests = rests[checksums._checks_S[rests] < max(1, storage._prefetches - 1)]  # not announced for the next step
    if len(rests):
        for slot in rests.tolist():
            place = slot * storage._record_bytes + 3
            byte = os.pread(storage._file.descriptor, 1, place)[0]
            os.pwrite(storage._file.descriptor, bytes([byte ^ 16]), place)
        damaged.add(storage)
        marker.touch()


DiskStorage.writing = writing_and_damaging
sys.exit(main(["train", *sys.argv[2:]]))
