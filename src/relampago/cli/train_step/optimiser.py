"""AdamW in two precisions: all in the weights' bf16, or moments and master weights in fp32."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class MasterAdamW:
    """AdamW on fp32 copies of the weights, with fp32 moments: 12 bytes per parameter beside weight and gradient.

    Each parameter is stepped for itself, so that only one gradient is held in fp32 at a time.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], *, lr: float, fused: bool) -> None:
        self.pairs = []
        for parameter in parameters:
            master = nn.Parameter(parameter.detach().float())
            self.pairs.append((parameter, master, torch.optim.AdamW([master], lr=lr, fused=fused)))

    @torch.no_grad()
    def step(self) -> None:
        """Update masters, then round them into the weights."""
        for parameter, master, adamw in self.pairs:
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
            adamw.step()
            master.grad = None
            parameter.copy_(master)

    def held(self) -> int:
        """Bytes of masters and moments."""
        return sum(size(master) + state_bytes(adamw) for _, master, adamw in self.pairs)


class PlainAdamW:
    """AdamW in the weights' own dtype: 4 bytes per bf16 parameter beside weight and gradient."""

    def __init__(self, parameters: Iterable[nn.Parameter], *, lr: float, fused: bool) -> None:
        self.adamw = torch.optim.AdamW(parameters, lr=lr, fused=fused)

    def step(self) -> None:
        """Update the weights."""
        self.adamw.step()

    def held(self) -> int:
        """Bytes of the moments."""
        return state_bytes(self.adamw)


OPTIMISERS = {"fp32": MasterAdamW, "bf16": PlainAdamW}


def held_per_parameter(precision: str) -> int:
    """Bytes of bf16 weight, gradient and optimiser for each parameter."""
    return 4 + {"fp32": 12, "bf16": 4}[precision]


def state_bytes(adamw: torch.optim.AdamW) -> int:
    """Bytes of an optimiser's state."""
    states = adamw.state.values()
    return sum(size(t) for state in states for t in state.values() if isinstance(t, Tensor))


def size(tensor: Tensor) -> int:
    """Bytes of a tensor."""
    return tensor.numel() * tensor.element_size()
