"""relampago: exact attention in O(N) memory, in pure Python, on whatever you have."""

from relampago.api import (
    attention,
    attention_varlen,
    partial,
    partial_backward,
)
from relampago.decode import attention_decode
from relampago.defaults import set_batch_invariant, using
from relampago.errors import InvalidInput, Unsupported
from relampago.explain import explain
from relampago.masks.blocks import BlockSparse
from relampago.masks.spec import Causal, Document, Prefix, Window
from relampago.merge import merge
from relampago.mods import ScoreMod

__all__ = [
    "BlockSparse",
    "Causal",
    "Document",
    "InvalidInput",
    "Prefix",
    "ScoreMod",
    "Unsupported",
    "Window",
    "attention",
    "attention_decode",
    "attention_varlen",
    "explain",
    "merge",
    "partial",
    "partial_backward",
    "set_batch_invariant",
    "using",
]
