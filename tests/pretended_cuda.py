"""A libcuda that is not there: the real Triton compiles, binds and launches on it, and nothing runs.

`pretended_cuda.c` stands for libcuda.so.1. CPU tensors stand for a device's: `Device.of` calls the CPU an H100. All
between a call of relampago's and the driver's `cuLaunchKernelEx` is the real thing.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import os
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from relampago import op, warm
from relampago.problem import Device

H100 = Device("cuda", "sm90", 132, 227 * 1024)
INCLUDE = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
COMPILER = os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc")
SIZES = {"8": 1, "16": 2, "32": 4, "64": 8}
HEAD = struct.Struct("=256sQQ6Ii")


class Launch(NamedTuple):
    """What the driver was asked to launch."""

    name: str
    function: int
    stream: int
    grid: tuple[int, ...]
    threads: int
    shared: int
    attributes: int
    parameters: tuple[bytes, ...]


@functools.lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """The library, built and loaded: whoever asks for libcuda.so.1 from now on gets it."""
    folder = Path(tempfile.mkdtemp(prefix="pretended-cuda-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    source, built = Path(__file__).with_suffix(".c"), folder / "libcuda.so.1"
    subprocess.run(
        [str(COMPILER), "-O1", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", f"-I{INCLUDE}", source, "-o", built],
        check=True,
    )  # fmt: skip
    knobs.nvidia.libcuda_path = str(folder)
    loaded = ctypes.CDLL(str(built), mode=ctypes.RTLD_GLOBAL)
    loaded.pretended_written.restype = ctypes.c_void_p
    loaded.pretended_used.restype = ctypes.c_size_t
    return loaded


def _know(module: int, function: int, name: str, files: dict[str, Any], _: str) -> None:
    """Tell the library how large a kernel's parameters are; a hook of Triton's."""
    (text,) = [Path(path).read_text() for path in files.values() if str(path).endswith(".ptx")]
    head = text[text.index(".entry") :]
    head = head[head.index("(") : head.index(")")]
    found = re.findall(r"\.param[^,]*?\.[a-z](\d+) [^,\[]*(?:\[(\d+)\])?", head)
    sizes = [int(SIZES[bits]) * int(many or 1) for bits, many in found]
    array = (ctypes.c_int * len(sizes))(*sizes)
    library().pretended_parameters(ctypes.c_void_p(function), len(sizes), array)


class PretendedDriver:
    """Triton's own driver for NVIDIA, but for what it asks torch."""

    device, stream = 0, 0

    def __init__(self) -> None:
        from triton.backends.nvidia.driver import CudaLauncher, CudaUtils

        self.utils, self.launcher_cls = CudaUtils(), CudaLauncher

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return self.stream


@contextlib.contextmanager
def pretended() -> Iterator[PretendedDriver]:
    """Inside, CPU tensors lie on an H100 that runs nothing."""
    library()
    places = ((driver, "_active"), (Device, "of"), (op, "_check_cu_seqlens"), (warm, "host_reads"))
    before = [vars(owner)[name] for owner, name in places]
    made = PretendedDriver()
    driver.set_active(made)
    Device.of = staticmethod(lambda device: H100)
    op._check_cu_seqlens = lambda x: None  # as on a device: reading would wait
    warm.host_reads = lambda cu_seqlens: False
    knobs.runtime.kernel_load_end_hook.add(_know)
    try:
        yield made
    finally:
        knobs.runtime.kernel_load_end_hook.remove(_know)
        for (owner, name), value in zip(places, before, strict=True):
            setattr(owner, name, value)


@contextlib.contextmanager
def written() -> Iterator[list[Launch]]:
    """What is launched inside; the list is filled at the end."""
    found: list[Launch] = []
    cuda = library()
    cuda.pretended_write(1)
    yield found
    data = ctypes.string_at(cuda.pretended_written(), cuda.pretended_used())
    cuda.pretended_write(0)
    at = 0
    while at < len(data):
        name, function, stream, x, y, z, threads, shared, attributes, count = HEAD.unpack_from(
            data, at
        )
        at += HEAD.size
        parameters = []
        for _ in range(count):
            (size,) = struct.unpack_from("<i", data, at)
            parameters.append(data[at + 4 : at + 4 + size])
            at += 4 + size
        text, rest = name.rstrip(b"\0").decode(), (threads, shared, attributes, tuple(parameters))
        found.append(Launch(text, function, stream, (x, y, z), *rest))
