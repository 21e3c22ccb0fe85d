"""The Hopper kernel's own source, run on the CPU: its barriers, rings and turns over random schedules.

Nothing is transcribed. A pretended Gluon (numpy tiles, mbarriers, a copy engine, asynchronous products) takes Triton's
place while the backend's modules are imported, and the real host code launches the real kernel on it. Every warpgroup
is a thread; one runs at a time, and at each wait or asynchronous step chance picks the next. A load may come early or
late, a product may read its operands when it is issued or not before it is waited for, a store likewise. A protocol
fault shows as a deadlock or as a wrong result.
"""

from __future__ import annotations

import importlib
import random
import sys
import threading
import types
from typing import Any

import numpy as np
import pytest
import torch

from relampago.backends.reference import attend
from relampago.masks.rules import Band
from relampago.mods import register, softcap
from relampago.plan import Plan
from relampago.problem import Arrays

INF = float("inf")


# ---------------------------------------------------------------------------------------------- threads, one at a time


class Deadlock(AssertionError):
    """Nobody can go on."""


class Scheduler:
    """Runs functions as threads of which one runs at a time; at every `pause` chance picks the next that can go on."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.live: dict[int, tuple[threading.Semaphore, Any]] = {}  # gate, and what the thread waits for
        self.fault: BaseException | None = None
        self.done = threading.Semaphore(0)
        self.engine: list[Any] = []  # copies under way

    def run(self, functions: list[Any]) -> None:
        """All functions to their ends, and the copies that they started."""
        threads = []
        for function in functions:
            gate = threading.Semaphore(0)
            thread = threading.Thread(target=self._body, args=(function, gate), daemon=True)
            threads.append((thread, gate))
        for thread, gate in threads:
            thread.start()
            self.live[thread.ident] = (gate, None)
        self._next()
        self.done.acquire()
        if self.fault is not None:
            raise self.fault
        while self.engine:
            self.engine.pop()()

    def _body(self, function: Any, gate: threading.Semaphore) -> None:
        gate.acquire()
        try:
            if self.fault is None:
                function()
        except BaseException as fault:
            self.fault = self.fault or fault
        del self.live[threading.get_ident()]
        self._next()

    def _next(self) -> None:
        if not self.live:
            self.done.release()
            return
        while not (able := [gate for gate, wish in self.live.values() if wish is None or wish()]):
            if not self.engine or self.fault is not None:
                self.fault = self.fault or Deadlock("every thread waits")
                able = [gate for gate, _ in self.live.values()]
                break
            self._copy()
        self.chance.choice(able).release()

    def _copy(self) -> None:
        self.engine.pop(self.chance.randrange(len(self.engine)))()

    def pause(self, wish: Any = None) -> None:
        """Let someone else go on, perhaps; at least until the wish is true."""
        while self.engine and self.chance.random() < 0.5:
            self._copy()
        gate, _ = self.live[threading.get_ident()]
        self.live[threading.get_ident()] = (gate, wish)
        self._next()
        gate.acquire()
        if self.fault is not None:
            raise self.fault


# ---------------------------------------------------------------------------------------------- the pretended Gluon


class Machine:
    """What one launch shares."""

    scheduler: Scheduler
    here = threading.local()  # program, programs, warpgroup, products and stores under way, named barriers


M = Machine()


class Tensor:
    """A tile in registers."""

    def __init__(self, a: Any) -> None:
        self.a = np.asarray(a)
        self.shape = list(self.a.shape)
        self.dtype = "dt"
        self.type = types.SimpleNamespace(layout=None)

    def to(self, dtype: Any) -> Tensor:
        return Tensor(self.a)

    def __eq__(self, other: Any) -> Any:
        return Tensor(self.a == raw(other))

    __hash__ = None  # type: ignore[assignment]


def _operator(name: str) -> Any:
    def apply(self: Tensor, other: Any) -> Tensor:
        with np.errstate(all="ignore"):
            return Tensor(getattr(np.asarray(self.a), name)(raw(other)))

    return apply


for _name in "add radd sub rsub mul rmul truediv rtruediv lt le gt ge and or".split():
    setattr(Tensor, f"__{_name}__", _operator(f"__{_name}__"))


def raw(x: Any) -> Any:
    return x.a if isinstance(x, Tensor) else x


class Memory:
    """Shared memory, or a view of it."""

    def __init__(self, a: np.ndarray) -> None:
        self.a = a
        self.dtype = "dt"

    def index(self, i: int) -> Any:
        return self.a[i, 0] if self.a.dtype == object else Memory(self.a[i])

    def reshape(self, shape: list[int]) -> Memory:
        view = self.a.reshape(shape)
        assert np.shares_memory(view, self.a)
        return Memory(view)

    def permute(self, order: tuple[int, ...]) -> Memory:
        return Memory(self.a.transpose(order))

    def load(self, layout: Any) -> Tensor:
        return Tensor(self.a.copy())

    def store(self, value: Tensor) -> None:
        self.a[...] = value.a


class Barrier:
    """An mbarrier: arrivals and bytes that a phase waits for."""

    def __init__(self) -> None:
        self.count = self.pending = self.bytes = self.phase = 0

    def settle(self) -> None:
        assert self.pending >= 0
        if self.pending == 0 and self.bytes == 0:
            self.pending = self.count
            self.phase ^= 1


class NamedBarrier:
    """A hardware barrier of two warpgroups, of which one may arrive without waiting."""

    def __init__(self) -> None:
        self.arrived = self.phase = 0

    def arrive(self) -> int:
        mine = self.phase
        self.arrived += 1
        assert self.arrived <= 2
        if self.arrived == 2:
            self.arrived, self.phase = 0, self.phase + 1
        return mine


class Pending:
    """A product under way: it may read its operands now or when it is waited for."""

    def __init__(self, a: Any, b: Memory, acc: Any, use_acc: bool) -> None:
        self.operands = (a, b, acc, use_acc)
        self.value: Tensor | None = None
        if M.scheduler.chance.random() < 0.5:
            self.finish()

    def finish(self) -> None:
        if self.value is None:
            a, b, acc, use_acc = self.operands
            with np.errstate(all="ignore"):
                product = raw(a if isinstance(a, Tensor) else Tensor(a.a)) @ b.a
            self.value = Tensor(product + acc.a if use_acc else product)


class Pointer:
    """A place in a flat array."""

    def __init__(self, a: np.ndarray, at: Any = 0) -> None:
        self.a, self.at = a, at

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.a, self.at + raw(other))


class Descriptor:
    """TMA's view of a tensor: addresses wrap around at 64 bits."""

    def __init__(
        self, base: torch.Tensor, shape: Any, strides: Any, block_shape: Any, layout: Any
    ) -> None:
        size = base.element_size()
        assert base.data_ptr() % 16 == 0
        assert strides[-1] == 1
        assert all(s * size % 16 == 0 and 0 < s * size < 1 << 40 for s in strides[:-1])
        assert all(0 < n < 1 << 31 for n in shape)
        self.base, self.shape, self.strides = base, shape, strides
        self.block_shape, self.layout = block_shape, layout
        self.flat = base.as_strided((base.untyped_storage().size() // size,), (1,), 0)
        self.dtype = "dt"
        self.block_type = types.SimpleNamespace(nbytes=int(np.prod(block_shape)))

    def places(self, at: list[int]) -> tuple[Any, Any]:
        """(indices into the flat tensor, which of the box they are), of those elements that lie in the tensor."""
        size = self.base.element_size()
        inside = np.ones(self.block_shape, dtype=bool)
        place = np.full(self.block_shape, self.base.storage_offset() * size, dtype=np.uint64)
        for axis, (o, n) in enumerate(zip(at, self.block_shape, strict=True)):
            index = (o + np.arange(n)).reshape([n if a == axis else 1 for a in range(len(at))])
            inside &= (index >= 0) & (index < self.shape[axis])
            place += index.astype(np.uint64) * np.uint64(self.strides[axis] * size)  # wraps
        place = place[inside].astype(np.int64) // size
        assert place.size == 0 or place.max() < self.flat.numel()
        return torch.from_numpy(place), inside


def make_language() -> types.ModuleType:
    gl = types.ModuleType("language")
    gl.constexpr = lambda x: x
    gl.tensor = gl.shared_memory_descriptor = object
    for name in ("float32", "int32", "int64", "bfloat16", "float16"):
        setattr(gl, name, name)
    for name in (
        "BlockedLayout", "SwizzledSharedLayout", "NVMMADistributedLayout", "DotOperandLayout", "SliceLayout",
    ):  # fmt: skip
        setattr(gl, name, lambda *a, **k: None)
    gl.NVMMASharedLayout = types.SimpleNamespace(get_default_for=lambda block, dtype: None)
    gl.num_warps = lambda: 4
    gl.static_range = range
    gl.program_id = lambda axis: M.here.program
    gl.num_programs = lambda axis: M.here.programs
    gl.cast = lambda x, dtype: x
    gl.zeros = lambda shape, dtype, layout: Tensor(np.zeros(shape))
    gl.full = lambda shape, value, dtype, layout: Tensor(np.full(shape, value))
    gl.arange = lambda start, end, layout: Tensor(np.arange(start, end))
    gl.expand_dims = lambda x, axis: Tensor(np.expand_dims(x.a, axis))
    gl.reshape = lambda x, shape: Tensor(x.a.reshape(shape))
    gl.convert_layout = lambda x, layout, assert_trivial=False: x
    gl.where = lambda c, x, y: Tensor(np.where(raw(c), raw(x), raw(y)))
    gl.maximum = lambda x, y: Tensor(np.fmax(raw(x), raw(y)))
    gl.max = lambda x, axis: _scalar(np.fmax.reduce(x.a, axis=axis))
    gl.sum = lambda x, axis: Tensor(x.a.sum(axis))
    gl.log2 = lambda x: Tensor(_quiet(np.log2, x.a))
    gl.allocate_shared_memory = _allocate
    gl.inline_asm_elementwise = _assembly
    gl.atomic_add = _atomic_add
    gl.load = _load
    gl.store = _store
    gl.warp_specialize = _specialize
    return gl


def _scalar(a: Any) -> Any:
    return int(a) if np.ndim(a) == 0 else Tensor(a)


def _quiet(f: Any, a: Any) -> Any:
    with np.errstate(all="ignore"):
        return f(a)


def _allocate(dtype: str, shape: list[int], layout: Any) -> Memory:
    if dtype == "int64":
        bars = np.empty(shape, dtype=object)
        for i in np.ndindex(*shape):
            bars[i] = Barrier()
        return Memory(bars)
    return Memory(np.full(shape, np.nan) if dtype == "dt" else np.zeros(shape, dtype=np.int64))


def _assembly(text: str, constraints: str, args: list[Any], **_: Any) -> Any:
    if text.startswith("ex2"):
        return Tensor(_quiet(np.exp2, args[0].a))
    if text.startswith("rcp"):
        return Tensor(_quiet(np.reciprocal, args[0].a))
    if text.startswith("bar."):
        barrier = M.here.named.setdefault(args[0], NamedBarrier())
        phase = barrier.arrive()
        if text.startswith("bar.sync"):
            M.scheduler.pause(lambda: barrier.phase > phase)
        return None
    assert "st.volatile" in text
    return args[0]


def _load(pointer: Pointer) -> Any:
    value = pointer.a[pointer.at]
    return np.float64(value) if value.dtype.kind == "f" else int(value)


def _atomic_add(pointer: Pointer, value: int, sem: str) -> int:
    M.scheduler.pause()
    old = int(pointer.a[0])
    pointer.a[0] += value
    return old


def _store(pointer: Pointer, value: Any, mask: Any = True) -> None:
    at = np.atleast_1d(pointer.at)
    keep = np.broadcast_to(raw(mask), at.shape)
    pointer.a[at[keep]] = np.broadcast_to(raw(value), at.shape)[keep]


def _specialize(partitions: list[Any], warps: list[int], registers: list[int]) -> None:
    """Notes the partitions: the launch runs those of all programs together."""
    named: dict[int, NamedBarrier] = {}
    program, programs = M.here.program, M.here.programs

    def body(function: Any, args: tuple[Any, ...]) -> Any:
        def run() -> None:
            M.here.program, M.here.programs, M.here.named = program, programs, named
            M.here.products, M.here.stores = [], []
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
        assert deps[0].value is not None
        return deps[0].value

    hopper.warpgroup_mma, hopper.warpgroup_mma_wait = mma, mma_wait

    def init(bar: Barrier, count: int) -> None:
        bar.count = bar.pending = count

    def arrive(bar: Barrier, count: int = 1) -> None:
        M.scheduler.pause()
        bar.pending -= count
        bar.settle()

    def expect(bar: Barrier, nbytes: int) -> None:
        bar.bytes += nbytes
        bar.pending -= 1
        bar.settle()

    def wait(bar: Barrier, parity: int) -> None:
        assert parity in (0, 1)
        M.scheduler.pause(lambda: bar.phase != parity)

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


@pytest.fixture(scope="module")
def launcher():
    """relampago.backends.gluon.launch, on the pretended Gluon."""
    gluon = types.ModuleType("gluon")
    gluon.jit = lambda fn=None, **_: fn if fn is not None else (lambda f: f)
    gluon.constexpr_function = gluon.aggregate = lambda x: x
    gluon.language = make_language()
    hopper = types.ModuleType("hopper")
    hopper.TensorDescriptor = Descriptor
    root = "triton.experimental.gluon"
    pretended = {
        "triton": types.ModuleType("triton"),
        "triton.experimental": types.SimpleNamespace(gluon=gluon),
        root: gluon,
        f"{root}.language": gluon.language,
        f"{root}.language.nvidia": types.ModuleType("nvidia"),
        f"{root}.language.nvidia.hopper": make_hopper(),
        f"{root}.nvidia": types.ModuleType("nvidia"),
        f"{root}.nvidia.hopper": hopper,
    }
    ours = [f"relampago.backends.gluon.{name}" for name in ("versions", "channel", "sm90_forward", "launch")]
    before = {name: sys.modules.pop(name, None) for name in (*pretended, *ours)}
    sys.modules.update(pretended)
    try:
        yield importlib.import_module(ours[-1])
    finally:
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module


# ---------------------------------------------------------------------------------------------- tests


def run(launcher: Any, x: Arrays, plan: Plan, seed: int, multiprocessors: int = 3) -> Any:
    """The forward by the kernel's source, all programs of a grid at once."""
    M.scheduler = Scheduler(seed)

    def launch(kernel: Any, grid: int, plan: Plan, *args: Any) -> None:
        def as_pointer(t: Any) -> Any:
            if isinstance(t, tuple):
                return type(t)(*map(as_pointer, t))
            return Pointer(t.view(-1).numpy()) if isinstance(t, torch.Tensor) else t

        M.here.threads, M.here.named_all, M.here.programs = [], [], grid
        for program in range(grid):
            M.here.program = program
            kernel(*map(as_pointer, args))
        M.scheduler.run(M.here.threads)
        left = [b.arrived for named in M.here.named_all for b in named.values()]
        assert not any(left), "a named barrier is left half full"

    launcher.launch = launch
    out, lse = launcher.forward(plan, x, multiprocessors)
    counters = launcher._COUNTERS.get(0)
    assert counters is None or not counters.cells.any(), "the counter was not set back"
    return out, lse


def arrays(case: dict[str, Any]) -> Arrays:
    get = case.get
    lq, lk, heads, kv, dim = get("lq", 64), get("lk", 64), get("h", 2), get("g", 2), get("d", 64)
    g = torch.Generator().manual_seed(get("seed", 0))
    shapes = ((lq, heads, dim), (lk, kv, dim), (lk, kv, get("dv", dim)))
    q, k, v = (torch.randn(get("b", 1), *s, generator=g).bfloat16() for s in shapes)
    band = Band(lk - lq, get("left"), 0 if get("causal") else get("right"), get("prefix"))
    more = {"sinks": torch.randn(heads, generator=g)} if get("sinks") else {}
    if get("cap"):
        more["mods"] = (register(softcap(get("cap"))),)
    return Arrays(
        q=q, k=k, v=v, scale=get("scale", dim**-0.5), band=band, len_q=lq, len_k=lk, **more
    )


def packed(
    lens_q: list[int], lens_k: list[int], band: Band, tail: int = 5, dim: int = 64, **more: Any
) -> Arrays:
    """Packed sequences, 4 heads on 2, with rows of no sequence at the end, which hold NaN."""
    g = torch.Generator().manual_seed(1)
    total_q, total_k = sum(lens_q) + tail, sum(lens_k) + tail
    q, k, v = (torch.randn(n, h, dim, generator=g).bfloat16() for n, h in ((total_q, 4), (total_k, 2), (total_k, 2)))
    for t, n in ((q, sum(lens_q)), (k, sum(lens_k)), (v, sum(lens_k))):
        t[n:] = torch.nan
    cu_q, cu_k = (torch.tensor([0, *n]).cumsum(0).int() for n in (lens_q, lens_k))
    return Arrays(
        q=q, k=k, v=v, scale=dim**-0.5, band=band, len_q=max(lens_q), len_k=max(lens_k),
        cu_q=cu_q, cu_k=cu_k, **more,
    )  # fmt: skip


def compare(x: Arrays, got: Any) -> None:
    out, lse = got
    want, want_lse = attend(x, torch.float32)
    if x.cu_q is not None:
        rows = int(x.cu_q[-1])
        assert not out[rows:].any()
        assert (lse[:, rows:] == -INF).all()
    torch.testing.assert_close(out.float(), want, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(lse, want_lse, atol=1e-4, rtol=1e-4)


CASES = {
    "full": {"lq": 320, "lk": 320, "b": 2},
    "causal": {"lq": 320, "lk": 320, "causal": True},
    "causal-one": {"lq": 1, "lk": 77, "causal": True},
    "causal-unaligned": {"lq": 200, "lk": 333, "causal": True, "h": 4, "g": 2},
    "causal-blind-rows": {"lq": 333, "lk": 100, "causal": True},
    "ragged": {"lq": 77, "lk": 77, "b": 3},
    "window": {"lq": 300, "lk": 400, "left": 50, "right": 20},
    "window-left": {"lq": 300, "lk": 300, "left": 70},
    "window-blind-rows": {"lq": 400, "lk": 100, "left": 10, "right": 0},
    "prefix": {"lq": 300, "lk": 300, "causal": True, "prefix": 150},
    "dims": {"lq": 100, "lk": 100, "d": 40, "dv": 72},
    "odd-dim": {"lq": 70, "lk": 70, "d": 33},
    "negative-scale": {"lq": 70, "lk": 70, "scale": -0.3, "causal": True},
    "no-scale": {"lq": 70, "lk": 70, "scale": 0.0},
    "sinks": {"lq": 100, "lk": 150, "sinks": True},
    "sinks-blind-rows": {"lq": 150, "lk": 100, "sinks": True, "causal": True},
    "softcap": {"lq": 100, "lk": 150, "cap": 2.0, "causal": True, "scale": 1.0},
}
PLANS = {
    f"{('grid', 'static', 'dynamic')[schedule]}-{rows}x{keys}-{stages}-{'turns' if turns else 'free'}": Plan(
        block_q=rows, block_k=keys, warps=4, stages=stages, schedule=schedule, pingpong=turns, pin=turns
    )
    for schedule in (0, 1, 2)
    for rows, keys, stages in ((128, 128, 2), (192, 64, 1), (192, 128, 4))
    for turns in (0, 1)
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_kernel_source_on_random_schedules(launcher, case, plan) -> None:
    x = arrays(case)
    for seed in range(2):
        compare(x, run(launcher, x, plan, seed))


@pytest.mark.parametrize("turns", [0, 1])
@pytest.mark.parametrize("schedule", [0, 1, 2])
def test_many_tiles_on_few_multiprocessors(launcher, schedule, turns) -> None:
    x = arrays({"lq": 260, "lk": 260, "b": 3, "h": 4, "g": 1, "causal": True})
    plan = Plan(block_q=128, block_k=64, warps=4, stages=2, schedule=schedule, pingpong=turns)
    for seed in range(3):
        compare(x, run(launcher, x, plan, seed, multiprocessors=5))


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize(
    "band",
    [Band(), Band(0, None, 0), Band(0, 30, 0), Band(0, None, 0, 50), Band(5, None, 3)],
    ids=["full", "causal", "window", "prefix", "shifted"],
)
def test_packed(launcher, plan, band) -> None:
    x = packed([3, 130, 0, 200, 1], [3, 130, 4, 0, 260], band)
    compare(x, run(launcher, x, plan, 0))


def test_packed_with_sinks_and_softcap(launcher) -> None:
    mods = (register(softcap(2.0)),)
    x = packed([30, 130, 0], [60, 13, 4], Band(0, None, 0), sinks=torch.randn(4), mods=mods)
    compare(x, run(launcher, x, PLANS["dynamic-128x128-2-turns"], 0))


def test_packed_cu_seqlens_beyond_the_tensor(launcher) -> None:
    x = packed([30, 130, 40], [60, 13, 40], Band(), tail=0)
    got = run(launcher, x, PLANS["dynamic-128x128-2-turns"], 0)
    x.cu_q[-1], x.cu_k[-1] = 1000, 1000
    again = run(launcher, x, PLANS["dynamic-128x128-2-turns"], 0)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))


@pytest.mark.parametrize("shared", [True, False])
def test_result_where_the_queries_were(launcher, monkeypatch, shared) -> None:
    monkeypatch.setattr(launcher, "shares", lambda *_: shared)
    x = arrays({"lq": 260, "lk": 260, "b": 2, "causal": True})
    plan = Plan(block_q=128, block_k=64, warps=4, stages=2, schedule=2, pingpong=1)
    for seed in range(4):
        compare(x, run(launcher, x, plan, seed, multiprocessors=2))


def test_infinite_scores_of_a_row(launcher) -> None:
    x = arrays({"lq": 70, "lk": 140, "causal": True})
    x.q[0, 3] = INF
    x.q[0, 4] = 0
    x.k[0, :80, 0, 0] = -INF
    plan = Plan(block_q=128, block_k=64, warps=4, stages=2, schedule=2)
    out, _ = run(launcher, x, plan, 0)
    want, _ = attend(x, torch.float32)
    torch.testing.assert_close(out.float(), want, atol=1e-2, rtol=1e-2, equal_nan=True)


def test_a_missing_release_is_a_deadlock(launcher, monkeypatch) -> None:
    kernel = sys.modules["relampago.backends.gluon.sm90_forward"]
    monkeypatch.setattr(kernel, "release", lambda ring, stage: None)
    with pytest.raises(Deadlock):
        run(launcher, arrays({"lq": 64, "lk": 512}), PLANS["dynamic-128x128-2-free"], 0)


def test_a_release_too_early_is_a_wrong_result(launcher, monkeypatch) -> None:
    kernel = sys.modules["relampago.backends.gluon.sm90_forward"]
    real = kernel.receive

    def hasty(ring: Any, stage: int, phase: int, rows: int, dim: int) -> Any:
        view = real(ring, stage, phase, rows, dim)
        if rows != 64:
            kernel.release(ring, stage)
        return view

    monkeypatch.setattr(kernel, "receive", hasty)
    x = arrays({"lq": 128, "lk": 2048})
    with pytest.raises(AssertionError):
        compare(x, run(launcher, x, PLANS["dynamic-128x128-2-free"], 0))
