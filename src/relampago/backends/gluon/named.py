"""Named barriers: warps of a block of threads meet at a number, in inline assembly.

An mbarrier does the same, and tells of copies too, but the compiler knows it: Triton takes an arrival for a write to
all of shared memory, and lets the warpgroup meet before each and once after. A named barrier is an instruction of each
warp that comes, and no address. A block of threads has sixteen; Triton's warp specialisation takes the first of them,
one for each warpgroup and one for all.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

TURNS = gl.constexpr(5)  # three that order the warpgroups
MEETINGS = gl.constexpr(8)  # from here on: the backward's two meet for a buffer
PAIR = gl.constexpr(256)  # threads of two warpgroups


@gluon.constexpr_function
def assembly(kind, threads):
    """An instruction that needs a result."""
    return f"bar.{kind} $1, {threads}; mov.b32 $0, 0;"


@gluon.jit
def sync(number, THREADS: gl.constexpr):
    """Arrive, and wait until THREADS have."""
    gl.inline_asm_elementwise(
        assembly("sync", THREADS), "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def arrive(number, THREADS: gl.constexpr):
    """Arrive, as one of THREADS."""
    gl.inline_asm_elementwise(
        assembly("arrive", THREADS), "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1
    )
