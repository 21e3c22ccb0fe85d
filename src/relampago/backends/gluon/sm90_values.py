"""Values of FP8 transposed in shared memory, by a warpgroup of its own between the producer and the consumers.

FP8 products want both operands k-major, a key a column. `quant.columns` lays values out so in the pass that casts
them; here they come as rows, and this warpgroup turns each block as it arrives, as FlashAttention-3's producer does
(arXiv 2407.08608, section 3.3: LDSM.T, byte permutations, STSM). Two columns of a key are one 16-bit number, of which
`ldmatrix` transposes tiles of 8 by 8; two byte permutations then part the columns of four keys. The order of keys is
that of `quant.columns`. docs/fp8.md counts the instructions and says when it pays.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from relampago.backends.gluon import schedule
from relampago.backends.gluon.channel import Channel, barriers, release
from relampago.backends.gluon.tiles import DYNAMIC, ROWS, locate, receive_tile, tile_of
from relampago.backends.gluon.versions import reinterpret

advance = gluon.jit(schedule.advance)
AHEAD = gl.constexpr(schedule.AHEAD)


@gluon.constexpr_function
def pairs_layout(BK, E):
    """[BK, E / 2] of 16-bit numbers as `ldmatrix` transposes them: a thread has keys k, k + 1, k + 8, k + 9 of each.

    Lanes have the other bits of a key within 16 and 8 numbers next to each other; the rest is shared out at the end.
    """
    rest = [[0, 8 << i] for i in range(8) if 8 << i < E // 2]
    rest += [[16 << i, 0] for i in range(8) if 16 << i < BK]
    lanes = [[2, 0], [4, 0], [0, 1], [0, 2], [0, 4]]
    return gl.DistributedLinearLayout(
        [[1, 0], [8, 0], *rest[:-2]], lanes, rest[-2:], [], [BK, E // 2]
    )


@gluon.constexpr_function
def shared_layout(block, dtype):
    """How TMA would lay a block."""
    return gl.NVMMASharedLayout.get_default_for(block, dtype)


@gluon.constexpr_function
def pairs_shared(width):
    """Rows of so many bytes, swizzled as TMA lays them, seen as 16-bit numbers."""
    return gl.NVMMASharedLayout(swizzle_byte_width=min(width, 128), element_bitwidth=16, rank=2)


@gluon.jit
def columns(v_desc, STAGES: gl.constexpr, READERS: gl.constexpr, BK: gl.constexpr, E: gl.constexpr):
    """The ring that the consumers read: tiles [E, BK]."""
    layout: gl.constexpr = shared_layout([1, 1, E, BK], v_desc.dtype)
    tiles = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, 1, E, BK], layout)
    return Channel(tiles, barriers(STAGES, 1), barriers(STAGES, READERS))


@gluon.jit
def turn_block(rows, out, BK: gl.constexpr, E: gl.constexpr):
    """A block [BK, E] in rows as columns [E, BK]."""
    x = reinterpret(rows, gl.int16, [BK, E // 2], pairs_shared(E)).load(pairs_layout(BK, E))
    x = gl.permute(
        gl.reshape(x, [BK // 16, 2, 4, 2, E // 2]), (4, 0, 2, 1, 3)
    )  # [E/2, BK/16, 4, 2, 2]
    x = gl.inline_asm_elementwise(  # four keys of two columns: bytes k0 k0' k1 k1', k8 k8' k9 k9'
        "prmt.b32 $0, $2, $3, 0x6420;\nprmt.b32 $1, $2, $3, 0x7531;", "=&r,=r,r,r", [x],
        dtype=gl.int16, is_pure=True, pack=4,
    )  # fmt: skip
    x = gl.permute(x, (0, 3, 1, 2, 4))  # [E/2, 2, BK/16, 4, 2]
    out = reinterpret(out, gl.int16, [E, BK // 2], pairs_shared(BK))
    out.store(gl.reshape(x, [E, BK // 2]))


@gluon.jit
def turn_values(
    rows, values, slots, size, band, extra, WGS: gl.constexpr, BK: gl.constexpr, E: gl.constexpr,
    PACK: gl.constexpr, STAGES: gl.constexpr, SCHEDULE: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """All blocks that the producer loads, in its order."""
    PACKED: gl.constexpr = extra.cu_q is not None
    LISTED: gl.constexpr = SPLIT or extra.row_start is not None
    PART: gl.constexpr = ROWS // PACK
    stage_r, phase_r, stage_v, phase_v = 0, 0, 0, 1
    turn = 0
    number = tile_of(turn, size, slots, SCHEDULE)
    while number >= 0:
        if SCHEDULE == DYNAMIC:
            tile = receive_tile(number, slots, turn, size, band, WGS * PART, BK, PACKED, LISTED)
        else:
            tile = locate(number, size, band, extra, WGS, BK, PACK, SPLIT)
        for _ in range(tile.count):
            mbarrier.wait(rows.full.index(stage_r), phase_r)
            mbarrier.wait(values.empty.index(stage_v), phase_v)
            turn_block(rows.tiles.index(stage_r), values.tiles.index(stage_v), BK, E)
            fence_async_shared()  # what was stored, before products read it; what was read, before TMA writes it
            mbarrier.arrive(values.full.index(stage_v), count=1)
            release(rows, stage_r)
            stage_r, phase_r = advance(stage_r, phase_r, AHEAD)
            stage_v, phase_v = advance(stage_v, phase_v, STAGES)
        turn += 1
        number = tile_of(turn, size, slots, SCHEDULE)
