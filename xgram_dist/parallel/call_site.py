"""Which function of this package is running: what tools that watch the device name in their findings.

Imports nothing, so that it can be used before torch is imported.
"""

import sys
from types import FrameType

Place = tuple[str, str]
"""(file, function) of the innermost frame in this package or in DeepSpeed; a line number would change too often."""

PACKAGES = ("xgram_dist", "deepspeed")
AUTOGRAD: Place = ("autograd", "backward")
"""No frame of them: the backward pass in a thread of its own."""


def call_site(skip: str | None = None) -> Place:
    """`skip`: passes over frames whose path in the package begins so."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        for package in PACKAGES:
            _, found, path = frame.f_code.co_filename.rpartition(f"/{package}/")
            if found and (skip is None or not path.startswith(skip)):
                return (path if package == PACKAGES[0] else f"{package}/{path}"), frame.f_code.co_name
        frame = frame.f_back
    return AUTOGRAD
