"""Strides that are multiplied in 32 bits, searched in what Triton makes of a kernel before anything is optimised.

A stride is a caller's, and so is an index: rows of sequence-major keys of a large batch lie 2^25 elements apart, and 64
of them pass 2^31. Multiples of a stride by a constant round it to what divides a row (`tile.stepped`), and stay below.
"""

from __future__ import annotations

import re

# Arguments that strides come in: alone, or in a bundle of `arguments.py`, whose other numbers are not multiplied.
NAMED = r"s[a-z]{1,2}|(?:\w+_)?stride(?:_[blh])?|band|lay|extra|target"
STRIDE = re.compile(rf"(%(?:{NAMED})(?:_\d+|\.[\w.]+)?): i32\b")  # the newest Triton names fields
LINE = re.compile(r"(%\S+) = ([\w.]+) (.*?) : (.*?)(?: loc\(|$)")
CARRIED = (
    "tt.splat", "tt.broadcast", "tt.expand_dims", "arith.divsi", "arith.muli", "arith.addi", "arith.subi"
)  # fmt: skip


def narrow(ttir: str) -> list[str]:
    """Products of a stride and a number that is not a constant, in 32 bits."""
    strides, constants, found = set(STRIDE.findall(ttir)), set(), []
    for line in ttir.splitlines():
        parsed = LINE.search(line)
        if parsed is None or not parsed[4].rstrip().endswith(("i32", "i32>")):
            continue
        name, op, operands = parsed[1], parsed[2], re.findall(r"%[\w$.#-]+", parsed[3])
        if op == "arith.constant":
            constants.add(name)
        if not strides.intersection(operands):
            continue
        if op == "arith.muli" and not constants.intersection(operands):
            found.append(line.strip())
        if op in CARRIED:
            strides.add(name)
    return found
