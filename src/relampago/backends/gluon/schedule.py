"""Which tile comes when, and which keys it visits: plain arithmetic.

The kernel compiles these functions and the protocol test runs them as they are, so that the two cannot disagree.
Rows of queries are cut in tiles of BQ, keys in blocks of BK. Numbers are never negative where they are divided.
"""

GRID = 0  # one block of threads per tile; the hardware hands them out
STATIC = 1  # persistent blocks, tiles by a fixed rule
DYNAMIC = 2  # persistent blocks, tiles from a counter in global memory
SLOTS = 2  # tiles that the producer may have announced before the consumers take them up
UNIT = 128  # what the backward pads a head's rows to, where it copies numbers of rows in blocks
WORDS = 16  # room for the numbers that tell the consumers of a tile: 3 to 10
TURN = 3  # blocks of keys between the places where neighbouring tiles begin
FAR = 1 << 30  # rows that TMA believes a packed sequence to end at; see `packed_rows`


def place(tile, tiles, section, count):
    """(row tile, sequence and head) of a tile number.

    Heads go in sections whose keys and values fit the L2 cache together; within one, the last rows first, since under
    causal they are the heaviest, and all heads' tile before the next.
    """
    span = section * tiles
    first = tile // span * section
    rest = tile % span
    width = min(section, count - first)
    return tiles - 1 - rest // width, first + rest % width


def snake(turn, program, programs):
    """The tile number of a program's turn: back and forth, which evens out a list that falls."""
    back = turn % 2
    return turn * programs + program + back * (programs - 1 - 2 * program)


def blocks(start, end, BK):
    """(first block, number of blocks) of the keys [start, end); at least one, whose mask may hide everything."""
    end = max(end, 1)
    last = (end + (BK - 1)) // BK
    first = min(start // BK, last - 1)
    return first, last - first


def adders_before(first_key, row, offset, left, BK):
    """How many tiles of BK keys before the one from `first_key` on see rows of the block that begins at a row.

    All of those between the first key that the row sees and this one, since bounds move along with the rows.
    """
    first = 0
    if left is not None:
        first = max(row + offset - left, 0) // BK
    return first_key // BK - first


def share(first, count, split, splits, beyond):
    """(first block, number of blocks) of a split: as many as another's, or one more.

    One that gets none visits the block after the last key, which reads as 0 and is hidden.
    """
    each = count // splits
    rest = count % splits
    at = first + split * each + min(split, rest)
    own = each + 1 if split < rest else each
    at = beyond if own == 0 else at
    return at, max(own, 1)


def turned(j, count, row_tile, TURN):
    """Which block a tile that needs no masks visits j-th: from the last to the first, each tile begun TURN further on.

    Blocks of threads that run in step would else ask the L2 cache for the same lines at the same time.
    """
    return (2 * count - 1 - j - row_tile * TURN % count) % count


def advance(stage, phase, STAGES):
    """The next place in a ring, and the parity of its barriers' phase."""
    stage = stage + 1
    last = stage == STAGES
    phase = phase ^ 1 if last else phase
    stage = 0 if last else stage
    return stage, phase


def packed_rows(first, length, row, FAR):
    """TMA coordinates of a packed sequence's row: what lies beyond the sequence is beyond the tensor to TMA.

    The descriptor has three dimensions for the rows, of which the last ends at FAR. Its coordinate is such that the
    sequence ends there too; the second moves on to the sequence, and the first comes to FAR rows less, in 64-bit
    addresses that wrap around (see `launch.packed_descriptor`).
    """
    return FAR, first + length, row - length + FAR
