"""A fault of ptxas 12.8, searched in SASS: a 64-bit sum of uniform registers whose halves come from one register.

A descriptor of a wgmma's operand is an address of 14 bits with constants above it, and ptxas adds both halves apart:

    UIADD3   UR10, UP0, UR24, 0x20, URZ              the address, and how far into the tile
    UIADD3.X UR11, URZ, -0x3ffffff0, URZ, UP0, !UPT  0 of the upper half, the constants and the carry

Where registers are short it has been seen to take one unrelated register for both, UR4 here and there. The product then
reads wherever that points: other numbers, or beyond shared memory (H200, 2 December 2026, d 40/72).
"""

from __future__ import annotations

import re

LOW = re.compile(r"\bUIADD3 UR\d+, (UP\d), (UR\d+), [^,]+, URZ")
HIGH = re.compile(r"\bUIADD3\.X UR\d+, (UR\d+), [^,]+, URZ, (UP\d), !UPT")
WRITES = re.compile(r"(?:^|\s)(U\w[\w.]*|[RS]2UR[\w.]*) (?:UP\d, )?UR(\d+)[,\s]")


def mixed_up(sass: str) -> list[str]:
    """The upper halves of such sums."""
    pending: dict[
        str, str
    ] = {}  # by carry: what the lower half was read from, unless written since
    found = []
    for line in sass.splitlines():
        high = HIGH.search(line)
        if high and pending.get(high[2]) == high[1]:
            found.append(line.strip())
        if written := WRITES.search(line):
            wide = "64" in written[1] or "WIDE" in written[1]
            fresh = {f"UR{int(written[2]) + more}" for more in range(2 if wide else 1)}
            pending = {carry: name for carry, name in pending.items() if name not in fresh}
            low = LOW.search(line)
            if low and low[2] not in fresh:
                pending[low[1]] = low[2]
    return found
