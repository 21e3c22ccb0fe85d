"""What the table chooses, on the H200, in <= 100 s:  python benchmarks/gluon_check.py [budget_s]

1 compile (14 processes), 2 correctness through the public API in watched processes, and random launches, 3 timing of the
table's choices and a few variants beside cuDNN, in shuffled order, two rounds. Writes $OUT/gluon_final.json.
"""

import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time

T0 = time.time()
os.environ.setdefault("TRITON_CACHE_DIR", os.path.join(tempfile.gettempdir(), "gluon_final_cache"))
OUT = os.environ.get("OUT", "/tmp")
SHAPES = [(16, 1024), (4, 4096), (1, 16384), (1, 32768)]
PLANS = {  # d, causal or None for both, plan; at most two more a cell
    "d64-w3-pp-pin": (
        64,
        1,
        {"block_q": 192, "block_k": 128, "stages": 4, "schedule": 2, "pingpong": 1, "pin": 1},
    ),
    "d64-w3-pp": (
        64,
        1,
        {"block_q": 192, "block_k": 128, "stages": 4, "schedule": 2, "pingpong": 1},
    ),
    "d64-w3-pin": (64, 1, {"block_q": 192, "block_k": 128, "stages": 4, "schedule": 2, "pin": 1}),
    "d128-pp": (
        128,
        1,
        {"block_q": 128, "block_k": 128, "stages": 2, "schedule": 2, "pingpong": 1},
    ),
    "d256-dyn-pin": (256, 1, {"block_q": 128, "block_k": 64, "stages": 2, "schedule": 2, "pin": 1}),
    "d256-pp": (256, 0, {"block_q": 128, "block_k": 64, "stages": 2, "schedule": 2, "pingpong": 1}),
}


def say(**kw):
    print("@@" + json.dumps(kw), flush=True)


def cases():
    """name -> (function of the backend's name, NaN expected?)"""
    import torch

    import relampago as rl

    g = torch.Generator(device="cuda").manual_seed(7)

    def rand(*s):
        return torch.randn(*s, device="cuda", generator=g).bfloat16()

    made = {}

    def dense(name, b, lq, lk, h, kv, d, dv=None, dtype=None, trans=False, **o):
        def go(backend):
            gen = torch.Generator(device="cuda").manual_seed(11)

            def r(n, hh, dd):
                return torch.randn(b, n, hh, dd, device="cuda", generator=gen).to(
                    dtype or torch.bfloat16
                )

            q, k, v = r(lq, h, d), r(lk, kv, d), r(lk, kv, dv or d)
            if trans:
                q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
            return rl.attention(q, k, v, return_lse=True, backend=backend, **o)

        made[name] = go

    for d in (64, 128, 256):
        for causal in (False, True):
            tag = f"d{d}-{'causal' if causal else 'full'}"
            dense(f"{tag}-1000", 2, 1000, 1000, 4, 2, d, causal=causal)
            dense(f"{tag}-2048", 4, 2048, 2048, 8, 8, d, causal=causal)
            dense(f"{tag}-4161", 1, 4161, 4161, 4, 1, d, causal=causal)
            dense(f"{tag}-77-trans", 3, 77, 77, 4, 4, d, causal=causal, trans=True)
        dense(f"d{d}-wide", 2, 300, 1500, 4, 4, d, causal=True)
        dense(f"d{d}-blind", 2, 1500, 300, 4, 4, d, causal=True)
        dense(f"d{d}-window", 2, 1500, 1500, 4, 4, d, window=(100, 30))
        dense(f"d{d}-causal-window", 2, 3000, 3000, 4, 4, d, causal=True, window=(500, 0))
        dense(f"d{d}-softcap", 2, 700, 700, 4, 4, d, causal=True, softcap=5.0)
        dense(f"d{d}-sinks", 2, 700, 700, 4, 4, d, causal=True, sinks=rand(4))
        dense(f"d{d}-prefix", 2, 700, 700, 4, 4, d, mask=rl.Prefix(200))
    for d, dv in ((96, 96), (192, 128), (192, 192), (80, 80), (33, 33), (40, 72)):
        dense(f"d{d}-{dv}", 2, 700, 900, 4, 2, d, dv, causal=True)
    dense("fp16", 2, 700, 900, 4, 2, 128, dtype=torch.float16, causal=True)
    dense("len1", 2, 1, 500, 4, 2, 128, causal=True)
    dense("scale", 2, 300, 300, 4, 2, 64, causal=True, scale=-0.2)

    def packed(name, d, **o):
        def go(backend):
            gen = torch.Generator(device="cuda").manual_seed(5)
            lens = [3, 1300, 0, 200, 1, 77, 2640]
            cu = torch.tensor([0, *lens], device="cuda").cumsum(0).int()
            q, k, v = (
                torch.randn(sum(lens) + 9, h, d, device="cuda", generator=gen).bfloat16()
                for h in (4, 2, 2)
            )
            for t in (q, k, v):
                t[sum(lens) :] = float("nan")
            return rl.attention_varlen(
                q, k, v, cu, cu, max(lens), max(lens), return_lse=True, backend=backend, **o
            )

        made[name] = go

    for d in (64, 128, 256):
        packed(f"packed-d{d}", d)
        packed(f"packed-d{d}-causal", d, causal=True)
        packed(f"packed-d{d}-window", d, causal=True, window=(100, 0))
    return made


class Poison:
    def __init__(self, torch):
        self.__dict__["t"] = torch

    def __getattr__(self, name):
        return getattr(self.t, name)

    def empty(self, *a, **k):
        out = self.t.empty(*a, **k)
        return out.fill_(float("nan")) if out.is_floating_point() else out


def check(i, n):
    import torch

    from relampago.backends.gluon import launch as L

    L.torch = Poison(torch)
    for name, go in list(cases().items())[i::n]:
        say(kind="start", name=name)
        try:
            out, lse = go("gluon_sm90")
            torch.cuda.synchronize()
            want, want_lse = go("reference")
            rel = ((out.float() - want.float()).norm() / want.float().norm().clamp_min(1e-9)).item()
            none = torch.isneginf(want_lse)
            same = torch.equal(torch.isneginf(lse), none)
            dl = (lse - want_lse)[~none].abs().max().item()
            ok = same and dl < 1e-3 and rel < (1e-3 if "fp16" in name else 5e-3)
            say(kind="check", name=name, ok=bool(ok), rel=rel, lse=dl, same=same)
        except Exception as e:
            say(kind="check", name=name, ok=False, why=f"{type(e).__name__}: {str(e)[-300:]}")
            if "CUDA" in str(e):
                return
    say(kind="done", name=f"check{i}")


def timing_cells():
    import torch

    from relampago.plan import Plan
    from relampago.problem import Device, Problem
    from relampago.select import by_name

    sms = torch.cuda.get_device_properties(0).multi_processor_count
    for d in (64, 128, 256):
        for causal in (0, 1):
            for b, n in SHAPES:
                h = 2048 // d
                p = Problem(
                    device=Device("cuda", "sm90", sms),
                    batch=b,
                    heads_q=h,
                    heads_kv=h,
                    len_q=n,
                    len_k=n,
                    dim=d,
                    dim_v=d,
                    dtype="bf16",
                    right=bool(causal),
                )
                plans = {"table": by_name("gluon_sm90").plan(p)}
                for name, (dd, c, kw) in PLANS.items():
                    if (
                        dd == d
                        and c in (None, causal)
                        and Plan(warps=4, **kw) not in plans.values()
                    ):
                        plans[name] = Plan(warps=4, **kw)
                yield d, causal, b, n, h, sms, plans


def arrays(torch, d, causal, b, n, h):
    from relampago.masks.rules import Band
    from relampago.problem import Arrays

    q, k, v = (torch.randn(b, n, h, d, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    return Arrays(
        q=q, k=k, v=v, scale=d**-0.5, band=Band(0, None, 0 if causal else None), len_q=n, len_k=n
    )


def warm(i, n):
    import torch

    from relampago.backends.gluon import launch as L

    L.launch = lambda kernel, grid, plan, *args: kernel.run(
        *args, grid=(grid, 1, 1), warmup=True, num_warps=plan.warps
    )
    jobs = [(name, lambda go=go: go("gluon_sm90")) for name, go in cases().items()]
    seen = set()
    for d, causal, _b, nn, _h, _sms, plans in timing_cells():
        for name, plan in plans.items():
            if (d, causal, plan, nn % 192 == 0) in seen:
                continue
            seen.add((d, causal, plan, nn % 192 == 0))
            jobs.append(
                (
                    name,
                    lambda a=(d, causal, 1, nn, 1), plan=plan: L.forward(
                        plan, arrays(torch, *a), 132
                    ),
                )
            )
    for name, job in jobs[i::n]:
        try:
            job()
        except Exception as e:
            say(kind="warm", name=name, why=f"{type(e).__name__}: {str(e)[-300:]}")


def stress(seconds):
    """Random shapes, launched as fast as can be; a sample is compared."""
    import torch

    import relampago as rl

    rnd = random.Random(1)
    end, n = time.time() + seconds, 0
    while time.time() < end:
        d = rnd.choice((64, 128, 256))
        b = rnd.randint(1, 8)
        h = rnd.choice((1, 2, 4, 8))
        lq = rnd.randint(1, 3000)
        causal = rnd.random() < 0.6
        q, k, v = (torch.randn(b, lq, h, d, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        first = None
        for _ in range(40):
            out = rl.attention(q, k, v, causal=causal, backend="gluon_sm90")
            n += 1
            first = out if first is None else first
        same = torch.equal(first, out)  # waits
        if not same:
            say(kind="stress", ok=False, shape=[b, lq, h, d, causal])
        if not out.isfinite().all():
            say(kind="stress", ok=False, shape=[b, lq, h, d, causal], why="not finite")
    say(kind="stress", ok=True, launches=n)


def timed(torch, fn):
    fn()
    torch.cuda.synchronize()
    a, b = torch.cuda.Event(True), torch.cuda.Event(True)
    a.record()
    fn()
    b.record()
    torch.cuda.synchronize()
    once = max(a.elapsed_time(b), 0.02)
    n = max(1, min(10, int(4 / once)))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        fn()
    torch.cuda.current_stream().wait_stream(side)
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        for _ in range(n):
            fn()
    g.replay()
    torch.cuda.synchronize()
    ms = []
    for _ in range(max(4, min(9, int(35 / (n * once))))):
        a.record()
        g.replay()
        b.record()
        torch.cuda.synchronize()
        ms.append(a.elapsed_time(b) / n)
    return statistics.median(ms)


def clock(limit):
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend as B
    from torch.nn.attention import sdpa_kernel

    from relampago.backends.gluon import launch as L

    end = time.time() + limit
    rnd = random.Random(0)
    for turn in range(2):
        cells = list(timing_cells())
        rnd.shuffle(cells)
        for d, causal, b, n, h, sms, plans in cells:
            x = arrays(torch, d, causal, b, n, h)
            flops = 4 * b * h * n * n * d * (0.5 if causal else 1)
            qt, kt, vt = (t.transpose(1, 2) for t in (x.q, x.k, x.v))

            def cudnn():
                with sdpa_kernel(B.CUDNN_ATTENTION), torch.no_grad():
                    return F.scaled_dot_product_attention(qt, kt, vt, is_causal=bool(causal))

            jobs = [("cudnn", cudnn)] + [
                (name, lambda plan=plan: L.forward(plan, x, sms)) for name, plan in plans.items()
            ]
            rnd.shuffle(jobs)
            for name, fn in jobs:
                if time.time() > end:
                    return
                try:
                    ms = timed(torch, fn)
                    say(
                        kind="time",
                        turn=turn,
                        name=name,
                        d=d,
                        causal=causal,
                        b=b,
                        n=n,
                        ms=ms,
                        tf=flops / ms * 1e-9,
                    )
                except Exception as e:
                    say(kind="note", name=name, why=f"{type(e).__name__}: {str(e)[-200:]}")


def spawn(*args):
    f = tempfile.TemporaryFile("w+")
    return (
        subprocess.Popen(
            [sys.executable, os.path.abspath(__file__), *map(str, args)],
            stdout=f,
            stderr=subprocess.STDOUT,
        ),
        f,
        time.time(),
        args,
    )


def pool(todo, each, until):
    live, rows = [spawn(*t) for t in todo], []
    while live:
        for job in list(live):
            p, f, t, args = job
            rc = p.poll()
            if rc is None and (time.time() - t > each or time.time() - T0 > until):
                p.kill()
                rc = "TIMEOUT"
                with contextlib.suppress(subprocess.TimeoutExpired):
                    p.wait(5)
            if rc is None:
                continue
            live.remove(job)
            f.seek(0)
            text = f.read()
            mine = []
            for line in text.splitlines():
                if line.startswith("@@"):
                    with contextlib.suppress(ValueError):
                        mine.append(json.loads(line[2:]))
            if rc != 0:
                print(
                    f"!! {args} rc={rc} after {time.time() - t:.0f}s last {[r for r in mine if r['kind'] == 'start'][-1:]} "
                    + " | ".join(l for l in text.splitlines() if not l.startswith("@@"))[-500:],
                    flush=True,
                )
            rows += mine
        time.sleep(0.05)
    return rows


def main(budget):
    import torch
    import triton

    print(
        f"{torch.cuda.get_device_name()} torch {torch.__version__} triton {triton.__version__}",
        flush=True,
    )
    rows = pool([("warm", i, 14) for i in range(14)], 60, budget * 0.4)
    for r in rows:
        print("warm failed", r, flush=True)
    print(f"compiled at {time.time() - T0:.0f}s", flush=True)
    rows += pool([("check", i, 5) for i in range(5)] + [("stress", 12)], 40, budget * 0.65)
    checks = [r for r in rows if r["kind"] == "check"]
    print(
        f"checks {len(checks)} bad {sum(not r['ok'] for r in checks)} worst rel {max([r.get('rel', 0) for r in checks], default=9):.2e} "
        f"lse {max([r.get('lse', 0) for r in checks], default=9):.1e}; stress {[r for r in rows if r['kind'] == 'stress'][-3:]}"
    )
    for r in checks:
        if not r["ok"]:
            print("  BAD", r)
    print(f"checked at {time.time() - T0:.0f}s", flush=True)
    rows += pool([("clock", budget - 6 - (time.time() - T0))], budget, budget - 2)
    for r in rows:
        if r["kind"] == "note":
            print(r)
    for d in (64, 128, 256):
        print(
            f"\nd{d} TFLOP/s     "
            + "".join(
                f"{m + ' ' + str(b) + 'x' + str(n // 1024) + 'k':>14s}"
                for m in ("full", "causal")
                for b, n in SHAPES
            )
        )
        for name in dict.fromkeys(
            ["cudnn", "table"] + [r["name"] for r in rows if r["kind"] == "time" and r["d"] == d]
        ):
            cells = ""
            for causal in (0, 1):
                for b, n in SHAPES:
                    x = [
                        r["tf"]
                        for r in rows
                        if r["kind"] == "time"
                        and (r["name"], r["d"], r["causal"], r["b"], r["n"])
                        == (name, d, causal, b, n)
                    ]
                    cells += f"{'/'.join(f'{t:.0f}' for t in x) or '-':>14s}"
            print(f"{name:16s}" + cells)
    json.dump(rows, open(os.path.join(OUT, "gluon_final.json"), "w"))
    print(f"total {time.time() - T0:.0f}s")


if __name__ == "__main__":
    a = sys.argv[1:]
    jobs = {
        "warm": lambda: warm(int(a[1]), int(a[2])),
        "check": lambda: check(int(a[1]), int(a[2])),
        "stress": lambda: stress(float(a[1])),
        "clock": lambda: clock(float(a[1])),
    }
    if a and a[0] in jobs:
        jobs[a[0]]()
    else:
        main(float(a[0]) if a else 100.0)
