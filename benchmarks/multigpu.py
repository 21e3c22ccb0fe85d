"""Attention over 2, 4 or 8 GPUs: correctness, scaling, overlap, memory, the model's projection; torch's own beside it.

    torchrun --standalone --nproc_per_node 8 benchmarks/multigpu.py --budget 400 --out results.json
    torchrun --standalone --nproc_per_node 2 benchmarks/multigpu.py --dry          # the script's logic, gloo, tiny

Causal, 32 query heads on 8 kv heads of dim 128, bf16, forward and backward. Times are medians, of the slowest rank.
`rate` is TFLOP/s per GPU with the FLOPs that the mask shows; `efficiency` its ratio to what one GPU reaches alone on a
long sequence in the same run. `silent` is the same program with its messages removed: what is left is computing, so
the difference is communication that was not hidden. torch's `context_parallel` is timed at the same lengths; it has no
attention for CPUs, and `--dry` says so. Every number is written with its case; what failed says why.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "src"))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402

import relampago as rl  # noqa: E402
from relampago.distributed import ContextParallelPlan, attention  # noqa: E402
from relampago.distributed.sight import Sight  # noqa: E402
from relampago.distributed.transport import Done, Shape, Traffic  # noqa: E402

DRY = "--dry" in sys.argv
DEVICE = "cpu" if DRY else "cuda"
HEADS, KV_HEADS, DIM = (8, 2, 16) if DRY else (32, 8, 128)
DTYPE = torch.float32 if DRY else torch.bfloat16
K = 1 if DRY else 1024
CHECKED = 64 * K
LENGTHS = (32 * K, 128 * K, 512 * K, 1024 * K)
ALONE = 128 * K  # tokens of the one GPU's own figure
REPEATS = 2 if DRY else 5


class Silent:
    """A transport whose messages have always arrived, with whatever lies in memory: computing alone."""

    def __init__(self, real: Any) -> None:
        self.rank, self.size, self.device = real.rank, real.size, real.device
        self.traffic = Traffic()

    def exchange(self, sends: Any, receives: Any, device: Any, step: str) -> Done:
        return Done([torch.zeros(s.shape, dtype=s.dtype, device=device) for _, s in receives])

    def all_gather(self, tensor: Any, step: str) -> Done:
        return Done([tensor.new_zeros((self.size, *tensor.shape))])

    def all_to_all(self, sends: Any, receives: list[Shape], step: str) -> Done:
        return Done([torch.zeros(s.shape, dtype=s.dtype, device=sends[0].device) for s in receives])


def sync() -> None:
    if not DRY:
        torch.cuda.synchronize()


def slowest(value: float) -> float:
    """The largest of all ranks."""
    found = torch.tensor(value, dtype=torch.float64, device=DEVICE)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.item()


def inputs(plan: ContextParallelPlan | None, length: int) -> list[torch.Tensor]:
    """Whole tensors from one seed, or this rank's part of them, made without the whole."""
    g = torch.Generator(DEVICE).manual_seed(length)
    found = []
    for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS):  # q, k, v, dout
        if plan is None or length <= CHECKED:
            whole = torch.randn(1, length, heads, DIM, generator=g, device=DEVICE).to(DTYPE)
            found.append(whole if plan is None else plan.shard(whole))
        else:
            shape = (1, plan.local_length(), heads, DIM)
            found.append(torch.randn(shape, generator=g, device=DEVICE, dtype=DTYPE))
    return found


def measure(call: Any, tensors: list[torch.Tensor]) -> dict[str, float]:
    """Seconds of forward and backward, the slowest rank's medians; and peak bytes."""
    *qkv, dout = tensors
    qkv = [t.detach().requires_grad_() for t in qkv]
    times: dict[str, list[float]] = {"forward": [], "backward": []}
    if not DRY:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(REPEATS + 1):
        dist.barrier()
        sync()
        start = time.perf_counter()
        out = call(*qkv)
        sync()
        times["forward"].append(slowest(time.perf_counter() - start))
        dist.barrier()
        sync()
        start = time.perf_counter()
        torch.autograd.grad(out, qkv, dout)
        sync()
        times["backward"].append(slowest(time.perf_counter() - start))
    peak = 0 if DRY else torch.cuda.max_memory_allocated()
    found = {name: statistics.median(t[1:]) for name, t in times.items()}
    return {**found, "peak_bytes": slowest(float(peak))}


def flops(length: int) -> tuple[float, float]:
    """Of a causal forward and backward, all heads."""
    forward = 4 * (length * (length + 1) / 2) * HEADS * DIM
    return forward, 2.5 * forward


def rates(times: dict[str, float], length: int, ranks: int) -> dict[str, Any]:
    ahead, back = flops(length)
    return {
        "forward_ms": times["forward"] * 1e3, "backward_ms": times["backward"] * 1e3,
        "forward_rate": ahead / times["forward"] / ranks / 1e12,
        "backward_rate": back / times["backward"] / ranks / 1e12,
        "tokens_per_s": length / (times["forward"] + times["backward"]),
        "peak_gb": times["peak_bytes"] / 1e9,
    }  # fmt: skip


def beside(row: dict[str, Any], alone: dict[str, Any]) -> dict[str, float]:
    """A row's rates to one GPU's own."""
    ways = ("forward", "backward")
    return {f"{way}_efficiency": row[f"{way}_rate"] / alone[f"{way}_rate"] for way in ways}


def plans(length: int) -> dict[str, ContextParallelPlan]:
    """Every strategy that fits this number of ranks."""
    size, world = dist.get_world_size(), dist.group.WORLD
    found = {
        name: ContextParallelPlan(world, length, strategy=name, machine="h200")
        for name in ("ring", "allgather", "ulysses")
    }
    if size >= 4:
        mesh = init_device_mesh(DEVICE, (2, size // 2), mesh_dim_names=("context", "heads"))
        found[f"usp 2x{size // 2}"] = ContextParallelPlan(
            mesh, length, strategy="usp", machine="h200"
        )
    return found


def correctness() -> list[dict[str, Any]]:
    """Each strategy's rows and gradients against one GPU's, in relative RMS."""
    *qkv, dout = inputs(None, CHECKED)
    qkv = [t.requires_grad_() for t in qkv]
    out = rl.attention(*qkv, causal=True)
    want = [out, *torch.autograd.grad(out, qkv, dout)]
    rows = []
    for name, plan in plans(CHECKED).items():
        local = [plan.shard(t.detach()).requires_grad_() for t in qkv]
        mine = attention(*local, plan=plan, causal=True)
        got = [mine, *torch.autograd.grad(mine, local, plan.shard(dout))]
        errors = {}
        for label, a, b in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
            b = plan.shard(b.detach()).float()
            errors[label] = slowest(((a.float() - b).norm() / b.norm()).item())
        rows.append({"strategy": name, "tokens": CHECKED, "difference": errors,
                     "passed": max(errors.values()) <= 4 * torch.finfo(DTYPE).eps})  # fmt: skip
    return rows


def projected(plan: ContextParallelPlan, name: str) -> dict[str, float]:
    """What the performance model says."""
    sight = Sight.of(plan.length, causal=True)
    itemsize = torch.empty((), dtype=DTYPE).element_size()
    ranking = plan.ranking(HEADS, KV_HEADS, DIM, itemsize, sight)
    (e,) = [e for e in ranking if e.strategy == name.split()[0]]
    return {"model_forward_ms": e.forward * 1e3, "model_backward_ms": e.backward * 1e3}


def scaling(name: str, plan: ContextParallelPlan, alone: dict[str, Any]) -> dict[str, Any]:
    """One strategy at one length: with its messages, and without."""
    size, length = plan.size, plan.length
    tensors = inputs(plan, length)

    def call(q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v, plan=plan, causal=True)

    row = rates(measure(call, tensors), length, size)
    real = plan.groups
    plan.__dict__["groups"] = tuple(map(Silent, real))  # a cached property: this plan's own copy
    silent = measure(call, tensors)
    plan.__dict__["groups"] = real
    return {
        "strategy": name, "ranks": size, "tokens": length, **row, **beside(row, alone),
        "silent_forward_ms": silent["forward"] * 1e3, "silent_backward_ms": silent["backward"] * 1e3,
        **projected(plan, name),
    }  # fmt: skip


def torch_own(method: str, length: int, alone: dict[str, Any]) -> dict[str, Any]:
    """torch's context_parallel with FlashAttention, on as many kv heads as query heads: it knows no GQA."""
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method
    from torch.nn.attention import SDPBackend, sdpa_kernel

    size = dist.get_world_size()
    mesh = init_device_mesh(DEVICE, (size,))
    set_rotate_method(method)
    shape = (1, HEADS, length // size, DIM)
    q, k, v, dout = (torch.randn(shape, device=DEVICE, dtype=DTYPE) for _ in range(4))
    whole = torch.empty(1, 1, length, 1, device=DEVICE)

    def call(q: Any, k: Any, v: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    spread = context_parallel(mesh, buffers=[whole], buffer_seq_dims=[2])
    found: dict[str, Any] = {"strategy": f"torch {method}", "ranks": size, "tokens": length}
    try:
        with spread, sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            row = rates(measure(call, [q, k, v, dout]), length, size)
    except NotImplementedError as error:
        why = f"torch's context_parallel has no attention for {DEVICE}: {error}"
        return {**found, "not_run": why}
    return {**found, **row, **beside(row, alone)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--budget", type=float, default=400.0, help="seconds")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--dry", action="store_true")
    options = parser.parse_args()
    begun = time.monotonic()
    if not DRY:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo" if DRY else "nccl", timeout=datetime.timedelta(seconds=120))
    lead = dist.get_rank() == 0

    def one(q: Any, k: Any, v: Any) -> Any:
        return rl.attention(q, k, v, causal=True)

    def say(row: Any) -> Any:
        if lead:
            print(json.dumps(row), flush=True)
        return row

    report: dict[str, Any] = {
        "machine": f"{dist.get_world_size()} x {'cpu, dry' if DRY else torch.cuda.get_device_name()}, "
        f"torch {torch.__version__}",
        "date": datetime.date.today().isoformat(),
        "shape": f"causal, heads {HEADS}/{KV_HEADS}, dim {DIM}, {DTYPE}, batch 1; medians of {REPEATS}",
        "alone": say({"tokens": ALONE, **rates(measure(one, inputs(None, ALONE)), ALONE, 1)}),
        "correctness": say(correctness()), "rows": [], "left_out": [],
    }  # fmt: skip
    theirs = ("torch allgather", "torch alltoall")
    jobs: list[tuple[str, int]] = [(name, n) for n in LENGTHS for name in (*plans(n), *theirs)]
    for name, length in jobs:
        if slowest(time.monotonic() - begun) > options.budget:  # all ranks decide alike
            report["left_out"].append((name, length))
            continue
        try:
            if name.startswith("torch"):
                row = torch_own(name.split()[1], length, report["alone"])
            else:
                row = scaling(name, plans(length)[name], report["alone"])
        except Exception as error:  # the other cases still count
            row = {"strategy": name, "tokens": length, "error": repr(error)[:400]}
        report["rows"].append(say(row))
        if not DRY:
            torch.cuda.empty_cache()
    if lead and options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    with contextlib.suppress(RuntimeError):
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
