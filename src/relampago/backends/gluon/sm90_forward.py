"""The forward on Hopper: FlashAttention-3 (arXiv 2407.08608), Algorithm 2, in Gluon; docs/hopper.md has the drawing.

A block of threads is one producer warp, which loads tiles by TMA, and WGS consumer warpgroups, each with 64 rows of
queries, which multiply by WGMMA. While the tensor cores form Sⱼ = Q·Kⱼᵀ and then O += Pⱼ₋₁·Vⱼ₋₁, a warpgroup takes the
softmax of Sⱼ under the second product. Keys are visited from the last block to the first.

The papers' letters: m running maximum (of unscaled scores), l running sum, acc unnormalised output, p weights,
s scores. Legend: B batch, H query heads, G kv heads, BQ = 64·WGS rows of a tile, BK keys of a block, D/E head dims of
keys and values, padded to powers of two by TMA's zero fill. `size`, `band` and `extra` are the NamedTuples of
`launch.py`; a field that is None compiles to nothing.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from relampago.backends.gluon import schedule
from relampago.backends.gluon.channel import (
    Channel,
    Rows,
    barriers,
    channel,
    receive,
    release,
    ring,
    send,
    store,
)
from relampago.masks import rules

LN2 = gl.constexpr(0.6931471805599453)
LOG2E = gl.constexpr(1.4426950408889634)
ROWS = gl.constexpr(64)  # of a warpgroup: WGMMA's M
GRID, STATIC, DYNAMIC = (
    gl.constexpr(schedule.GRID), gl.constexpr(schedule.STATIC), gl.constexpr(schedule.DYNAMIC),
)  # fmt: skip
SLOTS, WORDS = gl.constexpr(schedule.SLOTS), gl.constexpr(schedule.WORDS)
FIRST_TURN = gl.constexpr(8)  # named barriers 8 to 10 order the warpgroups; Triton uses the first

visible = gluon.jit(rules.visible)
place = gluon.jit(schedule.place)
snake = gluon.jit(schedule.snake)
key_range = gluon.jit(rules.key_range)
full_range = gluon.jit(rules.full_range)
blocks = gluon.jit(schedule.blocks)
advance = gluon.jit(schedule.advance)


# ---------------------------------------------------------------------------------------------- the next tile


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
def send_tile(slots, turn, row_tile, head, q_at, k_at, PACKED: gl.constexpr):
    """Producer: tell the consumers what this turn is for, so that they need not divide; no row tile: nothing more."""
    slot = turn % SLOTS
    mbarrier.wait(slots.empty.index(slot), (turn // SLOTS & 1) ^ 1)
    put(slots, slot * WORDS, row_tile)
    put(slots, slot * WORDS + 1, head)
    put(slots, slot * WORDS + 2, q_at.b)
    if PACKED:
        put(slots, slot * WORDS + 3, q_at.first)
        put(slots, slot * WORDS + 4, q_at.length)
        put(slots, slot * WORDS + 5, k_at.first)
        put(slots, slot * WORDS + 6, k_at.length)
    mbarrier.arrive(slots.full.index(slot), count=1)


@gluon.jit
def receive_tile(slots, turn, size, band, PACKED: gl.constexpr):
    """Consumer: head, rows of queries, keys and offset of this turn's tile; `tile_of` has waited for it."""
    slot = turn % SLOTS
    head = get(slots, slot * WORDS + 1)
    b = get(slots, slot * WORDS + 2)
    first_q, len_q, first_k, len_k = b, gl.to_tensor(size.len_q), b, gl.to_tensor(size.len_k)
    offset = band.offset
    if PACKED:
        first_q = get(slots, slot * WORDS + 3)
        len_q = get(slots, slot * WORDS + 4)
        first_k = get(slots, slot * WORDS + 5)
        len_k = get(slots, slot * WORDS + 6)
        offset = band.offset + len_k - len_q
    mbarrier.arrive(slots.empty.index(slot), count=1)
    return head, Rows(b, first_q, len_q), Rows(b, first_k, len_k), offset


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
def locate(tile, size, band, extra):
    """(row tile, head, its rows of queries, its keys, offset) of a tile number."""
    row_tile, which = place(tile, size.tiles, size.section, size.places)
    b = which // size.heads
    head = which % size.heads
    if extra.cu_q is None:
        len_q, len_k = gl.to_tensor(size.len_q), gl.to_tensor(size.len_k)  # a length of 1 comes as a constant
        return row_tile, head, Rows(b, b, len_q), Rows(b, b, len_k), band.offset
    else:
        first_q, len_q = span(extra.cu_q, b, size.len_q)
        first_k, len_k = span(extra.cu_k, b, size.len_k)
        offset = band.offset + len_k - len_q
        return row_tile, head, Rows(b, first_q, len_q), Rows(b, first_k, len_k), offset


@gluon.jit
def first_row(row_tile, size, BQ: gl.constexpr):
    """Of a tile. A shifted first tile overlaps the second, whose rows it computes alike: TMA stores at no negative row."""
    return max(row_tile * BQ - size.shift, 0)


@gluon.jit
def visited(row, len_q, len_k, offset, band, BQ: gl.constexpr, BK: gl.constexpr):
    """(first block, number of blocks) of the keys that a tile visits."""
    last_row = min(row + BQ, len_q) - 1
    start, end = key_range(row, last_row, len_k, offset, band.left, band.right, band.prefix)
    return blocks(start, end, BK)


# ---------------------------------------------------------------------------------------------- producer


@gluon.jit
def send_rows(
    queries, keys, values, slots, q_desc, k_desc, v_desc, counter, size, band, row_tile, head, q_at,
    k_at, offset, tile, turn, stage_k, phase_k, stage_v, phase_v, WGS: gl.constexpr,
    BK: gl.constexpr, STAGES: gl.constexpr, SCHEDULE: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """All loads of a tile, and which is the next."""
    BQ: gl.constexpr = ROWS * WGS
    g = head // size.group
    row = first_row(row_tile, size, BQ)
    first, n = visited(row, q_at.length, k_at.length, offset, band, BQ, BK)
    k0 = (first + n - 1) * BK
    if SCHEDULE == DYNAMIC:
        send_tile(slots, turn, row_tile, head, q_at, k_at, PACKED)
    # the first keys before the queries: these wait for the previous tile's epilogue
    send(keys, k_desc, stage_k, phase_k, k_at, k0, g, PACKED)
    stage_k, phase_k = advance(stage_k, phase_k, STAGES)
    for w in gl.static_range(WGS):
        send(queries, q_desc, w, (turn & 1) ^ 1, q_at, row + w * ROWS, head, PACKED)
    if SCHEDULE == DYNAMIC:  # early: an answer from the L2 cache takes its time
        following = draw(counter, size.count)
    else:
        following = tile_of(turn + 1, size, slots, SCHEDULE)
        following = size.count if following < 0 else following
    for j in range(1, n):
        send(keys, k_desc, stage_k, phase_k, k_at, k0 - j * BK, g, PACKED)
        stage_k, phase_k = advance(stage_k, phase_k, STAGES)
        send(values, v_desc, stage_v, phase_v, k_at, k0 - (j - 1) * BK, g, PACKED)
        stage_v, phase_v = advance(stage_v, phase_v, STAGES)
    send(values, v_desc, stage_v, phase_v, k_at, first * BK, g, PACKED)
    stage_v, phase_v = advance(stage_v, phase_v, STAGES)
    return following, stage_k, phase_k, stage_v, phase_v


@gluon.jit
def produce(
    queries, keys, values, slots, q_desc, k_desc, v_desc, counter, size, band, extra,
    WGS: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, SCHEDULE: gl.constexpr,
):  # fmt: skip
    """One warp: loads what the consumers will need, as far ahead as the rings allow."""
    PACKED: gl.constexpr = extra.cu_q is not None
    stage_k, phase_k, stage_v, phase_v = 0, 1, 0, 1
    turn = 0
    tile = gl.program_id(0)
    while tile < size.count:
        row_tile, head, q_at, k_at, offset = locate(tile, size, band, extra)
        if PACKED:
            if row_tile * (ROWS * WGS) < q_at.length:
                tile, stage_k, phase_k, stage_v, phase_v = send_rows(
                    queries, keys, values, slots, q_desc, k_desc, v_desc, counter, size, band,
                    row_tile, head, q_at, k_at, offset, tile, turn, stage_k, phase_k, stage_v,
                    phase_v, WGS, BK, STAGES, SCHEDULE, PACKED,
                )  # fmt: skip
                turn += 1
            else:  # a shorter sequence than the longest has no such tile
                tile = draw(counter, size.count)
        else:
            tile, stage_k, phase_k, stage_v, phase_v = send_rows(
                queries, keys, values, slots, q_desc, k_desc, v_desc, counter, size, band,
                row_tile, head, q_at, k_at, offset, tile, turn, stage_k, phase_k, stage_v,
                phase_v, WGS, BK, STAGES, SCHEDULE, PACKED,
            )  # fmt: skip
            turn += 1
    if SCHEDULE == DYNAMIC:
        nothing = Rows(turn, turn, turn)
        send_tile(slots, turn, -1, 0, nothing, nothing, False)


# ---------------------------------------------------------------------------------------------- softmax


@gluon.jit
def exp2(x):
    """2ˣ by the exponential unit."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def reciprocal(x):
    """1 / x to a unit in the last place."""
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def pin(x):
    """x, behind a fence that keeps ptxas from ending the overlap: it moves the wait for PV above pure arithmetic.

    The fence is a store to shared memory that never happens and that needs x: a row sum, which no one can order below
    -1.7e38 but ptxas does not know.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 a; mov.b32 a, 0; setp.lt.f32 p, $2, 0fFEFFFFFF; "
        "@p st.volatile.shared.f32 [a], $3; mov.b32 $0, $2; mov.b32 $1, $3; }",
        "=f,=f,f,f", [x], dtype=gl.float32, is_pure=False, pack=2,
    )  # fmt: skip


@gluon.jit
def row_max(s, R_L: gl.constexpr):
    """Maxima of rows. A tree over a thread's own elements: gl.max alone would be one chain of dependent steps."""
    M: gl.constexpr = s.shape[0]
    N: gl.constexpr = s.shape[1] // 8
    x = gl.max(gl.reshape(s, [M, N, 4, 2]), axis=3)
    if N >= 16:
        x = gl.max(gl.reshape(x, [M, 2, N // 2, 4]), axis=1)
    if N >= 8:
        x = gl.max(gl.reshape(x, [M, 2, x.shape[1] // 2, 4]), axis=1)
    if N >= 4:
        x = gl.max(gl.reshape(x, [M, 2, x.shape[1] // 2, 4]), axis=1)
    x = gl.max(x, axis=1)
    return gl.convert_layout(gl.max(x, axis=1), R_L, assert_trivial=True)


@gluon.jit
def part_sum(p):
    """[M, 4]: sums over the elements of a row that one thread holds. The quad's four are added once, at the end."""
    x = gl.sum(gl.reshape(p, [p.shape[0], p.shape[1] // 8, 4, 2]), axis=3)
    return gl.sum(x, axis=1)


@gluon.jit
def finite(m):
    """The maximum to subtract: 0 for a row that has seen nothing, so that -inf minus it stays -inf."""
    return gl.where(m == float("-inf"), 0.0, m)


@gluon.jit
def hide(s, k0, rows, len_k, offset, band, ENDS: gl.constexpr, S_L: gl.constexpr):
    """Scores with -inf where a row does not see a key. ENDS: whether the block may reach beyond the last key."""
    keys = k0 + gl.expand_dims(gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, S_L)), 0)
    rows = gl.expand_dims(rows, 1)
    if band.left is not None or band.right is not None:
        seen = visible(rows, keys, offset, band.left, band.right, band.prefix)
        if ENDS:
            seen = seen & (keys < len_k)
        s = gl.where(seen, s, float("-inf"))
    elif ENDS:
        s = gl.where(keys < len_k, s, float("-inf"))
    return s


@gluon.jit
def capped(s, cap):
    """tanh of cap · s by the exponential unit, if there is a cap; `factor` has the rest of softcap."""
    if cap is not None:
        s = 1.0 - 2.0 * reciprocal(1.0 + exp2(s * (cap * 2.0 * LOG2E)))
    return s


@gluon.jit
def softmax(s, m, l, factor, R_L: gl.constexpr, PIN: gl.constexpr):
    """Algorithm 1, lines 9 and 10: weights of this block; m, l, and what earlier sums shrink by."""
    m_new = gl.maximum(m, row_max(s, R_L))
    shift = finite(m_new)
    alpha = exp2((m - shift) * factor)
    p = exp2(s * factor - gl.expand_dims(shift * factor, 1))  # [64, BK]
    sums = part_sum(p)
    alpha4 = gl.convert_layout(alpha, gl.SliceLayout(1, sums.type.layout), assert_trivial=True)
    l = l * gl.expand_dims(alpha4, 1) + sums  # [64, 4]
    if PIN:
        l = pin(l)
    return p, m_new, l, alpha


# ---------------------------------------------------------------------------------------------- consumer


@gluon.jit
def wait_turn(WG: gl.constexpr, PINGPONG: gl.constexpr):
    """Until the warpgroup before this one has issued its products."""
    if PINGPONG:
        gl.inline_asm_elementwise(
            "bar.sync $1, 256; mov.b32 $0, 0;", "=r,r", [WG + FIRST_TURN], dtype=gl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip


@gluon.jit
def give_turn(WG: gl.constexpr, PINGPONG: gl.constexpr):
    """Let warpgroup WG issue its products."""
    if PINGPONG:
        gl.inline_asm_elementwise(
            "bar.arrive $1, 256; mov.b32 $0, 0;", "=r,r", [WG + FIRST_TURN], dtype=gl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip


@gluon.jit
def step(
    q, keys, values, acc, p16, m, l, stage_k, phase_k, stage_v, phase_v, k0, rows, masked, len_k,
    offset, band, cap, factor, WG: gl.constexpr, WGS: gl.constexpr, BK: gl.constexpr,
    D: gl.constexpr, E: gl.constexpr, STAGES: gl.constexpr, S_L: gl.constexpr, O_L: gl.constexpr,
    P_L: gl.constexpr, MASKS: gl.constexpr, ENDS: gl.constexpr, PINGPONG: gl.constexpr,
    PIN: gl.constexpr,
):  # fmt: skip
    """Algorithm 2, lines 8 to 14: Sⱼ and O += Pⱼ₋₁Vⱼ₋₁ in flight together, softmax of Sⱼ under the latter."""
    k = receive(keys, stage_k, phase_k, BK, D)
    wait_turn(WG, PINGPONG)
    s = gl.zeros([ROWS, BK], gl.float32, S_L)
    s = warpgroup_mma(q, k.permute((1, 0)), s, use_acc=False, is_async=True)
    v = receive(values, stage_v, phase_v, BK, E)
    acc = warpgroup_mma(p16, v, acc, is_async=True)
    give_turn((WG + 1) % WGS, PINGPONG)
    s = warpgroup_mma_wait(num_outstanding=1, deps=(s,))
    release(keys, stage_k)
    s = capped(s, cap)
    if MASKS:  # noqa: SIM102 - one is known when the kernel is compiled, the other is not
        if masked:
            s = hide(s, k0, rows, len_k, offset, band, ENDS, S_L)
    p, m, l, alpha = softmax(s, m, l, factor, gl.SliceLayout(1, S_L), PIN)
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    release(values, stage_v)
    p16 = gl.convert_layout(p.to(p16.dtype), P_L, assert_trivial=True)
    alpha = gl.convert_layout(alpha, gl.SliceLayout(1, O_L), assert_trivial=True)
    acc = acc * gl.expand_dims(alpha, 1)
    stage_k, phase_k = advance(stage_k, phase_k, STAGES)
    stage_v, phase_v = advance(stage_v, phase_v, STAGES)
    return acc, p16, m, l, stage_k, phase_k, stage_v, phase_v


@gluon.jit
def finish(m, total, factor, sinks, head):
    """(what to multiply acc by, LSE) from the maxima and sums: Algorithm 1, line 12. A sink is one more score."""
    m = m * factor
    if sinks is not None:
        sink = gl.cast(gl.load(sinks + head), gl.float32) * LOG2E
        top = gl.maximum(m, sink)
        shrink = exp2(m - finite(top))
        total = total * shrink + exp2(sink - finite(top))
        inverse = shrink / gl.where(total == 0.0, 1.0, total)
        m = top
    else:
        inverse = 1.0 / gl.where(total == 0.0, 1.0, total)
    return inverse, (finite(m) + gl.log2(total)) * LN2


@gluon.jit
def consume(
    queries, keys, values, slots, results, o_desc, lse, size, band, extra, factor,
    WG: gl.constexpr, WGS: gl.constexpr, BK: gl.constexpr, D: gl.constexpr, E: gl.constexpr,
    STAGES: gl.constexpr, SCHEDULE: gl.constexpr, PEELED: gl.constexpr, LOOPED: gl.constexpr,
    ENDS: gl.constexpr, PINGPONG: gl.constexpr, PIN: gl.constexpr, SHARE: gl.constexpr,
):  # fmt: skip
    """One warpgroup: 64 rows of every tile of this block of threads."""
    BQ: gl.constexpr = ROWS * WGS
    DT: gl.constexpr = keys.tiles.dtype
    PACKED: gl.constexpr = extra.cu_q is not None
    S_L: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BK, 16]
    )
    O_L: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, E, 16]
    )
    P_L: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O_L, k_width=2)
    R_L: gl.constexpr = gl.SliceLayout(1, S_L)
    RO_L: gl.constexpr = gl.SliceLayout(1, O_L)
    stage_k, phase_k, stage_v, phase_v = 0, 0, 0, 0
    turn = 0
    if WG == WGS - 1:
        give_turn(0, PINGPONG)
    tile = tile_of(turn, size, slots, SCHEDULE)
    while tile >= 0:
        if SCHEDULE == DYNAMIC:
            row_tile = tile
            head, q_at, k_at, offset = receive_tile(slots, turn, size, band, PACKED)
        else:
            row_tile, head, q_at, k_at, offset = locate(tile, size, band, extra)
        len_k = k_at.length
        row0 = first_row(row_tile, size, BQ)
        first, n = visited(row0, q_at.length, len_k, offset, band, BQ, BK)
        row0 += WG * ROWS
        rows = row0 + gl.arange(0, ROWS, layout=R_L)
        start, end = full_range(
            row0, row0 + ROWS - 1, len_k, offset, band.left, band.right, band.prefix
        )  # no mask is needed there
        k0 = (first + n - 1) * BK
        acc = gl.zeros([ROWS, E], gl.float32, O_L)
        q = receive(queries, WG, turn & 1, ROWS, D)

        # the first block: S and its softmax, with nothing to overlap but the other warpgroups
        k = receive(keys, stage_k, phase_k, BK, D)
        s = gl.zeros([ROWS, BK], gl.float32, S_L)
        s = warpgroup_mma(q, k.permute((1, 0)), s, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
        release(keys, stage_k)
        stage_k, phase_k = advance(stage_k, phase_k, STAGES)
        s = capped(s, extra.cap)
        if PEELED:
            s = hide(s, k0, rows, len_k, offset, band, ENDS, S_L)
        m = row_max(s, R_L)
        shift = finite(m)
        p = exp2(s * factor - gl.expand_dims(shift * factor, 1))
        l = part_sum(p)
        p16 = gl.convert_layout(p.to(DT), P_L, assert_trivial=True)

        # one loop, the mask under a branch that a whole warpgroup takes: two successive loops would make LLVM carry
        # the weights as single 16-bit values
        for _ in range(n - 1):
            k0 -= BK
            masked = (k0 < start) | (k0 + BK > end)
            acc, p16, m, l, stage_k, phase_k, stage_v, phase_v = step(
                q, keys, values, acc, p16, m, l, stage_k, phase_k, stage_v, phase_v, k0, rows,
                masked, len_k, offset, band, extra.cap, factor, WG, WGS, BK, D, E, STAGES, S_L,
                O_L, P_L, LOOPED, ENDS, PINGPONG, PIN,
            )  # fmt: skip
        v = receive(values, stage_v, phase_v, BK, E)
        acc = warpgroup_mma(p16, v, acc, is_async=True)
        if not SHARE:
            mbarrier.arrive(queries.empty.index(WG), count=1)
        total = gl.convert_layout(gl.sum(l, axis=1), R_L)
        inverse, rows_lse = finish(m, total, factor, extra.sinks, head)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        release(values, stage_v)
        stage_v, phase_v = advance(stage_v, phase_v, STAGES)

        inverse = gl.convert_layout(inverse, RO_L, assert_trivial=True)
        out = (acc * gl.expand_dims(inverse, 1)).to(DT)
        result = results.index(WG)
        if not SHARE:
            tma.store_wait(pendings=0)
        result.reshape([ROWS, E]).store(out)
        fence_async_shared()
        store(o_desc, result, q_at, row0, head, PACKED)
        if PACKED:
            at = lse + gl.cast(head, gl.int64) * size.len_q + q_at.first
        else:
            at = lse + (gl.cast(q_at.b, gl.int64) * size.heads + head) * size.len_q
        gl.store(at + rows, rows_lse, mask=rows < q_at.length)
        turn += 1
        tile = tile_of(turn, size, slots, SCHEDULE)
        if SHARE:
            tma.store_wait(pendings=0)
            mbarrier.arrive(queries.empty.index(WG), count=1)
    if WG == 0:
        wait_turn(0, PINGPONG)  # the last turn given, so that no barrier is left half full
    tma.store_wait(pendings=0)


# ---------------------------------------------------------------------------------------------- kernel


@gluon.jit(do_not_specialize=["factor", "size", "band", "extra"])
def attend(
    q_desc, k_desc, v_desc, o_desc, lse, counter, factor, size, band, extra,
    WGS: gl.constexpr, BK: gl.constexpr, D: gl.constexpr, E: gl.constexpr, STAGES: gl.constexpr,
    SCHEDULE: gl.constexpr, PEELED: gl.constexpr, LOOPED: gl.constexpr, ENDS: gl.constexpr,
    PINGPONG: gl.constexpr, PIN: gl.constexpr, SHARE: gl.constexpr, REGISTERS: gl.constexpr,
    REGISTERS_PRODUCER: gl.constexpr,
):  # fmt: skip
    """Out and LSE.

    PEELED, LOOPED: whether the first block, and the others, may need a mask. ENDS: whether it must look at the last
    key. SHARE: O's tile lies where Q's was. The default partition takes the registers that the others leave.
    """
    queries = channel(q_desc, WGS, 1)
    keys = channel(k_desc, STAGES, WGS)
    values = channel(v_desc, STAGES, WGS)
    if SHARE:
        results = queries.tiles
    else:
        results = gl.allocate_shared_memory(
            o_desc.dtype, ring(WGS, o_desc.block_shape), o_desc.layout
        )
    places = gl.allocate_shared_memory(
        gl.int32, [SLOTS * WORDS, 1], gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    )
    slots = Channel(places, barriers(SLOTS, 1), barriers(SLOTS, WGS))
    fence_async_shared()
    if WGS == 3:
        gl.warp_specialize([
            (consume, (queries, keys, values, slots, results, o_desc, lse, size, band, extra, factor, 0, WGS, BK, D, E,
                       STAGES, SCHEDULE, PEELED, LOOPED, ENDS, PINGPONG, PIN, SHARE)),
            (consume, (queries, keys, values, slots, results, o_desc, lse, size, band, extra, factor, 1, WGS, BK, D, E,
                       STAGES, SCHEDULE, PEELED, LOOPED, ENDS, PINGPONG, PIN, SHARE)),
            (consume, (queries, keys, values, slots, results, o_desc, lse, size, band, extra, factor, 2, WGS, BK, D, E,
                       STAGES, SCHEDULE, PEELED, LOOPED, ENDS, PINGPONG, PIN, SHARE)),
            (produce, (queries, keys, values, slots, q_desc, k_desc, v_desc, counter, size, band, extra, WGS, BK,
                       STAGES, SCHEDULE)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, REGISTERS_PRODUCER])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (queries, keys, values, slots, results, o_desc, lse, size, band, extra, factor, 0, WGS, BK, D, E,
                       STAGES, SCHEDULE, PEELED, LOOPED, ENDS, PINGPONG, PIN, SHARE)),
            (consume, (queries, keys, values, slots, results, o_desc, lse, size, band, extra, factor, 1, WGS, BK, D, E,
                       STAGES, SCHEDULE, PEELED, LOOPED, ENDS, PINGPONG, PIN, SHARE)),
            (produce, (queries, keys, values, slots, q_desc, k_desc, v_desc, counter, size, band, extra, WGS, BK,
                       STAGES, SCHEDULE)),
        ], [4, 1], [REGISTERS, REGISTERS_PRODUCER])  # fmt: skip
