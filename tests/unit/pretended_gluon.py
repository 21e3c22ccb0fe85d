"""A Gluon that is not there: its language, on numpy tiles of `pretended_machine`. Kernels run on it on a CPU."""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from unit.pretended_machine import (
    Barrier,
    Deadlock,
    Descriptor,
    M,
    Memory,
    NamedBarrier,
    Pending,
    Pointer,
    Scheduler,
    Tensor,
    Twos,
    raw,
)

from relampago.backends.gluon.counter import COUNTERS
from relampago.plan import Plan
from relampago.problem import Arrays

# The forward's modules, to be imported anew with the pretended Gluon, an importer after what it imports.
FORWARD = (
    "versions", "named", "channel", "tiles", "held", "softmax", "producer", "sm90_step", "sm90_results", "sm90_chain",
    "sm90_forward",
)  # fmt: skip


def make_language() -> types.ModuleType:
    gl = types.ModuleType("language")
    gl.constexpr = lambda x: x
    gl.tensor, gl.shared_memory_descriptor = object, Memory
    for name in (
        "float32",
        "int1",
        "int8",
        "int16",
        "int32",
        "int64",
        "bfloat16",
        "float16",
        "float8e4nv",
    ):
        setattr(gl, name, name)
    for name in (
        "BlockedLayout", "SwizzledSharedLayout", "NVMMADistributedLayout", "DotOperandLayout", "SliceLayout",
        "DistributedLinearLayout",
    ):  # fmt: skip
        setattr(gl, name, lambda *a, **k: None)
    gl.NVMMASharedLayout = lambda *a, **k: None
    gl.NVMMASharedLayout.get_default_for = lambda block, dtype: None
    gl.num_warps = lambda: 4
    gl.static_range = range
    gl.static_assert = _must
    gl.program_id = lambda axis: M.here.program
    gl.num_programs = lambda axis: M.here.programs
    gl.cast = lambda x, dtype: x
    gl.zeros = lambda shape, dtype, layout: Tensor(np.zeros(shape))
    gl.zeros_like = lambda x: Tensor(np.zeros_like(x.a))
    gl.to_tensor = lambda x: x
    gl.full = lambda shape, value, dtype, layout: Tensor(np.full(shape, value))
    gl.arange = lambda start, end, layout: Tensor(np.arange(start, end))
    gl.expand_dims = lambda x, axis: Tensor(np.expand_dims(x.a, axis))
    gl.reshape = lambda x, shape: x.map(lambda a: a.reshape(shape))
    gl.permute = lambda x, order: x.map(lambda a: a.transpose(order))
    gl.split = lambda x: (Tensor(x.a[..., 0]), Tensor(x.a[..., 1]))
    gl.join = lambda x, y: Tensor(np.stack([x.a, y.a], axis=-1))
    gl.convert_layout = lambda x, layout, assert_trivial=False: x
    gl.where = lambda c, x, y: Tensor(np.where(raw(c), raw(x), raw(y)))
    gl.maximum, gl.minimum = _most, _least
    gl.max = lambda x, axis: _scalar(np.fmax.reduce(x.a, axis=axis))
    gl.min = lambda x, axis: _scalar(np.fmin.reduce(x.a, axis=axis))
    gl.sum = lambda x, axis: Tensor(x.a.sum(axis))
    gl.log2 = lambda x: Tensor(_quiet(np.log2, x.a))
    gl.allocate_shared_memory = _allocate
    gl.inline_asm_elementwise = _assembly
    gl.atomic_add = _atomic_add
    gl.atomic_max = _atomic_max
    gl.load = _load
    gl.store = _store
    gl.warp_specialize = _specialize
    return gl


def _must(true: bool, why: str) -> None:
    assert true, why


def _most(x: Any, y: Any) -> Any:
    """Of numbers, or of each place of a tile: Python's own would ask whether a tile is true."""
    return Tensor(np.fmax(raw(x), raw(y))) if _tiles(x, y) else max(x, y)


def _least(x: Any, y: Any) -> Any:
    return Tensor(np.fmin(raw(x), raw(y))) if _tiles(x, y) else min(x, y)


def _tiles(*these: Any) -> bool:
    return any(isinstance(x, Tensor) for x in these)


def _jit(fn: Any = None, **_: Any) -> Any:
    """fn, whose `max` and `min` are the language's; a function from outside of the kernels stays as it is there."""
    if fn is None:
        return _jit
    names = fn.__globals__ if "gluon" in fn.__globals__ else dict(fn.__globals__)
    names |= {"max": _most, "min": _least}
    return types.FunctionType(fn.__code__, names, fn.__name__, fn.__defaults__, fn.__closure__)


def _scalar(a: Any) -> Any:
    return a.item() if np.ndim(a) == 0 else Tensor(a)


def _quiet(f: Any, a: Any) -> Any:
    with np.errstate(all="ignore"):
        return f(a)


def _allocate(dtype: str, shape: list[int], layout: Any) -> Memory:
    if dtype == "int64":
        bars = np.empty(shape, dtype=object)
        for i in np.ndindex(*shape):
            bars[i] = Barrier()
        return Memory(bars)
    return Memory(np.zeros(shape, dtype=np.int64) if dtype == "int32" else np.full(shape, np.nan))


def _assembly(text: str, constraints: str, args: list[Any], **_: Any) -> Any:
    if text.startswith("ex2"):
        return Tensor(_quiet(np.exp2, args[0].a))
    if text.startswith("rcp"):
        return Tensor(_quiet(np.reciprocal, args[0].a))
    if "e4m3x2" in text:
        return _words(args)
    if text.startswith("mov.b32 $0"):
        return args[0] if args[0].a.dtype.kind == "f" else _bytes_of(args[0])
    if text.startswith("prmt"):
        return _permuted(text, args[0])
    if "vote.sync" in text:
        return args[0] * args[1]
    if text.startswith("bar."):
        most = -(-int(re.search(r", (\d+);", text)[1]) // 128)  # the producer is a warp
        barrier = M.here.named.setdefault(args[0], NamedBarrier(most))
        assert barrier.most == most
        phase = barrier.arrive()
        if text.startswith("bar.sync"):
            M.scheduler.pause(lambda: barrier.phase > phase)
        return None
    assert "st.volatile" in text
    return args[0]


def _permuted(text: str, x: Twos) -> Twos:
    """Byte permutations of two registers, which are four 16-bit integers: the last two dimensions."""
    four = [part.reshape(*part.shape[:-2], 4) for part in x.parts]
    octet = [four[n % 2][..., n // 2] for n in range(8)]
    picked = [octet[int(n)] for word in re.findall("0x([0-7]{4})", text) for n in reversed(word)]
    return Twos([np.stack(picked[i::2], -1).reshape(x.parts[0].shape) for i in (0, 1)])


def _words(four: list[Any]) -> Any:
    """Four numbers in e4m3 as the bytes of an int32, the first lowest."""
    eights = torch.from_numpy(np.stack([x.a for x in four], axis=-1)).clamp(-448, 448)
    return Tensor(eights.to(torch.float8_e4m3fn).view(torch.int32)[..., 0].numpy())


def _bytes_of(words: Any) -> Any:
    """Of four equal words the first's lowest byte, the second's next one, ..., as numbers."""
    one = torch.from_numpy(words.a[..., ::4].astype(np.int32))
    assert (words.a == np.repeat(one.numpy(), 4, axis=-1)).all()
    return Tensor(one.contiguous().view(torch.float8_e4m3fn).double().numpy())


def _load(pointer: Pointer, mask: Any = None, other: float | None = None) -> Any:
    if np.ndim(pointer.at) == 0:
        value = pointer.a[pointer.at].item()
        return value if mask is None or mask else other
    keep = np.broadcast_to(True if mask is None else raw(mask), pointer.at.shape)
    assert other is not None or keep.all()
    found = np.full(pointer.at.shape, 0 if other is None else other, dtype=np.float64)
    found[keep] = pointer.a[torch.from_numpy(pointer.at[keep])].double().numpy()
    return Tensor(found if pointer.a.dtype.is_floating_point else found.astype(np.int64))


def _atomic_add(pointer: Pointer, value: Any, sem: str, mask: Any = True) -> Any:
    M.scheduler.pause()
    if isinstance(value, Tensor):
        keep = np.broadcast_to(raw(mask), pointer.at.shape)
        at = torch.from_numpy(pointer.at[keep])
        pointer.a.index_add_(0, at, torch.from_numpy(value.a[keep]).to(pointer.a.dtype))
        return None
    old = int(pointer.a[pointer.at])
    if value == 0:  # a question, which is asked again and again until the answer is another one
        asked = pointer.a.data_ptr(), pointer.at, old
        if M.here.asked == asked:
            M.scheduler.pause(lambda: int(pointer.a[pointer.at]) != old)
            old = int(pointer.a[pointer.at])
        M.here.asked = pointer.a.data_ptr(), pointer.at, old
    pointer.a[pointer.at] += value
    return old


def _atomic_max(pointer: Pointer, value: Any, sem: str) -> None:
    M.scheduler.pause()
    for at, x in np.nditer([pointer.at, raw(value)]):
        pointer.a[int(at)] = max(pointer.a[int(at)], torch.tensor(float(x)))


def _store(pointer: Pointer, value: Any, mask: Any = True) -> None:
    at = np.atleast_1d(pointer.at)
    keep = np.broadcast_to(raw(mask), at.shape)
    values = np.broadcast_to(raw(value), at.shape)[keep]
    pointer.a[torch.from_numpy(at[keep])] = torch.from_numpy(values).to(pointer.a.dtype)


def _specialize(partitions: list[Any], warps: list[int], registers: list[int]) -> None:
    """Notes the partitions: the launch runs those of all programs together."""
    named: dict[int, NamedBarrier] = {}
    program, programs = M.here.program, M.here.programs

    def body(function: Any, args: tuple[Any, ...]) -> Any:
        def run() -> None:
            M.here.program, M.here.programs, M.here.named = program, programs, named
            M.here.products, M.here.stores, M.here.asked = [], [], None
            function(*args)
            assert not M.here.products
            assert all(store.done for store in M.here.stores)

        return run

    M.here.threads += [body(function, args) for function, args in partitions]
    M.here.named_all.append(named)


def make_hopper() -> types.ModuleType:
    hopper = types.ModuleType("hopper")
    hopper.fence_async_shared = lambda: None

    def mma(a: Any, b: Memory, acc: Any, use_acc: bool = True, is_async: bool = False) -> Pending:
        M.scheduler.pause()
        pending = Pending(a, b, acc, use_acc)
        M.here.products.append(pending)
        return pending

    def mma_wait(num_outstanding: int, deps: tuple[Any, ...]) -> Tensor:
        M.scheduler.pause()
        while len(M.here.products) > num_outstanding:
            M.here.products.pop(0).finish()
        values = tuple(dep.value for dep in deps)
        assert all(value is not None for value in values)
        return values[0] if len(values) == 1 else values

    hopper.warpgroup_mma, hopper.warpgroup_mma_wait = mma, mma_wait

    def init(bar: Barrier, count: int) -> None:
        bar.count = bar.pending = count

    def arrive(bar: Barrier, count: int = 1, pred: bool = True) -> None:
        if not pred:
            return
        M.scheduler.pause()
        bar.pending -= count
        bar.settle()

    def expect(bar: Barrier, nbytes: int) -> None:
        bar.bytes += nbytes
        bar.pending -= 1
        bar.settle()

    def wait(bar: Barrier, parity: int, pred: bool = True) -> None:
        assert parity in (0, 1)
        M.scheduler.pause(lambda: not pred or bar.phase != parity)

    hopper.mbarrier = types.SimpleNamespace(
        init=init, arrive=arrive, expect=expect, wait=wait, MBarrierLayout=lambda: None
    )

    def load(desc: Descriptor, at: list[int], bar: Barrier, tile: Memory) -> None:
        def copy() -> None:
            place, inside = desc.places(at)
            tile.a[...] = 0
            tile.a[inside] = desc.flat[place].double().numpy()
            bar.bytes -= desc.block_type.nbytes
            bar.settle()

        tile.a[...] = np.nan  # nobody may read it from here on
        M.scheduler.engine.append(copy)

    def store(desc: Descriptor, at: list[int], tile: Memory) -> None:
        assert min(at) >= 0, f"illegal instruction: TMA stores to no negative coordinate, got {at}"

        def copy() -> None:
            place, inside = desc.places(at)
            desc.flat[place] = torch.from_numpy(tile.a[inside]).to(desc.flat.dtype)
            copy.done = True

        copy.done = False
        M.here.stores.append(copy)
        M.scheduler.engine.append(copy)

    def store_wait(pendings: int) -> None:
        stores = M.here.stores  # of this thread: another one may look
        M.scheduler.pause(lambda: all(store.done for store in stores))

    hopper.tma = types.SimpleNamespace(async_load=load, async_store=store, store_wait=store_wait)
    return hopper


def pretended() -> dict[str, Any]:
    """The modules that the backend imports from Triton."""
    gluon = types.ModuleType("gluon")
    gluon.jit = _jit
    gluon.constexpr_function = gluon.aggregate = lambda x: x
    gluon.language = make_language()
    hopper = types.ModuleType("hopper")
    hopper.TensorDescriptor = Descriptor
    root = "triton.experimental.gluon"
    return {
        "triton": types.ModuleType("triton"),
        "triton.experimental": types.SimpleNamespace(gluon=gluon),
        root: gluon,
        f"{root}.language": gluon.language,
        f"{root}.language.nvidia": types.ModuleType("nvidia"),
        f"{root}.language.nvidia.hopper": make_hopper(),
        f"{root}.nvidia": types.ModuleType("nvidia"),
        f"{root}.nvidia.hopper": hopper,
    }


@contextlib.contextmanager
def imported_with(modules: dict[str, Any], *names: str) -> Iterator[list[Any]]:
    """The backend's modules of these names, imported anew while others have the places of Triton's.

    Memory is poisoned meanwhile: new tensors are NaN, or the largest integer.
    """
    ours = [f"relampago.backends.gluon.{name}" for name in names]
    torch.use_deterministic_algorithms(True)  # before: it imports what needs Triton
    before = {name: sys.modules.pop(name, None) for name in (*modules, *ours)}
    sys.modules.update(modules)
    try:
        yield [importlib.import_module(name) for name in ours]
    finally:
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module
        torch.use_deterministic_algorithms(False)


def launch(kernel: Any, grid: int, plan: Plan, *args: Any) -> None:
    """A kernel's source, all programs of a grid at once."""

    def as_pointer(t: Any) -> Any:
        if isinstance(t, tuple):
            return type(t)(*map(as_pointer, t))
        return Pointer.to(t) if isinstance(t, torch.Tensor) else t

    M.here.threads, M.here.named_all, M.here.programs = [], [], grid
    for program in range(grid):
        M.here.program = program
        kernel(*map(as_pointer, args))
    if M.here.threads:
        M.scheduler.run(M.here.threads)
    left = [len(b.arrived) for named in M.here.named_all for b in named.values()]
    assert not any(left), "a named barrier is left half full"


def run(launcher: Any, x: Arrays, plan: Plan, seed: int, multiprocessors: int = 3) -> Any:
    """The forward by the kernel's source."""
    M.scheduler = Scheduler(seed)
    launcher.launch = launch
    try:
        out, lse = launcher.forward(plan, x, multiprocessors)
    except Deadlock:  # which a test may ask for: the next one begins at 0 all the same
        if counters := COUNTERS.get(0):
            counters.cells.zero_()
        raise
    counters = COUNTERS.get(0)
    assert counters is None or not counters.cells.any(), "the counter was not set back"
    return out, lse


def run_backward(launcher: Any, seed: int, *args: Any) -> Any:
    """The backward by its kernels' source."""
    return run_backward_part(launcher, "backward", seed, *args)


def run_backward_part(launcher: Any, name: str, seed: int, *args: Any) -> Any:
    """Likewise another function of the launcher."""
    M.scheduler = Scheduler(seed)
    launcher.launch = launch
    return getattr(launcher, name)(*args)
