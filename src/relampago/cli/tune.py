"""`relampago tune`: measure plans on the machine at hand and propose table rows."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table

from relampago.cli.console import console, progress, seconds

if TYPE_CHECKING:
    from relampago.plan import Plan


KEYS_AND_ROWS = ("tangent_dkdv", "tangent_dq")


def tune(
    case: Annotated[
        str, typer.Option(help="a dense case of the catalogue (cases.BENCH)")
    ] = "causal-d128-4k",
    kernel: Annotated[
        str,
        typer.Option(
            help="forward, decode, backward_dkdv, backward_dq, tangent, tangent_dkdv or tangent_dq; "
            "on the CPU forward or backward"
        ),
    ] = "forward",
    dtype: Annotated[
        str, typer.Option(help="fp32, bf16 or fp16; the machine's usual one if not given")
    ] = "",
    backend: Annotated[
        str, typer.Option(help="triton on a GPU, cpu elsewhere: no other's plans are tuned")
    ] = "",
    page: Annotated[
        int, typer.Option(min=0, help="decode: keys of a page; 0 for a contiguous cache")
    ] = 0,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; the GPU if there is one")] = None,
    samples: Annotated[int, typer.Option(min=1, help="samples of each plan")] = 5,
    limit: Annotated[int, typer.Option(min=1, help="try at most so many plans")] = 120,
) -> None:
    """Measure the plans of a kernel and print the best as a row for `tuning/tables`."""
    from relampago.cli import machine, timing
    from relampago.cli.explain import torch_dtype
    from relampago.tuning.search import candidates, row

    where = device or machine.best_device()
    name = _tuned(backend, where)
    precision = dtype or ("bf16" if where == "cuda" else "fp32")
    problem, prepare = _subject(case, torch_dtype(precision), where, name, kernel, page)
    times: list[tuple[float, Plan]] = []
    failed = 0
    plans = list(candidates(problem, kernel))[:limit]
    with progress() as bar:
        for plan in bar.track(plans, description=f"{name}.{kernel} {case}"):
            try:
                run = prepare(plan)
                spent = timing.alternate({"": run}, device=where, repeats=samples, budget=10)
            except Exception as error:  # a plan may not fit the machine: that is what is asked
                failed += 1
                console.print(f"[dim]{_words(plan)}: {type(error).__name__}[/dim]")
                continue
            times.append((spent[""].median, plan))
    if not times:
        raise typer.Exit(1)
    times.sort(key=lambda entry: entry[0])
    table = Table(box=box.SIMPLE_HEAD, title=f"{problem}", title_justify="left")
    table.add_column("plan")
    table.add_column("median", justify="right")
    for spent, plan in times[:8]:
        table.add_row(_words(plan), seconds(spent))
    console.print(table)
    best, plan = times[0]
    chip = machine.facts()["gpus"][0]["name"] if where == "cuda" else machine.facts()["cpu"]
    source = f"{chip} {datetime.date.today()} relampago tune --case {case}: {best * 1e3:.3g} ms"
    console.print(
        f"{len(times)} plans measured, {failed} do not fit. Put this above the rows it should win over:\n"
    )
    console.print(row(problem, name, kernel, plan, source), markup=False, highlight=False)


def _tuned(backend: str, device: str) -> str:
    """The backend whose plans are tried on a device."""
    from relampago.errors import InvalidInput

    own = "triton" if device == "cuda" else "cpu"
    if backend not in ("", own):
        raise InvalidInput(
            f"--backend is {backend!r}; expected {own} on {device}: tune knows the plans of cpu and triton, "
            "those of gluon_sm90 are swept by benchmarks/hopper"
        )
    return own


def _words(plan: Plan) -> str:
    return " ".join(f"{name}={value}" for name, value in plan.items() if value)


def _subject(
    name: str, dtype: Any, device: str, backend: str, kernel: str, page: int = 0
) -> tuple[Any, Callable[[Plan], Callable[[], Any]]]:
    """The problem, and what makes a plan into a call to be timed."""
    import torch

    import relampago as rl
    from relampago.cases import BENCH
    from relampago.errors import InvalidInput
    from relampago.lower import prepare
    from relampago.op import arrays_of, problem_of
    from relampago.options import Options
    from relampago.problem import Saved, Wanted
    from relampago.select import by_name
    from relampago.tuning.search import KERNELS

    dense = {case.name: case for case in BENCH if not case.packed}
    if name not in dense:
        raise InvalidInput(f"--case is {name!r}; expected one of {', '.join(dense)}")
    known = ("forward", "backward") if backend == "cpu" else KERNELS
    if kernel not in known:
        raise InvalidInput(
            f"--kernel is {kernel!r}; expected one of {', '.join(known)} for {backend}"
        )
    tensors, options = dense[name].make(dtype, device)
    q, k, v = tensors
    if kernel == "decode":
        return _decoding(q, k, v, page)
    call = prepare(q, k, v, Options(**options))
    if kernel == "forward":
        problem = problem_of(call)

        def forward(plan: Plan) -> Callable[[], Any]:
            def run() -> Any:
                with rl.using(backend=backend, plan=plan):
                    return rl.attention(*tensors, **options)

            return run

        return problem, forward
    if kernel.startswith("tangent"):
        return _along(call, kernel)
    problem = problem_of(call, wanted=Wanted())
    out, lse = rl.attention(*tensors, **options, return_lse=True, backend=backend)
    saved, dout, x = Saved(out, lse), torch.randn_like(out), arrays_of(call)
    if backend == "cpu":
        engine = by_name("cpu")
        return (
            problem,
            lambda plan: lambda: engine.backward(problem, plan, x, saved, dout, None, Wanted()),
        )

    from relampago.backends.triton import tables
    from relampago.backends.triton.backward import backward
    from relampago.plan import first_match

    if kernel == "backward_dq":
        rows = Wanted(k=False, v=False)
        return problem, lambda plan: lambda: backward(x, plan, plan, saved, dout, None, rows, True)
    # Over keys with what a plan leaves to rows: where it adds up dQ too, nothing is left.
    own = first_match(tables(problem.device.arch), "triton.backward_dq", problem)
    fixed = problem.deterministic
    return (
        problem,
        lambda plan: lambda: backward(x, plan, own, saved, dout, None, Wanted(), fixed),
    )


def _decoding(q: Any, k: Any, v: Any, page: int) -> tuple[Any, Callable[[Plan], Callable[[], Any]]]:
    """The same of decoding: the last query against all keys, in a cache or in pages that lie in any order."""
    import torch

    from relampago.backends.triton.decode import decode
    from relampago.cache import KVCache, PagedKVCache
    from relampago.lower import prepare
    from relampago.op import arrays_of, problem_of
    from relampago.options import Options

    batch, length, heads, dim = k.shape
    kinds: dict[str, Any] = {"dtype": k.dtype, "device": k.device}
    if page:
        each = -(-length // page)
        cache = PagedKVCache(batch, batch * each, page, heads, dim, v.shape[-1], most=each, **kinds)
        cache.reserve(length)
        order = torch.randperm(batch * each, device=k.device)
        cache.page_table.copy_(cache.page_table.flatten()[order].view(batch, each))
    else:
        cache = KVCache(batch, length, heads, dim, v.shape[-1], **kinds)
    cache.append(k, v)
    call = prepare(q[:, -1:], cache.k, cache.v, Options(causal=True), cache=cache)
    x = arrays_of(call)
    return problem_of(call), lambda plan: lambda: decode(x, plan)


def _along(call: Any, kernel: str) -> tuple[Any, Callable[[Plan], Callable[[], Any]]]:
    """The same of a kernel of derivatives, q, k, v and dO moving; over keys with what a plan leaves to rows."""
    import torch

    from relampago.backends.triton import tables
    from relampago.backends.triton.backward_tangent import backward_tangent
    from relampago.backends.triton.tangent import tangent
    from relampago.op import describe, gather
    from relampago.plan import first_match
    from relampago.problem import Moving, Saved, Tangents, Wanted

    x, facts = gather(call)
    along = Tangents(*(torch.randn_like(t) for t in (x.q, x.k, x.v)))
    ahead = describe(x, facts, moving=True)
    if kernel == "tangent":
        return ahead, lambda plan: lambda: tangent(x, plan, along)
    problem = describe(x, facts, wanted=Wanted(), moving=True)
    arch = problem.device.arch
    own = {name: first_match(tables(arch), f"triton.{name}", problem) for name in KEYS_AND_ROWS}
    out, lse, tout, tlse = tangent(x, first_match(tables(arch), "triton.tangent", ahead), along)
    saved, dout = Saved(out, lse), torch.randn_like(out)
    moving = Moving(along, tout, tlse, torch.randn_like(out), None)
    by_keys = kernel == "tangent_dkdv"
    wanted = Wanted() if by_keys else Wanted(k=False, v=False)

    def prepare(plan: Plan) -> Callable[[], Any]:
        over_keys, over_rows = (plan if name == kernel else own[name] for name in KEYS_AND_ROWS)
        return lambda: backward_tangent(
            x, over_keys, over_rows, moving, saved, dout, None, wanted, not by_keys
        )

    return problem, prepare
