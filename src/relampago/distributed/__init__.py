"""Sequences longer than one device: context parallelism on torch.distributed. See docs/distributed.md."""

from relampago.distributed import statistics
from relampago.distributed.attention import attention
from relampago.distributed.plan import ContextParallelPlan
from relampago.distributed.simulator import Simulation
from relampago.distributed.transport import RankFailure

__all__ = ["ContextParallelPlan", "RankFailure", "Simulation", "attention", "statistics"]
