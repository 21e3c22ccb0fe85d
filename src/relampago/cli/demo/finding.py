"""What a part of the demo found, for the summary at the end."""

from __future__ import annotations

import importlib.util
from typing import NamedTuple


class Finding(NamedTuple):
    """One line of the summary.

    Args:
        title: the part.
        said: what it showed, or how to make it run.
        holds: whether what it set out to show is so; None if it did not run.
    """

    title: str
    said: str
    holds: bool | None


def missing(modules: dict[str, str]) -> list[str]:
    """The packages, of {module: package}, that are not installed."""
    return [package for module, package in modules.items() if not installed(module)]


def installed(module: str) -> bool:
    """Whether a module can be imported."""
    return importlib.util.find_spec(module) is not None
