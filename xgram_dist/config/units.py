"""Sizes with units, as people write them."""

import re

BYTES = r"^\d+(\.\d+)? ?[kKMGT]i?B$"
_POWERS = {"K": 1, "M": 2, "G": 3, "T": 4}


def parse_bytes(text: str) -> int:
    """1.5GiB -> 1610612736, 80GB -> 80000000000; the text must match BYTES."""
    assert re.match(BYTES, text), text
    number, letter, binary = re.findall(r"^([\d.]+) ?(\w)(i?)B$", text)[0]
    return int(float(number) * (1024 if binary else 1000) ** _POWERS[letter.upper()])
