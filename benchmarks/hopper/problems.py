"""Named calls: what the check compares with the oracle. Small enough for fp64, odd enough to reach every path."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

import relampago as rl

Options = dict[str, Any]


class Named(NamedTuple):
    """One call of `attention`, or of `attention_varlen` if `lens_q` says how long the sequences are."""

    batch: int
    len_q: int
    len_k: int
    heads: int
    kv: int
    dim: int
    dim_v: int
    options: Options
    dtype: torch.dtype = torch.bfloat16
    transposed: bool = False
    lens_q: tuple[int, ...] = ()
    lens_k: tuple[int, ...] = ()

    def make(self, device: str = "cuda") -> tuple[tuple[torch.Tensor, ...], Options]:
        """Tensors and keyword arguments; rows of no sequence hold NaN."""
        g = torch.Generator(device=device).manual_seed(11)
        options = {n: v(device) if callable(v) else v for n, v in self.options.items()}
        kinds = ((self.heads, self.dim), (self.kv, self.dim), (self.kv, self.dim_v))
        tensors = []
        for i, (heads, dim) in enumerate(kinds):
            lens = self.lens_q if i == 0 else self.lens_k
            lead = (sum(lens) + 9,) if lens else (self.batch, self.len_k if i else self.len_q)
            t = torch.randn(*lead, heads, dim, device=device, generator=g).to(self.dtype)
            if lens:
                t[sum(lens) :] = torch.nan
            if self.transposed:
                t = t.transpose(1, 2).contiguous().transpose(1, 2)
            tensors.append(t)
        for side, lens in (("q", self.lens_q), ("k", self.lens_k)):
            if lens:
                ends = torch.tensor([0, *lens], device=device).cumsum(0).int()
                options[f"cu_seqlens_{side}"], options[f"max_seqlen_{side}"] = ends, max(lens)
        return tuple(tensors), options


def call(tensors: tuple[torch.Tensor, ...], options: Options, backend: str) -> Any:
    """(out, lse) by the public API."""
    which = rl.attention_varlen if "cu_seqlens_q" in options else rl.attention
    return which(*tensors, **options, backend=backend, return_lse=True)


def dense(b: int, lq: int, lk: int, h: int, kv: int, d: int, dv: int = 0, **options: Any) -> Named:
    """A dense problem."""
    more = {n: options.pop(n) for n in ("dtype", "transposed") if n in options}
    return Named(b, lq, lk, h, kv, d, dv or d, options, **more)


def packed(lq: list[int], lk: list[int], h: int, kv: int, d: int, dv: int = 0, **o: Any) -> Named:
    """Packed sequences."""
    return Named(len(lq), 0, 0, h, kv, d, dv or d, o, lens_q=tuple(lq), lens_k=tuple(lk))


def _sinks(heads: int) -> Any:
    return lambda device: torch.linspace(-2, 2, heads, device=device)


def _documents(*starts: int) -> Any:
    return lambda device: rl.Document(torch.tensor(starts, device=device))


def _causal_documents(*starts: int) -> Any:
    return lambda device: rl.Causal() & rl.Document(torch.tensor(starts, device=device))


LENS = [3, 1300, 0, 200, 1, 77, 2640]


def _of_dims(d: int, dv: int) -> dict[str, Named]:
    """What every pair of head dims is tried with."""
    tag = f"d{d}" if d == dv else f"d{d}/{dv}"
    return {
        f"{tag} full": dense(4, 2048, 2048, 8, 8, d, dv),
        f"{tag} causal": dense(2, 2048, 2048, 8, 8, d, dv, causal=True),
        f"{tag} ragged": dense(2, 1000, 1000, 4, 2, d, dv),
        f"{tag} ragged causal": dense(1, 4161, 4161, 4, 1, d, dv, causal=True),
        f"{tag} 77 transposed": dense(3, 77, 77, 4, 4, d, dv, causal=True, transposed=True),
        f"{tag} window": dense(2, 1500, 1500, 4, 4, d, dv, window=(100, 30)),
        f"{tag} softcap sinks": dense(
            2, 700, 700, 4, 4, d, dv, causal=True, softcap=5.0, sinks=_sinks(4)
        ),
        f"{tag} documents": dense(
            1, 1500, 1500, 4, 2, d, dv, mask=_causal_documents(0, 17, 600, 1400)
        ),
        f"{tag} packed": packed(LENS, LENS, 4, 2, d, dv, causal=True),
        f"{tag} split": dense(1, 130, 9000, 2, 2, d, dv),
        f"{tag} few rows": dense(1, 5, 5000, 16, 2, d, dv, causal=True),
    }


def problems() -> dict[str, Named]:
    """All of them by name."""
    named: dict[str, Named] = {}
    for d, dv in ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)):
        named |= _of_dims(d, dv)
    for d in (64, 128, 256):
        named |= {
            f"d{d} bottom right": dense(2, 300, 1500, 4, 4, d, causal=True),
            f"d{d} blind rows": dense(2, 1500, 300, 4, 4, d, causal=True),
            f"d{d} causal window": dense(2, 3000, 3000, 4, 4, d, causal=True, window=(500, 0)),
            f"d{d} prefix": dense(2, 700, 700, 4, 4, d, mask=rl.Prefix(200)),
            f"d{d} packed full": packed(LENS, LENS, 4, 2, d),
        }
    for d, dv in ((80, 80), (33, 33), (40, 72), (160, 160), (64, 128), (72, 72)):
        named[f"d{d}/{dv}"] = dense(2, 700, 900, 4, 2, d, dv, causal=True)
    named |= {
        "fp16": dense(2, 700, 900, 4, 2, 128, dtype=torch.float16, causal=True),
        "one row": dense(2, 1, 500, 32, 2, 128, causal=True),
        "one key": dense(1, 9, 1, 1, 1, 64),
        "negative scale": dense(2, 300, 300, 4, 2, 64, causal=True, scale=-0.2),
        "one row, 128 heads": dense(1, 1, 3000, 128, 1, 128, causal=True),
        "heads 6 to 1": dense(2, 30, 900, 6, 1, 128, causal=True),
        "few rows, documents": dense(1, 40, 3000, 8, 1, 128, mask=_documents(0, 90, 170, 2970)),
        "split causal sinks": dense(1, 100, 6000, 4, 1, 128, causal=True, sinks=_sinks(4)),
        "split window": dense(1, 64, 9000, 1, 1, 128, window=(3000, 10)),
        "split far window": dense(1, 200, 9000, 1, 1, 64, causal=True, window=(40, 0)),
        "split softcap fp16": dense(1, 64, 5000, 2, 2, 64, softcap=5.0, dtype=torch.float16),
        "split packed": packed([3, 60, 0, 1], [4000, 3000, 5, 2000], 4, 4, 128, causal=True),
        "packed heads": packed([3, 60, 0, 1, 20], [400, 300, 5, 200, 20], 16, 2, 64, causal=True),
        "documents per sequence": dense(
            2, 700, 700, 4, 4, 64,
            mask=lambda device: rl.Document(torch.tensor([[0, 90, 400], [3, 20, 700]], device=device)),
        ),
    }  # fmt: skip
    return named
