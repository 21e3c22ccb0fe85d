"""Compile what a call would launch, for a GPU that is not there: the real launchers on a pretended driver.

Whatever is compiled so multiplies strides in 64 bits, see `offsets.py`; Gluon's kernels have no such stage.
"""

from __future__ import annotations

import contextlib
import functools
import io
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from crosscompile.offsets import narrow
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime.driver import driver

TARGETS = {
    **{f"sm{n}": GPUTarget("cuda", n, 32) for n in (80, 89, 90, 100, 120)},
    **{name: GPUTarget("hip", name, 64) for name in ("gfx942", "gfx950")},
}
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
SAID: dict[str, str] = {}  # what ptxas said as Triton ran it in this process, by PTX


class Pretended:
    """A driver that has one device per architecture and cannot launch."""

    def __init__(self, arch: str) -> None:
        self.arch = arch

    def get_current_target(self) -> GPUTarget:
        return TARGETS[self.arch]

    def get_current_device(self) -> str:
        return self.arch

    def get_current_stream(self, device: Any) -> int:
        return 0


@dataclass(frozen=True)
class Built:
    """One compiled kernel."""

    name: str
    shared: int
    registers: int
    spills: int  # bytes (NVIDIA) or registers (AMD)
    asm: dict[str, Any]


class Recorder:
    """Stands for `forward.launch`: compiles, records, launches nothing."""

    def __init__(self, arch: str, only: str | None = None) -> None:
        self.arch, self.only = arch, only
        self.built: list[Built] = []

    def __call__(self, kernel: Any, grid: int, plan: Any, *args: Any, fusion: bool = True) -> None:
        if self.only not in (None, kernel.fn.__name__):
            return
        before = driver._active
        driver.set_active(Pretended(self.arch))
        try:
            with knobs.nvidia.scope(), contextlib.redirect_stdout(io.StringIO()) as log:
                knobs.nvidia.dump_ptxas_log = True
                compiled = kernel.run(
                    *args, grid=(grid,), warmup=True, num_warps=plan.warps, num_stages=plan.stages,
                    enable_fp_fusion=fusion,
                )  # fmt: skip
        finally:
            driver._active = before
        compiled = compiled.result() if hasattr(compiled, "result") else compiled
        if "Compiling entry function" in log.getvalue():
            SAID[compiled.asm["ptx"]] = log.getvalue()
        narrowed = narrow(compiled.asm.get("ttir", ""))
        assert not narrowed, f"{kernel.fn.__name__}: {narrowed}"
        registers, spills = usage(self.arch, compiled.asm)
        name = kernel.fn.__name__
        self.built.append(Built(name, compiled.metadata.shared, registers, spills, compiled.asm))


def usage(arch: str, asm: dict[str, Any]) -> tuple[int, int]:
    """Registers of a thread, and what it spills."""
    if arch.startswith("gfx"):
        text = asm["amdgcn"]
        found = [re.search(rf"\.{n}:\s*(\d+)", text) for n in ("vgpr_count", "vgpr_spill_count")]
        return tuple(int(m[1]) if m else 0 for m in found)
    text = asked(asm, "cuobjdump", "--dump-resource-usage")
    found = [int(re.search(rf"{n}:(\d+)", text)[1]) for n in ("REG", "STACK", "LOCAL")]
    return found[0], found[1] + found[2]


@functools.lru_cache(maxsize=8)  # several checks of a test ask about one kernel
def _asked(cubin: bytes, tool: str, *options: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [TOOLS / tool, *options, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def asked(asm: dict[str, Any], tool: str, *options: str) -> str:
    """What one of NVIDIA's tools says of a kernel."""
    return _asked(asm["cubin"], tool, *options)


def disassembled(built: Built) -> list[str]:
    """SASS, an instruction or a label a line."""
    text = asked(built.asm, "nvdisasm", "-c")
    found = re.findall(r"^\s*(\.L_x_\d+):|^\s*/\*[0-9a-f]{4,}\*/\s+(.*?);", text, re.MULTILINE)
    return [label or instruction.strip() for label, instruction in found]


def innermost(sass: list[str]) -> list[list[str]]:
    """The innermost loops."""
    labels = {line: i for i, line in enumerate(sass) if line.startswith(".L_x_")}
    found = []
    for end, line in enumerate(sass):
        target = re.search(r"\bBRA\S*\s.*?(\.L_x_\d+)", line)
        if target and labels.get(target[1], end) < end:
            found.append((labels[target[1]], end))
    inner = [a for a in found if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in found)]
    return [sass[start:end] for start, end in inner]


def assembler_says(built: Built) -> str:
    """What ptxas warns of, on Hopper: it runs once more only where the kernel came from Triton's cache."""
    ptx = built.asm["ptx"]
    if ptx not in SAID:
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "k.ptx"
            source.write_text(ptx)
            try:
                tool = get_ptxas(90)
            except TypeError:
                tool = get_ptxas()
            command = [tool.path, "-v", "--gpu-name=sm_90a", source, "-o", Path(folder) / "k.cubin"]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            SAID[ptx] = done.stderr
    return SAID[ptx]
