"""The Hopper backward on a card:  PYTHONPATH=src python benchmarks/backward_sweep.py [budget_s] [regex of variants]

1 lanes compile, 2 one process per head dim checks its variants against fp64, then times those that are right beside
cuDNN, flash and Triton (CUDA-graph replay): all at 4 x 4k, the best at all shapes, two rounds in alternating order. A
silent process is killed. Rows go to $OUT/bwd.json and to stdout as they come; the table last.
"""

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time

T0 = time.time()
os.environ.setdefault("TRITON_CACHE_DIR", os.path.join(tempfile.gettempdir(), "bwd_go_cache"))
OUT = os.environ.get("OUT", "/tmp")
HERE = os.path.abspath(__file__)
SHAPES = [(4, 4096), (16, 1024), (1, 16384), (1, 32768)]
KEEP = 3  # variants of a cell that all shapes are measured with
HANG = 15  # seconds
COMPILE = 35  # seconds at most


def P(block_q, block_k, stages=2, **more):
    return dict(block_q=block_q, block_k=block_k, warps=4, stages=stages, **more)


DQ = {64: P(128, 128, 3), 128: P(128, 64, 4), 256: P(128, 64, 2)}
V = {}  # name -> (d, plan, dq plan, deterministic)


def variant(name, d, plan, dq=None, det=False):
    V[name] = (d, plan, dq or DQ[d], det)


variant("d128-f0", 128, P(64, 128, 2, fused=1))
variant("d128-f0n", 128, P(64, 128, 2, fused=1, pingpong=1))
variant("d128-f1n", 128, P(64, 128, 2, fused=1, ahead=1, pingpong=1))
variant("d128-f2", 128, P(64, 128, 2, fused=1, ahead=2))
variant("d128-f2n", 128, P(64, 128, 2, fused=1, ahead=2, pingpong=1))
variant("d128-f3n", 128, P(64, 128, 2, fused=1, ahead=3, pingpong=1))
variant("d128-f0-drawn", 128, P(64, 128, 2, fused=1, schedule=2))
variant("d128-f2n-drawn", 128, P(64, 128, 2, fused=1, ahead=2, pingpong=1, schedule=2))
variant("d128-f3n-drawn", 128, P(64, 128, 2, fused=1, ahead=3, pingpong=1, schedule=2))
variant("d128-f0n-s3", 128, P(64, 128, 3, fused=1, pingpong=1))
variant("d128-apart0", 128, P(64, 128, 2), det=True)
variant("d128-apart1p", 128, P(64, 128, 3, ahead=1), P(128, 64, 4, pin=1), det=True)
variant("d256-twins", 256, P(64, 64, 2), det=True)
variant("d256-twins-pin", 256, P(64, 64, 2), P(128, 64, 2, pin=1), det=True)
variant("d64-q64-f0n", 64, P(64, 128, 4, fused=1, pingpong=1))
variant("d64-q64-f2", 64, P(64, 128, 4, fused=1, ahead=2))
variant("d64-q64-f2n", 64, P(64, 128, 4, fused=1, ahead=2, pingpong=1))
variant("d64-q64-f2n-drawn", 64, P(64, 128, 4, fused=1, ahead=2, pingpong=1, schedule=2))
variant("d64-q128-f0n", 64, P(128, 128, 2, fused=1, pingpong=1))
variant("d64-q128-f2", 64, P(128, 128, 2, fused=1, ahead=2))
variant("d64-q128-f2n", 64, P(128, 128, 2, fused=1, ahead=2, pingpong=1))
variant("d64-apart0", 64, P(128, 128, 2), det=True)
variant("d64-apart0p", 64, P(128, 128, 2), P(128, 128, 3, pin=1), det=True)
variant("d64-apart1-k64", 64, P(64, 128, 4, ahead=1), P(128, 64, 6), det=True)
variant("d64-apart1-k64p", 64, P(64, 128, 6, ahead=1), P(128, 64, 6, pin=1), det=True)
IN_ORDER = {"fused": 1, "ordered": 1, "schedule": 2}
variant("d64-order-f0n", 64, P(64, 128, 4, pingpong=1, **IN_ORDER), det=True)
variant("d64-order-f2", 64, P(64, 128, 4, ahead=2, **IN_ORDER), det=True)
variant("d64-order-f2n", 64, P(64, 128, 4, ahead=2, pingpong=1, **IN_ORDER), det=True)
variant("d128-order-f0", 128, P(64, 128, 2, **IN_ORDER), det=True)
variant("d128-order-f2n", 128, P(64, 128, 2, ahead=2, pingpong=1, **IN_ORDER), det=True)
variant("d128-order-f3n", 128, P(64, 128, 2, ahead=3, pingpong=1, **IN_ORDER), det=True)

# name -> (b, lq, lk, h, g, d or None, dv or None, dtype, options)
CHECKS = {
    "full": (2, 1024, 1024, 3, 3, None, None, "bfloat16", {"plain": True}),
    "causal-ragged": (2, 777, 1000, 4, 1, None, None, "bfloat16", {"right": 0}),
}
FORMS = {
    "fp16": (2, 500, 500, 4, 2, None, None, "float16", {"right": 0}),
    "window-ragged": (1, 900, 700, 2, 2, None, None, "bfloat16", {"left": 100, "right": 30}),
    "blind": (2, 1500, 300, 4, 2, None, None, "bfloat16", {"right": 0}),
    "softcap": (1, 500, 500, 2, 2, None, None, "bfloat16", {"right": 0, "cap": 5.0}),
    "sinks": (1, 500, 500, 2, 2, None, None, "bfloat16", {"right": 0, "sinks": True}),
    "wide-out": (2, 300, 400, 4, 2, None, None, "bfloat16", {"right": 0, "wide": True}),
    "packed-causal": (7, 0, 0, 4, 2, None, None, "bfloat16", {"packed": True, "right": 0}),
}
MANY = {  # more tiles than multiprocessors, so that blocks of threads draw several
    "many-full": (3, 2100, 2000, 16, 16, None, None, "bfloat16", {}),
    "many-window": (2, 3000, 3000, 16, 4, None, None, "bfloat16", {"left": 700, "right": 0}),
}
DEEP = {
    "d256-twins": {
        **FORMS,
        "d192": (1, 500, 600, 4, 2, 192, 192, "bfloat16", {"right": 0}),
        "d192-128": (1, 500, 600, 4, 2, 192, 128, "bfloat16", {"right": 0}),
    },
    "d64-order-f2n": {**FORMS, **MANY},
    "d128-order-f3n": {**FORMS, **MANY},
}
LENS = [3, 1300, 0, 200, 1, 77, 640]
BENCH = {
    "bench-full": (1, 1024, 1024, 2, 2, None, None, "bfloat16", {"plain": True}),
    "bench-causal": (1, 1024, 1024, 2, 2, None, None, "bfloat16", {"right": 0, "plain": True}),
}


def say(**kw):
    print("@@" + json.dumps(kw), flush=True)


def poison(torch):
    class Poison:
        def __getattr__(self, n):
            return getattr(torch, n)

        def empty(self, *a, **k):
            out = torch.empty(*a, **k)
            return out.fill_(float("nan") if out.is_floating_point() else 2**31 - 1)

    return Poison()


def make(case, d, solve=True):
    """(Arrays, saved, dout, dlse, wanted gradients in fp64)"""
    from dataclasses import replace

    import torch

    from relampago.backends.reference import attend
    from relampago.masks.rules import Band
    from relampago.mods import softcap
    from relampago.problem import Arrays, Saved

    b, lq, lk, h, g, dk, dv, dtype, o = case
    dk, dv, dtype = dk or d, dv or d, getattr(torch, dtype)
    gen = torch.Generator(device="cuda").manual_seed(3)

    def r(*s):
        return torch.randn(*s, device="cuda", generator=gen).to(dtype)

    more = {}
    if o.get("packed"):
        total = sum(LENS) + 9
        q, k, v = r(total, h, dk), r(total, g, dk), r(total, g, dv)
        cu = torch.tensor([0, *LENS], device="cuda").cumsum(0).int()
        more = {"cu_q": cu, "cu_k": cu}
        lq = lk = max(LENS)
        offset = 0
    else:
        q, k, v = r(b, lq, h, dk), r(b, lk, g, dk), r(b, lk, g, dv)
        offset = lk - lq
    if o.get("cap"):
        more["mods"] = (softcap(o["cap"]).token,)
    if o.get("sinks"):
        more["sinks"] = r(h).float()
    if o.get("wide"):
        more["dtype"] = torch.float32
    band = Band(offset, o.get("left"), o.get("right"), o.get("prefix"))
    x = Arrays(q=q, k=k, v=v, scale=dk**-0.5, band=band, len_q=lq, len_k=lk, **more)
    if not solve:
        rows, lse_shape = (*q.shape[:-1], dv), (b, h, lq) if q.dim() == 4 else (h, q.shape[0])
        lse = torch.zeros(lse_shape, device="cuda")
        dlse = None if o.get("plain") else lse
        return x, Saved(torch.zeros(rows, device="cuda", dtype=dtype), lse), r(*rows), dlse, None
    leaves = {n: getattr(x, n).double().requires_grad_() for n in ("q", "k", "v")}
    if x.sinks is not None:
        leaves["sinks"] = x.sinks.double().requires_grad_()
    out, lse = attend(replace(x, **leaves), torch.float64)
    dout, dlse = r(*out.shape), torch.randn(lse.shape, device="cuda", generator=gen)
    seen = lse > float("-inf")
    lost = (out * dout.double()).sum() + (torch.where(seen, lse, 0.0) * dlse)[seen].sum()
    if o.get("plain"):
        dlse, lost = None, (out * dout.double()).sum()
    grads = torch.autograd.grad(lost, list(leaves.values()))
    if o.get("packed"):
        for t in (q, k, v, dout):
            t[sum(LENS) :] = float("nan")
    want = dict(zip(leaves, grads, strict=False))
    return x, Saved(out.detach().to(dtype), lse.detach().float()), dout, dlse, want


def lane(items):
    """Compile forms of variants: "name/form"."""
    from relampago.backends.gluon import backward_launch as BL
    from relampago.plan import Plan
    from relampago.problem import Wanted

    def compile_only(kernel, grid, plan, *args):
        kernel.run(*args, grid=(grid, 1, 1), warmup=True, num_warps=plan.warps)

    BL.launch = compile_only
    for item in items:
        name, form = item.split("/")
        if name.startswith("triton"):
            triton_once(int(name[6:]), form == "causal")
            continue
        d, plan, dq, det = V[name]
        case = {**CHECKS, **DEEP.get(name, {}), **BENCH}[form]
        try:
            x, saved, dout, dlse, _ = make(case, d, False)
            BL.backward(
                Plan(**plan),
                Plan(**dq),
                x,
                saved,
                dout,
                dlse,
                Wanted(sinks=x.sinks is not None),
                det,
            )
        except Exception as ex:
            say(
                kind="error",
                name=name,
                case=form,
                msg=f"compile {type(ex).__name__}: {str(ex)[-300:]}",
            )
    say(kind="compiled", t=time.time() - T0)


def bench_arrays(d, b, s, causal):
    import torch

    from relampago.masks.rules import Band
    from relampago.problem import Arrays

    h = 2048 // d
    gen = torch.Generator(device="cuda").manual_seed(1)
    q, k, v, dout = (
        torch.randn(b, s, h, d, device="cuda", generator=gen, dtype=torch.bfloat16)
        for _ in range(4)
    )
    band = Band(0, None, 0 if causal else None)
    return Arrays(q=q, k=k, v=v, scale=d**-0.5, band=band, len_q=s, len_k=s), dout


def triton_backward(x, saved, dout, causal):
    from relampago.backends.triton import Triton
    from relampago.problem import Facts, Wanted, describe

    triton, wanted = Triton(), Wanted()
    p = describe(x, Facts(right=0 if causal else None), wanted=wanted)
    plan = triton.plan(p)
    return lambda: triton.backward(p, plan, x, saved, dout, None, wanted)


def triton_once(d, causal):
    import torch

    from relampago.problem import Saved

    x, dout = bench_arrays(d, *SHAPES[0], causal)
    b, s, h, _ = x.q.shape
    triton_backward(x, Saved(x.q, torch.full((b, h, s), 20.0, device="cuda")), dout, causal)()
    torch.cuda.synchronize()


def verify(name, cases):
    """Whether a variant's gradients are right; says each."""
    import torch

    from relampago.backends.gluon import backward_launch as BL
    from relampago.plan import Plan
    from relampago.problem import Wanted

    d, plan, dq, det = V[name]
    BL.torch = poison(torch)
    good = True
    for key, case in cases.items():
        if (key, d) not in MADE:
            MADE[key, d] = make(case, d)
        x, saved, dout, dlse, want = MADE[key, d]
        runs = []
        try:
            for _ in range(3):
                got = BL.backward(
                    Plan(**plan),
                    Plan(**dq),
                    x,
                    saved,
                    dout,
                    dlse,
                    Wanted(sinks=x.sinks is not None),
                    det,
                )
                torch.cuda.synchronize()
                runs.append({n: getattr(got, n) for n in want})
            errors = {
                n: ((runs[0][n].double() - want[n]).norm() / want[n].norm()).item() for n in want
            }
            again = max(
                ((run[n].double() - runs[0][n].double()).norm() / want[n].norm()).item()
                for run in runs[1:]
                for n in want
            )
            limit = 1e-2 if x.q.dtype == torch.bfloat16 else 2e-3
            ok = all(e < limit for e in errors.values()) and (again == 0 if det else again < 1e-3)
            say(kind="check", name=name, case=key, e=errors, again=again, ok=ok)
        except Exception as ex:
            ok = False
            say(
                kind="check",
                name=name,
                case=key,
                ok=False,
                msg=f"{type(ex).__name__}: {str(ex)[-300:]}",
            )
            if "CUDA" in str(ex) or "cuda" in str(ex):
                raise
        good = good and ok
    BL.torch = torch
    return good


MADE = {}


def timer(d, names):
    """All cells of a head dim."""
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from relampago.backends.gluon import backward_launch as BL
    from relampago.plan import Plan
    from relampago.problem import Saved, Wanted

    torch.zeros(1, device="cuda")
    real = BL.launch
    seconds = float(sys.stdin.readline())
    start = time.time()
    names = [n for n in names if verify(n, CHECKS)]

    def graph_of(fn, stream=None):
        stream = stream or torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            fn()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g, stream=stream):
            fn()
        return g

    def once(g, budget=0.05):
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        g.replay()
        a.record()
        g.replay()
        b.record()
        b.synchronize()
        n = max(3, min(40, int(budget * 1e3 / max(a.elapsed_time(b), 1e-3))))
        times = []
        for _ in range(n):
            a.record()
            g.replay()
            b.record()
            b.synchronize()
            times.append(a.elapsed_time(b))
        return statistics.median(times)

    def cell(b, s, causal, which, rounds, peers):
        x, dout = bench_arrays(d, b, s, causal)
        q, k, v, h = x.q, x.k, x.v, x.q.shape[2]
        with torch.no_grad():
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention(
                *(t.transpose(1, 2) for t in (q, k, v)), 0.0, causal, False
            )[:2]
        out, lse = out.transpose(1, 2), lse.contiguous()
        saved, wanted = Saved(out, lse), Wanted()
        fns, streams = {}, {}
        for name in which:
            _, plan, dq, det = V[name]
            plans = Plan(**plan), Plan(**dq)
            fns[name] = lambda plans=plans, det=det: BL.backward(
                *plans, x, saved, dout, None, wanted, det
            )
        if peers:
            if (b, s) == SHAPES[0]:
                fns["triton"] = triton_backward(x, saved, dout, causal)
            for nm, be in (
                ("cudnn", SDPBackend.CUDNN_ATTENTION),
                ("flash", SDPBackend.FLASH_ATTENTION),
            ):
                leaves = [t.transpose(1, 2).detach().requires_grad_() for t in (q, k, v)]
                side = streams[nm] = torch.cuda.Stream()
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side), sdpa_kernel(be):
                    o = F.scaled_dot_product_attention(*leaves, is_causal=causal)
                torch.cuda.current_stream().wait_stream(side)
                do = dout.transpose(1, 2)
                fns[nm] = lambda o=o, leaves=leaves, do=do: torch.autograd.grad(
                    o, leaves, do, retain_graph=True
                )
        graphs = {}
        for nm, fn in fns.items():
            try:
                graphs[nm] = graph_of(fn, streams.get(nm))
            except Exception as ex:
                torch.cuda.synchronize()
                say(
                    kind="error",
                    name=nm,
                    case=f"{b}x{s}{causal}",
                    msg=f"{type(ex).__name__}: {str(ex)[-200:]}",
                )
        best = {}
        order = list(graphs)
        for i in range(rounds):
            for nm in order if i % 2 == 0 else order[::-1]:
                best.setdefault(nm, []).append(once(graphs[nm]))
        flops = 10.0 * b * h * s * s * d * (0.5 if causal else 1.0)
        del graphs
        for nm, ms in best.items():
            ms = statistics.median(ms)
            say(kind="time", d=d, causal=causal, b=b, s=s, name=nm, ms=ms, tf=flops / ms * 1e-9)
        return {nm: statistics.median(ms) for nm, ms in best.items()}

    def parts(b, s, causal, name):
        """Time of each kernel alone."""
        for only in ("prepare", "by_keys", "by_products", "by_queries", "convert"):
            hit = []

            def some(kernel, grid, plan, *args, only=only, hit=hit):
                if kernel.fn.__name__ == only:
                    hit.append(1)
                    real(kernel, grid, plan, *args)

            BL.launch = some
            got = cell_parts(b, s, causal, name)
            if hit:
                say(kind="part", d=d, causal=causal, b=b, s=s, name=name, part=only, ms=got)
        BL.launch = real

    def cell_parts(b, s, causal, name):
        h = 2048 // d
        x, dout = bench_arrays(d, b, s, causal)
        saved = Saved(x.q, torch.full((b, h, s), 10.0, device="cuda"))
        _, plan, dq, det = V[name]
        g = graph_of(
            lambda: BL.backward(Plan(**plan), Plan(**dq), x, saved, dout, None, Wanted(), det)
        )
        return once(g, 0.02)

    chosen = {}
    for causal in (False, True):
        b, s = SHAPES[0]
        got = cell(b, s, causal, names, 2, True)
        ranked = sorted((n for n in got if n in V), key=got.get)
        chosen[causal] = ranked[:KEEP]
        say(kind="rank", d=d, causal=causal, ranked=[(n, round(got[n], 3)) for n in ranked])
    for b, s in SHAPES[1:]:
        for causal in (False, True):
            if time.time() - start > seconds:
                say(kind="skipped", d=d, b=b, s=s, causal=causal)
                continue
            cell(b, s, causal, chosen[causal], 2, True)
    for causal in (False, True):
        if time.time() - start < seconds:
            parts(*SHAPES[0], causal, chosen[causal][0])
            apart = [n for n in names if V[n][3]][:1]
            if apart and apart[0] not in chosen[causal][:1]:
                parts(*SHAPES[0], causal, apart[0])
    for name, cases in DEEP.items():
        if name in names and time.time() - start < seconds + 3:
            verify(name, cases)


class Child:
    """A process of this script whose lines are watched."""

    def __init__(self, *args):
        self.rows, self.tail, self.last = [], [], time.time()
        self.p = subprocess.Popen(
            [sys.executable, HERE, *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ,
        )
        self.thread = threading.Thread(target=self.read, daemon=True)
        self.thread.start()

    def read(self):
        for line in self.p.stdout:
            self.last = time.time()
            if line.startswith("@@"):
                row = json.loads(line[2:])
                self.rows.append(row)
                show(row)
            else:
                self.tail = ([*self.tail, line.rstrip()])[-8:]

    def alive(self):
        return self.p.poll() is None

    def kill(self):
        self.p.kill()


def show(r):
    if r["kind"] == "time":
        print(
            f"t{time.time() - T0:.0f} d{r['d']} {'causal' if r['causal'] else 'full'} "
            f"{r['b']}x{r['s']} {r['name']} {r['tf']:.0f}",
            flush=True,
        )
    elif r["kind"] == "part":
        print(
            f"part d{r['d']} {'causal' if r['causal'] else 'full'} {r['b']}x{r['s']} {r['name']} "
            f"{r['part']} {r['ms']:.3f} ms",
            flush=True,
        )
    elif r["kind"] == "check" and not r["ok"]:
        print(
            "WRONG",
            r["name"],
            r["case"],
            r.get("msg") or {n: f"{e:.1e}" for n, e in r["e"].items()},
            r.get("again"),
            flush=True,
        )
    elif r["kind"] in ("error", "skipped"):
        print(r, flush=True)


def main():
    budget = float(sys.argv[1]) if len(sys.argv) > 1 else 150
    only = sys.argv[2] if len(sys.argv) > 2 else ""
    names = [n for n in V if re.search(only, n)]
    dims = [d for d in (128, 256, 64) if any(V[n][0] == d for n in names)]
    items = [f"{n}/{form}" for form in (*CHECKS, *BENCH) for n in names]
    items += [f"triton{d}/{m}" for d in dims for m in ("full", "causal")]
    items += [f"{n}/{form}" for n, cases in DEEP.items() if n in names for form in cases]
    lanes = [Child("--lane", ",".join(items[i::14])) for i in range(min(14, len(items)))]
    timers = {d: Child("--time", str(d), ",".join(n for n in names if V[n][0] == d)) for d in dims}
    while any(c.alive() for c in lanes) and time.time() - T0 < COMPILE:
        time.sleep(0.2)
    for c in lanes:
        if c.alive():
            c.kill()
            print("a lane was not ready", flush=True)
        elif c.p.returncode:
            print("lane rc", c.p.returncode, " | ".join(c.tail)[-500:], flush=True)
    print(f"compiled in {time.time() - T0:.0f} s", flush=True)
    rows = [r for c in lanes for r in c.rows]
    for i, d in enumerate(dims):
        share = (budget - 3 - (time.time() - T0)) / (len(dims) - i)
        c, end = timers[d], time.time() + share
        c.last = time.time()
        c.p.stdin.write(f"{share * 0.72}\n")
        c.p.stdin.flush()
        while c.alive() and time.time() < end and time.time() - c.last < HANG:
            time.sleep(0.1)
        if c.alive():
            c.kill()
            print(f"timer {d} killed after {time.time() - c.last:.0f} s of silence", flush=True)
        elif c.p.returncode:
            print("timer", d, "rc", c.p.returncode, " | ".join(c.tail)[-600:], flush=True)
        c.thread.join(2)
        rows += c.rows
        with open(os.path.join(OUT, "bwd.json"), "w") as f:
            json.dump(rows, f)
    worst = {}
    for r in rows:
        if r["kind"] == "check" and r["ok"]:
            for n, e in r["e"].items():
                worst[n] = max(worst.get(n, 0), e)
    good = sum(r["kind"] == "check" and r["ok"] for r in rows)
    print(f"{good} checks good; worst errors {worst}")
    for r in rows:
        if r["kind"] == "rank":
            flops = 10.0 * SHAPES[0][0] * 2048 * SHAPES[0][1] ** 2 * (0.5 if r["causal"] else 1.0)
            print(
                f"d{r['d']} {'causal' if r['causal'] else 'full'} 4x4k:",
                " ".join(f"{n.split('-', 1)[1]}={flops / ms * 1e-9:.0f}" for n, ms in r["ranked"]),
            )
    t = {
        (r["d"], r["causal"], r["b"], r["s"], r["name"]): r["tf"]
        for r in rows
        if r["kind"] == "time"
    }
    print(f"{'cell':24s} {'ours':>6s} {'cudnn':>6s} {'flash':>6s} {'triton':>6s}  by")
    for d in (64, 128, 256):
        for causal in (False, True):
            for b, s in [SHAPES[1], SHAPES[0], *SHAPES[2:]]:
                ours = sorted(
                    (
                        (tf, n)
                        for (dd, c, bb, ss, n), tf in t.items()
                        if (dd, c, bb, ss) == (d, causal, b, s) and n in V
                    ),
                    reverse=True,
                )
                if not ours:
                    continue
                peer = [t.get((d, causal, b, s, n), 0) for n in ("cudnn", "flash", "triton")]
                print(
                    f"d{d} {'causal' if causal else 'full':6s} {b}x{s:<8d} {ours[0][0]:8.0f} "
                    f"{peer[0]:6.0f} {peer[1]:6.0f} {peer[2]:6.0f}  "
                    + " ".join(f"{n.split('-', 1)[1]}={tf:.0f}" for tf, n in ours[:4])
                )
    print(f"total {time.time() - T0:.0f} s")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--lane"]:
        lane(sys.argv[2].split(","))
    elif sys.argv[1:2] == ["--time"]:
        timer(int(sys.argv[2]), sys.argv[3].split(","))
    else:
        main()
