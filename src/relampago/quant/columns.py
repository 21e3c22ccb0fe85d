"""How FP8 values lie for Hopper's products, which want both operands k-major: (B or 1, G, E, columns), a key a column.

Sequences begin at multiples of BLOCK columns. Within 16 keys the columns are in the order in which an accumulator's
thread holds them as it hands them on: key bits b3 b2 b1 b0 stand at b2 b1 b3 b0, so that the weights move no register.
"""

from __future__ import annotations


def first_column(first, b, BLOCK):
    """Where packed sequence b, whose first row is `first`, begins: none reaches into the next, whatever the lengths."""
    return first // BLOCK * BLOCK + b * BLOCK


def columns_in_all(total: int, batch: int, block: int) -> int:
    """Room for all packed sequences, from shapes alone."""
    return (total // block + batch) * block


def column_of(key):
    """Where a key stands, of one sequence."""
    return key - key % 16 + key % 8 // 2 * 4 + key % 16 // 8 * 2 + key % 2
