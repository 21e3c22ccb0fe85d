"""Which tile is next, and where it lies: what the producer finds out and tells the consumers.

A tile is BQ rows of a block of threads; with PACK heads packed into it, row r of a tile is query r // PACK of head
r % PACK. Legend: see `sm90_forward`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from relampago.backends.gluon import schedule
from relampago.backends.gluon.channel import Rows
from relampago.backends.gluon.versions import aggregate
from relampago.masks import rules

ROWS = gl.constexpr(64)  # of a warpgroup: WGMMA's M
BIG = gl.constexpr(2147483647)
GRID, STATIC, DYNAMIC = (
    gl.constexpr(schedule.GRID), gl.constexpr(schedule.STATIC), gl.constexpr(schedule.DYNAMIC),
)  # fmt: skip
SLOTS, WORDS = gl.constexpr(schedule.SLOTS), gl.constexpr(schedule.WORDS)

place = gluon.jit(schedule.place)
snake = gluon.jit(schedule.snake)
share = gluon.jit(schedule.share)
blocks = gluon.jit(schedule.blocks)
key_range = gluon.jit(rules.key_range)


@gluon.constexpr_function
def accumulator(columns, depth=16):
    """How a warpgroup holds a product [64, columns]; depth: of an instruction, 32 for numbers of 8 bits."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, depth]
    )


@aggregate
class Tile:
    """One tile's work."""

    row_tile: gl.tensor
    head: gl.tensor  # the first, where heads are packed
    q: Rows
    k: Rows
    offset: gl.tensor
    split: gl.tensor
    first: gl.tensor  # block of keys
    count: gl.tensor  # blocks of keys

    @gluon.constexpr_function
    def __init__(self, row_tile, head, q, k, offset, split, first, count):
        self.row_tile = row_tile
        self.head = head
        self.q = q
        self.k = k
        self.offset = offset
        self.split = split
        self.first = first
        self.count = count


@gluon.jit
def put(slots, word, value):
    """One number into a word of shared memory."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    slots.tiles.index(word).store(gl.full([1], value, gl.int32, one))


@gluon.jit
def get(slots, word):
    """A word of shared memory."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(slots.tiles.index(word).load(one), axis=0)


@gluon.jit
def send_tile(slots, turn, tile, PACKED: gl.constexpr, LISTED: gl.constexpr):
    """Producer: tell the consumers what this turn is for, so that they need not divide, nor read tables."""
    slot = turn % SLOTS
    mbarrier.wait(slots.empty.index(slot), (turn // SLOTS & 1) ^ 1)
    put(slots, slot * WORDS, tile.row_tile)
    put(slots, slot * WORDS + 1, tile.head)
    put(slots, slot * WORDS + 2, tile.q.b)
    if PACKED:
        put(slots, slot * WORDS + 3, tile.q.first)
        put(slots, slot * WORDS + 4, tile.q.length)
        put(slots, slot * WORDS + 5, tile.k.first)
        put(slots, slot * WORDS + 6, tile.k.length)
    if LISTED:
        put(slots, slot * WORDS + 7, tile.split)
        put(slots, slot * WORDS + 8, tile.first)
        put(slots, slot * WORDS + 9, tile.count)
    mbarrier.arrive(slots.full.index(slot), count=1)


@gluon.jit
def send_number(slots, turn, number):
    """Producer: a tile's number and nothing more."""
    slot = turn % SLOTS
    mbarrier.wait(slots.empty.index(slot), (turn // SLOTS & 1) ^ 1)
    put(slots, slot * WORDS, number)
    mbarrier.arrive(slots.full.index(slot), count=1)


@gluon.jit
def send_end(slots, turn):
    """Producer: there is no tile any more."""
    send_number(slots, turn, -1)


@gluon.jit
def receive_tile(
    row_tile, slots, turn, size, band, BQ: gl.constexpr, BK: gl.constexpr, PACKED: gl.constexpr,
    LISTED: gl.constexpr,
):  # fmt: skip
    """Consumer: this turn's tile; `tile_of` has waited for it."""
    slot = turn % SLOTS
    head = get(slots, slot * WORDS + 1)
    b = get(slots, slot * WORDS + 2)
    first_q, len_q, first_k, len_k, offset = b, size.len_q, b, size.len_k, band.offset
    if PACKED:
        first_q = get(slots, slot * WORDS + 3)
        len_q = get(slots, slot * WORDS + 4)
        first_k = get(slots, slot * WORDS + 5)
        len_k = get(slots, slot * WORDS + 6)
        offset += len_k - len_q
    split = b
    if LISTED:
        split = get(slots, slot * WORDS + 7)
        first = get(slots, slot * WORDS + 8)
        count = get(slots, slot * WORDS + 9)
    mbarrier.arrive(slots.empty.index(slot), count=1)
    if not LISTED:
        first, count = visited(first_row(row_tile, size, BQ), len_q, len_k, offset, band, BQ, BK)
    return Tile(
        row_tile,
        head,
        Rows(b, first_q, len_q),
        Rows(b, first_k, len_k),
        offset,
        split,
        first,
        count,
    )


@gluon.jit
def draw(counter, count):
    """The next tile that nobody has. Every tile number draws once, so the last draw of all can set the counter back."""
    drawn = gl.atomic_add(counter, 1, sem="relaxed")
    if drawn == count - 1:
        gl.store(counter, 0)
    return drawn + gl.num_programs(0)


@gluon.jit
def tile_of(turn, size, slots, SCHEDULE: gl.constexpr):
    """Consumer: this turn's tile (its row tile if the schedule is dynamic), less than 0 if there is none."""
    if SCHEDULE == DYNAMIC:
        slot = turn % SLOTS
        mbarrier.wait(slots.full.index(slot), turn // SLOTS & 1)
        tile = get(slots, slot * WORDS)
    elif SCHEDULE == STATIC:
        tile = snake(turn, gl.program_id(0), gl.num_programs(0))
        tile = tile if tile < size.count else -1
    else:
        tile = gl.program_id(0) if turn == 0 else -1
    return tile


@gluon.jit
def span(cu, b, total):
    """(first row, rows) of a packed sequence, whatever stands in cu_seqlens."""
    first = min(max(gl.load(cu + b), 0), total)
    end = min(max(gl.load(cu + b + 1), first), total)
    return first, end - first


@gluon.jit
def first_row(row_tile, size, PART: gl.constexpr):
    """Of a tile of PART queries. A shifted first tile overlaps the second: TMA stores at no negative row."""
    return max(row_tile * PART - size.shift, 0)


@gluon.jit
def visited(row, len_q, len_k, offset, band, BQ: gl.constexpr, BK: gl.constexpr):
    """(first block, number of blocks) of the keys that BQ queries from a row on visit."""
    last_row = min(row + BQ, len_q) - 1
    start, end = key_range(row, last_row, len_k, offset, band.left, band.right, band.prefix)
    return blocks(start, end, BK)


@gluon.jit
def table_at(size, b):
    """Where a sequence begins in the row tables."""
    return gl.cast(b, gl.int64) * size.table_stride


@gluon.jit
def listed(
    row,
    q_at,
    k_at,
    offset,
    size,
    band,
    extra,
    WGS: gl.constexpr,
    PART: gl.constexpr,
    BK: gl.constexpr,
):
    """Producer: `visited`, where the rows have tables of their own: from the least start to the greatest end."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    last_row = min(row + WGS * PART, q_at.length) - 1
    start, end = key_range(row, last_row, k_at.length, offset, band.left, band.right, band.prefix)
    low = BIG + row * 0
    high = row * 0
    for w in gl.static_range(WGS):
        rows = row + w * PART + gl.arange(0, PART, layout=one)
        inside = rows < q_at.length
        at = table_at(size, q_at.b) + rows
        starts = gl.load(extra.row_start + at, mask=inside, other=0)
        ends = gl.load(extra.row_end + at, mask=inside, other=0)
        low = min(low, gl.min(gl.where(starts < ends, starts, BIG), axis=0))
        high = max(high, gl.max(ends, axis=0))
    return blocks(max(start, low), min(end, high), BK)


@gluon.jit
def locate(
    number, size, band, extra, WGS: gl.constexpr, BK: gl.constexpr, PACK: gl.constexpr,
    SPLIT: gl.constexpr,
):  # fmt: skip
    """The tile of a number, but for what `cut` adds."""
    heads = size.heads // PACK
    row_tile, which = place(number, size.tiles, size.section, size.places * size.splits)
    split = which
    if SPLIT:
        split = which // size.places
        which = which % size.places
    b = which // heads
    head = which % heads * PACK
    PART: gl.constexpr = ROWS // PACK
    q_at, k_at, offset = Rows(b, b, size.len_q), Rows(b, b, size.len_k), band.offset
    if extra.cu_q is not None:
        first_q, len_q = span(extra.cu_q, b, size.len_q)
        first_k, len_k = span(extra.cu_k, b, size.len_k)
        q_at, k_at = Rows(b, first_q, len_q), Rows(b, first_k, len_k)
        offset += len_k - len_q
    row = first_row(row_tile, size, WGS * PART)
    if extra.row_start is not None:
        first, count = listed(row, q_at, k_at, offset, size, band, extra, WGS, PART, BK)
    else:
        first, count = visited(row, q_at.length, k_at.length, offset, band, WGS * PART, BK)
    if SPLIT:
        first, count = share(first, count, split, size.splits, (k_at.length + (BK - 1)) // BK)
    return Tile(row_tile, head, q_at, k_at, offset, split, first, count)
