"""Which cell first: what matters most comes first, since time may run out."""

from __future__ import annotations

from relampago.cli.train_step.cell import WITHOUT
from relampago.cli.train_step.shapes import Shape

KINDS = ("relampago", "eager", "sdpa", WITHOUT)  # in this order at one length
EAGER_BYTES = (
    14  # per score, about: bf16 scores, fp32 and bf16 weights, and gradients of two of them
)


def order(
    lengths: list[int], kinds: list[str], shape: Shape, room: int | None
) -> list[tuple[int, str]]:
    """(length, kind) pairs: the longest with relampago, then the longest where eager may fit, then the rest.

    Args:
        lengths: tokens.
        kinds: of attention.
        shape: of the model.
        room: bytes for activations; None if not known.
    """
    longest = max(lengths)
    fits = [n for n in lengths if room is None or EAGER_BYTES * shape.heads * n**2 <= room]
    common = max(fits, default=min(lengths))

    def rank(pair: tuple[int, str]) -> tuple[int, int, int]:
        length, kind = pair
        place = KINDS.index(kind)
        if length == longest and kind == "relampago":
            return (0, 0, 0)
        if length == common:
            return (1, 0, place)
        if length == longest:
            return (2, 0, -place)
        return (3, length, place)

    return sorted(((n, kind) for n in lengths for kind in kinds), key=rank)
